"""Linear layers. Projections of one input that a checkpoint stores apart are one matrix here."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b, with weight [out_features, in_features] left uninitialised for the loader."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


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
