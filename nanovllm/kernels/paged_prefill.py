"""Causal attention of many query tokens a sequence over the paged cache (prefill and its chunks).

Flash-attention 2's forward (Dao 2023, arXiv:2307.08691): program (head, sequence, query tile) keeps an online
softmax over key tiles. Key tiles that every row of the query tile may see run without masks, tiles past the last row
are never visited, and only those between, on the diagonal, are masked.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import (
    LOG2_E,
    check_attention,
    dot_precision,
    load_pages,
    shared_memory_per_block,
)


@triton.jit
def attend_keys(
    acc,  # [ROWS, DIMS] fp32
    peak,  # [ROWS] fp32, of base-2 scores
    total,  # [ROWS] fp32
    q,  # [ROWS, DIMS]
    position,  # [ROWS] int32: row i sees keys 0 .. position[i]
    start,  # of the key tiles, a multiple of TILE
    end,
    k_head_ptr,
    v_head_ptr,
    table_ptr,
    scale,
    k_block,
    k_slot,
    v_block,
    v_slot,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold keys start .. end-1 into the running softmax; MASKED: some of them are invisible to some row."""
    dim = tl.arange(0, DIMS)
    page = load_pages(table_ptr, start, end, PAGE, TILE)
    for first in range(start, end, TILE):
        next_page = load_pages(table_ptr, first + TILE, end, PAGE, TILE)
        token = first + tl.arange(0, TILE)
        valid = token < end
        k_ptrs = k_head_ptr + (page.to(tl.int64) * k_block + token % PAGE * k_slot)[:, None] + dim[None, :]
        v_ptrs = v_head_ptr + (page.to(tl.int64) * v_block + token % PAGE * v_slot)[:, None] + dim[None, :]
        if MASKED or HEAD_DIM != DIMS:
            # slots past the context may hold anything: loaded as 0, because 0 * NaN would poison the second product
            mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_ptrs, mask=mask, other=0.0)
            v = tl.load(v_ptrs, mask=mask, other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [ROWS, TILE]
        if MASKED:
            visible = token[None, :] <= position[:, None]
            scores = tl.where(visible & valid[None, :], scores, float("-inf"))
        # finite even for a fully masked row of this tile: each row has seen key 0 in the first tile
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
        page = next_page
    return acc, peak, total


@triton.jit(do_not_specialize=["table_ptr", "cu_seqlens_ptr", "context_lens_ptr", "table_row"])
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    out_ptr,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    # late query tiles see the most keys: started first, they don't become the tail of the launch
    first_row = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS
    query_start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    if first_row >= query_len:
        return
    offset = tl.load(context_lens_ptr + seq) - query_len  # position of the sequence's first query

    row = first_row + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    mask = (row < query_len)[:, None] & (dim < HEAD_DIM)[None, :]
    token = (query_start + row).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * q_row + head * q_head + dim[None, :], mask=mask, other=0.0)

    kv_head = (head // GROUP).to(tl.int64)
    k_head_ptr = k_cache_ptr + kv_head * k_head
    v_head_ptr = v_cache_ptr + kv_head * v_head
    table_ptr += seq * table_row
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    all_see = (offset + first_row + 1) // TILE * TILE  # keys before this are visible to every row
    end = offset + tl.minimum(first_row + ROWS, query_len)  # the last row sees none from here on
    acc, peak, total = attend_keys(
        acc, peak, total, q, offset + row, 0, all_see, k_head_ptr, v_head_ptr, table_ptr, scale,
        k_block, k_slot, v_block, v_slot, HEAD_DIM, DIMS, PAGE, TILE, False, PRECISION,
    )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, q, offset + row, all_see, end, k_head_ptr, v_head_ptr, table_ptr, scale,
        k_block, k_slot, v_block, v_slot, HEAD_DIM, DIMS, PAGE, TILE, True, PRECISION,
    )  # fmt: skip
    out_offsets = token[:, None] * out_row + head * out_head + dim[None, :]
    tl.store(out_ptr + out_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def _tiles(dims: int, element_size: int, shared_memory: int) -> tuple[int, int, int, int]:
    """(query rows, key tokens, warps, stages) of a program whose q tile and staged K and V tiles fit shared memory."""
    if element_size == 4:  # full-precision fp32 doesn't run on tensor cores; larger tiles spill registers
        return (32, 32, 8, 1) if dims <= 128 else (16, 16, 8, 1)
    choices = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)]
    if dims > 64:
        choices = choices[1:]  # at head_dim 128 a 128 x 128 tile takes nearly all registers
    for rows, tokens, warps, stages in choices:
        if (rows + 2 * tokens * stages) * dims * element_size <= shared_memory - 4096:
            return rows, tokens, warps, stages
    return 16, 16, 4, 1


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax(scale * q k^T) v of packed queries over each sequence's cached tokens.

    Query i of a sequence with L queries and context C stands at position C - L + i and sees keys 0 .. C - L + i; the
    step's own keys must be in the cache already.

    q:                [num_tokens, num_heads, head_dim], head_dim contiguous; num_heads a multiple of num_kv_heads
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, block_size a multiple of 16
    block_tables:     [num_seqs, max_blocks] int32; entries past a context's last block are never read
    cu_seqlens_q:     [num_seqs + 1] int32: sequence s owns rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 of q
    context_lens:     [num_seqs] int32, >= the sequence's query length; sequences without queries are skipped
    max_query_len:    at least the longest query length (longer ones would be cut off silently)
    returns:          [num_tokens, num_heads, head_dim]; rows that belong to no sequence are not written
    Raises ValueError when the shapes or dtypes disagree.
    """
    group = check_attention(q, k_cache, v_cache)
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = block_tables.shape[0]
    if cu_seqlens_q.shape != (num_seqs + 1,) or context_lens.shape != (num_seqs,) or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)} and "
            f"context_lens {tuple(context_lens.shape)} must describe the same sequences"
        )
    if not (cu_seqlens_q.is_contiguous() and context_lens.is_contiguous()):
        raise ValueError("cu_seqlens_q and context_lens must be contiguous")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0 or num_seqs == 0 or max_query_len == 0:
        return out
    dims = max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps, stages = _tiles(dims, q.element_size(), shared_memory_per_block(q.device))
    _prefill_kernel[(num_heads, num_seqs, triton.cdiv(max_query_len, rows))](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_seqlens_q,
        context_lens,
        out,
        scale * LOG2_E.value,
        *q.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        DIMS=dims,
        PAGE=k_cache.shape[1],
        ROWS=rows,
        TILE=tile,
        PRECISION=dot_precision(q.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    return out
