"""What changes the logits of some rows before temperature and filters: by kernels on a GPU where plain torch is slow.

All of it works in place, on float32: next to a logit of 20, bfloat16 has no room for a penalty of 0.05.
"""

from dataclasses import dataclass

import torch

from nanovllm import kernels

# Rows whose tokens are counted at a time: each needs a count for every token of the vocabulary.
COUNTED_ROWS = 64


@dataclass(frozen=True)
class LogitsRows:
    """What a logits processor gets to know of its M requests. It lies on the device, where it is complete: the newest
    token of a request may not have reached the host yet. Reading it on the host waits for the device.

    Attributes:
        token_ids: [M, L] int32, prompt and output so far; beyond a row's `num_tokens` it means nothing.
        num_prompt_tokens: [M] int32.
        num_tokens: [M] int32, prompt and output.
    """

    token_ids: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor


def apply_masks_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Bans the tokens whose bit is not set.

    Args:
        logits: [N, V].
        rows: [A] int32, distinct rows of N.
        masks: [A, at least ceil(V / 32)] int32; bit i % 32 of word i // 32 is token i's.
    """
    if kernels.serve(logits):
        from nanovllm.kernels import logits_edits

        logits_edits.apply_masks_(logits, rows, masks)
        return
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    for row, mask in zip(rows.tolist(), masks, strict=True):
        is_allowed = (mask[:, None] >> bits & 1).flatten()[: logits.shape[1]]
        logits[row].masked_fill_(is_allowed == 0, -torch.inf)


def add_biases_(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i], for distinct pairs."""
    logits[rows, token_ids] += values


def ban_words_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    prefixes: torch.Tensor,
    token_ids: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    history_lens: torch.Tensor,
) -> None:
    """Bans the last token of each of W words where the output ends with the others.

    Args:
        logits: [N, V].
        rows: [W], rows of N.
        prefixes, token_ids: [W, P] and [W], a word's tokens but the last, padded with -1 on the left; and the last.
        histories: [num_slots, max_len], prompts and outputs.
        slots, prompt_lens, history_lens: [W], of each word's row.
    """
    width = prefixes.shape[1]
    columns = history_lens[:, None] - width + torch.arange(width, dtype=torch.int32, device=logits.device)
    is_output = columns >= prompt_lens[:, None]
    newest = histories[slots[:, None], columns.clamp(min=0)]
    is_banned = ((newest == prefixes) & is_output | (prefixes < 0)).all(dim=1)
    values = torch.where(is_banned, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((rows, token_ids), values, accumulate=True)  # words may share their last token


def apply_penalties_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    histories: torch.Tensor,
    slots: torch.Tensor,
    prompt_lens: torch.Tensor,
    history_lens: torch.Tensor,
    max_history_len: int,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Makes tokens of the histories less likely (or more).

    Repetition (Keskar et al. 2019, arXiv:1909.05858): a logit of a token that prompt or output have is divided by the
    penalty if it is positive, else multiplied by it. Then frequency * (how often the output has the token), and
    presence if it has it at all, are subtracted.

    Args:
        logits: [N, V] float32.
        rows: [H] int32, distinct rows of N.
        histories: [num_slots, max_len] int32, prompts and outputs.
        slots, prompt_lens, history_lens: [H] int32, of each row; no history is empty.
        max_history_len: the longest history.
        penalties: repetition, frequency and presence, [H] float32 each.
    """
    if kernels.serve(logits):
        from nanovllm.kernels import logits_edits

        logits_edits.apply_penalties_(
            logits, rows, histories, slots, prompt_lens, history_lens, max_history_len, *penalties, COUNTED_ROWS
        )
        return
    for first in range(0, len(rows), COUNTED_ROWS):
        part = slice(first, first + COUNTED_ROWS)
        token_ids = histories[slots[part], :max_history_len]
        some = [values[part, None] for values in (rows, prompt_lens, history_lens, *penalties)]
        _penalize(logits, token_ids, *some)


def _penalize(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    prompt_lens: torch.Tensor,
    history_lens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """`token_ids` is [H, L], the others are [H, 1]. Each place of a history computes its token's new logit, so a token
    that comes several times is written several times, each time the same."""
    columns = torch.arange(token_ids.shape[1], device=logits.device)
    is_token = columns < history_lens
    ids = torch.where(is_token, token_ids, token_ids[:, :1]).long()  # what fills up is a token that is there
    is_output = is_token & (columns >= prompt_lens)
    counts = logits.new_zeros(len(ids), logits.shape[1]).scatter_add_(1, ids, is_output.to(logits.dtype))
    count = counts.gather(1, ids)
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, ids] = values - frequency * count - presence * (count > 0)
