from collections import Counter

import numpy as np
import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels.logits_edits import HISTORY_BLOCK, apply_masks_, apply_penalties_
from nanovllm.layers import logits as layer
from nanovllm.layers.logprobs import score_tokens

# Masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 5000])
def test_masks(vocab_size, dtype, device, generator):
    """Bit order, the sign bit of a word, a last word that is cut, and rows out of order beside ones without a mask."""
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32)
    allowed = torch.rand(3, vocab_size, generator=generator) < 0.5
    width = -(-vocab_size // 32)
    bits = np.ones((3, (width + 1) * 32), dtype=np.uint8)  # a mask may be wider than the vocabulary
    bits[:, :vocab_size] = allowed.numpy()
    masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    masked = apply_masks_(logits.clone().to(device), rows.to(device), masks.to(device)).cpu()
    expected = logits.clone()
    for row, is_allowed in zip(rows.tolist(), allowed, strict=True):
        expected[row, ~is_allowed] = float("-inf")
    assert torch.equal(masked, expected)


def test_masks_stay_inside_the_vocabulary(device):
    """What lies behind a row belongs to somebody else."""
    wide = torch.zeros(2, 100).to(device)
    apply_masks_(wide[:, :40], torch.tensor([1], dtype=torch.int32).to(device), torch.zeros(1, 4).int().to(device))
    assert (wide[1, :40] == float("-inf")).all()
    assert (wide[1, 40:] == 0).all() and (wide[0] == 0).all()
    with pytest.raises(ValueError, match="masks"):
        apply_masks_(wide, torch.tensor([1], dtype=torch.int32).to(device), torch.zeros(1, 3).int().to(device))


# Penalties


def penalize_naively(logits, history, prompt_len, repetition, frequency, presence):
    """One token at a time, as the formulas say."""
    result = logits.clone()
    for token in set(history):
        value = float(logits[token])
        result[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(history[prompt_len:]).items():
        result[token] -= frequency * count + presence
    return result


def run(logits, rows, slots, histories, prompt_lens, penalties, device, num_counted=64, num_slots=9):
    """The penalised logits; the table is poisoned wherever no history is."""
    table = torch.full((num_slots, max(map(len, histories)) + 3), 2**30, dtype=torch.int32)
    for slot, history in zip(slots, histories, strict=True):
        table[slot, : len(history)] = torch.tensor(history)
    lists = [rows, slots, prompt_lens, [len(history) for history in histories]]
    rows, slots, prompt_lens, lens = (torch.tensor(values, dtype=torch.int32).to(device) for values in lists)
    columns = [torch.tensor(column).to(device) for column in zip(*penalties, strict=True)]
    longest = max(map(len, histories))
    work = logits.clone().to(device)
    result = apply_penalties_(work, rows, table.to(device), slots, prompt_lens, lens, longest, *columns, num_counted)
    assert result is work
    return result.cpu()


@pytest.mark.parametrize("num_counted", [1, 2, 64])
@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_penalties(vocab_size, num_counted, device, generator):
    """Prompts and outputs over few tokens and over many, lengths around a program's, and counts that are used again
    for the next rows."""
    lengths = [1, 2, HISTORY_BLOCK, HISTORY_BLOCK + 1, 2 * HISTORY_BLOCK + 77]
    histories = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    prompt_lens = [1, 1, 100, HISTORY_BLOCK, 2]
    penalties = [(1.3, 0.25, 0.5), (1.0, 0.0, 1.0), (0.7, -0.5, 0.0), (2.0, 2.0, -2.0), (1.0, 0.125, 0.0)]
    rows, slots = [4, 0, 6, 2, 5], [8, 3, 0, 7, 1]
    logits = torch.randn(7, vocab_size, generator=generator) * 3
    result = run(logits, rows, slots, histories, prompt_lens, penalties, device, num_counted)
    expected = logits.clone()
    for row, history, prompt_len, values in zip(rows, histories, prompt_lens, penalties, strict=True):
        expected[row] = penalize_naively(logits[row], history, prompt_len, *values)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(result[[1, 3]], logits[[1, 3]])


def test_one_token_many_times(device):
    """Hundreds of places compete for one logit, which must be changed once."""
    history = [3] * (3 * HISTORY_BLOCK)
    result = run(torch.tensor([[5.0] * 8]), [0], [2], [history], [10], [(2.0, 0.01, 0.5)], device)
    assert result[0, 3] == pytest.approx(5.0 / 2 - 0.01 * (len(history) - 10) - 0.5, abs=1e-5)
    assert (result[0, [0, 1, 2, 4, 5, 6, 7]] == 5.0).all()


def test_banned_tokens_stay_banned(device):
    """-inf times or minus anything."""
    logits = torch.tensor([[float("-inf"), 1.0, -1.0]])
    result = run(logits, [0], [0], [[0, 1, 2, 0]], [1], [(1e30, -2.0, -2.0)], device)
    assert result[0, 0] == float("-inf")
    assert not result.isnan().any()


def test_wrong_arguments(device):
    logits = torch.zeros(2, 9)
    with pytest.raises(ValueError, match="fp32"):
        run(logits.bfloat16(), [0], [0], [[1]], [1], [(1.0, 0.0, 1.0)], device)


# The layers that choose between kernels and plain torch


def test_layers_hand_on_what_kernels_take(device, generator, monkeypatch):
    """The same call gives the same by either: on a GPU nobody else would see an argument in another's place."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    def edit(logits):
        layer.apply_masks_(logits[:, :290], ints(2, 0), masks)
        penalties = (torch.tensor([1.5, 1.0]), torch.tensor([0.5, -0.25]), torch.tensor([0.0, 1.0]))
        penalties = tuple(values.to(device) for values in penalties)
        layer.apply_penalties_(logits, ints(1, 2), histories, ints(4, 0), ints(7, 2), ints(30, 21), 30, penalties)
        return logits, score_tokens(logits, ints(2, 1), ints(9, 300), 4)

    masks = torch.randint(-(2**31), 2**31, (2, 10), generator=generator).int().to(device)
    histories = torch.randint(300, (5, 40), generator=generator).int().to(device)
    logits = torch.randn(3, 301, generator=generator).to(device)
    monkeypatch.setattr(kernels, "serve", lambda x: False)
    expected, expected_scores = edit(logits.clone())
    monkeypatch.setattr(kernels, "serve", lambda x: True)
    result, scores = edit(logits.clone())
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores[:2], expected_scores[:2])
    actual, wanted = scores[2].view(torch.float32), expected_scores[2].view(torch.float32)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
