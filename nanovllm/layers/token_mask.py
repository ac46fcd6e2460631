"""Bans tokens by bitmask: by a kernel on a GPU, else in plain torch, which is also its reference."""

import torch

from nanovllm import kernels


def mask_logits_(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Sets to -inf, in place, the tokens whose bit is 0; returns logits.

    Args:
        logits: [N, V] in any float dtype.
        rows: [M] int32, distinct rows of N; -1 is skipped.
        bitmask: [M, at least ceil(V / 32)] int32; bit t % 32 of word t // 32 allows token t.
    """
    if kernels.serve(logits):
        from nanovllm.kernels import token_mask

        return token_mask.mask_logits_(logits, rows, bitmask)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for row, words in zip(rows.tolist(), bitmask, strict=True):  # one at a time: its bits stay in the cache of a core
        if row >= 0:
            is_banned = (words[:, None] >> shifts & 1) == 0
            logits[row].masked_fill_(is_banned.view(-1)[: logits.shape[1]], -torch.inf)
    return logits
