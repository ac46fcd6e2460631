"""This project's own kernels as a backend: any CUDA GPU, no flash-attn needed."""

import importlib.util
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.utils.context import ForwardContext


class TritonBackend(AttentionBackend):
    name = "triton"
    preferred_block_size = 64

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type != "cuda":
            return ["needs a CUDA device"]
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if torch.cuda.get_device_capability(spec.device) < (8, 0):
            reasons.append("needs compute capability 8.0 or newer")
        if spec.head_dim > 256 or spec.head_dim % 8:
            reasons.append(f"head size {spec.head_dim} is not a multiple of 8 up to 256")
        if spec.block_size is not None and spec.block_size % 16:
            reasons.append(f"block size {spec.block_size} is not a multiple of 16")
        return reasons

    def prepare_decode(self, context: ForwardContext) -> Any:
        from nanovllm.kernels.decode_plan import plan_decode

        spec = self.spec
        lens = context.context_lens[: context.num_decode_seqs]
        return plan_decode(lens, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype) if len(lens) else None

    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        from nanovllm.kernels.paged_decode import paged_decode_attention

        num_seqs = context.num_decode_seqs
        return paged_decode_attention(
            query,
            k_cache,
            v_cache,
            context.block_tables[:num_seqs],
            context.context_lens[:num_seqs],
            self.spec.scale,
            context.decode_plan,
        )

    def prefill(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        from nanovllm.kernels.paged_prefill import paged_prefill_attention

        first = context.num_decode_seqs
        return paged_prefill_attention(
            query,
            k_cache,
            v_cache,
            context.block_tables[first:],
            context.query_starts[first:] - first,
            context.context_lens[first:],
            context.max_query_len,
            self.spec.scale,
        )
