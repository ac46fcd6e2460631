"""Linear layers. Projections of one input that a checkpoint stores apart are one matrix here."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm import kernels
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.parallel import SINGLE, Parallel, Shard
from nanovllm.layers.peers import PartialSum

# A long prompt's rows are multiplied in parts, and while ranks add up one, the next is multiplied.
_MIN_OVERLAPPED_ROWS = 2048
_NUM_OVERLAPPED_PARTS = 4


class Linear(nn.Module):
    """y = x W^T + b, with weight [out_features, in_features] left uninitialised for the loader."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.bias)

    def in_pieces(self, x: torch.Tensor) -> torch.Tensor | PartialSum:
        """What `forward` gives, or float32 partial sums of it [num_pieces, T, out_features], or one of ranks, as a GPU
        likes it better. `RMSNorm.add_and_normalize` takes any."""
        if self.bias is None and _is_skinny(x, self.weight, in_pieces=True):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, in_pieces=True)
        output: torch.Tensor = self(x)
        return output

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        if _is_skinny(x, self.weight):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, bias, out=out)
        if out is None:
            return F.linear(x, self.weight, bias)
        if bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(bias, x, self.weight.t(), out=out)


class RowLinear(Linear):
    """A projection whose input features are shared out over the ranks: each gives a part of every sum.

    Attributes:
        place: where these sums are in `Peers`, if the ranks have that.
    """

    def __init__(
        self, columns: Shard, out_features: int, bias: bool = False, parallel: Parallel = SINGLE, place: int = 0
    ) -> None:
        super().__init__(len(columns), out_features, bias)
        self.columns, self.parallel, self.place = columns, parallel, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return super().forward(x)
        if len(x) < _MIN_OVERLAPPED_ROWS:
            return self._add_bias(self.parallel.all_reduce(self._multiply(x, None)))
        out = x.new_empty(len(x), len(self.weight))
        ends = []
        for rows, part in zip(x.chunk(_NUM_OVERLAPPED_PARTS), out.chunk(_NUM_OVERLAPPED_PARTS), strict=True):
            self._multiply(rows, None, out=part)
            ends.append(self.parallel.begin_all_reduce(part))
        for end in ends:
            end()
        return self._add_bias(out)

    def in_pieces(self, x: torch.Tensor) -> torch.Tensor | PartialSum:
        peers = self.parallel.peers
        if peers is not None and peers.serves(len(x)):
            result = peers.begin_sum(self.place, len(x))
            self._multiply(x, self.bias if self.parallel.rank == 0 else None, out=result.part)  # a bias counts once
            return result
        if self.parallel.size == 1 or self.bias is not None:
            return super().in_pieces(x)
        if not _is_skinny(x, self.weight, in_pieces=True):
            return self(x)
        pieces = super().in_pieces(x)
        assert isinstance(pieces, torch.Tensor)
        return self.parallel.all_reduce(pieces.sum(0).to(x.dtype) if pieces.dim() == 3 else pieces)

    def _add_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x.add_(self.bias)  # once, not by every rank


class MergedLinear(Linear):
    """Several projections of the same input as one matrix product, each with the rows that this rank holds.

    Attributes:
        parts: checkpoint name of each projection -> its rows of the merged weight, in output order, and what rows of
            the checkpoint's weight those are.
    """

    def __init__(self, in_features: int, part_rows: Mapping[str, Shard], bias: bool = False) -> None:
        super().__init__(in_features, sum(map(len, part_rows.values())), bias)
        self.parts: dict[str, tuple[slice, Shard]] = {}
        start = 0
        for name, shard in part_rows.items():
            self.parts[name] = slice(start, start + len(shard)), shard
            start += len(shard)


class GatedLinear(MergedLinear):
    """Two projections of the same input, gate and up; gives silu(gate) * up (SwiGLU: Shazeer, 2020)."""

    def __init__(self, in_features: int, rows: Shard, bias: bool = False) -> None:
        super().__init__(in_features, {"gate_proj": rows, "up_proj": rows}, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and _is_skinny(x, self.weight, silu_and_mul=True):
            from nanovllm.kernels.skinny_linear import skinny_linear

            return skinny_linear(x, self.weight, silu_and_mul=True)
        return silu_and_mul(F.linear(x, self.weight, self.bias))


def _is_skinny(x: torch.Tensor, weight: torch.Tensor, *, silu_and_mul: bool = False, in_pieces: bool = False) -> bool:
    """Whether this project's kernel multiplies faster than the library."""
    if not kernels.serve(x):
        return False
    from nanovllm.kernels import skinny_linear

    return skinny_linear.suits(x, weight, silu_and_mul=silu_and_mul, in_pieces=in_pieces)
