"""Packs a scheduled batch into the integer arrays that a forward pass reads. Pure functions, numpy only."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# Stands for a token that is known to the device only: the one its sequence's slot sampled last.
UNKNOWN_TOKEN = -1


@dataclass(frozen=True)
class SamplingArrays:
    """How to choose one token for each of N sampled sequences.

    Attributes:
        temperature: [N], 0 where greedy.
        keys: [N, 2], bit patterns of two uint32 that key the noise of this token.
        filter_rows: [M], which of the N rows have a filter (top_k, top_p or min_p).
        top_k: [M], 0 where off. top_p: [M], 1 where off. min_p: [M], 0 where off.
        banned_rows, banned_ids: [B] each, pairs of (row of N, token id) that must not be sampled.
    """

    temperature: FloatArray
    keys: IntArray
    filter_rows: IntArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    banned_rows: IntArray
    banned_ids: IntArray


@dataclass(frozen=True)
class PackedBatch:
    """One step's input for S sequences with T query tokens in all, N of them sampled.

    Attributes:
        token_ids: [T], UNKNOWN_TOKEN where only the device knows it (single-token rows alone).
        positions: [T], of each token in its sequence.
        kv_slots: [T], where its KV goes: block * block_size + offset ("slot mapping").
        query_starts: [S + 1], prefix sums of the query lengths.
        context_lens: [S], KV tokens of the sequence including this step's.
        block_tables: [S, W], padded with 0 to the widest table of the batch.
        num_decode_seqs: the first so many sequences have one query token.
        slots: [S], each sequence's row in the device's table of last sampled tokens.
        sampled_rows: [N], which of the S sequences sample a token.
        prompt_lens: [S].
        sampling: how they sample it.
    """

    token_ids: IntArray
    positions: IntArray
    kv_slots: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    num_decode_seqs: int
    slots: IntArray
    sampled_rows: IntArray
    prompt_lens: IntArray
    sampling: SamplingArrays


def pack(batch: ScheduledBatch, block_size: int) -> PackedBatch:
    """Packs a batch right after it was scheduled, before its sequences move on."""
    sequences = batch.sequences
    starts = _ints(batch.starts)
    query_lens = _ints(batch.num_query_tokens)
    query_starts = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_starts[1:])

    row_of_token = np.repeat(np.arange(len(sequences), dtype=np.int32), query_lens)
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[row_of_token]
    block_tables = _pack_block_tables(sequences)
    kv_slots = block_tables[row_of_token, positions // block_size] * block_size + positions % block_size
    sampled_rows = np.flatnonzero(batch.is_sampled).astype(np.int32)
    return PackedBatch(
        token_ids=_pack_token_ids(batch),
        positions=positions,
        kv_slots=kv_slots,
        query_starts=query_starts,
        context_lens=starts + query_lens,
        block_tables=block_tables,
        num_decode_seqs=int(np.count_nonzero(query_lens == 1)),
        slots=_ints([seq.slot for seq in sequences]),
        sampled_rows=sampled_rows,
        prompt_lens=_ints([seq.num_prompt_tokens for seq in sequences]),
        sampling=pack_sampling(batch.sampled_sequences),
    )


def pack_sampling(sequences: list[Sequence]) -> SamplingArrays:
    """The sampling settings of sequences whose next token was scheduled to be sampled (and is in flight)."""
    params = [seq.params for seq in sequences]
    filter_rows = [row for row, p in enumerate(params) if p.has_filter]
    # The token to be sampled is in flight already: its position is the one before the sequence's new length.
    positions = np.array([seq.num_tokens - 1 for seq in sequences], dtype=np.uint64)
    seeds = np.array([seq.seed for seq in sequences], dtype=np.uint64)
    banned = [
        (row, token_id)
        for row, seq in enumerate(sequences)
        if seq.num_output_tokens <= seq.params.min_tokens
        for token_id in seq.stop_ids
    ]
    banned_rows, banned_ids = np.array(banned, dtype=np.int32).reshape(-1, 2).T
    return SamplingArrays(
        temperature=_floats([0.0 if p.is_greedy else p.temperature for p in params]),
        keys=noise_keys(seeds, positions),
        filter_rows=_ints(filter_rows),
        top_k=_ints([min(max(params[row].top_k, 0), 2**31 - 1) for row in filter_rows]),
        top_p=_floats([params[row].top_p for row in filter_rows]),
        min_p=_floats([params[row].min_p for row in filter_rows]),
        banned_rows=banned_rows,
        banned_ids=banned_ids,
    )


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


def _floats(values: list[Any]) -> FloatArray:
    return np.array(values, dtype=np.float32)
