"""This project's own kernels as a backend: any CUDA GPU, no flash-attn needed."""

from typing import Any

import torch

from nanovllm import kernels
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
        if not kernels.are_installed():
            reasons.append("triton is not installed")
        if torch.cuda.get_device_capability(spec.device) < (8, 0):
            reasons.append("needs compute capability 8.0 or newer")
        if spec.head_dim > 256 or spec.head_dim % 8:
            reasons.append(f"head size {spec.head_dim} is not a multiple of 8 up to 256")
        if spec.block_size is not None and spec.block_size % 16:
            reasons.append(f"block size {spec.block_size} is not a multiple of 16")
        return reasons

    @property
    def group_capacity(self) -> int:
        from nanovllm.kernels.shared_prefix import group_capacity

        return group_capacity(self.spec.num_heads, self.spec.num_kv_heads, self.spec.dtype)

    def shared_bytes(self, num_groups: int) -> int:
        from nanovllm.kernels.shared_prefix import shared_bytes

        spec = self.spec
        if self.group_capacity < 2:
            return 0
        return shared_bytes(num_groups, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device)

    def prepare_decode(self, context: ForwardContext) -> Any:
        from nanovllm.kernels.decode_plan import plan_decode
        from nanovllm.kernels.shared_prefix import plan_shared

        spec, prefixes = self.spec, context.prefixes
        if not len(prefixes.own_lens):
            return None
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype)
        shared_plan = plan_shared(prefixes, *sizes) if len(prefixes.lens) else None
        return plan_decode(prefixes.own_lens, *sizes), shared_plan

    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        from nanovllm.kernels.paged_decode import paged_decode_attention
        from nanovllm.kernels.shared_prefix import shared_prefix_attention

        plan, shared_plan = context.decode_plan
        prefixes, tables = context.prefixes, context.block_tables[: context.num_decode_seqs]
        if shared_plan is not None:
            shared_prefix_attention(query, k_cache, v_cache, tables, prefixes, self.spec.scale, shared_plan)
        return paged_decode_attention(
            query,
            k_cache,
            v_cache,
            tables,
            prefixes.own_lens,
            self.spec.scale,
            plan,
            prefixes.shared_lens,
            shared_plan,
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
