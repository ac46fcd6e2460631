"""Constrained output: what a bitmask leaves out of some rows of logits becomes -inf, in place."""

import torch
import triton
import triton.language as tl

BLOCK = 8192  # tokens of a program, 256 words of the mask


@triton.jit(do_not_specialize=["rows_ptr", "bitmask_ptr"])
def _mask_kernel(logits_ptr, rows_ptr, bitmask_ptr, logits_row, bitmask_row, vocab_size, BLOCK: tl.constexpr):
    listed = tl.program_id(0)
    row = tl.load(rows_ptr + listed).to(tl.int64)
    if row < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocab_size
    word = tl.load(bitmask_ptr + listed.to(tl.int64) * bitmask_row + token // 32, mask=valid, other=0)
    is_banned = ((word >> (token % 32)) & 1) == 0  # the sign that an arithmetic shift copies is masked away
    tl.store(logits_ptr + row * logits_row + token, float("-inf"), mask=valid & is_banned)


def mask_logits_(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Set to -inf, in place, the logits of the tokens whose bit is 0; returns logits. Reads no logit.

    logits:  [num_rows, vocab_size] bf16, fp16 or fp32, any row stride
    rows:    [num_listed] int32, contiguous: distinct rows to mask; -1 entries are skipped, so a graph can pad the list
    bitmask: [num_listed, at least ceil(vocab_size / 32)] int32, any row stride: bit t % 32 of word t // 32 of a row
             allows token t
    Raises ValueError when the shapes disagree.
    """
    num_listed, num_words = bitmask.shape
    vocab_size = logits.shape[1]
    if rows.shape != (num_listed,) or num_words * 32 < vocab_size:
        raise ValueError(f"{tuple(rows.shape)} rows, a bitmask of {tuple(bitmask.shape)} words, {vocab_size} tokens")
    if logits.stride(1) != 1 or bitmask.stride(1) != 1 or not rows.is_contiguous():
        raise ValueError("the rows of logits and bitmask must be contiguous, and so must the list of rows")
    if num_listed:
        grid = (num_listed, triton.cdiv(vocab_size, BLOCK))
        _mask_kernel[grid](
            logits, rows, bitmask, logits.stride(0), bitmask.stride(0), vocab_size, BLOCK=BLOCK, num_warps=8
        )
    return logits
