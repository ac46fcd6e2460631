"""FlashAttention 2, 3 and 4 over the paged cache (Dao et al., 2022 to 2025), each from its own package."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.utils.context import ForwardContext


@dataclass(frozen=True)
class _Plan:
    """Some neighbouring sequences of a batch, S' of them, as a variable-length call wants them."""

    query_starts: torch.Tensor  # [S' + 1] int32, the first entry 0
    context_starts: torch.Tensor  # [S' + 1] int32, prefix sums of the context lengths
    context_lens: torch.Tensor  # [S'] int32
    block_tables: torch.Tensor  # [S', W] int32
    max_query_len: int
    max_context_len: int

    @classmethod
    def of(cls, context: ForwardContext, rows: slice, *, max_query_len: int) -> "_Plan":
        """The sequences `rows`, before which each sequence has one query token."""
        first = rows.start
        context_lens = context.context_lens[rows]
        context_starts = F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        query_starts = context.query_starts[first : first + len(context_lens) + 1] - first
        tables = context.block_tables[rows]
        return cls(query_starts, context_starts, context_lens, tables, max_query_len, context.max_context_len)


class FlashAttentionBackend(AttentionBackend):
    """What the versions share: the checks, and one variable-length call for prefill and decode alike.

    Attributes:
        module: what to import for it.
        function: name in that module of the function that does the work.
    """

    module: str
    function: str
    min_capability: tuple[int, int]
    max_capability: tuple[int, int] = (99, 0)
    block_size_multiple: int
    max_head_dim = 256

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type != "cuda":
            return ["needs a CUDA device"]
        try:
            cls._load()
        except Exception as error:  # a wheel for another torch fails with more than ImportError
            reasons.append(f"{cls.module} can't be imported ({error})")
        capability = torch.cuda.get_device_capability(spec.device)
        if not cls.min_capability <= capability <= cls.max_capability:
            reasons.append(f"does not run on compute capability {capability[0]}.{capability[1]}")
        if spec.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"needs float16 or bfloat16, not {spec.dtype}")
        if spec.head_dim > cls.max_head_dim or spec.head_dim % 8:
            reasons.append(f"head size {spec.head_dim} is not a multiple of 8 up to {cls.max_head_dim}")
        if spec.block_size is not None and spec.block_size % cls.block_size_multiple:
            reasons.append(f"block size {spec.block_size} is not a multiple of {cls.block_size_multiple}")
        return reasons

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._call = self._load()

    @classmethod
    def _load(cls) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(cls.module), cls.function)
        return function

    def prepare_decode(self, context: ForwardContext) -> _Plan:
        return _Plan.of(context, slice(0, context.num_decode_seqs), max_query_len=1)

    def prepare_prefill(self, context: ForwardContext) -> _Plan:
        return _Plan.of(context, slice(context.num_decode_seqs, None), max_query_len=context.max_query_len)

    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return self._attend(query, k_cache, v_cache, context.decode_plan)

    def prefill(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return self._attend(query, k_cache, v_cache, context.prefill_plan)

    def _attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        raise NotImplementedError


class FlashAttention2Backend(FlashAttentionBackend):
    """Package `flash-attn`. Its pages are multiples of 256 tokens."""

    name = "flash_attn_2"
    module = "flash_attn"
    function = "flash_attn_varlen_func"
    preferred_block_size = 256
    min_capability = (8, 0)
    block_size_multiple = 256

    def _attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        output: torch.Tensor = self._call(
            query,
            k_cache,
            v_cache,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.context_starts,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_context_len,
            softmax_scale=self.spec.scale,
            causal=True,
            block_table=plan.block_tables,
        )
        return output


class FlashAttention3Backend(FlashAttentionBackend):
    """The package that brings `flash_attn_interface`: Hopper only."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    function = "fwd"
    preferred_block_size = 64
    min_capability = (9, 0)
    max_capability = (9, 9)
    block_size_multiple = 16

    @classmethod
    def _load(cls) -> Callable[..., Any]:
        # The module's Python functions are wrapped for torch.compile: their first call imports the compiler (5 s), and
        # each costs more host time than a layer's other launches together. The operator below them is as public.
        importlib.import_module(cls.module)
        operator: Callable[..., Any] = getattr(torch.ops.flash_attn_3, cls.function)
        return operator

    def _attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        output: torch.Tensor = self._call(
            query,
            k_cache,
            v_cache,
            cu_seqlens_q=plan.query_starts,
            seqused_k=plan.context_lens,
            max_seqlen_q=plan.max_query_len,
            page_table=plan.block_tables,
            softmax_scale=self.spec.scale,
            is_causal=True,
        )[0]
        return output


class FlashAttention4Backend(FlashAttentionBackend):
    """Package `flash-attn-4`, written in CuTe's Python: Hopper and data-centre Blackwell."""

    name = "flash_attn_4"
    module = "flash_attn.cute"
    function = "flash_attn_varlen_func"
    preferred_block_size = 128
    min_capability = (9, 0)
    max_capability = (11, 9)  # 12.x (consumer Blackwell) has no paged KV there
    block_size_multiple = 16
    max_head_dim = 128

    def _attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _Plan) -> torch.Tensor:
        output: torch.Tensor
        output, _ = self._call(
            query,
            k_cache,
            v_cache,
            cu_seqlens_q=plan.query_starts,
            max_seqlen_q=plan.max_query_len,
            seqused_k=plan.context_lens,
            page_table=plan.block_tables,
            softmax_scale=self.spec.scale,
            causal=True,
        )
        return output
