"""Decode attention over the paged cache: one query token a sequence, the context split over programs.

Flash-decoding (Dao et al. 2023): program (kv_head, sequence, split) runs an online softmax over its share of the
context; a second kernel joins the shares by their log-sum-exp. All query heads of a KV head are one tile, padded to
16 rows so that `tl.dot` uses the tensor cores: each K and V element is read once, and the padding is free because
the kernel waits for memory, not for arithmetic.

The grid comes from shapes only (number of sequences, heads, maximum context), so a captured graph serves any
`context_lens`: programs past a context's end return at once. A sequence whose context fits one split is finished by
that program; both kernels read that off `context_lens[i] <= split_length`.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    H200_MULTIPROCESSORS,
    LN_2,
    LOG2_E,
    check_attention,
    dot_precision,
    locate_tokens,
    num_multiprocessors,
)

LONGEST_SPLIT = 1024  # tokens; longer ones leave the last wave of programs unbalanced
SHORTEST_SPLIT = 128  # tokens; shorter ones don't amortise loading q and storing the partial result
MAX_PROGRAMS = 16384  # bounds the workspace and the cost of programs that only find that they have nothing to do


@triton.jit(do_not_specialize=["table_ptr", "context_lens_ptr", "lse_ptr", "table_row", "split_length"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,  # [num_seqs, num_heads, num_splits, HEAD_DIM] fp32
    partial_lse_ptr,  # [num_seqs, num_heads, num_splits] fp32, base 2
    scale,  # softmax scale * log2(e)
    q_row,
    q_head,
    out_row,
    out_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_row,
    split_length,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # the bound only matters for a context that breaks the caller's max_context: cut off, not written out of bounds
    context = tl.minimum(tl.load(context_lens_ptr + seq), tl.num_programs(2) * split_length)
    start = split * split_length
    if (start >= context) & (split > 0):  # split 0 goes on: it writes the zeros of an empty row
        return
    end = tl.minimum(start + split_length, context)

    group = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + group
    dim_ok = dim < HEAD_DIM
    row_mask = (group < GROUP)[:, None] & dim_ok[None, :]
    q = tl.load(q_ptr + seq * q_row + head[:, None] * q_head + dim[None, :], mask=row_mask, other=0.0)

    k_cache_ptr += kv_head.to(tl.int64) * k_head
    v_cache_ptr += kv_head.to(tl.int64) * v_head
    table_ptr += seq * table_row
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(start, end, TILE):
        page, slot, valid = locate_tokens(table_ptr, first, end, PAGE, TILE)
        mask = valid[:, None] & dim_ok[None, :]
        # masked slots may hold anything: loaded as 0, because 0 * NaN would poison the second product
        k = tl.load(k_cache_ptr + (page * k_block + slot * k_slot)[:, None] + dim[None, :], mask=mask, other=0.0)
        v = tl.load(v_cache_ptr + (page * v_block + slot * v_slot)[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [ROWS, TILE]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))  # finite: every tile has a valid token
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak

    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), peak + tl.log2(total))
    num_heads = tl.num_programs(0) * GROUP
    if context <= split_length:
        out_offsets = seq * out_row + head[:, None] * out_head + dim[None, :]
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=row_mask)
        if WRITE_LSE:
            tl.store(lse_ptr + seq * num_heads + head, lse * LN_2, mask=group < GROUP)
    else:
        partial = (seq * num_heads + head) * tl.num_programs(2) + split  # [ROWS] int64
        tl.store(partial_ptr + partial[:, None] * HEAD_DIM + dim[None, :], result, mask=row_mask)
        tl.store(partial_lse_ptr + partial, lse, mask=group < GROUP)


@triton.jit(do_not_specialize=["context_lens_ptr", "lse_ptr", "split_length", "num_splits"])
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    out_row,
    out_head,
    split_length,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    context = tl.minimum(tl.load(context_lens_ptr + seq), num_splits * split_length)
    if context <= split_length:  # the decode kernel has written this row
        return
    live = tl.cdiv(context, split_length)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    mask = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros([HEADS, DIMS], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, live, SPLITS):
        split = first + tl.arange(0, SPLITS)
        partial = (seq * NUM_HEADS + head)[None, :] * num_splits + split[:, None]  # [SPLITS, HEADS]
        is_live = (split < live)[:, None] & (head < NUM_HEADS)[None, :]
        lse = tl.load(partial_lse_ptr + partial, mask=is_live, other=float("-inf"))
        values = tl.load(
            partial_ptr + partial[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=is_live[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        # heads past NUM_HEADS hold only -inf: a floor keeps their exponents from becoming inf - inf
        new_peak = tl.maximum(tl.maximum(peak, tl.max(lse, axis=0)), -1e30)
        weights = tl.exp2(lse - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        peak = new_peak
    out_offsets = seq * out_row + head[:, None] * out_head + dim[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    if WRITE_LSE:
        tl.store(lse_ptr + seq * NUM_HEADS + head, (peak + tl.log2(total)) * LN_2, mask=head < NUM_HEADS)


def split_length(num_seqs: int, num_kv_heads: int, max_context: int, num_sms: int = H200_MULTIPROCESSORS) -> int:
    """Tokens of context that one program of the decode kernel reads: 128 times a power of two.

    A batch with many (sequence, KV head) pairs fills the GPU alone and takes long splits, so that most sequences need
    no combine; a small one is cut finer. Depends on shapes only, so a captured graph keeps its split.
    """
    pairs = num_seqs * num_kv_heads
    length = LONGEST_SPLIT
    while length > 256 and pairs * LONGEST_SPLIT < 8 * num_sms * length:
        length //= 2
    while length > SHORTEST_SPLIT and 2 * pairs * triton.cdiv(max_context, length) <= num_sms:
        length //= 2
    while length < max_context and pairs * triton.cdiv(max_context, length) > MAX_PROGRAMS:
        length *= 2
    return length


def _num_partials(num_seqs: int, num_heads: int, num_splits: int) -> int:
    """Partial results that a call stores, each of head_dim values and one log-sum-exp."""
    return num_seqs * num_heads * num_splits if num_splits > 1 else 0


def decode_workspace_size(
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    num_sms: int = H200_MULTIPROCESSORS,
) -> int:
    """fp32 elements of a workspace that serves every batch of 1 .. num_seqs sequences of up to max_context tokens.

    A smaller batch can need more than a larger one, because it is split finer; hence the maximum over all of them.
    Where the device isn't an H200, pass its `common.num_multiprocessors` as num_sms.
    """

    def size(batch: int) -> int:
        num_splits = triton.cdiv(max_context, split_length(batch, num_kv_heads, max_context, num_sms))
        return _num_partials(batch, num_heads, num_splits) * (head_dim + 1)

    return max((size(batch) for batch in range(1, num_seqs + 1)), default=0)


def _tile(dims: int, element_size: int) -> int:
    """Tokens of one K or V tile: 16 KiB, which with two stages lets three programs share a multiprocessor."""
    return min(max(16384 // (dims * element_size), 16), 128)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    *,
    max_context: int | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one query token a sequence over the first `context_lens[i]` cached tokens.

    q:                [num_seqs, num_heads, head_dim], head_dim contiguous; num_heads a multiple of num_kv_heads
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, block_size a multiple of 16
    block_tables:     [num_seqs, max_blocks] int32; entries past a context's last block are never read
    context_lens:     [num_seqs] int32; a row of 0 (graph padding) gets zeros, and -inf in lse
    out:              [num_seqs, num_heads, head_dim], or None to allocate it
    workspace:        at least `decode_workspace_size(...)` contiguous fp32 elements, or None to allocate it; free
                      for reuse as soon as the next kernel of the same stream
    max_context:      a bound of context_lens known to the host (default: what block_tables can hold); a longer
                      context would be cut off silently
    lse:              [num_seqs, num_heads] fp32, contiguous: receives the natural log-sum-exp of the scaled scores
    Raises ValueError when the shapes or dtypes disagree or the workspace is too small.
    """
    group = check_attention(q, k_cache, v_cache)
    num_seqs, num_heads, head_dim = q.shape
    page, num_kv_heads = k_cache.shape[1:3]
    if block_tables.shape[0] != num_seqs or context_lens.shape != (num_seqs,) or block_tables.stride(1) != 1:
        raise ValueError(
            f"{num_seqs} queries, block_tables {tuple(block_tables.shape)}, context_lens {tuple(context_lens.shape)}"
        )
    if not context_lens.is_contiguous() or not (lse is None or lse.is_contiguous()):
        raise ValueError("context_lens and lse must be contiguous")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    capacity = block_tables.shape[1] * page
    max_context = max(capacity if max_context is None else min(max_context, capacity), 1)
    num_sms = num_multiprocessors(q.device)
    length = split_length(num_seqs, num_kv_heads, max_context, num_sms)
    num_splits = triton.cdiv(max_context, length)
    num_partials = _num_partials(num_seqs, num_heads, num_splits)
    needed = num_partials * (head_dim + 1)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed or not workspace.is_contiguous():
        raise ValueError(f"workspace holds {workspace.numel()} {workspace.dtype}, {needed} contiguous fp32 are needed")
    workspace = workspace.view(-1)
    # an empty tensor's pointer is null, which is fine: nothing is stored to it when there is one split
    partial = workspace[: num_partials * head_dim]
    partial_lse = workspace[num_partials * head_dim :]
    dims = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        out,
        partial_lse if lse is None else lse,
        partial,
        partial_lse,
        scale * LOG2_E.value,
        *q.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        length,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIMS=dims,
        PAGE=page,
        TILE=_tile(dims, q.element_size()),
        WRITE_LSE=lse is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        # a small batch has many splits to join; in a large one most rows have none, and fewer programs find out sooner
        heads, splits = (1, 16) if num_seqs * num_heads <= 8 * num_sms else (4, 4)
        _combine_kernel[(num_seqs, triton.cdiv(num_heads, heads))](
            partial,
            partial_lse,
            context_lens,
            out,
            partial_lse if lse is None else lse,
            *out.stride()[:2],
            length,
            num_splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            DIMS=dims,
            SPLITS=splits,
            WRITE_LSE=lse is not None,
            num_warps=4,
        )
    return out
