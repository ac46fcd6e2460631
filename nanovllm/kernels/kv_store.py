"""Write the keys and values of a step's tokens into the paged cache."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import check_cache

ELEMENTS_PER_PROGRAM = 4096  # of each of K and V; 32 a thread at 4 warps


@triton.jit
def store_heads(cache_ptr, slot, head, dim, values, mask, stride_block, stride_slot, stride_head, PAGE: tl.constexpr):
    """Write values [HEADS, DIMS] of one token to slot (int64, >= 0) of a cache; head, dim: index vectors."""
    base = slot // PAGE * stride_block + slot % PAGE * stride_slot
    offsets = head[:, None] * stride_head + dim[None, :]
    tl.store(cache_ptr + base + offsets, values.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slot_mapping_ptr"])
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_row,
    key_head,
    value_row,
    value_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIMS)
    mask = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + row * key_row + head[:, None] * key_head + dim[None, :], mask=mask)
    value = tl.load(value_ptr + row * value_row + head[:, None] * value_head + dim[None, :], mask=mask)
    store_heads(k_cache_ptr, slot, head, dim, key, mask, k_block, k_slot, k_head, PAGE)
    store_heads(v_cache_ptr, slot, head, dim, value, mask, v_block, v_slot, v_head, PAGE)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copy row i of key and value to slot `slot_mapping[i]` of the caches; a slot of -1 skips the row.

    key, value:       [num_tokens, num_kv_heads, head_dim], last dimension contiguous, other strides free
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place
    slot_mapping:     [num_tokens] int32, block * block_size + offset
    Raises ValueError when the shapes disagree.
    """
    num_tokens, num_heads, head_dim = key.shape
    check_cache(k_cache, v_cache, num_heads, head_dim)
    if value.shape != key.shape or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, slot_mapping {tuple(slot_mapping.shape)} disagree"
        )
    if key.stride(2) != 1 or value.stride(2) != 1 or not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping and the last dimension of key and value must be contiguous")
    if num_tokens == 0:
        return
    dims = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, ELEMENTS_PER_PROGRAM // dims))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        HEADS=heads,
        DIMS=dims,
    )
