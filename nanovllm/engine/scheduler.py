"""Which tokens each step computes. Policy only: no tensors, no device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nanovllm.engine.admission import BlockForecast, LengthEstimator
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.stats import StepCounts
from nanovllm.engine.waiting_queue import WaitingQueue

# A full engine admits its next prompts when this share of its sequences, at least one, has ended.
_ADMISSION_GROUPS = 32
# Waiting sequences to choose from, where some begin alike: each takes up to 5 KB beside its tokens.
LOOK_AHEAD = 4096


@dataclass
class ScheduledBatch:
    """What one step computes. Sequences with one query token come first ("decode" rows), then the others.

    `starts[i]` tokens of sequence i were computed before, `num_query_tokens[i]` are computed now; the step
    samples a token for it iff `is_sampled[i]`, that is, iff nothing is left to compute after it. `scored` are the
    sequences that asked for their prompt's log-probabilities, with the positions of the prompt tokens whose turn it is.
    `fully_scored` are those that want nothing else, and have all with this step: nothing is sampled for them.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_query_tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    scored: list[tuple[Sequence, range]] = field(default_factory=list)
    fully_scored: list[Sequence] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0

    @property
    def sampled_sequences(self) -> list[Sequence]:
        return [seq for seq, sampled in zip(self.sequences, self.is_sampled, strict=True) if sampled]

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedules the sequence's next tokens, and one more to be sampled when those are its last, unless it is only
        scored."""
        self.sequences.append(seq)
        self.starts.append(seq.num_computed_tokens)
        self.num_query_tokens.append(num_tokens)
        if seq.is_decoding and seq.num_output_tokens > 0:
            self.num_decode_tokens += 1
        else:
            self.num_prefill_tokens += num_tokens
            num_lost = min(seq.num_computed_tokens + num_tokens, seq.num_lost_tokens) - seq.num_computed_tokens
            self.num_recomputed_tokens += max(num_lost, 0)
            if seq.wants_prompt_scores:
                self._score(seq, num_tokens)
        seq.num_computed_tokens += num_tokens
        is_computed = seq.num_computed_tokens == seq.num_tokens
        self.is_sampled.append(is_computed and not seq.is_only_scored)
        seq.num_in_flight += self.is_sampled[-1]
        if is_computed and seq.is_only_scored:
            self.fully_scored.append(seq)

    def add_token(self, seq: Sequence) -> None:
        """What `add` does for one token, faster if nothing but an output token is left to compute."""
        if seq.num_computed_tokens < seq.num_prompt_tokens:
            self.add(seq, 1)
            return
        self.sequences.append(seq)
        self.starts.append(seq.num_computed_tokens)
        self.num_query_tokens.append(1)
        self.is_sampled.append(True)
        self.num_decode_tokens += 1
        seq.num_computed_tokens += 1
        seq.num_in_flight += 1

    def _score(self, seq: Sequence, num_tokens: int) -> None:
        """Notes the prompt tokens whose log-probabilities follow from the next tokens to be computed: each token's
        logits are about the one after it. What a preempted sequence computes again is not scored again."""
        end = min(seq.num_computed_tokens + num_tokens, seq.last_scored)
        if end > seq.num_scored_tokens:
            self.scored.append((seq, range(seq.num_scored_tokens + 1, end + 1)))
            seq.num_scored_tokens = end

    def move_single_tokens_first(self) -> None:
        """Restores the order of the class's docstring (a prompt's last chunk can be a single token)."""
        order = sorted(range(len(self.sequences)), key=lambda i: self.num_query_tokens[i] > 1)
        for name in ("sequences", "starts", "num_query_tokens", "is_sampled"):
            column = getattr(self, name)
            column[:] = [column[i] for i in order]


class Scheduler:
    """Mixes decode tokens and prefill chunks under a token budget.

    A step gives every decoding sequence its token first, then spends the rest of the budget on prompts that
    are under way, then on admissions. A sequence gets the blocks of its whole prompt when it is admitted, so
    only decoding can run out of blocks; then the youngest running sequence (the last admitted) is preempted: it
    gives up its blocks, goes back to the head of the queue, and later recomputes prompt and output. What host memory
    has kept of a prefix is loaded into blocks that its sequence gets when it is admitted; it is computed from when they
    are loaded.

    Nobody is admitted while a prompt is not scheduled to its end, unless it waits for its loads: at most one is under
    way, the last admitted. So whoever is looked up in the prefix cache finds there all that the running sequences have
    in common with it, and what several share is computed once. Nor is anybody whose prompt goes on like one that waits
    for its loads.

    `running` is in order of admission. Who is admitted next, `WaitingQueue` decides; first come first served
    ("fcfs"), that is the order of arrival, and everything waiting arrived after everything running.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        schedule_policy: str = "fcfs",
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        # Each running sequence may need one token of every step's budget.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.waiting = WaitingQueue(block_manager, schedule_policy)
        self.running: dict[int, Sequence] = {}
        self.estimator = LengthEstimator()
        self.counts = StepCounts()  # outlives `reset`
        self._free_slots = list(reversed(range(self.max_num_seqs)))
        self._num_awaited = 0  # sequences that have to make room before the next admission

    @property
    def has_sequences(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_wanted(self) -> int:
        """Sequences that are of use in the queue: no more than may start, unless its order gains from seeing others."""
        return max(self.max_num_seqs, LOOK_AHEAD) if self.waiting.is_sharing else self.max_num_seqs

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    def schedule(self) -> ScheduledBatch:
        """Chooses the tokens of the next step and takes their blocks; no sequences if there is nothing to compute.

        The token that the step before samples may still be unknown: lengths are all that counts here.
        """
        batch = ScheduledBatch()
        self._schedule_decodes(batch)
        budget = self.max_num_batched_tokens - len(batch.sequences)
        budget = self._schedule_prefills(batch, budget)
        if not batch.num_preemptions:
            self._admit(batch, budget)
        batch.move_single_tokens_first()
        self._count(batch)
        return batch

    def postprocess(
        self,
        batch: ScheduledBatch,
        token_ids: list[int],
        stop_strings: Mapping[int, str] | None = None,
        ended: Mapping[int, str] | None = None,
    ) -> list[Sequence]:
        """Appends the tokens of a step to its sampled sequences; returns those that it finished, the scored included.

        A sequence that ended meanwhile drops its token.

        Args:
            stop_strings: seq_id -> the stop string that the token completes in the text, which is not known here.
            ended: seq_id -> finish reason of sequences that turn out to have ended before their token.
        """
        stop_strings, ended = stop_strings or {}, ended or {}
        finished, num_appended = [], 0
        for seq, token_id in zip(batch.sampled_sequences, token_ids, strict=True):
            if seq.is_finished:
                continue
            if seq.seq_id in ended:
                self.finish(seq, ended[seq.seq_id])
                finished.append(seq)
                continue
            seq.num_in_flight -= 1
            seq.token_ids.append(token_id)
            num_appended += 1
            if seq.seq_id in stop_strings or token_id in seq.stop_ids:
                # Of a stop token that completes a stop string, the string counts: its text is to be cut.
                seq.stop_reason = stop_strings.get(seq.seq_id, token_id)
                self.finish(seq, "stop")
            elif seq.is_complete:
                self.finish(seq, "stop")
            elif len(seq.token_ids) >= seq.max_total_tokens:
                self.finish(seq, "length")
            else:
                if len(seq.token_ids) % self.block_manager.block_size == 0:
                    self.block_manager.publish(seq)
                continue
            self.estimator.observe(seq)
            finished.append(seq)
        self.counts.num_output_tokens += num_appended
        for seq in batch.fully_scored:
            if not seq.is_finished:
                self.finish(seq, "length")
                finished.append(seq)
        return finished

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a waiting or running sequence and takes its blocks; tokens in flight are dropped."""
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.publish(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
            self._num_awaited = 0  # another one may be the next now
        seq.end(reason)

    def reset(self) -> None:
        """Empties queues, blocks and prefix cache, whatever state an exception has left them in."""
        self.waiting.clear()
        self.running.clear()
        self._free_slots = list(reversed(range(self.max_num_seqs)))
        self._num_awaited = 0
        self.block_manager.reset()

    def find(self, seq_id: int) -> Sequence | None:
        return self.running.get(seq_id) or self.waiting.get(seq_id)

    def unfinished(self) -> Iterator[Sequence]:
        yield from self.running.values()
        yield from self.waiting.values()

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        block_size = self.block_manager.block_size
        for seq in list(self.running.values()):
            # `is_decoding` and `has_reached_limit`, written out: this is asked of every sequence in every step.
            num_tokens, num_computed = len(seq.token_ids) + seq.num_in_flight, seq.num_computed_tokens
            if num_tokens - num_computed != 1 or not num_computed or num_tokens >= seq.max_total_tokens:
                continue
            if seq.load_ticket and self.block_manager.is_loading(seq):
                continue
            if num_computed >= len(seq.block_table) * block_size and not self._append_block(batch, seq):
                continue
            batch.add_token(seq)
            if seq.num_computed_tokens % block_size == 0:
                self.block_manager.publish(seq)

    def _append_block(self, batch: ScheduledBatch, seq: Sequence) -> bool:
        """Makes room for a decoding sequence's token. False if it can't be computed yet: the sequence itself has been
        preempted for that, or got a block that is still being loaded for another, which has given it up."""
        while not self.block_manager.can_append(seq):
            # Oldest first, so the youngest is not in this batch yet. It can be the sequence itself.
            youngest = next(reversed(self.running.values()))
            self._preempt(youngest)
            batch.num_preemptions += 1
            if youngest is seq:
                return False
        self.block_manager.append(seq)
        return not self.block_manager.is_loading(seq)

    def _schedule_prefills(self, batch: ScheduledBatch, budget: int) -> int:
        for seq in self.running.values():
            num_left = seq.num_tokens - seq.num_computed_tokens
            if budget and num_left and not seq.is_decoding and not self.block_manager.is_loading(seq):
                budget -= self._schedule_chunk(batch, seq, min(num_left, budget))
        return budget

    def _admit(self, batch: ScheduledBatch, budget: int) -> None:
        if self._num_awaited > 0 and self.running:
            return
        forecast = None
        while self.waiting and budget:
            if not self._free_slots:
                self._await_room()
                break
            seq = self.waiting.choose()
            cached_block_ids = self.block_manager.find_cached_blocks(seq)
            offloaded = self.block_manager.find_offloaded_blocks(seq, cached_block_ids)
            if offloaded is None:
                break
            if forecast is None:
                forecast = BlockForecast(self.running.values(), self.estimator, self.block_manager)
            if not self._fits(seq, cached_block_ids, forecast):
                self._await_room()
                break
            self.waiting.take(seq)
            self.block_manager.allocate(seq, cached_block_ids, offloaded)
            seq.slot = self._free_slots.pop()
            seq.status = SequenceStatus.RUNNING
            self.running[seq.seq_id] = seq
            forecast.add(seq, len(seq.block_table), len(cached_block_ids))
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
                batch.num_cached_tokens += seq.num_computed_tokens
            if not self.block_manager.is_loading(seq):
                budget -= self._schedule_chunk(batch, seq, min(seq.num_tokens - seq.num_computed_tokens, budget))

    def _await_room(self) -> None:
        """After an admission has failed: the next is tried when some sequences have made room, not each time one has.

        A step with a prompt in it costs more than its tokens (no graph, many small launches); a few together cost it
        once. On average 1 / (2 * _ADMISSION_GROUPS) of the running sequences' places stay empty for it.
        """
        self._num_awaited = -(-len(self.running) // _ADMISSION_GROUPS)

    def _fits(self, seq: Sequence, cached_block_ids: list[int], forecast: BlockForecast) -> bool:
        """Whether the sequence's prompt fits now, and the running set with it at its expected peak."""
        manager = self.block_manager
        num_new = manager.num_new_blocks(seq, cached_block_ids)
        if num_new > manager.num_free_blocks:
            return False
        if not self.running:
            return True  # alone, every sequence fits to its end: the engine has checked that
        num_cached = len(cached_block_ids)
        num_idle = num_new - (manager.num_blocks_for(seq.num_tokens) - num_cached)  # cached, held by nobody
        forecast.add(seq, num_cached, num_cached)
        room = manager.num_free_blocks - num_idle
        fits = forecast.worst_growth() <= room or forecast.peak_growth() <= room
        forecast.discard_last()
        return fits

    def _schedule_chunk(self, batch: ScheduledBatch, seq: Sequence, num_tokens: int) -> int:
        batch.add(seq, num_tokens)
        # Published before it runs: sequences admitted in this very step already share it, since in each layer
        # the KV of all tokens is stored before attention reads any.
        self.block_manager.publish(seq)
        return num_tokens

    def _preempt(self, seq: Sequence) -> None:
        seq.num_lost_tokens = max(seq.num_lost_tokens, seq.num_computed_tokens)
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.put_back(seq)

    def _count(self, batch: ScheduledBatch) -> None:
        counts = self.counts
        counts.num_steps += bool(batch.sequences)
        counts.num_prefill_tokens += batch.num_prefill_tokens
        counts.num_cached_tokens += batch.num_cached_tokens
        counts.num_recomputed_tokens += batch.num_recomputed_tokens
        counts.num_preemptions += batch.num_preemptions

    def _release(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        self.block_manager.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1
        self._num_awaited -= 1
