import pytest
import torch

from nanovllm.kernels.token_mask import BLOCK, mask_logits_
from nanovllm.layers import token_mask as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_words(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500, BLOCK, 2 * BLOCK + 77])
def test_same_as_torch_and_as_the_definition(dtype, vocab_size, device, generator):
    """Rows in any order, -1 among them; the mask is wider than it must be, and a view of something wider still."""
    logits = torch.randn(6, vocab_size, generator=generator).to(dtype)
    rows = torch.tensor([4, -1, 0, 5], dtype=torch.int32)
    bitmask = random_words((4, vocab_size // 32 + 5), generator)[:, 1:-1]
    expected = logits.clone()
    for row, words in zip(rows.tolist(), bitmask.tolist(), strict=True):
        for token in range(vocab_size):
            if row >= 0 and not words[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    on_device = logits.to(device)
    assert mask_logits_(on_device, rows.to(device), bitmask.to(device)) is on_device
    assert torch.equal(on_device.cpu(), expected)
    assert torch.equal(reference.mask_logits_(logits, rows, bitmask), expected)


def test_rows_of_a_wider_tensor_and_bits_at_both_ends(device):
    """Only bits 0 and 31 of each word are set: the sign of an int32 is token 31, not the banned ones above it."""
    wide = torch.zeros(3, 100, device=device)
    logits = wide[:, :64]
    bitmask = torch.full((3, 2), -(2**31) + 1, dtype=torch.int32, device=device)
    mask_logits_(logits, torch.arange(3, dtype=torch.int32, device=device), bitmask)
    assert [(row == 0).nonzero().flatten().tolist() for row in logits] == [[0, 31, 32, 63]] * 3
    assert not wide[:, 64:].any()


def test_nothing_listed(device):
    logits = torch.zeros(2, 40, device=device)
    mask_logits_(
        logits,
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, 2, dtype=torch.int32, device=device),
    )
    assert not logits.any()


@pytest.mark.parametrize("num_rows, num_words", [(2, 1), (1, 2)], ids=["narrow mask", "short list"])
def test_shapes_that_disagree(num_rows, num_words, device):
    rows = torch.zeros(num_rows, dtype=torch.int32, device=device)
    bitmask = torch.zeros(2, num_words, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="40 tokens"):
        mask_logits_(torch.zeros(3, 40, device=device), rows, bitmask)


def test_rows_that_are_not_contiguous(device):
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        mask_logits_(torch.zeros(40, 3, device=device).T, rows, torch.zeros(2, 2, dtype=torch.int32, device=device))
