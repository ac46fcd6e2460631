"""One launch for what lies between a layer's QKV projection and its attention.

Optional per-head RMSNorm of q and k (Qwen3), rotary embedding of both, and the write of k and v into the paged cache.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import check_cache, launch_options, scale_by_weight, wait_for_previous_kernel
from nanovllm.kernels.kv_store import store_heads


@triton.jit
def _norm_and_rotate(
    head_ptr,  # first of the heads of one token in the packed qkv row
    weight_ptr,
    cos,  # [HALVES] fp32
    sin,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load NUM_HEADS heads as two halves, normalise and rotate; returns both halves, [HEADS, HALVES] fp32 each.

    Half-split ("neox") rotation, Su et al. 2021, arXiv:2104.09864: (a, b) -> (a cos - b sin, b cos + a sin).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = head_ptr.dtype.element_ty
    head = tl.arange(0, HEADS)
    dim = tl.arange(0, HALVES)
    mask = (head < NUM_HEADS)[:, None] & (dim < HALF)[None, :]
    offsets = head[:, None] * HEAD_DIM + dim[None, :]
    first = tl.load(head_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        inverse = tl.rsqrt(variance + eps)[:, None]
        first_weight = tl.load(weight_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
        second_weight = tl.load(weight_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
        first = scale_by_weight(first * inverse, first_weight, dtype)
        second = scale_by_weight(second * inverse, second_weight, dtype)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr"])
def _qk_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    qkv_row,
    cos_sin_row,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HALVES)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * cos_sin_row
    cos = tl.load(angle_ptr + dim, mask=dim < HALF, other=0.0)
    sin = tl.load(angle_ptr + HALF + dim, mask=dim < HALF, other=0.0)
    slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
    wait_for_previous_kernel(PDL)

    qkv_ptr += row * qkv_row
    first, second = _norm_and_rotate(qkv_ptr, q_weight_ptr, cos, sin, eps, NUM_HEADS, HEAD_DIM, Q_HEADS, HALVES, NORM_Q)
    head = tl.arange(0, Q_HEADS)
    mask = (head < NUM_HEADS)[:, None] & (dim < HALF)[None, :]
    q_offsets = row * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(q_ptr + q_offsets, first.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(q_ptr + q_offsets + HALF, second.to(q_ptr.dtype.element_ty), mask=mask)

    if slot < 0:  # a padding row: its q is computed (the graph reads it), but it owns no place in the cache
        return
    key_ptr = qkv_ptr + NUM_HEADS * HEAD_DIM
    value_ptr = key_ptr + NUM_KV_HEADS * HEAD_DIM
    first, second = _norm_and_rotate(
        key_ptr, k_weight_ptr, cos, sin, eps, NUM_KV_HEADS, HEAD_DIM, KV_HEADS, HALVES, NORM_K
    )
    head = tl.arange(0, KV_HEADS)
    mask = (head < NUM_KV_HEADS)[:, None] & (dim < HALF)[None, :]
    store_heads(k_cache_ptr, slot, head, dim, first, mask, k_block, k_slot, k_head, PAGE)
    store_heads(k_cache_ptr + HALF, slot, head, dim, second, mask, k_block, k_slot, k_head, PAGE)
    value_offsets = head[:, None] * HEAD_DIM + dim[None, :]
    first_value = tl.load(value_ptr + value_offsets, mask=mask)
    second_value = tl.load(value_ptr + value_offsets + HALF, mask=mask)
    store_heads(v_cache_ptr, slot, head, dim, first_value, mask, v_block, v_slot, v_head, PAGE)
    store_heads(v_cache_ptr + HALF, slot, head, dim, second_value, mask, v_block, v_slot, v_head, PAGE)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Normalise (where a weight is given) and rotate q and k, store k and v in the paged cache, return q.

    qkv:                [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all of q, then k, then v
    q_weight, k_weight: [head_dim] or None: RMSNorm over each head, Hugging Face's order of roundings
    cos_sin:            [max_positions, head_dim] fp32: cos in the first half, sin in the second
    positions:          [num_tokens] integer, each < max_positions, also in padding rows
    k_cache, v_cache:   [num_blocks, block_size, num_kv_heads, head_dim], written in place
    slot_mapping:       [num_tokens] int32, block * block_size + offset; -1: k and v are not stored, q is still made
    returns:            q [num_tokens, num_heads, head_dim], new and contiguous, in qkv's dtype
    The rotation is done in fp32 and rounded once. Raises ValueError when the shapes disagree.
    """
    num_tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    check_cache(k_cache, v_cache, num_kv_heads, head_dim)
    if qkv.shape != (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} must hold {num_heads} + 2 * {num_kv_heads} heads of {head_dim}, rows contiguous"
        )
    if cos_sin.dtype != torch.float32 or cos_sin.shape[-1] != head_dim or cos_sin.stride(-1) != 1:
        raise ValueError(f"cos_sin must be fp32 [positions, {head_dim}], not {cos_sin.dtype} {tuple(cos_sin.shape)}")
    if positions.shape != (num_tokens,) or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"positions {tuple(positions.shape)} and slot_mapping {tuple(slot_mapping.shape)} must be [{num_tokens}]"
        )
    if not (positions.is_contiguous() and slot_mapping.is_contiguous()):
        raise ValueError("positions and slot_mapping must be contiguous")
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return q
    q_heads = triton.next_power_of_2(num_heads)
    halves = triton.next_power_of_2(head_dim // 2)
    _qk_norm_rope_store_kernel[(num_tokens,)](
        qkv,
        qkv if q_weight is None else q_weight,  # unread without NORM_Q, but a pointer must be passed
        qkv if k_weight is None else k_weight,
        cos_sin,
        positions,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        eps,
        qkv.stride(0),
        cos_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        Q_HEADS=q_heads,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HALVES=halves,
        NORM_Q=q_weight is not None,
        NORM_K=k_weight is not None,
        num_warps=8 if q_heads * halves > 2048 else 4,
        **launch_options(qkv.device),
    )
    return q
