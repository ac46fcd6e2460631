"""Decode attention over the paged cache: one query token a sequence, the work cut into equal shares.

Flash-decoding (Dao et al. 2023) with the balance of stream-K (Osama et al. 2023): all sequences' contexts, one after
the other, are a line of tiles. Share s of a KV head is the s-th of equally long pieces of that line, and one program
runs an online softmax over each sequence's part in it. There are as many programs as the GPU runs at once, so all end
together, whatever the lengths. A sequence that lies in one share is finished there; of one that several shares hold,
each program leaves a partial result, and the last to do so joins them by their log-sum-exp.

All query heads of a KV head are one tile, padded to 16 rows so that `tl.dot` uses the tensor cores: each K and V
element is read once, and the padding is free because the kernel waits for memory, not for arithmetic.

Where sequences share prefixes, `shared_prefix.py` has attended to those before: a sequence's context is what it has for
itself then, and its softmax goes on from the results over the shared parts, as from a tile of keys.

The grid depends on the GPU alone and the shares are laid out on the device, so a captured graph serves any lengths.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    LOG2_E,
    check_attention,
    dot_precision,
    launch_options,
    load_pages,
    wait_for_previous_kernel,
)
from nanovllm.kernels.decode_plan import DecodePlan, padded, tile_length
from nanovllm.kernels.shared_prefix import MAX_PIECES, SharedPlan

MAX_REGISTERS = 128  # of a thread: leaves room for as many programs as the plan reckons with


@triton.jit(do_not_specialize=["table_ptr", "context_lens_ptr", "shared_lens_ptr", "table_row"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    context_lens_ptr,
    shares_ptr,
    first_tiles_ptr,
    arrivals_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    shared_lens_ptr,
    pieces_ptr,
    shared_partial_ptr,
    shared_lse_ptr,
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
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    LEVELS: tl.constexpr,  # 0: nothing is shared
    SHARED_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    group = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + group
    dim_ok = dim < HEAD_DIM
    row_mask = (group < GROUP)[:, None] & dim_ok[None, :]
    k_cache_ptr += kv_head.to(tl.int64) * k_head
    v_cache_ptr += kv_head.to(tl.int64) * v_head
    wait_for_previous_kernel(PDL)

    shares_ptr += 8 * share
    tile = tl.load(shares_ptr)
    share_end = tl.load(shares_ptr + 1)
    share_length = tl.load(shares_ptr + 2)
    seq = tl.load(shares_ptr + 3).to(tl.int64)
    first_tile = tl.load(shares_ptr + 4)
    end_tile = tl.load(shares_ptr + 5)
    context = tl.load(shares_ptr + 6)
    shared, piece, span = 0, 0, 0
    next_shared, next_piece, next_span = 0, 0, 0
    if LEVELS:
        shared = tl.load(shared_lens_ptr + seq, mask=tile < share_end, other=0)
        piece = tl.load(pieces_ptr + seq * LEVELS * 2, mask=tile < share_end, other=0)
        span = tl.load(pieces_ptr + seq * LEVELS * 2 + 1, mask=tile < share_end, other=0)
    while tile < share_end:
        stop = tl.minimum(end_tile, share_end)
        end = tl.minimum(context, (stop - first_tile) * TILE)
        # asked for now, it is there when this sequence is done
        has_next = stop < share_end
        next_end_tile = tl.load(first_tiles_ptr + seq + 2, mask=has_next, other=0)
        next_context = tl.load(context_lens_ptr + seq + 1, mask=has_next, other=0)
        if LEVELS:
            next_shared = tl.load(shared_lens_ptr + seq + 1, mask=has_next, other=0)
            next_piece = tl.load(pieces_ptr + (seq + 1) * LEVELS * 2, mask=has_next, other=0)
            next_span = tl.load(pieces_ptr + (seq + 1) * LEVELS * 2 + 1, mask=has_next, other=0)
        q = tl.load(q_ptr + seq * q_row + head[:, None] * q_head + dim[None, :], mask=row_mask, other=0.0)
        row_table_ptr = table_ptr + seq * table_row + shared // PAGE
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        begins_shared = (tile == first_tile) & (shared > 0)
        if LEVELS:  # asked for now, the first result over what is shared is there when the rest has been attended to
            shared_lse, shared_values = _load_piece(
                shared_partial_ptr, shared_lse_ptr, piece, span, tl.where(begins_shared, GROUP, 0), kv_head,
                ROWS, HEAD_DIM, DIMS, SHARED_ROWS,
            )  # fmt: skip
        start = (tile - first_tile) * TILE
        page = load_pages(row_table_ptr, start, end, PAGE, TILE)
        for first in range(start, end, TILE):
            next_page = load_pages(row_table_ptr, first + TILE, end, PAGE, TILE)
            token = first + tl.arange(0, TILE)
            valid = token < end
            mask = valid[:, None] & dim_ok[None, :]
            k_ptrs = k_cache_ptr + (page.to(tl.int64) * k_block + token % PAGE * k_slot)[:, None] + dim[None, :]
            v_ptrs = v_cache_ptr + (page.to(tl.int64) * v_block + token % PAGE * v_slot)[:, None] + dim[None, :]
            # masked slots may hold anything: loaded as 0, because 0 * NaN would poison the second product
            k = tl.load(k_ptrs, mask=mask, other=0.0)
            v = tl.load(v_ptrs, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [ROWS, TILE]
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))  # finite: every tile has a valid token
            weights = tl.exp2(scores - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            peak = new_peak
            page = next_page
        if LEVELS:
            acc, peak, total = _join(acc, peak, total, shared_lse, shared_values)
            if begins_shared & (span % MAX_PIECES + span // (MAX_PIECES * SHARED_ROWS) > 2):  # more of them, or levels
                acc, peak, total = _join_others(
                    acc, peak, total, pieces_ptr + seq * LEVELS * 2, shared_partial_ptr, shared_lse_ptr, kv_head,
                    GROUP, ROWS, HEAD_DIM, DIMS, SHARED_ROWS,
                )  # fmt: skip
        result = acc / total[:, None]

        if stop - tile == end_tile - first_tile:  # the whole sequence lies in this share
            out_offsets = (seq * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=row_mask)
        else:
            partial = (2 * share + (tile == first_tile).to(tl.int32)) * num_heads + head
            tl.store(partial_ptr + partial[:, None] * HEAD_DIM + dim[None, :], result, mask=row_mask)
            tl.store(partial_lse_ptr + partial, peak + tl.log2(total), mask=group < GROUP)
            tl.debug_barrier()  # all threads' stores come before the one thread's atomic, which publishes them
            arrival_ptr = arrivals_ptr + seq * tl.num_programs(0) + kv_head
            first_share = first_tile // share_length
            num_partials = (end_tile - 1) // share_length - first_share + 1
            if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == num_partials - 1:
                tl.store(arrival_ptr, 0)
                _merge(
                    partial_ptr, partial_lse_ptr, out_ptr + seq * num_heads * HEAD_DIM, first_share, num_partials,
                    kv_head, num_heads, GROUP, HEAD_DIM, DIMS, MERGE, MERGE_HEADS,
                )  # fmt: skip
        tile = stop
        seq += 1
        first_tile, end_tile, context = end_tile, next_end_tile, next_context
        shared, piece, span = next_shared, next_piece, next_span


@triton.jit
def _load_piece(
    partial_ptr,
    partial_lse_ptr,
    piece,
    span,
    num_heads,
    kv_head,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):
    """A sequence's log-sum-exp [ROWS] and result [ROWS, DIMS] over a piece of a shared prefix; of weight 0 past
    `num_heads`. `span` is as in `SharedPlan`."""
    group = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    first_row = span // MAX_PIECES % SHARED_ROWS
    row = (piece * tl.num_programs(0) + kv_head).to(tl.int64) * SHARED_ROWS + first_row + group
    is_live = group < num_heads
    mask = is_live[:, None] & (dim < HEAD_DIM)[None, :]
    lse = tl.load(partial_lse_ptr + row, mask=is_live, other=float("-inf"))
    return lse, tl.load(partial_ptr + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _join(acc, peak, total, lse, values):
    """Fold a result with its log-sum-exp into a running softmax that has begun: `peak` is finite."""
    new_peak = tl.maximum(peak, lse)
    shrink = tl.exp2(peak - new_peak)
    weight = tl.exp2(lse - new_peak)
    return acc * shrink[:, None] + weight[:, None] * values, new_peak, total * shrink + weight


@triton.jit
def _join_others(
    acc,
    peak,
    total,
    pieces_ptr,  # of the sequence
    partial_ptr,
    partial_lse_ptr,
    kv_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):
    """Fold all results over the sequence's shared prefixes but the first into its softmax."""
    num_levels = tl.load(pieces_ptr + 1) // (MAX_PIECES * SHARED_ROWS)
    for level in range(num_levels):
        piece = tl.load(pieces_ptr + 2 * level)
        span = tl.load(pieces_ptr + 2 * level + 1)
        for index in range(tl.where(level == 0, 1, 0), span % MAX_PIECES):
            lse, values = _load_piece(
                partial_ptr, partial_lse_ptr, piece + index, span, GROUP, kv_head,
                ROWS, HEAD_DIM, DIMS, SHARED_ROWS,
            )  # fmt: skip
            acc, peak, total = _join(acc, peak, total, lse, values)
    return acc, peak, total


@triton.jit
def _merge(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,  # of the sequence
    first_share,
    num_partials,
    kv_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MERGE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Join the partial results of one sequence and KV head, and store them as its output."""
    group = tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + group
    acc = tl.zeros([HEADS, DIMS], tl.float32)
    peak = tl.full([HEADS], -1e30, tl.float32)  # finite, so that rows past GROUP don't get inf - inf
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, num_partials, MERGE):
        index = first + tl.arange(0, MERGE)
        partial = (2 * (first_share + index) + (index == 0).to(tl.int32))[:, None] * num_heads + head[None, :]
        is_live = (index < num_partials)[:, None] & (group < GROUP)[None, :]  # [MERGE, HEADS]
        # read past the L1 cache: other multiprocessors wrote this
        lse = tl.load(partial_lse_ptr + partial, mask=is_live, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_ptr + partial[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=is_live[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        peak = new_peak
    mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan,
    shared_lens: torch.Tensor | None = None,
    shared_plan: SharedPlan | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one query token a sequence over its first cached tokens: `shared_lens[i]`, which
    `shared_prefix_attention` has attended to, and the `context_lens[i]` after those.

    q:                [num_seqs, num_heads, head_dim], head_dim contiguous; num_heads a multiple of num_kv_heads
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, block_size a multiple of 16
    block_tables:     [num_seqs, max_blocks] int32; entries past a context's last block are never read
    context_lens:     [num_seqs] int32; a row of 0 (graph padding) gets anything, NaN included
    plan:             `plan_decode` of these context_lens and sizes
    shared_lens:      [num_seqs] int32, multiples of block_size; None if nothing is shared
    shared_plan:      holds the results over those
    returns:          [num_seqs, num_heads, head_dim], contiguous
    Raises ValueError when the shapes or dtypes disagree.
    """
    group = check_attention(q, k_cache, v_cache)
    num_seqs, num_heads, head_dim = q.shape
    page, num_kv_heads = k_cache.shape[1:3]
    if block_tables.shape[0] != num_seqs or context_lens.shape != (num_seqs,) or block_tables.stride(1) != 1:
        raise ValueError(
            f"{num_seqs} queries, block_tables {tuple(block_tables.shape)}, context_lens {tuple(context_lens.shape)}"
        )
    dims, heads = padded(head_dim), triton.next_power_of_2(group)
    sizes = ((num_seqs, num_kv_heads), (num_heads, head_dim), tile_length(dims, q.element_size()))
    if sizes != (tuple(plan.arrivals.shape), tuple(plan.partial.shape[1:]), plan.tile):
        raise ValueError("the plan was made for another batch or other heads")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    shared = (q, q, q, q)  # not looked at
    if shared_plan is not None:
        shared = (shared_lens, shared_plan.pieces, shared_plan.partial, shared_plan.partial_lse)
    _decode_kernel[(num_kv_heads, len(plan.shares))](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        plan.shares,
        plan.first_tiles,
        plan.arrivals,
        plan.partial,
        plan.partial_lse,
        out,
        *shared,
        scale * LOG2_E.value,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        ROWS=max(16, heads),
        HEAD_DIM=head_dim,
        DIMS=dims,
        PAGE=page,
        TILE=plan.tile,
        MERGE=8 if heads <= 2 else 1,  # at a time; what the registers hold without spilling
        MERGE_HEADS=heads,
        LEVELS=0 if shared_plan is None else shared_plan.pieces.shape[1],
        SHARED_ROWS=0 if shared_plan is None else shared_plan.partial.shape[2],
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
        num_stages=2,
        maxnreg=MAX_REGISTERS,
        **launch_options(q.device),
    )
    return out
