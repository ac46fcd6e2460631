"""The attention layer: one layer's part of the KV cache, and the backends that work on it."""

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm import kernels
from nanovllm.attention.base import AttentionBackend
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import Rotation, apply_rotary
from nanovllm.utils.context import ForwardContext, get_forward_context


@dataclass(frozen=True)
class LayerCache:
    """What the model runner binds to a layer: its cache, each [num_blocks, block_size, num_kv_heads, head_dim], and
    the backends that attend over it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    prefill: AttentionBackend
    decode: AttentionBackend


class Attention(nn.Module):
    """Normalises and rotates queries and keys, stores the new KV, then attends over the cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_counts = (num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.cache: LayerCache | None = None

    def forward(self, qkv: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None, rotation: Rotation) -> torch.Tensor:
        """[T, (num_heads + 2 num_kv_heads) head_dim] -> [T, num_heads head_dim].

        `norms` are those of each head's query and key, where the model has them.
        """
        assert self.cache is not None
        context = get_forward_context()
        query = self._rotate_and_store(qkv, norms, rotation, self.cache, context)
        num_decode, caches = context.num_decode_seqs, (self.cache.k_cache, self.cache.v_cache)
        outputs = []
        if num_decode:
            outputs.append(self.cache.decode.decode(query[:num_decode], *caches, context))
        if num_decode < len(query):
            outputs.append(self.cache.prefill.prefill(query[num_decode:], *caches, context))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)

    def _rotate_and_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        rotation: Rotation,
        cache: LayerCache,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Writes the new keys and values to `context.kv_slots`; returns the queries [T, num_heads, head_dim]."""
        if kernels.serve(qkv):
            from nanovllm.kernels.rope_store import qk_norm_rope_store

            return qk_norm_rope_store(
                qkv,
                norms[0].weight if norms else None,
                norms[1].weight if norms else None,
                norms[0].eps if norms else 0.0,
                rotation.table,
                rotation.rows,
                cache.k_cache,
                cache.v_cache,
                context.kv_slots,
                num_heads=self.head_counts[0],
                num_kv_heads=self.head_counts[1],
            )
        query, key, value = qkv.view(len(qkv), -1, self.head_dim).split(self.head_counts, dim=1)
        if norms:
            query, key = norms[0](query), norms[1](key)
        query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        kv_slots = context.kv_slots.long()
        cache.k_cache.flatten(0, 1).index_copy_(0, kv_slots, key)
        cache.v_cache.flatten(0, 1).index_copy_(0, kv_slots, value)
        return query
