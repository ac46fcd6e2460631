"""The gated activation of the feed-forward block (SwiGLU: Shazeer, 2020)."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise."""
    return F.silu(gate) * up
