"""The attention layer: one layer's part of the KV cache, and a backend that works on it."""

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend
from nanovllm.utils.context import get_forward_context


class Attention(nn.Module):
    """Stores the new KV, then attends over the cache. The model runner binds backend and cache to it."""

    def __init__(self) -> None:
        super().__init__()
        self.backend: AttentionBackend | None = None
        self.k_cache = self.v_cache = torch.empty(0)

    def bind(self, backend: AttentionBackend, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Attaches the layer's cache, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        self.backend, self.k_cache, self.v_cache = backend, k_cache, v_cache

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim], twice [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim]."""
        assert self.backend is not None
        context = get_forward_context()
        self.backend.store_kv(key, value, self.k_cache, self.v_cache, context)
        num_decode = context.num_decode_seqs
        outputs = []
        if num_decode:
            outputs.append(self.backend.decode(query[:num_decode], self.k_cache, self.v_cache, context))
        if num_decode < len(query):
            outputs.append(self.backend.prefill(query[num_decode:], self.k_cache, self.v_cache, context))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
