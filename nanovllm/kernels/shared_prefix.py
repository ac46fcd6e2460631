"""Decode attention over prefixes that several sequences share: each is read once for all of them.

The first half of cascade attention (Hydragen, Juravsky et al. 2024, arXiv:2402.05099): softmax over a context is
softmax over its parts, weighted by their log-sum-exp. The queries of a group of sequences are the rows of one matrix
product with the keys that they share, so that the tensor cores work on full tiles; each row's result over that part,
with its log-sum-exp, is left for `paged_decode.py`, which goes on from there with what the sequence has for itself.

The work is cut like that of `paged_decode.py`: the groups' tokens, one group after the other, are a line of tiles, and
share s of a KV head is a piece of it. Each group's part in each share is a *piece* with a result of its own; along the
line, from piece to piece, either the group or the share is the next one, so group + share numbers them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    LOG2_E,
    check_attention,
    dot_precision,
    launch_options,
    num_multiprocessors,
    shared_memory_per_block,
    wait_for_previous_kernel,
)
from nanovllm.kernels.decode_plan import cut_into_shares, padded, tile_length
from nanovllm.kernels.paged_prefill import attend_keys
from nanovllm.utils.context import SharedPrefixes

PROGRAMS_PER_MULTIPROCESSOR = 2  # what registers and shared memory leave room for
RESOLVE_BLOCK = 128  # sequences
MAX_PIECES = tl.constexpr(4096)  # of a group: more than there are shares
NUM_WARPS = 4
# A third stage of the pipeline, where a multiprocessor has room for two programs with it.
MAX_DIMS_OF_THREE_STAGES = 128
SHARED_MEMORY_OF_THREE_STAGES = 200 * 1024  # of one block


def query_rows(dtype: torch.dtype) -> int:
    """Rows of the tile of queries: full tensor cores; without them (fp32), what the registers hold."""
    return 32 if dtype == torch.float32 else 64


def group_capacity(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> int:
    """Sequences whose queries fill a tile; with less than two there is nothing to share."""
    return query_rows(dtype) // (num_heads // num_kv_heads)


def shared_bytes(num_groups: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Memory of the results of a plan for so many groups."""
    num_pieces = num_groups + _num_shares(num_kv_heads, device)
    return 4 * num_pieces * num_kv_heads * query_rows(dtype) * (head_dim + 1)


def _num_shares(num_kv_heads: int, device: torch.device) -> int:
    return max(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)


@dataclass(frozen=True)
class SharedPlan:
    """How a batch's shared prefixes are cut into shares. Made once a step, used in every layer, one after the other.

    shares:       [num_shares, 8] int32, first_tiles: [num_groups + 1] int32; see `DecodePlan`
    pieces:       [num_seqs, levels, 2] int32: of each of a sequence's groups the first piece, and the span: number of
                  pieces + MAX_PIECES * (the sequence's first row in their tiles + rows * number of its groups);
                  the groups are those of the first levels
    partial:      [num_groups + num_shares, num_kv_heads, rows, head_dim] fp32: the pieces' results
    partial_lse:  [num_groups + num_shares, num_kv_heads, rows] fp32, base 2
    """

    shares: torch.Tensor
    first_tiles: torch.Tensor
    pieces: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor


@triton.jit(do_not_specialize=["num_seqs"])
def _resolve_kernel(
    places_ptr,
    shares_ptr,
    first_tiles_ptr,
    pieces_ptr,
    num_seqs,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where each sequence finds the results of its groups."""
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    level = tl.arange(0, LEVELS)[None, :]
    index = seq * LEVELS + level
    mask = (seq < num_seqs) & (level < LEVELS)
    place = tl.load(places_ptr + index, mask=mask, other=-1)
    is_member = place >= 0
    group = tl.where(is_member, place // CAPACITY, 0)
    share_length = tl.load(shares_ptr + 2)
    first_tile = tl.load(first_tiles_ptr + group, mask=is_member, other=0)
    end_tile = tl.load(first_tiles_ptr + group + 1, mask=is_member, other=0)
    first_share = first_tile // share_length
    count = tl.where(end_tile > first_tile, (end_tile - 1) // share_length - first_share + 1, 0)
    num_levels = tl.sum(is_member.to(tl.int32), axis=1)[:, None]
    first_row = tl.where(is_member, place % CAPACITY * GROUP, 0)
    span = count + MAX_PIECES * (first_row + ROWS * num_levels)
    tl.store(pieces_ptr + 2 * index, group + first_share, mask=mask)
    tl.store(pieces_ptr + 2 * index + 1, span, mask=mask)


def plan_shared(
    prefixes: SharedPrefixes, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> SharedPlan:
    """Cuts the shared prefixes of a batch, of at least one group, into shares; two launches.

    dtype: of queries and cache
    """
    device, num_groups = prefixes.lens.device, len(prefixes.lens)
    group, rows = num_heads // num_kv_heads, query_rows(dtype)
    num_shares = _num_shares(num_kv_heads, device)
    num_pieces = num_groups + num_shares
    shares, first_tiles = cut_into_shares(prefixes.lens, num_shares, tile_length(padded(head_dim), dtype.itemsize))
    num_seqs, num_levels = prefixes.places.shape
    pieces = torch.empty(num_seqs, num_levels, 2, dtype=torch.int32, device=device)
    _resolve_kernel[(triton.cdiv(num_seqs, RESOLVE_BLOCK),)](
        prefixes.places,
        shares,
        first_tiles,
        pieces,
        num_seqs,
        CAPACITY=prefixes.members.shape[1],
        GROUP=group,
        ROWS=rows,
        LEVELS=num_levels,
        BLOCK=RESOLVE_BLOCK,
    )
    return SharedPlan(
        shares=shares,
        first_tiles=first_tiles,
        pieces=pieces,
        partial=torch.empty(num_pieces, num_kv_heads, rows, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_pieces, num_kv_heads, rows, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["table_ptr", "starts_ptr", "lens_ptr", "members_ptr", "table_row"])
def _shared_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    members_ptr,
    shares_ptr,
    first_tiles_ptr,
    partial_ptr,
    partial_lse_ptr,
    scale,  # softmax scale * log2(e)
    q_row,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_row,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + row % GROUP
    dim_ok = dim < HEAD_DIM
    k_cache_ptr += kv_head.to(tl.int64) * k_head
    v_cache_ptr += kv_head.to(tl.int64) * v_head
    wait_for_previous_kernel(PDL)

    shares_ptr += 8 * share
    tile = tl.load(shares_ptr)
    share_end = tl.load(shares_ptr + 1)
    group = tl.load(shares_ptr + 3)
    first_tile = tl.load(shares_ptr + 4)
    end_tile = tl.load(shares_ptr + 5)
    while tile < share_end:
        stop = tl.minimum(end_tile, share_end)
        length = tl.load(lens_ptr + group)
        end = tl.minimum(length, (stop - first_tile) * TILE)
        group_members_ptr = members_ptr + group * CAPACITY
        seq = tl.load(group_members_ptr + row // GROUP, mask=row < CAPACITY * GROUP, other=-1).to(tl.int64)
        row_mask = (seq >= 0)[:, None] & dim_ok[None, :]
        q = tl.load(q_ptr + (seq * q_row + head * q_head)[:, None] + dim[None, :], mask=row_mask, other=0.0)
        group_table_ptr = table_ptr + tl.load(group_members_ptr).to(tl.int64) * table_row
        group_table_ptr += tl.load(starts_ptr + group) // PAGE
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        last = tl.full([ROWS], 0, tl.int32) + end  # every row sees all of the keys
        acc, peak, total = attend_keys(
            acc, peak, total, q, last, (tile - first_tile) * TILE, end, k_cache_ptr, v_cache_ptr, group_table_ptr,
            scale, k_block, k_slot, v_block, v_slot, HEAD_DIM, DIMS, PAGE, TILE, PAGE % TILE != 0, PRECISION,
        )  # fmt: skip
        piece = (group + share) * tl.num_programs(0) + kv_head
        partial = piece.to(tl.int64) * ROWS + row
        tl.store(partial_ptr + partial[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=row_mask)
        tl.store(partial_lse_ptr + partial, peak + tl.log2(total), mask=seq >= 0)
        tile = stop
        # groups of no tokens are not in the line: the next one that is begins where this one ends
        group += 1
        first_tile = end_tile
        if tile < share_end:
            end_tile = tl.load(first_tiles_ptr + group + 1)


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    plan: SharedPlan,
) -> None:
    """Attention of each group's queries over the tokens that it shares; leaves the results in the plan.

    q:                [num_seqs, num_heads, head_dim], head_dim contiguous; num_heads a multiple of num_kv_heads
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, block_size a multiple of 16
    block_tables:     [num_seqs, max_blocks] int32
    prefixes:         the groups; their starts and lens are multiples of block_size; those of no tokens come last
    plan:             `plan_shared` of these prefixes and sizes
    Raises ValueError when the shapes or dtypes disagree.
    """
    group = check_attention(q, k_cache, v_cache)
    num_seqs, _, head_dim = q.shape
    page, num_kv_heads = k_cache.shape[1:3]
    rows, (num_groups, capacity) = query_rows(q.dtype), prefixes.members.shape
    if block_tables.shape[0] != num_seqs or len(prefixes.places) != num_seqs or block_tables.stride(1) != 1:
        raise ValueError(
            f"{num_seqs} queries, block_tables {tuple(block_tables.shape)}, places {tuple(prefixes.places.shape)}"
        )
    if capacity * group > rows:
        raise ValueError(f"groups of {capacity} sequences, {group} heads each, don't fit {rows} rows")
    sizes = (num_groups + len(plan.shares), num_kv_heads, rows, head_dim)
    if sizes != tuple(plan.partial.shape):
        raise ValueError("the plan was made for another batch or other heads")
    dims = padded(head_dim)
    has_room = shared_memory_per_block(q.device) >= SHARED_MEMORY_OF_THREE_STAGES
    _shared_kernel[(num_kv_heads, len(plan.shares))](
        q,
        k_cache,
        v_cache,
        block_tables,
        prefixes.starts,
        prefixes.lens,
        prefixes.members,
        plan.shares,
        plan.first_tiles,
        plan.partial,
        plan.partial_lse,
        scale * LOG2_E.value,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        CAPACITY=capacity,
        ROWS=rows,
        HEAD_DIM=head_dim,
        DIMS=dims,
        PAGE=page,
        TILE=tile_length(dims, q.element_size()),
        PRECISION=dot_precision(q.dtype),
        num_warps=NUM_WARPS,
        num_stages=3 if has_room and dims <= MAX_DIMS_OF_THREE_STAGES else 2,
        **launch_options(q.device),
    )
