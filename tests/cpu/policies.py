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
from nanovllm.engine import waiting_queue
from nanovllm.engine.batch import UNKNOWN_TOKEN, PackedBatch, pack
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.prefix_groups import PrefixGrouper
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.waiting_queue import WaitingQueue

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
    request_id: int | None = None,
    num_kv_tokens: int | None = None,
) -> Sequence:
    """A waiting sequence. `num_kv_tokens` caps its length as the engine does: the last token needs no KV."""
    token_ids = array("i", prompt)
    limit = len(token_ids) + max_tokens
    return Sequence(
        seq_id,
        token_ids,
        SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=True),
        request_id=request_id,
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
        self.num_shared_tokens = 0  # attended to through groups

    def run(self, packed: PackedBatch) -> tuple[list[list[int]], list[int]]:
        """The tokens that each row attends to (its own included), and the sampled tokens. What the rows share they
        read from the tables of the first members of their groups.

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
        tables, context_lens = packed.block_tables.tolist(), packed.context_lens.tolist()
        histories = []
        for row, (table, context_len) in enumerate(zip(tables, context_lens, strict=True)):
            start = int(packed.groups.shared_lens[row]) if row < packed.num_decode_seqs else 0
            shared = self._read_groups(row, packed)
            assert len(shared) == start and (not start or start + packed.groups.own_lens[row] == context_len)
            histories.append(shared + self._read(table, start, context_len))
        banned: dict[int, set[int]] = {}
        for index, token_id in zip(packed.banned_rows.tolist(), packed.banned_ids.tolist(), strict=True):
            banned.setdefault(index, set()).add(token_id)
        sampled = []
        for index, last_token in enumerate(packed.logits_indices.tolist()):
            row = bounds.index(last_token + 1) - 1
            sampled.append(next_token(histories[row], frozenset(banned.get(index, ()))))
            self.last_tokens[packed.sampled_slots[index]] = sampled[-1]
        return histories, sampled

    def _read_groups(self, row: int, packed: PackedBatch) -> list[int]:
        groups, history = packed.groups, []
        for place in groups.places[row].tolist() if row < packed.num_decode_seqs else []:
            if place >= 0:
                group, index = divmod(place, groups.members.shape[1])
                assert groups.members[group, index] == row
                start = int(groups.starts[group])
                assert start == len(history), "the groups leave a gap"
                table = packed.block_tables[groups.members[group, 0]].tolist()
                history += self._read(table, start, start + int(groups.lens[group]))
                self.num_shared_tokens += int(groups.lens[group])
        return history

    def _read(self, table: list[int], start: int, end: int) -> list[int]:
        size = self.block_size
        return [self.kv_rows[table[position // size] * size + position % size] for position in range(start, end)]


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
        schedule_policy: str = "fcfs",
        host_cache: HostCache | None = None,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching, host_cache)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            schedule_policy=schedule_policy,
        )
        self.is_by_prefix = schedule_policy == "prefix" and enable_prefix_caching
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.device = StubDevice(num_blocks, block_size, self.scheduler.max_num_seqs)
        self.grouper = PrefixGrouper(block_size, capacity=3)
        self.sequences: list[Sequence] = []
        self.num_preemptions = self.num_prefill_tokens = self.num_decode_tokens = 0
        self.num_overtakings: dict[int, int] = {}  # by seq_id: later requests that began before
        self.admitted: list[Sequence] = []  # in the order in which they were for the first time
        self._num_before: dict[int, int] = {}  # by seq_id: requests that waited when it came
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
        request_id: int | None = None,
    ) -> Sequence:
        """Queues a sequence: the first sample of a request, unless `request_id` is another one's."""
        seq = make_sequence(
            len(self.sequences),
            prompt,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            cache_salt=cache_salt,
            request_id=request_id,
            num_kv_tokens=self.manager.num_blocks * self.manager.block_size,
        )
        self.sequences.append(seq)
        self._num_before[seq.seq_id] = len({other.request_id for other in self.scheduler.waiting.values()})
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
        histories, sampled = self.device.run(pack(batch, self.manager.block_size, self.grouper))
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

        preempted = {seq.seq_id for seq in before.running if seq.seq_id in scheduler.waiting}
        if self.is_by_prefix:
            self._check_order(before, preempted)
        else:
            # First come, first served: who runs arrived before all who wait, and both queues keep the order.
            queue = [*scheduler.running, *scheduler.waiting]
            assert queue == sorted(seq.seq_id for seq in before.running + before.waiting)
        self.admitted += [seq for seq in scheduler.running.values() if seq not in self.admitted]
        unready = [
            seq
            for seq in scheduler.running.values()
            if seq.num_computed_tokens < seq.num_tokens - 1 and not seq.load_ticket  # else it may have waited for loads
        ]
        assert unready in ([], [next(reversed(scheduler.running.values()))]), "admitted beside an unfinished prompt"

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

    def _check_order(self, before: _Before, preempted: set[int]) -> None:
        """Both queues keep their order but for admissions; preempted sequences come back first; nobody is overtaken
        more often than is promised."""
        scheduler, limit = self.scheduler, waiting_queue.MAX_OVERTAKINGS
        was_running = {seq.seq_id for seq in before.running}
        has_been_admitted = {seq.seq_id for seq in self.admitted}
        running = list(scheduler.running.values())
        admitted = [seq for seq in running if seq.seq_id not in was_running]
        assert running == [seq for seq in before.running if seq.seq_id not in preempted] + admitted
        rest = [seq.seq_id for seq in before.waiting if seq not in admitted]
        waiting = list(scheduler.waiting)
        assert waiting[len(preempted) :] == rest and waiting[: len(preempted)] == sorted(
            preempted, key=[seq.seq_id for seq in before.running].index
        )
        is_preempted = [seq.seq_id in has_been_admitted for seq in before.waiting]
        assert is_preempted == sorted(is_preempted, reverse=True), "preempted sequences wait first"
        if has_been_admitted & set(waiting):
            assert has_been_admitted.issuperset(seq.seq_id for seq in admitted), "a preempted sequence was overtaken"
        for seq in admitted:
            if seq.seq_id in has_been_admitted or seq.seq_id != seq.request_id:
                continue
            for other_id in waiting:
                if other_id < seq.seq_id and other_id not in has_been_admitted:
                    self.num_overtakings[other_id] = self.num_overtakings.get(other_id, 0) + 1
        for seq_id, num_overtakings in self.num_overtakings.items():
            assert num_overtakings <= limit * (self._num_before[seq_id] + 1)
        check_prefix_index(scheduler.waiting)


def check_prefix_index(waiting: WaitingQueue) -> None:
    """A radix tree's invariants: each node has just the sequences that begin like it, in order of arrival, and as many
    nodes as it takes to tell them apart."""
    index, manager = waiting._prefixes, waiting._block_manager
    indexed = [seq for seq in waiting._arrived.values() if seq.seq_id == seq.request_id]
    nodes, stack = set(), [index._root]
    while stack:
        node = stack.pop()
        for block_hash, child in node.children.items():
            depth = child.depth
            alike = [
                seq
                for seq in indexed
                if seq.num_reusable_tokens // manager.block_size >= depth
                and (node is index._root or seq.seq_id in node.sequences)
                and manager.prefix_hash(seq, depth) == block_hash
            ]
            assert (child.block_hash, child.parent, depth) == (block_hash, node, node.depth + 1)
            assert child.sequences and list(child.sequences.values()) == alike
            nodes.add(child)
            stack.append(child)
        if len(node.sequences) > 1 or node is index._root:
            # All are told apart by their next block, or have none.
            num_deeper = sum(len(child.sequences) for child in node.children.values())
            members = indexed if node is index._root else list(node.sequences.values())
            assert num_deeper == sum(seq.num_reusable_tokens // manager.block_size > node.depth for seq in members)
    warm = {node for level in index._warm.values() for node in level}
    assert warm <= nodes and all(index._warm.values())
    assert all(node.depth == depth for depth, level in index._warm.items() for node in level)
    assert {seq_id: node for node in nodes for seq_id in node.sequences}.keys() == index._deepest.keys()


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
