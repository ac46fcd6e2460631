"""How the work of decode attention is cut into equal shares: on the device, once a step.

All sequences' contexts, one after the other, are a line of tiles; share s is the s-th of equally long pieces of it. The
kernels that use them are in `paged_decode.py`, and in `shared_prefix.py`, whose line is one of shared prefixes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import num_multiprocessors

PROGRAMS_PER_MULTIPROCESSOR = 4  # what 128 threads of 128 registers leave room for
SHORTEST_SHARE = 2  # tiles; shorter ones don't amortise loading q and storing the partial result
PLAN_BLOCK = 1024  # sequences that the planning kernel looks at at a time


@dataclass(frozen=True)
class DecodePlan:
    """How a batch's contexts are cut into shares. Made once a step, used in every layer, one after the other.

    shares:       [num_shares, 8] int32: first and end tile on the line, tiles of a full share; then of the first
                  sequence in it the index, its first and end tile, and its context length; 0
    first_tiles:  [num_seqs + 1] int32: where each sequence's tiles begin on the line
    arrivals:     [num_seqs, num_kv_heads] int32: partial results left so far; 0 between launches
    partial:      [2 * num_shares, num_heads, head_dim] fp32: of each share the sequence that it continues, and the one
                  that it begins and does not end
    partial_lse:  [2 * num_shares, num_heads] fp32, base 2
    tile:         tokens of a tile
    """

    shares: torch.Tensor
    first_tiles: torch.Tensor
    arrivals: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    tile: int


@triton.jit(do_not_specialize=["context_lens_ptr", "num_seqs", "num_arrivals"])
def _plan_kernel(
    context_lens_ptr,
    shares_ptr,
    first_tiles_ptr,
    arrivals_ptr,
    num_seqs,
    num_arrivals,
    TILE: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    share = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = 0
    for first in range(0, num_seqs, BLOCK):
        seq = first + lane
        total += tl.sum(tl.cdiv(tl.load(context_lens_ptr + seq, mask=seq < num_seqs, other=0), TILE))
    length = tl.maximum(tl.cdiv(total, tl.num_programs(0)), SHORTEST)
    start = tl.minimum(share * length, total)
    first_seq = 0  # sequences that end at or before `start`
    first_tile = 0  # where the last of them ends
    end_tile = total  # where the first of the others ends
    reached = 0
    for first in range(0, num_seqs, BLOCK):
        seq = first + lane
        tiles = tl.cdiv(tl.load(context_lens_ptr + seq, mask=seq < num_seqs, other=0), TILE)
        ends = reached + tl.cumsum(tiles, axis=0)
        first_seq += tl.sum(((ends <= start) & (seq < num_seqs)).to(tl.int32))
        first_tile = tl.maximum(first_tile, tl.max(tl.where(ends <= start, ends, 0)))
        end_tile = tl.minimum(end_tile, tl.min(tl.where(ends > start, ends, total)))
        if share == 0:
            tl.store(first_tiles_ptr + seq, ends - tiles, mask=seq < num_seqs)
        reached += tl.sum(tiles)
    if share == 0:
        tl.store(first_tiles_ptr + num_seqs, total)
    context = tl.load(context_lens_ptr + first_seq, mask=first_seq < num_seqs, other=0)
    shares_ptr += 8 * share
    tl.store(shares_ptr, start)
    tl.store(shares_ptr + 1, tl.minimum(start + length, total))
    tl.store(shares_ptr + 2, length)
    tl.store(shares_ptr + 3, first_seq)
    tl.store(shares_ptr + 4, first_tile)
    tl.store(shares_ptr + 5, end_tile)
    tl.store(shares_ptr + 6, context)
    for first in range(share * BLOCK, num_arrivals, tl.num_programs(0) * BLOCK):
        tl.store(arrivals_ptr + first + lane, 0, mask=first + lane < num_arrivals)


def plan_decode(
    context_lens: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodePlan:
    """Cuts the contexts of a batch into shares; one launch.

    context_lens: [num_seqs] int32, contiguous
    dtype:        of queries and cache
    Raises ValueError for context_lens that are not contiguous int32.
    """
    if context_lens.dtype != torch.int32 or context_lens.dim() != 1 or not context_lens.is_contiguous():
        raise ValueError(f"context_lens must be contiguous int32 [num_seqs], not {context_lens.dtype}")
    device, num_seqs = context_lens.device, len(context_lens)
    num_shares = max(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)
    tile = tile_length(padded(head_dim), dtype.itemsize)
    arrivals = torch.empty(num_seqs, num_kv_heads, dtype=torch.int32, device=device)
    shares, first_tiles = cut_into_shares(context_lens, num_shares, tile, arrivals)
    return DecodePlan(
        shares=shares,
        first_tiles=first_tiles,
        arrivals=arrivals,
        partial=torch.empty(2 * num_shares, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(2 * num_shares, num_heads, dtype=torch.float32, device=device),
        tile=tile,
    )


def cut_into_shares(
    lens: torch.Tensor, num_shares: int, tile: int, arrivals: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`shares` and `first_tiles` of a plan, for lens [num_seqs] int32; one launch, which sets `arrivals` to 0, too."""
    shares = torch.empty(num_shares, 8, dtype=torch.int32, device=lens.device)
    first_tiles = torch.empty(len(lens) + 1, dtype=torch.int32, device=lens.device)
    _plan_kernel[(num_shares,)](
        lens,
        shares,
        first_tiles,
        shares if arrivals is None else arrivals,
        len(lens),
        0 if arrivals is None else arrivals.numel(),
        TILE=tile,
        SHORTEST=SHORTEST_SHARE,
        BLOCK=PLAN_BLOCK,
        num_warps=4,
    )
    return shares, first_tiles


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def tile_length(dims: int, element_size: int) -> int:
    """Tokens of one K or V tile: 16 KiB, small enough that registers limit the programs of a multiprocessor."""
    return min(max(16384 // (dims * element_size), 16), 128)
