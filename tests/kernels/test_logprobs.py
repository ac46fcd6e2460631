import pytest
import torch

from nanovllm.kernels.logprobs import score_tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(dtype)


def unpack(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, ranks, logprobs = scores.cpu()
    return ids, ranks, logprobs.view(torch.float32)


def check(logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, num_best: int, device) -> None:
    """Against a stable sort and a log-softmax in float64."""
    scores = score_tokens(
        logits.to(device), None if rows is None else rows.int().to(device), token_ids.to(device), num_best
    )
    ids, ranks, logprobs = unpack(scores)
    chosen = logits if rows is None else logits[rows.long()]
    assert ids.shape == (len(chosen), 1 + min(num_best, logits.shape[1]))
    order = chosen.double().sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1] - 1]
    assert torch.equal(ids[:, 0].long(), token_ids.long())
    assert torch.equal(ids[:, 1:].long(), order)
    for row, values in enumerate(chosen.double()):
        for column, token in enumerate(ids[row].tolist()):
            assert ranks[row, column] == 1 + (values > values[token]).sum()
    exact = chosen.double().log_softmax(-1).gather(1, ids.long())
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 129, 2048, 5000, 40001])
def test_equals_sorting(dtype, vocab_size, device, generator):
    """16-bit logits have many ties, so this is about their order too; the sizes are around those of segments, tiles
    and programs."""
    logits = make_logits(3, vocab_size, dtype, generator)
    token_ids = torch.randint(vocab_size, (3,), generator=generator)
    for num_best in (0, 1, 5, 20):
        check(logits, None, token_ids, num_best, device)


def test_some_rows(device, generator):
    """A row list in any order; the other rows are poisoned."""
    logits = make_logits(6, 3000, torch.float32, generator)
    logits[[0, 2, 4]] = float("nan")
    check(logits, torch.tensor([5, 1, 3]), torch.randint(3000, (3,), generator=generator), 4, device)


def test_padded_rows(device, generator):
    """The row stride may be larger than the vocabulary; what lies between is not read."""
    wide = torch.full((4, 1100), 1e9)
    wide[:, :1000] = make_logits(4, 1000, torch.float32, generator)
    scores = score_tokens(wide.to(device)[:, :1000], None, torch.arange(4).to(device), 3)
    expected = score_tokens(wide[:, :1000].contiguous().to(device), None, torch.arange(4).to(device), 3)
    assert torch.equal(scores, expected)
    check(wide[:, :1000], None, torch.arange(4), 3, device)


@pytest.mark.parametrize("value", [0.0, -60.0, 60.0])
def test_all_equal(value, device):
    """Every token is tied: the lowest come first, and all have rank 1."""
    ids, ranks, logprobs = unpack(
        score_tokens(torch.full((2, 4500), value).to(device), None, torch.tensor([4499, 7]).to(device), 20)
    )
    assert ids.tolist() == [[4499, *range(20)], [7, *range(20)]]
    assert (ranks == 1).all()
    torch.testing.assert_close(logprobs, -torch.tensor(4500.0).log().expand(2, 21), rtol=0, atol=1e-5)


def test_winners_share_a_segment(device):
    """The best tokens all lie in one segment, or each in another one: both must be found."""
    logits = torch.zeros(2, 8192)
    logits[0, 300:320] = torch.arange(20.0) + 1
    logits[1, torch.arange(20) * 400 + 13] = torch.arange(20.0) + 1
    check(logits, None, torch.tensor([310, 0]), 20, device)


def test_impossible_tokens(device):
    """-inf is a logit like any other: whole tiles of it must give no NaN."""
    logits = torch.full((2, 6000), float("-inf"))
    logits[0, [5999, 17]] = torch.tensor([1.0, 2.0])
    logits[1, :3000] = 0.0
    ids, ranks, logprobs = unpack(score_tokens(logits.to(device), None, torch.tensor([17, 5999]).to(device), 3))
    assert ids.tolist() == [[17, 17, 5999, 0], [5999, 0, 1, 2]]
    assert ranks.tolist() == [[1, 1, 2, 3], [3001, 1, 1, 1]]
    expected = logits.log_softmax(-1).gather(1, ids.long())
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)


def test_no_rows(device):
    assert score_tokens(torch.zeros(0, 50).to(device), None, torch.zeros(0, dtype=torch.int64).to(device), 3).shape == (
        3,
        0,
        4,
    )


def test_wrong_shapes(device):
    logits = torch.zeros(2, 50).to(device)
    with pytest.raises(ValueError, match="2 rows"):
        score_tokens(logits, None, torch.zeros(3, dtype=torch.int64).to(device), 1)
    with pytest.raises(ValueError, match="contiguous rows"):
        score_tokens(logits.T, None, torch.zeros(50, dtype=torch.int64).to(device), 1)


def test_rows_of_nan_stay_inside(device):
    """Guards against reading before the logits where nothing is the largest, as after an overflow of float16."""
    storage = torch.full((3, 300), 7.0, device=device)
    logits = storage[1:]
    logits[0] = float("nan")
    tokens = torch.tensor([5, 6], dtype=torch.int32, device=device)
    ids = score_tokens(logits, None, tokens, 3)[0]
    assert ((ids >= 0) & (ids < 300)).all()
    assert ids[1].tolist() == [6, 0, 1, 2]
