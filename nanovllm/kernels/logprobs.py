"""Log-softmax and rank of one token a row, and the best tokens, in one pass over the logits.

The pass leaves the maximum of each segment of 128 logits. Whatever segment is not among the K that come first by
(maximum, position) has K better tokens before it, so the K best tokens are found in K segments, without a sort.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import num_multiprocessors

SEGMENT = 128  # logits that share a maximum
SEGMENTS = 16  # that a program looks at at a time
BLOCK = SEGMENT * SEGMENTS
MAX_SPLITS = 64  # programs of one row
PROGRAMS_PER_MULTIPROCESSOR = 8
NO_INDEX = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["rows_ptr", "token_ptr"])
def _scan_kernel(
    logits_ptr,
    rows_ptr,  # [num_scored] int32, read only with HAS_ROWS
    token_ptr,  # [num_scored] int32 or int64
    segment_max_ptr,  # [num_scored, num_segments] fp32
    partial_ptr,  # [num_scored, num_splits, 3] fp32: maximum, sum of exp(logit - maximum), number above the token's
    logits_row,
    vocab_size,
    num_segments,
    chunk,  # logits of one program, a multiple of BLOCK
    HAS_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64) if HAS_ROWS else index
    logits_ptr += row * logits_row
    segment_max_ptr += index * num_segments
    own = tl.load(logits_ptr + tl.load(token_ptr + index)).to(tl.float32)
    start = split * chunk
    end = tl.minimum(start + chunk, vocab_size)
    peak = float("-inf")
    total = 0.0
    above = tl.zeros([SEGMENTS, SEGMENT], tl.int32)
    for first in range(start, end, SEGMENTS * SEGMENT):
        token = first + tl.arange(0, SEGMENTS)[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        logit = tl.load(logits_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
        above += (logit > own).to(tl.int32)
        maxima = tl.max(logit, axis=1)
        segment = first // SEGMENT + tl.arange(0, SEGMENTS)
        tl.store(segment_max_ptr + segment, maxima, mask=segment < num_segments)
        new_peak = tl.maximum(peak, tl.max(maxima, axis=0))
        # while everything so far is -inf, the difference would be NaN
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.sum(tl.exp(logit - base), axis=1), axis=0)
        peak = new_peak
    partial_ptr += (index * tl.num_programs(1) + split) * 3
    tl.store(partial_ptr, peak)
    tl.store(partial_ptr + 1, total)
    tl.store(partial_ptr + 2, tl.sum(tl.sum(above, axis=1), axis=0).to(tl.float32))  # exact up to 2**24


@triton.jit
def _store(scores_ptr, plane, column, token, rank, logprob):
    """One column of a row of scores: [3, num_scored, 1 + K] int32, the last plane bit patterns of fp32."""
    tl.store(scores_ptr + column, token.to(tl.int32))
    tl.store(scores_ptr + plane + column, rank.to(tl.int32))
    tl.store(scores_ptr + 2 * plane + column, logprob.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["rows_ptr", "token_ptr", "num_splits", "num_best"])
def _finish_kernel(
    logits_ptr,
    rows_ptr,
    token_ptr,
    segment_max_ptr,
    partial_ptr,
    scores_ptr,
    logits_row,
    vocab_size,
    num_segments,
    num_splits,
    num_best,
    HAS_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SEGMENTS: tl.constexpr,  # num_segments, rounded up to a power of two
    BEST: tl.constexpr,  # num_best, likewise; 0 if there is none to find
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64) if HAS_ROWS else index
    logits_ptr += row * logits_row
    plane = tl.num_programs(0).to(tl.int64) * (num_best + 1)
    scores_ptr += index * (num_best + 1)

    split = tl.arange(0, SPLITS)
    partial_ptr += (index * num_splits + split) * 3
    mask = split < num_splits
    peaks = tl.load(partial_ptr, mask=mask, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    totals = tl.load(partial_ptr + 1, mask=mask, other=0.0)
    log_total = peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))
    above = tl.sum(tl.load(partial_ptr + 2, mask=mask, other=0.0), axis=0)
    token = tl.load(token_ptr + index)
    own = tl.load(logits_ptr + token).to(tl.float32)
    _store(scores_ptr, plane, 0, token, above + 1, own - log_total)

    if BEST > 0:
        segment = tl.arange(0, ALL_SEGMENTS)
        segment_max_ptr += index * num_segments
        maxima = tl.load(segment_max_ptr + segment, mask=segment < num_segments, other=float("-inf"))
        slot = tl.arange(0, BEST)
        found = tl.full([BEST], -1, tl.int32)
        taken = segment >= num_segments
        for i in range(tl.minimum(num_best, num_segments)):
            top = tl.max(tl.where(taken, float("-inf"), maxima), axis=0)
            first = tl.min(tl.where((maxima == top) & (taken == 0), segment, NO_INDEX), axis=0)
            found = tl.where(slot == i, first, found)
            taken = taken | (segment == first)
        tokens = found[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        # a row of NaN has no maximum: its segments are NO_INDEX, and its products wrap
        valid = (found[:, None] >= 0) & (found[:, None] < num_segments) & (tokens < vocab_size)
        logits = tl.load(logits_ptr + tokens, mask=valid, other=float("-inf")).to(tl.float32)
        rank = 1
        previous = float("inf")
        for i in range(num_best):
            top = tl.max(tl.max(tl.where(valid, logits, float("-inf")), axis=1), axis=0)
            best = tl.min(tl.min(tl.where(valid & (logits == top), tokens, NO_INDEX), axis=1), axis=0)
            rank = tl.where(top < previous, i + 1, rank)
            previous = top
            _store(scores_ptr, plane, i + 1, tl.minimum(best, vocab_size - 1), rank, top - log_total)
            valid = valid & (tokens != best)


def score_tokens(
    logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, num_best: int
) -> torch.Tensor:
    """Log-softmax and rank of one token in each of M rows, and of the K = min(num_best, vocab_size) best ones.

    A rank is one more than the number of tokens with a larger logit. Of equal logits the lower ids come first.

    logits:    [num_rows, vocab_size] bf16, fp16 or fp32, any row stride, vocab_size < 2**24; not changed
    rows:      [M] int32, contiguous, which rows; or None: all
    token_ids: [M] int32 or int64, contiguous
    returns:   [3, M, 1 + K] int32: ids, ranks, and bit patterns of fp32 log-probabilities; the token itself comes first
    Raises ValueError when the shapes disagree.
    """
    num_rows, vocab_size = logits.shape
    num_scored = num_rows if rows is None else len(rows)
    if token_ids.shape != (num_scored,) or not token_ids.is_contiguous():
        raise ValueError(f"{num_scored} rows, but token_ids are {tuple(token_ids.shape)} {token_ids.stride()}")
    if logits.stride(1) != 1 or not 0 < vocab_size < 1 << 24:
        raise ValueError(f"logits must have contiguous rows of under 2**24 values, not {tuple(logits.shape)}")
    num_best = min(num_best, vocab_size)
    scores = torch.empty(3, num_scored, 1 + num_best, dtype=torch.int32, device=logits.device)
    if num_scored == 0:
        return scores
    splits = min(triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(logits.device), num_scored), MAX_SPLITS)
    chunk = triton.cdiv(triton.cdiv(vocab_size, splits), BLOCK) * BLOCK
    num_splits = triton.cdiv(vocab_size, chunk)
    num_segments = triton.cdiv(vocab_size, SEGMENT)
    segment_max = torch.empty(num_scored, num_segments, dtype=torch.float32, device=logits.device)
    partial = torch.empty(num_scored, num_splits, 3, dtype=torch.float32, device=logits.device)
    args = (logits, token_ids if rows is None else rows, token_ids, segment_max, partial)
    shape = {"HAS_ROWS": rows is not None, "SEGMENT": SEGMENT}
    _scan_kernel[(num_scored, num_splits)](
        *args, logits.stride(0), vocab_size, num_segments, chunk, **shape, SEGMENTS=SEGMENTS, num_warps=4
    )
    _finish_kernel[(num_scored,)](
        *args,
        scores,
        logits.stride(0),
        vocab_size,
        num_segments,
        num_splits,
        num_best,
        **shape,
        SPLITS=MAX_SPLITS,
        ALL_SEGMENTS=triton.next_power_of_2(num_segments),
        BEST=triton.next_power_of_2(num_best) if num_best else 0,
        num_warps=4,
    )
    return scores
