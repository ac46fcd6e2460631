"""Log-probabilities of chosen tokens and of the best ones: by kernels on a GPU, else in plain torch, which is also
their reference."""

import torch
import torch.nn.functional as F

from nanovllm import kernels

# The best tokens are looked for in the segments with the largest maxima, which are few: sorting a whole row costs more.
_SEGMENT = 128
# Rows that are worked on at a time, so that they stay in a core's cache.
_ROWS = 8


def score_tokens(
    logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, num_best: int
) -> torch.Tensor:
    """Log-softmax and rank of one token in each of M rows, and of the K = min(num_best, V) best ones.

    A rank is one more than the number of tokens with a larger logit. Of equal logits the lower ids come first.

    Args:
        logits: [N, V] in any float dtype, not changed.
        rows: [M] int32, which of the N they are; None: all.
        token_ids: [M].

    Returns:
        [3, M, 1 + K] int32: ids, ranks, and bit patterns of float32 log-probabilities; the token itself comes first.
    """
    if kernels.serve(logits):
        from nanovllm.kernels import logprobs

        return logprobs.score_tokens(logits, rows, token_ids, num_best)
    num_best = min(num_best, logits.shape[1])
    scores = torch.empty(3, len(token_ids), 1 + num_best, dtype=torch.int32, device=logits.device)
    for first in range(0, len(token_ids), _ROWS):
        part = slice(first, first + _ROWS)
        some = logits[part] if rows is None else logits[rows[part]]
        scores[:, part] = _score_some(some.float(), token_ids[part].long(), num_best)
    return scores


def _score_some(logits: torch.Tensor, token_ids: torch.Tensor, num_best: int) -> torch.Tensor:
    own = logits.gather(1, token_ids[:, None])  # [M, 1]
    own_rank = 1 + (logits > own).sum(-1, keepdim=True)
    best, best_ids = best_tokens(logits, num_best)
    best_rank = 1 + (best[:, None, :] > best[:, :, None]).sum(-1)
    logprobs = torch.cat((own, best), dim=1) - logits.logsumexp(-1, keepdim=True)
    ids = torch.cat((token_ids[:, None], best_ids), dim=1)
    ranks = torch.cat((own_rank, best_rank), dim=1)
    return torch.stack((ids.int(), ranks.int(), logprobs.view(torch.int32)))


def best_tokens(logits: torch.Tensor, num_best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits [M, K] in descending order, and their tokens: [M, V] float32 -> float32, int64.

    Whatever segment is not among the K that come first by (maximum, position) has K better tokens before it, one in
    each of those.
    """
    segments = F.pad(logits, (0, -logits.shape[1] % _SEGMENT), value=-torch.inf).unflatten(1, (-1, _SEGMENT))
    positions = torch.arange(segments.shape[1], device=logits.device).expand(segments.shape[:2])
    found = _first_of_order(segments.amax(-1), positions, min(num_best, segments.shape[1]))
    candidates = segments.gather(1, found[:, :, None].expand(-1, -1, _SEGMENT)).flatten(1)
    ids = (found[:, :, None] * _SEGMENT + torch.arange(_SEGMENT, device=logits.device)).flatten(1)
    best_ids = ids.gather(1, _first_of_order(candidates, ids, num_best))
    return logits.gather(1, best_ids), best_ids


def _first_of_order(values: torch.Tensor, ids: torch.Tensor, num_first: int) -> torch.Tensor:
    """Columns [M, num_first] of the first in the order of descending values [M, C] float32, then ascending ids."""
    bits = (values + 0.0).view(torch.int32)  # + 0: -0 and 0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (ordered.long() << 32) + (0x7FFFFFFF - ids)
    return keys.topk(num_first, dim=1).indices
