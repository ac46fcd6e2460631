"""Chooses one token a row of logits: by kernels on a GPU, else in plain torch, which is also their reference."""

import torch

from nanovllm import kernels
from nanovllm.engine.step_tensors import StepTensors

# Weyl increment and the two multipliers of a 32-bit integer mixer, as signed 32-bit numbers.
_WEYL = 0x9E3779B9 - 2**32
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
# Sorting holds each logit in several wider copies, so filtered rows are sorted so many at a time.
_ROWS_PER_SORT = 8


def sample(logits: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
    """Draws a token of each row.

    Adding Gumbel noise to logits / temperature and taking the largest draws from their softmax (Gumbel, 1954).
    The noise depends on a row's keys and the token alone, so a request draws the same tokens in any batch.

    Args:
        logits: [N, V] in any float dtype; banned tokens and those outside a filter are overwritten with -inf.

    Returns:
        [N] int64.
    """
    if len(inputs.banned_ids):
        logits[inputs.banned_rows, inputs.banned_ids] = -torch.inf
    if kernels.serve(logits):
        from nanovllm.kernels import sampling

        if len(inputs.filter_rows):
            filters = (inputs.top_k, inputs.top_p, inputs.min_p)
            sampling.filter_logits_(logits, inputs.filter_rows, inputs.temperature, *filters)
        return sampling.sample(logits, inputs.temperature, inputs.keys)
    for first in range(0, len(inputs.filter_rows), _ROWS_PER_SORT):
        rows = inputs.filter_rows[first : first + _ROWS_PER_SORT].long()
        rows = rows[rows >= 0]
        scaled = logits[rows].float() / inputs.temperature[rows, None]
        kept = filter_mask(scaled, inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows])
        logits[rows] = logits[rows].masked_fill(~kept, -torch.inf)
    return _draw(logits, inputs.temperature, inputs.keys)


def _draw(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_greedy = (temperature == 0).tolist()
    for row, greedy in enumerate(is_greedy):  # one at a time: a row and its noise stay in the cache of a core
        scores = logits[row]
        if not greedy:
            scores = scores.float() / temperature[row] + gumbel_noise(keys[row], len(scores))
        tokens[row] = scores.argmax()
    return tokens


def filter_mask(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Which tokens survive top-k, then top-p over the renormalised survivors, then min-p.

    Args:
        scaled: [M, V] logits over temperature, float32.
        top_k: [M], 0 keeps all. top_p: [M], 1 keeps all. min_p: [M], 0 keeps all.

    Returns:
        [M, V] bool. At least the most probable token survives; of equal logits, the lower token comes first.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    probability = ordered.masked_fill(~kept, -torch.inf).softmax(-1, dtype=torch.float64)
    mass_before = probability.cumsum(-1) - probability
    # The token that crosses the threshold has less than top_p before it, so it stays.
    kept &= (mass_before < top_p[:, None]) | (top_p == 1)[:, None]
    kept &= probability >= min_p[:, None] * probability[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of each token: float32 [vocab_size] from two keys (int32 [2] bit patterns).

    A counter-based generator: h(token) = mix(token * weyl + key 0) ^ key 1 in 32 bits, where mix is the
    xor-shift-multiply integer hash with 16-15-16 shifts found by Wellons' hash prospector (2018). The upper 24
    bits, centred in their interval, are a uniform number in (0, 1).
    """
    h = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    h = h.mul_(_WEYL).add_(keys[0])
    h ^= _logical_shift(h, 16)
    h.mul_(_MULTIPLIERS[0])
    h ^= _logical_shift(h, 15)
    h.mul_(_MULTIPLIERS[1])
    h ^= _logical_shift(h, 16)
    h ^= keys[1]
    # The largest value rounds up to 1, whose noise would be infinite: the largest float below stands for it.
    uniform = _logical_shift(h, 8).float().add_(0.5).mul_(2.0**-24).clamp_(max=1 - 2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits for int32 bit patterns of unsigned numbers (torch's own shift copies the sign)."""
    return (x >> bits) & (2 ** (32 - bits) - 1)
