"""Attention by torch's scaled_dot_product_attention: any device, any head size, one sequence at a time, but for
prefixes that several decoding sequences share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.engine.prefix_groups import MAX_CAPACITY
from nanovllm.utils.context import ForwardContext


@dataclass(frozen=True)
class _Keys:
    """Where some neighbouring tokens of a sequence lie in the cache, from the beginning of a block on."""

    num_tokens: int
    first_block: int
    scattered_blocks: torch.Tensor | None  # ids of all blocks, unless they lie side by side


@dataclass(frozen=True)
class _SequencePlan:
    """One sequence of a batch: where its query tokens are, and the keys that it attends to without company."""

    query_start: int
    query_len: int
    keys: _Keys


@dataclass(frozen=True)
class _DecodePlan:
    """Which of a batch's sequences with one query token each attend to which keys.

    `alone`: rows without company, each with all of its keys. `sharers`: the other rows [R], which attend in `parts`:
    what a group of them shares, or one has for itself; each part is rows [M] and their keys.
    """

    alone: list[tuple[int, _Keys]]
    sharers: torch.Tensor
    parts: list[tuple[torch.Tensor, _Keys]]


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

    @property
    def group_capacity(self) -> int:
        return MAX_CAPACITY

    def prepare_decode(self, context: ForwardContext) -> _DecodePlan:
        prefixes = context.prefixes
        context_lens, block_tables = context.context_lens.tolist(), context.block_tables.tolist()
        rows = torch.arange(context.num_decode_seqs, device=self.spec.device)
        alone, sharers, parts = [], [], []
        for row, start in enumerate(prefixes.shared_lens.tolist()):
            keys = self._keys(block_tables[row], start, context_lens[row])
            if start:
                sharers.append(row)
                parts.append((rows[row : row + 1], keys))
            else:
                alone.append((row, keys))
        groups = zip(prefixes.members, prefixes.starts.tolist(), prefixes.lens.tolist(), strict=True)
        for members, start, num_tokens in groups:
            if num_tokens:
                members = members[members >= 0].long()
                parts.append((members, self._keys(block_tables[members[0]], start, start + num_tokens)))
        return _DecodePlan(alone, rows[sharers], parts)

    def prepare_prefill(self, context: ForwardContext) -> list[_SequencePlan]:
        query_starts = context.query_starts.tolist()
        context_lens, block_tables = context.context_lens.tolist(), context.block_tables.tolist()
        return [
            _SequencePlan(
                query_starts[row],
                query_starts[row + 1] - query_starts[row],
                self._keys(block_tables[row], 0, context_lens[row]),
            )
            for row in range(context.num_decode_seqs, len(context_lens))
        ]

    def _keys(self, block_table: list[int], start: int, end: int) -> _Keys:
        """Tokens start .. end - 1 of a sequence; `start` is the first of a block."""
        block_size = self.spec.block_size
        assert block_size is not None
        ids = block_table[start // block_size : -(-end // block_size)]
        are_neighbours = ids == list(range(ids[0], ids[0] + len(ids)))
        return _Keys(end - start, ids[0], None if are_neighbours else torch.tensor(ids, device=self.spec.device))

    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        # The query heads that share a KV head are the query rows of one attention problem.
        queries = query.unflatten(1, (self.spec.num_kv_heads, -1))
        plan: _DecodePlan = context.decode_plan
        output = torch.empty_like(queries)
        for row, keys in plan.alone:
            output[row : row + 1] = F.scaled_dot_product_attention(
                queries[row : row + 1], self._read(k_cache, keys), self._read(v_cache, keys), scale=self.spec.scale
            )
        if plan.parts:
            output[plan.sharers] = self._attend_in_parts(queries, k_cache, v_cache, plan)[plan.sharers].to(query.dtype)
        return output.flatten(1, 2)

    def _attend_in_parts(
        self, queries: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: _DecodePlan
    ) -> torch.Tensor:
        """The sharers' attention, in fp32: over each of their parts, joined by the log-sum-exp. Other rows are 0."""
        queries = queries.float() * self.spec.scale
        output = torch.zeros_like(queries)
        lse = torch.full((*queries.shape[:3], 1), float("-inf"), device=queries.device)
        for rows, keys in plan.parts:
            key, value = self._read(k_cache, keys)[0].float(), self._read(v_cache, keys)[0].float()
            # [num_kv_heads, M * group, head_dim]: one matrix product a KV head
            scores = queries[rows].transpose(0, 1).flatten(1, 2) @ key.transpose(1, 2)
            part_lse = scores.logsumexp(-1, keepdim=True)
            part = (scores - part_lse).exp() @ value
            part, part_lse = (x.unflatten(1, (len(rows), -1)).transpose(0, 1) for x in (part, part_lse))
            joined = torch.logaddexp(lse[rows], part_lse)
            output[rows] = output[rows] * (lse[rows] - joined).exp() + part * (part_lse - joined).exp()
            lse[rows] = joined
        return output

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
        shape = (*grouped.shape[:2], plan.keys.num_tokens, self.spec.head_dim)
        # [num_kv_heads, group, context_len, head_dim]: a stride of 0 repeats a KV head for its group.
        key = self._read(k_cache, plan.keys).transpose(0, 1).expand(shape)
        value = self._read(v_cache, plan.keys).transpose(0, 1).expand(shape)
        num_before = plan.keys.num_tokens - plan.query_len
        mask = None
        if num_before:
            visible = torch.ones(plan.query_len, plan.keys.num_tokens, dtype=torch.bool, device=query.device)
            mask = visible.tril_(num_before)
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=mask, is_causal=mask is None, scale=self.spec.scale
        )
        return output.permute(2, 0, 1, 3).flatten(1, 2)

    def _read(self, cache: torch.Tensor, keys: _Keys) -> torch.Tensor:
        """A part of a cache, [1, num_kv_heads, num_tokens, head_dim]."""
        first_block = keys.first_block
        if keys.scattered_blocks is not None:
            cache, first_block = cache[keys.scattered_blocks], 0
        _, token_stride, head_stride, _ = cache.stride()
        # One call instead of four slices and views: this runs twice a layer for each sequence.
        return cache.as_strided(
            (1, cache.shape[2], keys.num_tokens, cache.shape[3]),
            (0, head_stride, token_stride, 1),
            cache.storage_offset() + first_block * cache.stride(0),
        )
