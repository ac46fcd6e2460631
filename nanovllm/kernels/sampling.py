"""Gumbel-max sampling in one pass over the logits.

argmax_t(logit_t / temperature + g_t) with independent standard Gumbel noise g_t is a draw from
softmax(logits / temperature) (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), so neither a softmax nor a sorted
row is needed. The noise is a pure function of the row's two key words and the token id: the same key gives the same
token in any batch, at any split of the row over programs.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from nanovllm.kernels.common import LN_2, num_multiprocessors
from nanovllm.kernels.logits_filter import MIN_TEMPERATURE, filter_logits_

__all__ = ["filter_logits_", "sample"]

BLOCK = 2048  # logits a program looks at at a time: 16 a thread
MAX_SPLITS = 128  # programs of one row
PROGRAMS_PER_MULTIPROCESSOR = 12
LARGEST_NOISE = tl.constexpr(17.0)  # above -log(-log(1 - 2**-24)) = 16.64, with room for rounding
NO_INDEX = tl.constexpr(2147483647)
HAS_FAST_LOG2 = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter can't call libdevice


@triton.jit
def uniform_noise(token, key_0, key_1):
    """Uniform numbers in (0, 1), fp32, of token ids (int32) and the two key words of a row (uint32 scalars).

    h = mix(token * 0x9E3779B9 + key_0) ^ key_1, u = ((h >> 8) + 0.5) / 2**24. The multipliers of `mix` are those of
    Chris Wellons' "lowbias32" hash (2018).
    """
    h = token.to(tl.uint32) * 0x9E3779B9 + key_0
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    h ^= h >> 16
    h ^= key_1
    u = ((h >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    # (2**24 - 1) + 0.5 rounds up to 2**24: u would be 1, its noise infinite, and one draw in 110 of a 152k vocabulary
    # would be that token whatever its logit. The largest float below 1 stands for that cell.
    return tl.minimum(u, 0.999999940395355224609375)


@triton.jit
def _fast_log2(x):
    if HAS_FAST_LOG2:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def gumbel_noise(token, key_0, key_1):
    """-log(-log(u)), fp32, absolute error of a few 1e-6 (two exact logs would cost more than reading the logits).

    The hardware's log2 has a small *absolute* error near 1, but -log(u) of a u near 1 is what decides for unlikely
    tokens, so there a series of -log(1 - v) takes over; 1 - u is exact.
    """
    u = uniform_noise(token, key_0, key_1)
    v = 1.0 - u
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))  # next term < 2e-7 of it for v < 1/16
    exponential = tl.where(v < 0.0625, series, -LN_2 * _fast_log2(u))
    return -LN_2 * _fast_log2(exponential)


@triton.jit
def _first_of_maximum(values, indices):
    """The largest value and the lowest index that holds it."""
    top = tl.max(values, axis=0)
    return top, tl.min(tl.where(values == top, indices, NO_INDEX), axis=0)


@triton.jit(do_not_specialize=["temperature_ptr", "keys_ptr", "out_ptr"])
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    keys_ptr,
    out_ptr,
    partial_score_ptr,  # [num_rows, num_splits] fp32
    partial_index_ptr,  # [num_rows, num_splits] int32
    logits_row,
    vocab_size,
    chunk,  # logits of one program, a multiple of BLOCK
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * chunk
    end = tl.minimum(start + chunk, vocab_size)
    logits_ptr += row * logits_row
    temperature = tl.load(temperature_ptr + row)
    # each lane keeps its own best and the first index that had it; NaN never compares greater, so it never wins
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = start + tl.arange(0, BLOCK)
    if temperature > MIN_TEMPERATURE:
        inverse = 1.0 / temperature
        key_0 = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        key_1 = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
        reached = float("-inf")  # best score of the tiles so far
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            score = tl.load(logits_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32) * inverse
            # the noise is most of the arithmetic; tiles that even the largest noise can't lift are passed over
            if tl.max(score, axis=0) + LARGEST_NOISE >= reached:
                score += gumbel_noise(token, key_0, key_1)
                index = tl.where(score > best, token, index)
                best = tl.where(score > best, score, best)
                reached = tl.maximum(reached, tl.max(score, axis=0))
    else:
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            score = tl.load(logits_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
            index = tl.where(score > best, token, index)
            best = tl.where(score > best, score, best)
    top, winner = _first_of_maximum(best, index)
    if tl.num_programs(1) == 1:
        tl.store(out_ptr + row, winner.to(tl.int64))
    else:
        tl.store(partial_score_ptr + row * tl.num_programs(1) + split, top)
        tl.store(partial_index_ptr + row * tl.num_programs(1) + split, winner)


@triton.jit(do_not_specialize=["out_ptr", "num_splits"])
def _pick_kernel(partial_score_ptr, partial_index_ptr, out_ptr, num_splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    mask = split < num_splits
    score = tl.load(partial_score_ptr + row * num_splits + split, mask=mask, other=float("-inf"))
    index = tl.load(partial_index_ptr + row * num_splits + split, mask=mask, other=NO_INDEX)
    tl.store(out_ptr + row, _first_of_maximum(score, index)[1].to(tl.int64))


def _chunk(num_rows: int, vocab_size: int, num_sms: int) -> int:
    """Logits of one program: rows are cut until the programs fill the GPU, a tile being the smallest piece."""
    splits = min(triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_sms, num_rows), MAX_SPLITS)
    return triton.cdiv(triton.cdiv(vocab_size, splits), BLOCK) * BLOCK


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature); argmax where the temperature is 0.

    logits:      [num_rows, vocab_size] bf16, fp16 or fp32, any row stride; -inf is never drawn
    temperature: [num_rows] fp32, >= 0
    keys:        [num_rows, 2] int32, contiguous: bit patterns of the two uint32 key words of each row. Both words
                 must be well mixed (hashes, not counters): the low 8 bits of the second don't reach the noise
    out:         [num_rows] int64, contiguous, or None to allocate it
    returns:     [num_rows] int64; ties go to the lowest index. A row that is all -inf gives 0; NaN is never drawn
                 unless nothing else is there, and then some valid index comes back.
    Raises ValueError when the shapes disagree.
    """
    num_rows, vocab_size = logits.shape
    if temperature.shape != (num_rows,) or keys.shape != (num_rows, 2):
        raise ValueError(f"{num_rows} rows, temperature {tuple(temperature.shape)}, keys {tuple(keys.shape)}")
    if not (temperature.is_contiguous() and keys.is_contiguous()):
        raise ValueError("temperature and keys must be contiguous")
    if logits.stride(1) != 1 or vocab_size == 0:
        raise ValueError(f"logits must have contiguous, non-empty rows, not {tuple(logits.shape)} {logits.stride()}")
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    chunk = _chunk(num_rows, vocab_size, num_multiprocessors(logits.device))
    num_splits = triton.cdiv(vocab_size, chunk)
    partial_score = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    partial_index = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    _sample_kernel[(num_rows, num_splits)](
        logits,
        temperature,
        keys,
        out,
        partial_score,
        partial_index,
        logits.stride(0),
        vocab_size,
        chunk,
        BLOCK=BLOCK,
        num_warps=4,
    )
    if num_splits > 1:
        _pick_kernel[(num_rows,)](partial_score, partial_index, out, num_splits, SPLITS=MAX_SPLITS, num_warps=1)
    return out
