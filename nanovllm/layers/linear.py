"""Linear layers. Projections of one input that a checkpoint stores apart are one matrix here."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.layers.activation import silu_and_mul


class Linear(nn.Module):
    """y = x W^T + b, with weight [out_features, in_features] left uninitialised for the loader."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _is_skinny(x, self.weight):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def in_pieces(self, x: torch.Tensor) -> torch.Tensor:
        """What `forward` gives, or float32 partial sums of it [num_pieces, T, out_features], as a GPU likes it better.
        `RMSNorm.add_and_normalize` takes either."""
        if self.bias is None and _is_skinny(x, self.weight, in_pieces=True):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, in_pieces=True)
        output: torch.Tensor = self(x)
        return output


class MergedLinear(Linear):
    """Several projections of the same input as one matrix product.

    Attributes:
        parts: checkpoint name of each projection -> its rows of the merged weight, in output order.
    """

    def __init__(self, in_features: int, part_sizes: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(part_sizes.values()), bias)
        self.parts: dict[str, slice] = {}
        start = 0
        for name, size in part_sizes.items():
            self.parts[name] = slice(start, start + size)
            start += size


class GatedLinear(MergedLinear):
    """Two projections of the same input, gate and up; gives silu(gate) * up (SwiGLU: Shazeer, 2020)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, {"gate_proj": out_features, "up_proj": out_features}, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and _is_skinny(x, self.weight):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, silu_and_mul=True)
        return silu_and_mul(F.linear(x, self.weight, self.bias))


def _is_skinny(x: torch.Tensor, weight: torch.Tensor, *, in_pieces: bool = False) -> bool:
    """Whether this project's kernel multiplies faster than the library."""
    if not kernels.serve(x):
        return False
    from nanovllm.kernels import skinny_linear

    return skinny_linear.suits(x, weight, in_pieces=in_pieces)
