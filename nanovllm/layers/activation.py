"""The gated activation of the feed-forward block (SwiGLU: Shazeer, 2020)."""

import torch
import torch.nn.functional as F

from nanovllm import kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 size] -> [T, size]: silu of the first half times the second."""
    if kernels.serve(gate_up):
        from nanovllm.kernels import activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
