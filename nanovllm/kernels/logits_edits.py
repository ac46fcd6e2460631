"""What changes a few logits of a row: bit masks of allowed tokens, and penalties of the tokens so far.

The penalties need how often each token came. Each row gets a zeroed count for every token; one kernel counts, and the
next lets every place of a history take its token's count out: the first that comes gets it and changes the logit, the
others get 0, and at the end all counts are zero again for the next rows.
"""

import torch
import triton
import triton.language as tl

MASK_BLOCK = 4096  # logits a program looks at
HISTORY_BLOCK = 256  # places of a history
IN_PROMPT = tl.constexpr(1 << 30)  # beside the count of outputs


@triton.jit(do_not_specialize=["rows_ptr", "masks_ptr"])
def _mask_kernel(logits_ptr, rows_ptr, masks_ptr, logits_row, masks_row, vocab_size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks_ptr + index * masks_row + token // 32, mask=token < vocab_size, other=-1)
    is_banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_row + token, float("-inf"), mask=(token < vocab_size) & is_banned)


def apply_masks_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Set to -inf, in place, the logits whose bit is 0; returns logits.

    logits: [num_rows, vocab_size] bf16, fp16 or fp32, any row stride
    rows:   [num_masks] int32, distinct rows
    masks:  [num_masks, at least ceil(vocab_size / 32)] int32; bit i % 32 of word i // 32 is token i's
    Raises ValueError when the shapes disagree.
    """
    num_masks, num_words = masks.shape
    vocab_size = logits.shape[1]
    if rows.shape != (num_masks,) or num_words * 32 < vocab_size or masks.stride(1) != 1 or logits.stride(1) != 1:
        raise ValueError(f"rows {tuple(rows.shape)}, masks {tuple(masks.shape)}, logits {tuple(logits.shape)}")
    if num_masks:
        grid = (num_masks, triton.cdiv(vocab_size, MASK_BLOCK))
        _mask_kernel[grid](
            logits, rows, masks, logits.stride(0), masks.stride(0), vocab_size, BLOCK=MASK_BLOCK, num_warps=4
        )
    return logits


@triton.jit
def _load_history(histories_ptr, slots_ptr, history_lens_ptr, index, history_row, BLOCK: tl.constexpr):
    """One block of a row's history: columns, tokens, and which are there."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < tl.load(history_lens_ptr + index)
    slot = tl.load(slots_ptr + index).to(tl.int64)
    token = tl.load(histories_ptr + slot * history_row + column, mask=is_token, other=0)
    return column, token, is_token


@triton.jit(do_not_specialize=["first", "slots_ptr", "prompt_lens_ptr", "history_lens_ptr"])
def _count_kernel(
    counts_ptr,  # [num_counted, vocab_size] int32
    histories_ptr,
    slots_ptr,
    prompt_lens_ptr,
    history_lens_ptr,
    first,  # row of the lists that is the first of the counted ones
    history_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = first + tl.program_id(0)
    column, token, is_token = _load_history(histories_ptr, slots_ptr, history_lens_ptr, index, history_row, BLOCK)
    is_output = column >= tl.load(prompt_lens_ptr + index)
    counts_ptr += tl.program_id(0).to(tl.int64) * vocab_size + token
    tl.atomic_add(counts_ptr, 1, mask=is_token & is_output, sem="relaxed")
    tl.atomic_or(counts_ptr, IN_PROMPT, mask=is_token & (is_output == 0), sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "first",
        "slots_ptr",
        "history_lens_ptr",
        "rows_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ]
)
def _penalize_kernel(
    counts_ptr,
    logits_ptr,
    rows_ptr,
    histories_ptr,
    slots_ptr,
    history_lens_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    first,
    history_row,
    logits_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    index = first + tl.program_id(0)
    _, token, is_token = _load_history(histories_ptr, slots_ptr, history_lens_ptr, index, history_row, BLOCK)
    counts_ptr += tl.program_id(0).to(tl.int64) * vocab_size + token
    zero = tl.zeros([BLOCK], tl.int32)
    count = tl.atomic_xchg(counts_ptr, zero, mask=is_token, sem="relaxed")
    is_first = is_token & (count != 0)
    count = (count & (IN_PROMPT - 1)).to(tl.float32)
    row = tl.load(rows_ptr + index).to(tl.int64)
    logit = tl.load(logits_ptr + row * logits_row + token, mask=is_first, other=0.0)
    repetition = tl.load(repetition_ptr + index)
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit -= tl.load(frequency_ptr + index) * count
    logit -= tl.where(count > 0, tl.load(presence_ptr + index), 0.0)
    tl.store(logits_ptr + row * logits_row + token, logit, mask=is_first)


def apply_penalties_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    history_lens: torch.Tensor,
    max_history_len: int,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    num_counted: int,
) -> torch.Tensor:
    """Penalise the tokens of the histories, in place; returns logits.

    A logit of a token in prompt or output is divided by the repetition penalty if it is positive, else multiplied by
    it; then frequency * (how often the output has the token), and presence if it has it at all, are subtracted.

    logits:          [num_rows, vocab_size] fp32, any row stride
    rows:            [num_listed] int32, distinct rows
    histories:       [num_slots, max_len] int32, prompts and outputs; tokens are below vocab_size
    slots, prompt_lens, history_lens, repetition, frequency, presence: [num_listed], int32 and fp32, of each row
    max_history_len: the longest of the lengths
    num_counted:     rows whose counts (vocab_size int32 each) exist at a time
    Raises ValueError when the shapes disagree.
    """
    num_listed, vocab_size = len(rows), logits.shape[1]
    lists = (rows, slots, prompt_lens, history_lens, repetition, frequency, presence)
    if any(values.shape != (num_listed,) or not values.is_contiguous() for values in lists):
        raise ValueError(f"lists of {num_listed} rows must be contiguous, not {[tuple(v.shape) for v in lists]}")
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or histories.stride(1) != 1:
        raise ValueError(f"logits must be fp32 in contiguous rows, not {logits.dtype} {logits.stride()}")
    num_counted = min(num_counted, num_listed)
    counts = torch.zeros(num_counted, vocab_size, dtype=torch.int32, device=logits.device)
    lens = (histories, slots, prompt_lens, history_lens)
    penalties = (repetition, frequency, presence)
    for first in range(0, num_listed, num_counted):
        grid = (min(num_counted, num_listed - first), triton.cdiv(max_history_len, HISTORY_BLOCK))
        strides = (first, histories.stride(0))
        _count_kernel[grid](counts, *lens, *strides, vocab_size, BLOCK=HISTORY_BLOCK, num_warps=4)
        _penalize_kernel[grid](
            counts, logits, rows, histories, slots, history_lens, *penalties, *strides, logits.stride(0), vocab_size,
            BLOCK=HISTORY_BLOCK, num_warps=4,
        )  # fmt: skip
    return logits
