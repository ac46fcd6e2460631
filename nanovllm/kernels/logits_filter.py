"""Top-k, top-p and min-p on logits in place, without a sort.

Sorting a row of 152k logits costs far more than reading it a few times. The kept set is a prefix of the row in stable
descending order, that is: every logit above some cut, and the first few (by index) of those equal to it. The cut is
found by bisection on the integers that order floats: the count (top-k) or the probability mass (top-p) of the logits
>= c falls as c grows, and three candidates c are tried in each pass over the row. Exact, because the interval of
integers shrinks to one value.

Passes are saved by a lower bound. The first pass, which finds the maximum, also leaves one maximum per lane, of
disjoint parts of the row; what those few alone count or weigh is at least there in the whole row, and in practice
that bound is the cut itself or next to it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import LOG2_E

BLOCK = 8192  # logits a program looks at at a time: 8 a thread, 16 bytes of a 16-bit type
NUM_WARPS = 32  # one program is a whole row, so it gets all the threads that a block can have
MIN_TEMPERATURE = tl.constexpr(1e-30)  # at or below it a row is greedy: logit / temperature would overflow
UNLIMITED = tl.constexpr(1 << 30)  # more ties than any row has


@triton.jit
def float_to_key(value, DTYPE: tl.constexpr):
    """Order-preserving int64 of a float scalar (fp32 that holds a DTYPE value): its magnitude bits, signed.

    Both zeros map to 0, so that equal floats have equal keys.
    """
    if DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int64)
        return tl.where(bits < 0, -(bits & 0x7FFF), bits)
    else:
        bits = value.to(DTYPE).to(tl.int32, bitcast=True).to(tl.int64)
        return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def key_to_float(key, DTYPE: tl.constexpr):
    """The inverse of `float_to_key`, as fp32."""
    if DTYPE.primitive_bitwidth == 16:
        bits = tl.where(key < 0, -key | 0x8000, key).to(tl.int16)
        return bits.to(DTYPE, bitcast=True).to(tl.float32)
    else:
        bits = tl.where(key < 0, -key | 0x80000000, key).to(tl.int32)
        return bits.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _load_tile(row_ptr, first, vocab_size, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    return tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _lane_maxima(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """[BLOCK] fp32: lane i has the maximum of logits i, i + BLOCK, i + 2 * BLOCK, ..."""
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        maxima = tl.maximum(maxima, _load_tile(row_ptr, first, vocab_size, BLOCK))
    return maxima


@triton.jit
def _masses(row_ptr, vocab_size, c_1, c_2, c_3, peak, sharpness, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Three sums over the logits >= c (fp32, c > -inf): of exp((logit - peak) / temperature), or of 1."""
    sum_1 = tl.zeros([BLOCK], tl.float32)
    sum_2 = tl.zeros([BLOCK], tl.float32)
    sum_3 = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        logit = _load_tile(row_ptr, first, vocab_size, BLOCK)
        weight = tl.exp2((logit - peak) * sharpness) if WEIGHTED else 1.0  # sums of 1 are exact up to 2**24
        sum_1 += tl.where(logit >= c_1, weight, 0.0)
        sum_2 += tl.where(logit >= c_2, weight, 0.0)
        sum_3 += tl.where(logit >= c_3, weight, 0.0)
    return tl.sum(sum_1, axis=0), tl.sum(sum_2, axis=0), tl.sum(sum_3, axis=0)


@triton.jit
def _lower_bound(maxima, weights, target, low, high, DTYPE: tl.constexpr):
    """The largest key in [low, high) at which the lane maxima alone reach target, or low. Reads no memory."""
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum(tl.where(maxima >= key_to_float(middle, DTYPE), weights, 0.0), axis=0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _find_cut(
    row_ptr, vocab_size, target, low, high, peak, sharpness,
    WEIGHTED: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key in (low, high) whose logits >= it sum to target, or low; and the sum of those above it.

    If some key's sum is the target exactly, the search stops early at the key below, of which nothing is needed.
    Invariant: sum(low) >= target > sum(high) = above.
    """
    above = 0.0
    exact = False
    while (high - low > 1) & (exact == 0):
        # low + 1 rather than the first quarter: `low` is mostly a bound just under the cut
        c_1 = low + 1
        c_2 = low + tl.maximum((high - low) // 3, 1)
        c_3 = low + tl.maximum((high - low) * 2 // 3, 1)
        f_1, f_2, f_3 = _masses(
            row_ptr, vocab_size, key_to_float(c_1, DTYPE), key_to_float(c_2, DTYPE), key_to_float(c_3, DTYPE),
            peak, sharpness, WEIGHTED, BLOCK,
        )  # fmt: skip
        best = tl.where(f_3 >= target, c_3, tl.where(f_2 >= target, c_2, c_1))
        best_sum = tl.where(f_3 >= target, f_3, tl.where(f_2 >= target, f_2, f_1))
        above = tl.where(f_3 >= target, above, tl.where(f_2 >= target, f_3, tl.where(f_1 >= target, f_2, f_1)))
        high = tl.where(f_3 >= target, high, tl.where(f_2 >= target, c_3, tl.where(f_1 >= target, c_2, c_1)))
        exact = best_sum == target
        low = tl.where(exact, best - 1, tl.where(f_1 >= target, best, low))
        above = tl.where(exact, target, above)
    return low, above


@triton.jit
def _apply(row_ptr, vocab_size, cut, num_ties, peak, sharpness, log2_min_p, BLOCK: tl.constexpr):
    """Write -inf over all but: logits > cut, and the first num_ties (by index) of those equal to it; then min-p."""
    seen = 0  # ties in the tiles so far
    for first in range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = _load_tile(row_ptr, first, vocab_size, BLOCK)
        is_tie = logit == cut
        in_tile = tl.sum(is_tie.to(tl.int32), axis=0)
        keep = logit > cut
        if seen + in_tile <= num_ties:
            keep |= is_tie
        elif seen < num_ties:  # the one tile in which the ties run out: only here is a scan needed
            keep |= is_tie & (seen + tl.cumsum(is_tie.to(tl.int32), axis=0) <= num_ties)
        seen += in_tile
        keep &= (logit - peak) * sharpness >= log2_min_p
        tl.store(row_ptr + token, float("-inf"), mask=(token < vocab_size) & (keep == 0))


@triton.jit(do_not_specialize=["rows_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _filter_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_count = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    if (temperature <= MIN_TEMPERATURE) | ((min_p <= 0.0) & (by_count == 0) & (by_mass == 0)):
        return
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    row_ptr = logits_ptr + row * logits_row
    sharpness = LOG2_E / temperature
    maxima = _lane_maxima(row_ptr, vocab_size, BLOCK)
    peak = tl.max(maxima, axis=0)
    if peak == float("-inf"):
        return

    cut = float_to_key(tl.full([], float("-inf"), tl.float32), dtype)
    high = float_to_key(peak, dtype) + 1
    num_ties = tl.full([], UNLIMITED, tl.int32)
    if by_count:
        target = top_k.to(tl.float32)
        # - 1: so that the search tries the bound itself, where it mostly ends
        low = tl.maximum(_lower_bound(maxima, 1.0, target, cut, high, dtype) - 1, cut)
        cut, above = _find_cut(row_ptr, vocab_size, target, low, high, peak, sharpness, False, dtype, BLOCK)
        num_ties = (target - above).to(tl.int32)
    if by_mass:
        at_cut = key_to_float(cut, dtype)
        just_above = key_to_float(cut + 1, dtype)
        cut_weight = tl.exp2((at_cut - peak) * sharpness)
        mass, _, _ = _masses(row_ptr, vocab_size, just_above, peak, peak, peak, sharpness, True, BLOCK)
        if num_ties < UNLIMITED:
            mass += num_ties * cut_weight
        target = tl.maximum(top_p * mass, 1e-30)  # top_p = 0 still keeps one token (the likeliest weighs 1)
        weights = tl.exp2((maxima - peak) * sharpness)
        low = tl.maximum(_lower_bound(maxima, weights, target, cut, high, dtype) - 1, cut)
        new_cut, above = _find_cut(row_ptr, vocab_size, target, low, high, peak, sharpness, True, dtype, BLOCK)
        weight = tl.exp2((key_to_float(new_cut, dtype) - peak) * sharpness)
        # tie i stays while the mass before it, above + i * weight, is under the target: so the crossing token does
        needed = tl.ceil(tl.minimum((target - above) / weight, 1e9)).to(tl.int32)
        num_ties = tl.where(new_cut == cut, tl.minimum(needed, num_ties), needed)  # rounding never adds to top-k
        cut = new_cut
    log2_min_p = tl.log2(tl.minimum(tl.maximum(min_p, 0.0), 1.0))  # -inf when off
    _apply(row_ptr, vocab_size, key_to_float(cut, dtype), num_ties, peak, sharpness, log2_min_p, BLOCK)


def filter_logits_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Set to -inf, in place, what top-k, top-p and min-p leave out of the listed rows; returns logits.

    Order: temperature, then top-k, then top-p over the renormalised survivors (the token that crosses the threshold
    stays), then min-p relative to the largest probability. Equal logits count as in a stable descending sort: the
    lower index first. The kept logits are not changed, in particular not divided by the temperature.

    logits:      [num_rows, vocab_size] bf16, fp16 or fp32, any row stride, vocab_size < 2**24
    rows:        [num_listed] int32, distinct rows to filter; -1 entries are skipped, so a graph can pad the list
    temperature: [num_rows] fp32; rows of 0 are greedy and left alone
    top_k:       [num_rows] int32; <= 0 or >= vocab_size: off
    top_p:       [num_rows] fp32; >= 1: off; 0 keeps one token
    min_p:       [num_rows] fp32 in [0, 1]; 0: off
    Raises ValueError when the shapes disagree.
    """
    num_rows, vocab_size = logits.shape
    if any(values.shape != (num_rows,) for values in (temperature, top_k, top_p, min_p)) or rows.dim() != 1:
        shapes = [tuple(values.shape) for values in (rows, temperature, top_k, top_p, min_p)]
        raise ValueError(f"{num_rows} rows of logits, but rows, temperature, top_k, top_p and min_p are {shapes}")
    if not all(values.is_contiguous() for values in (rows, temperature, top_k, top_p, min_p)):
        raise ValueError("rows, temperature, top_k, top_p and min_p must be contiguous")
    if logits.stride(1) != 1 or vocab_size >= 1 << 24:
        raise ValueError(f"logits must have contiguous rows of under 2**24 values, not {tuple(logits.shape)}")
    if rows.shape[0]:
        _filter_kernel[(rows.shape[0],)](
            logits,
            rows,
            temperature,
            top_k,
            top_p,
            min_p,
            logits.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            maxnreg=65536 // (NUM_WARPS * 32),  # the register file's share of each thread; more could not launch
        )
    return logits
