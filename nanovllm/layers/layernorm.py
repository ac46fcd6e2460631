"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.layers.peers import PartialSum


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if kernels.serve(x):
            from nanovllm.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight

    def add_and_normalize(self, x: torch.Tensor | PartialSum, residual: torch.Tensor) -> torch.Tensor:
        """Adds x [T, size], or partial sums of it on a GPU, [num_pieces, T, size] or of several ranks, to the residual
        [T, size] in place, and returns the sum normalised."""
        if isinstance(x, PartialSum):
            return x.add_and_normalize(residual, self.weight, self.eps)
        if kernels.serve(x):
            from nanovllm.kernels.norm import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        return self(residual.add_(x))
