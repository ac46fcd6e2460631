"""Matrix products of a few rows: a decode step's, whose time is that of reading the weights.

A library's product waits for the kernel before it, then starts to read. These start beside the end of whatever runs
before (programmatic dependent launch), and ask for the beginning of their share of the weight, which no kernel writes,
before they wait. All programs run at once, so that none begins when the others end. Where few programs would leave the
GPU half empty, the inner dimension is cut: each piece gives its partial sums, which the norm that follows adds up as it
reads them.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    has_dependent_launch,
    launch_options,
    num_multiprocessors,
    shared_memory_per_block,
    wait_for_previous_kernel,
)

MAX_ROWS = 128  # with more, arithmetic counts, and a library's kernels do that better
MAX_ROWS_IN_PIECES = 256
MAX_PIECES = 4
SHARED_MEMORY = 200 << 10  # bytes that the largest tiles take; a consumer GPU has half of that
INNER = 128  # of which in_features is a multiple
PREFETCHED_LINES = 4  # of 128 bytes, for each column of a program, gate and up together; a power of two


@dataclass(frozen=True)
class _Tile:
    """What a program computes: so many rows and columns, so many inner features at a time."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# (at most 16 rows, gate and up) -> tiles, narrowest first: the best of sweeps on an H200, with models from 0.6B to 32B.
_TILES = {
    (True, False): [_Tile(16, 64, 128, 4, 6)],
    (True, True): [_Tile(16, 64, 128, 4, 4), _Tile(16, 128, 64, 8, 5)],
    (False, False): [_Tile(64, 32, 128, 4, 6), _Tile(64, 64, 128, 4, 6)],
    (False, True): [_Tile(64, 32, 128, 4, 5), _Tile(64, 64, 128, 4, 4), _Tile(64, 128, 64, 8, 4)],
}


@dataclass(frozen=True)
class _Plan:
    tile: _Tile
    grid: tuple[int, int, int]  # columns, rows, pieces

    @property
    def num_programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@triton.jit
def _prefetch(ptrs):
    """Brings the 128-byte lines at `ptrs` into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,  # [num_rows, out_features], or with pieces [num_pieces, num_rows, out_features] fp32
    num_rows,
    out_features,
    piece,  # inner features of a program, a multiple of INNER
    x_row,
    weight_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    LINES: tl.constexpr,
    SWAP: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.program_id(1) * ROWS
    start = tl.program_id(2) * piece
    row = first_row + tl.arange(0, ROWS)
    inner = tl.arange(0, INNER)
    row_ok, column_ok = row < num_rows, column < out_features
    weight_ptrs = weight_ptr + column.to(tl.int64) * weight_row
    up_ptrs = weight_ptrs + out_features.to(tl.int64) * weight_row  # used with SILU alone
    if PDL:  # a piece has no fewer than LINES
        line = start + tl.arange(0, LINES) * (128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8))
        present = tl.minimum(column, out_features - 1).to(tl.int64) * weight_row
        _prefetch(weight_ptr + present[:, None] + line[None, :])
        if SILU:
            _prefetch(weight_ptr + out_features.to(tl.int64) * weight_row + present[:, None] + line[None, :])
    wait_for_previous_kernel(PDL)
    # SWAP: the tensor cores' long side takes the weight's rows, because there are few of x's
    gate = tl.zeros([COLUMNS, ROWS] if SWAP else [ROWS, COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS] if SWAP else [ROWS, COLUMNS], tl.float32)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_row
    for first in range(start, start + piece, INNER):
        x = tl.load(x_ptrs + (first + inner)[None, :], mask=row_ok[:, None], other=0.0)
        weight = tl.load(weight_ptrs[:, None] + (first + inner)[None, :], mask=column_ok[:, None], other=0.0)
        gate = tl.dot(weight, tl.trans(x), gate) if SWAP else tl.dot(x, tl.trans(weight), gate)
        if SILU:
            weight = tl.load(up_ptrs[:, None] + (first + inner)[None, :], mask=column_ok[:, None], other=0.0)
            up = tl.dot(weight, tl.trans(x), up) if SWAP else tl.dot(x, tl.trans(weight), up)
    result = tl.trans(gate) if SWAP else gate
    if BIAS:
        result += tl.load(bias_ptr + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if SILU:
        result = result / (1.0 + tl.exp(-result)) * (tl.trans(up) if SWAP else up)
    if PARTIAL:
        out_ptr += tl.program_id(2).to(tl.int64) * num_rows * out_features
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@cache
def _plan(
    num_rows: int, in_features: int, out_features: int, num_programs: int, *, gated: bool, in_pieces: bool
) -> _Plan:
    """The tile that gives most programs, if possible not more than `num_programs`; of equals the widest."""
    plans = []
    for tile in _TILES[num_rows <= 16, gated]:
        columns, rows, pieces = triton.cdiv(out_features, tile.columns), triton.cdiv(num_rows, tile.rows), 1
        if in_pieces:
            while pieces < MAX_PIECES and in_features % (2 * pieces * INNER) == 0:
                if 2 * pieces * columns * rows > num_programs:
                    break
                pieces *= 2
        plans.append(_Plan(tile, (columns, rows, pieces)))
    fitting = [plan for plan in plans if plan.num_programs <= num_programs]
    return max(reversed(fitting), key=lambda plan: plan.num_programs) if fitting else plans[-1]


def suits(x: torch.Tensor, weight: torch.Tensor, *, silu_and_mul: bool = False, in_pieces: bool = False) -> bool:
    """Whether `skinny_linear` serves x [num_rows, in_features] and a weight better than a library's product."""
    num_rows, in_features = x.shape
    if (
        not 0 < num_rows <= (MAX_ROWS_IN_PIECES if in_pieces else MAX_ROWS)
        or in_features % INNER
        or weight.element_size() != 2
        or not has_dependent_launch(x.device)
        or shared_memory_per_block(x.device) < SHARED_MEMORY
    ):
        return False
    limit = num_multiprocessors(x.device)
    out_features = len(weight) // (2 if silu_and_mul else 1)
    plan = _plan(num_rows, in_features, out_features, limit, gated=silu_and_mul, in_pieces=in_pieces)
    if plan.num_programs > limit:
        return False
    if num_rows <= 16:
        return True
    # A library cuts long sums better: beyond 16 rows those that few multiprocessors share, beyond 64 rows all.
    piece = in_features // plan.grid[2]
    return piece <= 1536 or (num_rows <= 64 and (piece <= 3072 or 3 * plan.num_programs >= 2 * limit))


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu_and_mul: bool = False,
    in_pieces: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x weight^T + bias, in fp32, rounded once.

    x:            [num_rows, in_features], 16-bit, last dimension contiguous; in_features a multiple of 128
    weight:       [out_features, in_features], rows contiguous
    bias:         [out_features] or None
    silu_and_mul: the weight is two of [out_features, in_features], gate first; gives silu(x gate^T) * (x up^T)
    in_pieces:    the result may come as partial sums: [num_pieces, num_rows, out_features] fp32, to be added up
    out:          [num_rows, out_features] of x's dtype, contiguous, or None to allocate it; not in pieces
    returns:      [num_rows, out_features] of x's dtype, or pieces
    Raises ValueError when the shapes disagree, for a bias with silu_and_mul or in_pieces, and for out with in_pieces.
    """
    num_rows, in_features = x.shape
    if weight.shape[1] != in_features or in_features % INNER or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must agree, in multiples of {INNER}")
    if bias is not None and (silu_and_mul or in_pieces):
        raise ValueError("a bias goes with neither silu_and_mul nor in_pieces")
    if out is not None and in_pieces:
        raise ValueError("the pieces' number is not known beforehand, so they can't go to a given tensor")
    out_features = weight.shape[0] // (2 if silu_and_mul else 1)
    plan = _plan(
        num_rows, in_features, out_features, num_multiprocessors(x.device), gated=silu_and_mul, in_pieces=in_pieces
    )
    tile, num_pieces = plan.tile, plan.grid[2]
    piece = in_features // num_pieces
    shape = (num_pieces, num_rows, out_features) if num_pieces > 1 else (num_rows, out_features)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32 if num_pieces > 1 else x.dtype, device=x.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} must be contiguous and {shape}")
    if num_rows == 0:
        return out
    _skinny_linear_kernel[plan.grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        out_features,
        piece,
        x.stride(0),
        weight.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        LINES=2 if silu_and_mul or piece == INNER else PREFETCHED_LINES,
        SWAP=tile.rows == 16,
        SILU=silu_and_mul,
        BIAS=bias is not None,
        PARTIAL=num_pieces > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(x.device),
    )
    return out
