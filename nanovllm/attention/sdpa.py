"""Attention by torch's scaled_dot_product_attention: any device, any head size, one sequence at a time."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.utils.context import ForwardContext


@dataclass(frozen=True)
class _SequencePlan:
    """One sequence of a batch: where its query tokens and its KV blocks are."""

    query_start: int
    query_len: int
    context_len: int
    first_block: int
    scattered_blocks: torch.Tensor | None  # ids of all blocks, unless they lie side by side


class SDPABackend(AttentionBackend):
    """The backend of CPUs, and of devices that no other backend serves.

    A sequence's keys and values are read in place where its blocks are neighbours in the cache, which is why
    large blocks are preferred; they are gathered only where they are not.
    """

    name = "sdpa"
    preferred_block_size = 256
    captures_in_graphs = False

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []

    def prepare_decode(self, context: ForwardContext) -> list[_SequencePlan]:
        return self._plan(context, range(context.num_decode_seqs))

    def prepare_prefill(self, context: ForwardContext) -> list[_SequencePlan]:
        return self._plan(context, range(context.num_decode_seqs, len(context.context_lens)))

    def _plan(self, context: ForwardContext, rows: range) -> list[_SequencePlan]:
        query_starts = context.query_starts.tolist()
        context_lens = context.context_lens.tolist()
        block_tables = context.block_tables.tolist()
        block_size = self.spec.block_size
        assert block_size is not None
        plans = []
        for row in rows:
            num_blocks = -(-context_lens[row] // block_size)
            first, ids = block_tables[row][0], block_tables[row][:num_blocks]
            are_neighbours = ids == list(range(first, first + num_blocks))
            scattered = None if are_neighbours else context.block_tables[row, :num_blocks]
            query_len = query_starts[row + 1] - query_starts[row]
            plans.append(_SequencePlan(query_starts[row], query_len, context_lens[row], first, scattered))
        return plans

    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        # The query heads that share a KV head are the query rows of one attention problem.
        queries = query.unflatten(1, (self.spec.num_kv_heads, -1)).split(1)  # each [1, num_kv_heads, group, head_dim]
        outputs = [
            F.scaled_dot_product_attention(
                rows, self._read(k_cache, plan), self._read(v_cache, plan), scale=self.spec.scale
            )
            for rows, plan in zip(queries, context.decode_plan, strict=True)
        ]
        return torch.cat(outputs).flatten(1, 2)

    def prefill(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        for plan in context.prefill_plan:
            start = plan.query_start - context.num_decode_seqs
            rows = slice(start, start + plan.query_len)
            output[rows] = self._prefill_sequence(query[rows], k_cache, v_cache, plan)
        return output

    def _prefill_sequence(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _SequencePlan
    ) -> torch.Tensor:
        grouped = query.unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 2, 0, 3)
        shape = (*grouped.shape[:2], plan.context_len, self.spec.head_dim)
        # [num_kv_heads, group, context_len, head_dim]: a stride of 0 repeats a KV head for its group.
        key = self._read(k_cache, plan).transpose(0, 1).expand(shape)
        value = self._read(v_cache, plan).transpose(0, 1).expand(shape)
        num_before = plan.context_len - plan.query_len
        mask = None
        if num_before:
            visible = torch.ones(plan.query_len, plan.context_len, dtype=torch.bool, device=query.device)
            mask = visible.tril_(num_before)
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, is_causal=mask is None, scale=self.spec.scale
        )
        return output.permute(2, 0, 1, 3).flatten(1, 2)

    def _read(self, cache: torch.Tensor, plan: _SequencePlan) -> torch.Tensor:
        """The sequence's part of a cache, [1, num_kv_heads, context_len, head_dim]."""
        first_block = plan.first_block
        if plan.scattered_blocks is not None:
            cache, first_block = cache[plan.scattered_blocks], 0
        _, token_stride, head_stride, _ = cache.stride()
        # One call instead of four slices and views: this runs twice a layer for each sequence.
        return cache.as_strided(
            (1, cache.shape[2], plan.context_len, cache.shape[3]),
            (0, head_stride, token_stride, 1),
            cache.storage_offset() + first_block * cache.stride(0),
        )
