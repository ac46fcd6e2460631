"""Packs a scheduled batch into the integer arrays that a forward pass reads. Pure functions, numpy only."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.extras import PackedExtras, pack_extras
from nanovllm.engine.prefix_groups import PrefixGrouper, PrefixGroups, max_num_groups
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# Stands for a token that is known to the device only: the one its sequence's slot sampled last.
UNKNOWN_TOKEN = -1


@dataclass(frozen=True)
class PackedBatch:
    """One step's input for S sequences with T query tokens in all, N of them sampled.

    Every array is int32 or float32. The arrays of length N say how each sampled token is chosen.

    Attributes:
        token_ids: [T], UNKNOWN_TOKEN where only the device knows it (single-token rows alone).
        positions: [T], of each token in its sequence.
        kv_slots: [T], where its KV goes: block * block_size + offset ("slot mapping"); -1 is not stored.
        query_starts: [S + 1], prefix sums of the query lengths.
        context_lens: [S], KV tokens of the sequence including this step's.
        block_tables: [S, W], padded with 0 to the widest table of the batch.
        slots: [S], each sequence's row in the device's table of last sampled tokens.
        rope_lens: [T], the context length that a length-dependent rotary embedding adapts to.
        logits_indices: [N], rows of the T tokens whose logits are wanted.
        sampled_slots: [N], rows of the table of last sampled tokens that the sampled tokens go to.
        temperature: [N], 0 where greedy.
        keys: [N, 2], bit patterns of two uint32 that key the noise of the token.
        filter_rows: [M], which of the N rows have a filter (top_k, top_p or min_p); -1 is none.
        top_k: [N], 0 where off. top_p: [N], 1 where off. min_p: [N], 0 where off.
        banned_rows, banned_ids: [B] each, pairs of (row of N, token id) that must not be sampled.
        num_decode_seqs: the first so many sequences have one query token.
        max_query_len: longest query of the others, 0 if there are none.
        max_context_len: longest context.
        groups: what the first `num_decode_seqs` sequences share.
        extras: what some rows ask for beside all this; None if none does.
    """

    token_ids: IntArray
    positions: IntArray
    kv_slots: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    slots: IntArray
    rope_lens: IntArray
    logits_indices: IntArray
    sampled_slots: IntArray
    temperature: FloatArray
    keys: IntArray
    filter_rows: IntArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    banned_rows: IntArray
    banned_ids: IntArray
    num_decode_seqs: int
    max_query_len: int
    max_context_len: int
    groups: PrefixGroups
    extras: PackedExtras | None = None

    @property
    def is_pure_decode(self) -> bool:
        """Whether every sequence has one query token and samples one."""
        num_seqs = len(self.context_lens)
        return self.num_decode_seqs == num_seqs == len(self.sampled_slots)

    @property
    def has_groups(self) -> bool:
        """Whether sequences attend to anything together."""
        return len(self.groups.lens) > 0

    @property
    def has_plain_sampling(self) -> bool:
        """Whether nothing but temperatures and filters touches the logits."""
        return not len(self.banned_ids) and self.extras is None


def pack(batch: ScheduledBatch, block_size: int, grouper: PrefixGrouper | None = None) -> PackedBatch:
    """Packs a batch right after it was scheduled, before its sequences move on. Without `grouper`, each sequence is
    to attend to its context alone."""
    sequences = batch.sequences
    starts, query_lens = _ints(batch.starts), _ints(batch.num_query_tokens)
    query_starts = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(len(sequences), dtype=np.int32), query_lens)
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[row_of_token]
    block_tables = _pack_block_tables(sequences)
    prompt_lens = _ints([seq.num_prompt_tokens for seq in sequences])
    slots = _ints([seq.slot for seq in sequences])
    sampled_rows = np.flatnonzero(batch.is_sampled)
    sampled_sequences = batch.sampled_sequences
    num_decode_seqs = int(np.count_nonzero(query_lens == 1))
    context_lens = starts + query_lens
    groups = PrefixGroups.none(context_lens[:num_decode_seqs])
    if grouper is not None:
        seq_ids = [seq.seq_id for seq in sequences[:num_decode_seqs]]
        groups = grouper.find(seq_ids, block_tables[:num_decode_seqs], context_lens[:num_decode_seqs])
    return PackedBatch(
        token_ids=_pack_token_ids(batch),
        positions=positions,
        kv_slots=block_tables[row_of_token, positions // block_size] * block_size + positions % block_size,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        slots=slots,
        # A prompt is rotated for its own length, each later token for the length that it completes.
        rope_lens=np.maximum(prompt_lens[row_of_token], positions + 1),
        logits_indices=query_starts[1:][sampled_rows] - 1,
        sampled_slots=slots[sampled_rows],
        num_decode_seqs=num_decode_seqs,
        max_query_len=int(query_lens[num_decode_seqs:].max(initial=0)),
        max_context_len=int(context_lens.max()),
        groups=groups,
        extras=pack_extras(batch, sampled_sequences, query_starts),
        **pack_sampling(sampled_sequences),
    )


def pad_decode(batch: PackedBatch, num_seqs: int, dummy_slot: int) -> PackedBatch:
    """A pure-decode batch with rows added up to `num_seqs`, one filter entry a row, and, if it has any groups, as many
    as it could have at most.

    The added rows have an empty context, store no KV, and leave their token in `dummy_slot`. Every array but the block
    tables has the shape that it has in any other batch padded alike, so that one captured graph finds them all; what
    only other sampling reads (banned tokens) is left out.
    """
    assert batch.is_pure_decode
    num_added = num_seqs - len(batch.context_lens)

    def pad(array: npt.NDArray[Any], value: float = 0) -> npt.NDArray[Any]:
        return np.concatenate((array, np.full((num_added, *array.shape[1:]), value, dtype=array.dtype)))

    filter_rows = np.full(num_seqs, -1, dtype=np.int32)
    filter_rows[: len(batch.filter_rows)] = batch.filter_rows
    rows = np.arange(num_seqs, dtype=np.int32)
    return replace(
        batch,
        token_ids=pad(batch.token_ids),
        positions=pad(batch.positions),
        kv_slots=pad(batch.kv_slots, -1),
        query_starts=np.arange(num_seqs + 1, dtype=np.int32),
        context_lens=pad(batch.context_lens),
        block_tables=pad(batch.block_tables),
        slots=pad(batch.slots, dummy_slot),
        rope_lens=pad(batch.rope_lens, 1),
        logits_indices=rows,
        sampled_slots=pad(batch.sampled_slots, dummy_slot),
        temperature=pad(batch.temperature),
        keys=pad(batch.keys),
        filter_rows=filter_rows,
        top_k=pad(batch.top_k),
        top_p=pad(batch.top_p, 1),
        min_p=pad(batch.min_p),
        banned_rows=batch.banned_rows[:0],
        banned_ids=batch.banned_ids[:0],
        num_decode_seqs=num_seqs,
        groups=batch.groups.padded(num_seqs, max_num_groups(num_seqs) if batch.has_groups else 0),
    )


def dummy_batch(
    num_seqs: int,
    query_len: int,
    *,
    dummy_slot: int,
    num_filters: int = 0,
    group_capacity: int = 0,
    num_groups: int = 0,
) -> PackedBatch:
    """A batch of the largest cost for its shape, to warm up and to measure with: it stores no KV and reads block 0. Its
    groups, of up to `group_capacity` sequences, are padding."""
    num_tokens = num_seqs * query_len
    rows = np.arange(num_seqs, dtype=np.int32)
    positions = np.tile(np.arange(query_len, dtype=np.int32), num_seqs)
    return PackedBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=positions,
        kv_slots=np.full(num_tokens, -1, dtype=np.int32),
        query_starts=np.arange(num_seqs + 1, dtype=np.int32) * query_len,
        context_lens=np.full(num_seqs, query_len, dtype=np.int32),
        block_tables=np.zeros((num_seqs, query_len), dtype=np.int32),
        slots=np.full(num_seqs, dummy_slot, dtype=np.int32),
        rope_lens=positions + 1,
        logits_indices=(rows + 1) * query_len - 1,
        sampled_slots=np.full(num_seqs, dummy_slot, dtype=np.int32),
        temperature=np.ones(num_seqs, dtype=np.float32),
        keys=np.zeros((num_seqs, 2), dtype=np.int32),
        filter_rows=rows[:num_filters],
        top_k=np.zeros(num_seqs, dtype=np.int32),
        top_p=np.full(num_seqs, 0.9, dtype=np.float32),
        min_p=np.zeros(num_seqs, dtype=np.float32),
        banned_rows=np.zeros(0, dtype=np.int32),
        banned_ids=np.zeros(0, dtype=np.int32),
        num_decode_seqs=num_seqs if query_len == 1 else 0,
        max_query_len=0 if query_len == 1 else query_len,
        max_context_len=query_len,
        groups=PrefixGroups.none(
            np.ones(num_seqs if query_len == 1 else 0, dtype=np.int32), group_capacity, num_groups
        ),
    )


def pack_sampling(sequences: list[Sequence]) -> dict[str, npt.NDArray[Any]]:
    """The sampling arrays of sequences whose next token was scheduled to be sampled (and is in flight)."""
    numbers = np.array([seq.params.sampling_numbers for seq in sequences], dtype=np.float64).reshape(-1, 5)
    temperature, top_k, top_p, min_p, has_filter = numbers.T
    # The token to be sampled is in flight already: its position is the one before the sequence's new length.
    positions = np.array([len(seq.token_ids) + seq.num_in_flight - 1 for seq in sequences], dtype=np.uint64)
    seeds = np.array([seq.seed for seq in sequences], dtype=np.uint64)
    banned = [
        (row, token_id)
        for row, seq in enumerate(sequences)
        if seq.stop_ids and seq.num_output_tokens <= seq.params.min_tokens and seq.grammar is None  # whose masks do
        for token_id in seq.stop_ids
    ]
    banned_rows, banned_ids = np.array(banned, dtype=np.int32).reshape(-1, 2).T
    return {
        "temperature": temperature.astype(np.float32),
        "keys": noise_keys(seeds, positions),
        "filter_rows": np.flatnonzero(has_filter).astype(np.int32),
        "top_k": top_k.astype(np.int32),
        "top_p": top_p.astype(np.float32),
        "min_p": min_p.astype(np.float32),
        "banned_rows": banned_rows,
        "banned_ids": banned_ids,
    }


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> IntArray:
    """Keys of the sampler's noise: a 64-bit mix of (seed, position), as [N, 2] int32 bit patterns.

    Two rounds of the splitmix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), so that neighbouring seeds and positions give unrelated keys.
    """
    keys: IntArray = _mix64(_mix64(seeds) + positions).view(np.int32).reshape(-1, 2)
    return keys


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # wraps, as meant
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _pack_token_ids(batch: ScheduledBatch) -> IntArray:
    token_ids = np.empty(sum(batch.num_query_tokens), dtype=np.int32)
    offset = 0
    for seq, start, num_tokens in zip(batch.sequences, batch.starts, batch.num_query_tokens, strict=True):
        if num_tokens == 1:
            token_ids[offset] = seq.token_ids[start] if start < len(seq.token_ids) else UNKNOWN_TOKEN
        else:
            token_ids[offset : offset + num_tokens] = seq.token_ids[start : start + num_tokens]
        offset += num_tokens
    return token_ids


def _pack_block_tables(sequences: list[Sequence]) -> IntArray:
    width = max(len(seq.block_table) for seq in sequences)
    block_tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, seq in zip(block_tables, sequences, strict=True):
        row[: len(seq.block_table)] = seq.block_table
    return block_tables


def _ints(values: list[Any]) -> IntArray:
    return np.array(values, dtype=np.int32)
