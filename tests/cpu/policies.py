"""Helpers of the scheduler's tests: a checking engine without a model, and two simulations of whole workloads.

`StubEngine` drives the real scheduler, block manager and `pack` in the order in which `LLMEngine` does (a step's
tokens are read one step late), on a `StubDevice` whose KV cache holds token ids: what a step would attend to can
then be compared with what the sequence consists of. Each step is checked against the scheduler's contract.
"""

import random
import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm import SamplingParams
from nanovllm.engine.batch import UNKNOWN_TOKEN, PackedBatch, pack
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence

VOCAB_SIZE = 3  # so small that prompts often begin alike


def next_token(history: Iterable[int], banned: frozenset[int] = frozenset()) -> int:
    """The stub model: a pure function of all tokens so far."""
    token_id = zlib.crc32(array("i", history).tobytes()) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def make_sequence(
    seq_id: int,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    stop_ids: Iterable[int] = (),
    min_tokens: int = 0,
    cache_salt: int = 0,
    num_kv_tokens: int | None = None,
) -> Sequence:
    """A waiting sequence. `num_kv_tokens` caps its length as the engine does: the last token needs no KV."""
    token_ids = array("i", prompt)
    limit = len(token_ids) + max_tokens
    return Sequence(
        seq_id,
        token_ids,
        SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=True),
        max_total_tokens=limit if num_kv_tokens is None else min(limit, num_kv_tokens + 1),
        stop_ids=frozenset(stop_ids),
        cache_salt=cache_salt,
    )


def unstopped_tokens(seq: Sequence) -> list[int]:
    """Prompt and output up to the length limit, by the stub model alone, as if no stop token ended them."""
    tokens = seq.token_ids[: seq.num_prompt_tokens].tolist()
    while len(tokens) < seq.max_total_tokens:
        is_banned = len(tokens) - seq.num_prompt_tokens < seq.params.min_tokens
        tokens.append(next_token(tokens, seq.stop_ids if is_banned else frozenset()))
    return tokens


def reference_output(seq: Sequence) -> tuple[list[int], str]:
    """Output tokens and finish reason that the sequence must end with, whatever the schedule."""
    output = unstopped_tokens(seq)[seq.num_prompt_tokens :]
    for index, token_id in enumerate(output):
        if token_id in seq.stop_ids:
            return output[: index + 1], "stop"
    return output, "length"


class StubDevice:
    """Runs packed batches on a KV cache that holds, in place of keys and values, the token ids themselves."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.kv_rows = [-1] * (num_blocks * block_size)
        self.last_tokens = [-1] * num_slots  # the device's table of last sampled tokens

    def run(self, packed: PackedBatch) -> tuple[list[list[int]], list[int]]:
        """The tokens that each row attends to (its own included), and the sampled tokens.

        All KV is stored before any is read, as in each layer of a real forward.
        """
        bounds = packed.query_starts.tolist()
        slots = packed.slots.tolist()
        kv_slots = packed.kv_slots.tolist()
        assert len(set(kv_slots)) == len(kv_slots), "two tokens of one step go to the same KV row"
        for row, slot in enumerate(slots):
            for index in range(bounds[row], bounds[row + 1]):
                token_id = int(packed.token_ids[index])
                self.kv_rows[kv_slots[index]] = self.last_tokens[slot] if token_id == UNKNOWN_TOKEN else token_id
        histories = [
            self._read(table, context_len)
            for table, context_len in zip(packed.block_tables.tolist(), packed.context_lens.tolist(), strict=True)
        ]
        banned: dict[int, set[int]] = {}
        for index, token_id in zip(packed.banned_rows.tolist(), packed.banned_ids.tolist(), strict=True):
            banned.setdefault(index, set()).add(token_id)
        sampled = []
        for index, last_token in enumerate(packed.logits_indices.tolist()):
            row = bounds.index(last_token + 1) - 1
            sampled.append(next_token(histories[row], frozenset(banned.get(index, ()))))
            self.last_tokens[packed.sampled_slots[index]] = sampled[-1]
        return histories, sampled

    def _read(self, table: list[int], context_len: int) -> list[int]:
        size = self.block_size
        return [self.kv_rows[table[position // size] * size + position % size] for position in range(context_len)]


@dataclass
class _Before:
    """The scheduler's state before a step."""

    running: list[Sequence]
    waiting: list[Sequence]
    num_computed: dict[int, int]
    decoding: list[Sequence]


class StubEngine:
    """`LLMEngine` without a model; `step` raises AssertionError where the scheduler breaks its contract."""

    patience = 2  # steps a token

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        enable_prefix_caching: bool = True,
        host_cache: HostCache | None = None,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching, host_cache)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.device = StubDevice(num_blocks, block_size, self.scheduler.max_num_seqs)
        self.sequences: list[Sequence] = []
        self.num_preemptions = self.num_prefill_tokens = self.num_decode_tokens = 0
        self._expected_tokens: list[list[int]] = []  # by seq_id
        self._in_flight: tuple[ScheduledBatch, list[int]] | None = None

    def add(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int = 8,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        cache_salt: int = 0,
    ) -> Sequence:
        seq = make_sequence(
            len(self.sequences),
            prompt,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            cache_salt=cache_salt,
            num_kv_tokens=self.manager.num_blocks * self.manager.block_size,
        )
        self.sequences.append(seq)
        self._expected_tokens.append(unstopped_tokens(seq))
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        if self.scheduler.find(seq.seq_id) is not None:
            self.scheduler.finish(seq, "abort")

    def fail(self) -> None:
        """What the engine does when a step raises: everybody ends, and the step in flight is never read."""
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        self.scheduler.reset()
        self._in_flight = None
        for seq in unfinished:
            seq.end("abort")
        self.device.kv_rows = [-1] * len(self.device.kv_rows)  # nothing that was published may be trusted

    @property
    def is_finished(self) -> bool:
        return not self.scheduler.has_sequences and self._in_flight is None

    def step(self) -> ScheduledBatch:
        """Launches a step, then reads the one before. The batch is empty when there was nothing to launch."""
        scheduler = self.scheduler
        running = list(scheduler.running.values())
        before = _Before(
            running,
            list(scheduler.waiting.values()),
            {seq.seq_id: seq.num_computed_tokens for seq in running},
            [seq for seq in running if seq.is_decoding and not seq.has_reached_limit],
        )
        self._finish_copies()
        batch = scheduler.schedule()
        self._begin_copies()
        self.num_preemptions += batch.num_preemptions
        launched = None
        if batch.sequences:
            self._check_batch(batch, before)
            launched = batch, self._run(batch)
        previous, self._in_flight = self._in_flight, launched
        host_cache = self.manager.host_cache
        is_busy = launched or previous or (host_cache is not None and host_cache.is_loading)
        assert is_busy or not scheduler.has_sequences, "stuck: requests wait, but none can run"
        if previous is not None:
            self._read(*previous)
        self.manager.check_integrity(scheduler.unfinished())
        return batch

    def run(self) -> None:
        """Steps until nothing is left; then every request must have ended as the reference says.

        The oldest sequence gains a token in each step that launches anything (`_check_batch`), so the bound on
        the number of steps can't be reached by a scheduler that keeps its contract.
        """
        for _ in range(self.patience * (sum(seq.max_total_tokens for seq in self.sequences) + 2)):
            if self.is_finished:
                break
            self.step()
        assert self.is_finished, "requests starve"
        for seq in self.sequences:
            output = seq.output_token_ids.tolist()
            expected, reason = reference_output(seq)
            assert seq.is_finished
            if seq.finish_reason == "abort":
                assert output == expected[: len(output)]
                continue
            assert (output, seq.finish_reason) == (expected, reason)
            assert seq.stop_reason == (output[-1] if reason == "stop" else None)
        assert self.manager.num_used_blocks == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.scheduler.max_num_seqs))

    def _finish_copies(self) -> None:
        """For who has copies between device and host: what is known to be finished."""

    def _begin_copies(self) -> None:
        """Those that are decided on with a step, before it is launched."""

    def _run(self, batch: ScheduledBatch) -> list[int]:
        histories, sampled = self.device.run(pack(batch, self.manager.block_size))
        for seq, history in zip(batch.sequences, histories, strict=True):
            expected = self._expected_tokens[seq.seq_id][: seq.num_computed_tokens]
            assert history == expected, f"sequence {seq.seq_id} attends to {history}, but consists of {expected}"
        return sampled

    def _read(self, batch: ScheduledBatch, token_ids: list[int]) -> None:
        live = [seq for seq in batch.sampled_sequences if not seq.is_finished]
        lengths = [len(seq.token_ids) for seq in live]
        dropped = [(seq, list(seq.token_ids)) for seq in batch.sampled_sequences if seq.is_finished]
        finished = self.scheduler.postprocess(batch, token_ids)
        assert finished == [seq for seq in live if seq.is_finished]
        assert [len(seq.token_ids) for seq in live] == [length + 1 for length in lengths]
        assert all(list(seq.token_ids) == tokens for seq, tokens in dropped)

    def _check_batch(self, batch: ScheduledBatch, before: _Before) -> None:
        scheduler = self.scheduler
        rows = {seq.seq_id: num_tokens for seq, num_tokens in zip(batch.sequences, batch.num_query_tokens, strict=True)}
        num_tokens = sum(batch.num_query_tokens)
        assert len(rows) == len(batch.sequences), "a sequence is scheduled twice"
        assert 0 < num_tokens <= self.max_num_batched_tokens
        assert batch.num_prefill_tokens + batch.num_decode_tokens == num_tokens
        assert len(scheduler.running) <= self.max_num_seqs
        assert min(batch.num_query_tokens) >= 1
        is_single = [count == 1 for count in batch.num_query_tokens]
        assert is_single == sorted(is_single, reverse=True), "decode rows come first"
        assert set(rows) <= set(scheduler.running)
        slots = [seq.slot for seq in scheduler.running.values()]
        assert len(set(slots)) == len(slots) and all(0 <= slot < scheduler.max_num_seqs for slot in slots)

        # First come, first served: who runs arrived before all who wait, and both queues keep the order.
        queue = [*scheduler.running, *scheduler.waiting]
        assert queue == sorted(seq.seq_id for seq in before.running + before.waiting)

        preempted = {seq.seq_id for seq in before.running if seq.seq_id in scheduler.waiting}
        assert len(preempted) == batch.num_preemptions
        assert all(not scheduler.waiting[seq_id].block_table for seq_id in preempted)
        for seq in before.decoding:
            is_excused = seq.seq_id in preempted or self.manager.is_loading(seq)
            assert rows.get(seq.seq_id) == 1 or is_excused, "a decoding sequence got no token"
        for seq in scheduler.running.values():
            is_due = seq.num_computed_tokens < seq.num_tokens and not seq.has_reached_limit
            if is_due and seq.seq_id not in rows and not self.manager.is_loading(seq):
                assert num_tokens == self.max_num_batched_tokens, "budget is left, but a running sequence has no row"
        oldest = next(iter(scheduler.running.values()))
        is_excused = oldest.has_reached_limit or self.manager.is_loading(oldest)
        assert oldest.seq_id in rows or is_excused, "the oldest sequence makes no progress"
        for seq, start, count in zip(batch.sequences, batch.starts, batch.num_query_tokens, strict=True):
            assert start == before.num_computed.get(seq.seq_id, start)
            assert seq.num_computed_tokens == start + count <= len(seq.block_table) * self.manager.block_size
        self.num_prefill_tokens += batch.num_prefill_tokens
        self.num_decode_tokens += batch.num_decode_tokens


def bench_lengths(num_seqs: int = 256, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) lengths of nano-vLLM's benchmark: uniform in 100..1024 each.

    Its generator draws every prompt's token ids between the lengths; so must this one to get the same lengths.
    """
    rng = random.Random(seed)
    prompt_lens = []
    for _ in range(num_seqs):
        prompt_lens.append(rng.randint(100, 1024))
        for _ in range(prompt_lens[-1]):
            rng.randint(0, 10000)
    return [(prompt_len, rng.randint(100, 1024)) for prompt_len in prompt_lens]


@dataclass
class Simulation:
    """What running a workload took. Pool use is sampled after each step while requests wait."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_recomputed_tokens: int = 0
    pool_use: list[float] = field(default_factory=list)

    @property
    def recomputed_share(self) -> float:
        """Of all tokens that prefill computed, the share that had been computed before."""
        return self.num_recomputed_tokens / self.num_prefill_tokens

    @property
    def mean_pool_use(self) -> float:
        return sum(self.pool_use) / len(self.pool_use)


def simulate(
    lengths: list[tuple[int, int]],
    num_blocks: int,
    *,
    block_size: int = 256,
    max_tokens: int | None = None,
    max_num_batched_tokens: int = 16384,
    max_num_seqs: int = 512,
) -> Simulation:
    """Runs this project's scheduler, one step late, without prefix caching (so that recomputation shows in full).

    With `max_tokens` the output lengths are unknown to it: each sequence may go up to `max_tokens`, but a stop
    token ends it at its length.
    """
    stop_id, other_id = 1, 0
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    for seq_id, (prompt_len, output_len) in enumerate(lengths):
        stop_ids = () if max_tokens is None else (stop_id,)
        seq = make_sequence(seq_id, [other_id] * prompt_len, max_tokens=max_tokens or output_len, stop_ids=stop_ids)
        scheduler.add(seq)
    result = Simulation()
    most_computed = [0] * len(lengths)
    in_flight: tuple[ScheduledBatch, list[int]] | None = None
    while scheduler.has_sequences or in_flight:
        batch = scheduler.schedule()
        result.num_preemptions += batch.num_preemptions
        launched = None
        if batch.sequences:
            token_ids = [
                stop_id if seq.num_output_tokens == lengths[seq.seq_id][1] else other_id
                for seq in batch.sampled_sequences
            ]
            launched = batch, token_ids
            result.num_steps += 1
            result.num_prefill_tokens += batch.num_prefill_tokens
            for seq, start, count in zip(batch.sequences, batch.starts, batch.num_query_tokens, strict=True):
                result.num_recomputed_tokens += max(0, min(start + count, most_computed[seq.seq_id]) - start)
                most_computed[seq.seq_id] = max(most_computed[seq.seq_id], start + count)
            if scheduler.waiting:
                result.pool_use.append(manager.num_used_blocks / num_blocks)
        previous, in_flight = in_flight, launched
        if previous is not None:
            scheduler.postprocess(*previous)
    assert manager.num_used_blocks == 0
    return result


def simulate_prefill_first(
    lengths: list[tuple[int, int]],
    num_blocks: int,
    *,
    block_size: int = 256,
    max_num_batched_tokens: int = 16384,
    max_num_seqs: int = 512,
) -> Simulation:
    """The plain policy to compare with, that of nano-vLLM: a step either prefills whole prompts for as long as the
    head of the queue fits the token budget and the free blocks, or else decodes one token of everybody; when a
    decoding sequence finds no free block, the youngest gives up its blocks and is prefilled again later."""
    result = Simulation()
    num_tokens = [prompt_len for prompt_len, _ in lengths]
    num_held = [0] * len(lengths)
    num_free = num_blocks
    has_run = [False] * len(lengths)
    waiting, running = deque(range(len(lengths))), list[int]()

    def release(seq_id: int) -> None:
        nonlocal num_free
        num_free += num_held[seq_id]
        num_held[seq_id] = 0

    while waiting or running:
        result.num_steps += 1
        scheduled: list[int] = []
        budget = max_num_batched_tokens
        while waiting and len(running) < max_num_seqs:
            head = waiting[0]
            needed = -(-num_tokens[head] // block_size)
            if num_tokens[head] > budget or needed > num_free:
                break
            budget -= num_tokens[head]
            num_free -= needed
            num_held[head] = needed
            result.num_prefill_tokens += num_tokens[head]
            # The token sampled last was never computed before.
            result.num_recomputed_tokens += num_tokens[head] - 1 if has_run[head] else 0
            has_run[head] = True
            running.append(waiting.popleft())
            scheduled.append(head)
        if not scheduled:
            for seq_id in list(running):
                if num_held[seq_id] == 0:
                    continue  # preempted in this very step
                if num_tokens[seq_id] > num_held[seq_id] * block_size:
                    while num_free == 0 and num_held[seq_id]:
                        youngest = running.pop()
                        release(youngest)
                        waiting.appendleft(youngest)
                        result.num_preemptions += 1
                    if num_held[seq_id] == 0:
                        continue
                    num_free -= 1
                    num_held[seq_id] += 1
                scheduled.append(seq_id)
        for seq_id in scheduled:
            num_tokens[seq_id] += 1
            if num_tokens[seq_id] == sum(lengths[seq_id]):
                release(seq_id)
                running.remove(seq_id)
    return result
