"""The engine: schedules a step, launches it, and reads the one before while it runs."""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from nanovllm.config import Config
from nanovllm.engine.batch import pack
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.entrance import Entrance
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.frontend import Frontend
from nanovllm.engine.host_cache import HostCache, max_copies_a_step
from nanovllm.engine.inputs import Prompt, RequestParams
from nanovllm.engine.launched_step import LaunchedStep, begin_masks, constrained_sequences
from nanovllm.engine.ledger import Ledger
from nanovllm.engine.outputs import RequestOutput, ResultError, StepOutput
from nanovllm.engine.prefix_groups import PrefixGrouper
from nanovllm.engine.progress import ProgressBar
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import EngineStats
from nanovllm.engine.tensor_parallel import make_runner
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import clear_forward_context

logger = logging.getLogger(__name__)
Output = TypeVar("Output")

# Longest time that `generate` turns results into text between two steps: about what the device needs for a step.
_SECONDS_OF_OUTPUT_A_STEP = 0.005


class LLMEngine(Frontend):
    """Generates completions for many prompts at once. Not thread-safe.

    Use `generate` for a list of prompts, or `add_request` and `step` to drive it yourself.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        """Loads a model.

        Args:
            model: a local directory, a `.gguf` file, or a Hugging Face id.
            **kwargs: fields of `nanovllm.config.Config`.

        Raises:
            TypeError: an unknown keyword or a wrong type.
            ValueError: an impossible setting, or a model that is damaged or not supported.
            FileNotFoundError: there is no such model.
        """
        self.config = Config.from_kwargs(model, **kwargs)
        checkpoint, spec = self._open_model()
        self.runner = make_runner(self.config, checkpoint, self.max_model_len, self._num_sampled_ids)

        num_blocks, block_size = self.runner.num_kv_blocks, self.runner.block_size
        self.host_cache = self._make_host_cache()
        caching = self.config.enable_prefix_caching
        self.block_manager = BlockManager(num_blocks, block_size, caching, self.host_cache)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            schedule_policy=self.config.schedule_policy,
        )
        self.entrance = Entrance(self.scheduler)
        self._grouper = PrefixGrouper(block_size, self.runner.group_capacity)
        self._make_way_in(spec, num_blocks * block_size)
        self._in_flight: LaunchedStep | None = None
        self.ledger = Ledger()
        self._step_seconds = 0.0
        self._num_failures = 0
        self._is_closed = False

    def _make_host_cache(self) -> HostCache | None:
        runner, config = self.runner, self.config
        if not runner.num_host_blocks or runner.min_load_blocks is None:
            if config.kv_offload_gb:
                logger.warning("kv_offload_gb is of no use here: no number of blocks is copied faster than computed")
            return None
        num_tokens = runner.min_load_blocks * runner.block_size
        logger.info("KV offload: %d blocks; prefixes are copied from %d tokens on", runner.num_host_blocks, num_tokens)
        max_copies = max_copies_a_step(config.max_num_batched_tokens, self.max_model_len, runner.block_size)
        return HostCache(runner.num_host_blocks, max_copies=max_copies, min_load_blocks=runner.min_load_blocks)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its seq_id, which stands for all its samples. Raises like `generate`."""
        self.check_open()
        (token_ids,) = self.inputs.process_prompts([prompt])
        (params,) = self.inputs.process_params(sampling_params, 1)
        return self.add_checked(token_ids, params)

    def add_checked(self, token_ids: "array[int]", params: RequestParams) -> int:
        """Queues a request of what `inputs` has made of a prompt and its params; `add_request` without the checks."""
        self.check_open()
        seq = self.requests.make(token_ids, params)
        self._enqueue(seq)
        return seq.seq_id

    def abort(self, seq_id: int) -> bool:
        """Ends a request; the next `step` reports what it had. False if there is no such unfinished request."""
        self.check_open()
        request = self.ledger.unfinished.get(seq_id)
        if request is None:
            return False
        with self._nothing_half_done():
            self.entrance.abort(request)
            self._retire([request])
        return True

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_wanted(self) -> int:
        """Requests and samples that it is of use to have queued, beside those that run."""
        return self.scheduler.num_wanted

    def is_finished(self) -> bool:
        """Whether there is nothing left to compute, to read or to report."""
        return self.ledger.is_empty and self._in_flight is None

    def step(self) -> StepOutput:
        """Launches one step and returns the results of the step before.

        If the step fails, every request in the engine is aborted, the next call reports them, and the engine goes on.

        Raises:
            ResultError: the text of a result can't be decoded. That result is lost, and the others stay for the next
                call.
        """
        self.check_open()
        output = self._step()
        ended = self.ledger.ended
        for seq_id, seq in ended.items():
            try:
                output.finished[seq_id] = self.texts.output_of(seq)
            except Exception as error:
                del ended[seq_id]  # it would fail again
                raise ResultError(seq_id) from error
        ended.clear()
        return output

    def stats(self) -> EngineStats:
        """Counters since the engine started, and gauges of this moment. It may be closed."""
        # Numbers and lengths only: an `AsyncLLM` is asked in other threads than the engine's.
        manager = self.block_manager
        return EngineStats(
            **vars(self.ledger.counts),
            **vars(self.scheduler.counts),
            **vars(manager.counts),
            step_seconds=self._step_seconds,
            num_failures=self._num_failures,
            num_running=len(self.scheduler.running),
            num_waiting=self.entrance.num_queued,
            max_num_seqs=self.scheduler.max_num_seqs,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_cached_free_blocks=manager.num_cached_free_blocks,
            num_engines=1,
        )

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: strings and lists of token ids, mixed at will. A single string is a list of one.
            sampling_params: one for all prompts, or one a prompt.
            use_tqdm: show a progress bar.

        Returns:
            One result a prompt, in their order.

        Raises:
            TypeError, ValueError: something about a prompt or its params is wrong. The message names its index. What
                shows only when a text is tokenised, such as its number of tokens, may be found after the first
                steps of a large job; nothing of it is left in the engine then.
        """
        self.check_open()
        checked = self.inputs.check_prompts(prompts)
        params = self.inputs.process_params(sampling_params, len(checked))
        feed = PromptFeed(checked, params, self.inputs.encode)
        return self._complete(feed, use_tqdm, self.requests.make, self.texts.output_of)

    def close(self) -> None:
        """Gives up everything the engine holds. Calling it again does nothing; asking for work raises."""
        if self._is_closed:
            return
        self._is_closed = True
        self._abort_all()
        self.ledger.ended.clear()
        self.inputs.close()
        self.runner.close()
        del self.runner

    exit = close

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(
        self,
        feed: PromptFeed,
        use_tqdm: bool,
        make: Callable[[Any, RequestParams], Sequence],
        output_of: Callable[[Sequence], Output],
    ) -> list[Output]:
        """The results of a feed's prompts, in their order. `make` makes a request of what the feed hands out, and
        `output_of` a result of the request."""
        requests: dict[int, Sequence] = {}
        outputs: dict[int, Output] = {}
        try:
            with ProgressBar(feed.num_prompts, enabled=use_tqdm) as progress:
                while len(outputs) < feed.num_prompts:
                    feed.encode_chunk()
                    # No more than is of use: what waits in the feed takes less memory. And no more at a time than a
                    # step may start: to make them takes a while.
                    most = self.entrance.num_queued + self.scheduler.max_num_seqs
                    while feed.can_take and self.entrance.num_queued < min(most, self.num_wanted):
                        seq = make(*feed.take())
                        requests[seq.seq_id] = seq
                        self._enqueue(seq)
                    step = self._step()
                    num_finished = self._collect(requests, outputs, output_of)
                    progress.update(step.num_prefill_tokens, len(step.new_token_ids), num_finished)
        finally:
            self._forget(list(requests.values()))
        return [outputs[seq_id] for seq_id in sorted(outputs)]  # ids rise in the order of the prompts

    def _collect(
        self, requests: dict[int, Sequence], outputs: dict[int, Output], output_of: Callable[[Sequence], Output]
    ) -> int:
        """Makes outputs of requests that ended, as many as there is time for, and counts them."""
        deadline = time.perf_counter() + _SECONDS_OF_OUTPUT_A_STEP
        num_before = len(outputs)
        for seq_id in requests.keys() & self.ledger.ended.keys():
            outputs[seq_id] = output_of(self.ledger.ended.pop(seq_id))
            del requests[seq_id]  # a large job has no room for them all
            if time.perf_counter() > deadline:
                break
        return len(outputs) - num_before

    def _step(self) -> StepOutput:
        with self._timed(), self._nothing_half_done():
            if self.entrance.num_held:
                self._retire(self.entrance.open())
            if self.host_cache is not None:
                self.host_cache.finish(*self.runner.finished_copies())
            batch = self.scheduler.schedule()
            packed = pack(batch, self.block_manager.block_size, self._grouper) if batch.sequences else None
            previous = self._in_flight
            if previous is not None and previous.handle is None:
                previous.handle = self.runner.sample(previous.take_masks())
            copies = self.block_manager.begin_copies()
            if copies is not None:
                self.runner.copy_blocks(copies)
            launched = None
            if packed is not None:
                launched = LaunchedStep(batch, constrained_sequences(batch, packed), self.runner.run(packed))
            self._in_flight = launched
            if launched is None and previous is None and self.ledger.unfinished:
                self._wait()
            return self._read(previous, batch)

    def _wait(self) -> None:
        """Nothing can be computed before the KV of some request is loaded, or its constraint compiled."""
        if self.host_cache is not None and self.host_cache.is_loading:
            self.runner.wait_for_loads()
        elif self.entrance.num_held < len(self.ledger.unfinished):
            raise RuntimeError("the scheduler is stuck: requests wait, but none can run")
        else:
            self.entrance.wait()

    def _read(self, previous: LaunchedStep | None, batch: ScheduledBatch) -> StepOutput:
        """Takes over the tokens of the previous step, and reports them with the counts of the launched one."""
        output = StepOutput(
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_cached_tokens=batch.num_cached_tokens,
            num_preemptions=batch.num_preemptions,
        )
        token_ids = previous.read() if previous is not None else []
        moved = previous.accept_tokens(token_ids) if previous is not None else []
        begin_masks(self._in_flight, moved, self.runner.allocate_masks)
        if previous is not None:
            stop_strings = previous.report_tokens(token_ids, output)
            self._retire(self.scheduler.postprocess(previous.batch, token_ids, stop_strings, previous.ended))
        output.num_used_blocks = self.block_manager.num_used_blocks
        output.num_free_blocks = self.block_manager.num_free_blocks
        return output

    def _enqueue(self, seq: Sequence) -> None:
        with self._nothing_half_done():
            self.ledger.receive(seq)
            self.entrance.add(seq)
            if seq.is_finished:
                self._retire([seq])

    def _retire(self, sequences: list[Sequence]) -> None:
        self.ledger.retire(sequences)
        self._drop_idle_step()

    def _drop_idle_step(self) -> None:
        """Forgets the step in flight if its tokens concern nobody any more."""
        if self._in_flight is not None and all(seq.is_finished for seq in self._in_flight.batch.sequences):
            self._in_flight = None

    def _forget(self, sequences: list[Sequence]) -> None:
        """Removes what is left of a call's sequences: nothing, unless it failed."""
        with self._nothing_half_done():
            for seq in sequences:
                self.entrance.abort(seq)
                self.ledger.forget(seq)
            self._drop_idle_step()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._step_seconds += time.perf_counter() - started

    @contextmanager
    def _nothing_half_done(self) -> Iterator[None]:
        """What an exception, or Ctrl-C at any line, cuts off inside leaves queues and blocks in an unknown state: every
        request is ended then, and nothing is built on it."""
        try:
            yield
        except BaseException:
            self._num_failures += 1
            self._abort_all()
            if not self._is_closed and self.runner.is_lost:
                self.close()
            raise

    def _abort_all(self) -> None:
        """Ends every request, whatever state it is in, and begins with empty queues, blocks and cache."""
        clear_forward_context()
        self.entrance.reset()
        self._in_flight = None
        sequences = [sample for seq in self.ledger.unfinished.values() for sample in seq.samples]
        for seq in sequences:
            if not seq.is_finished:  # one that is has ended before, or in the very step that failed
                seq.end("abort")
        self._retire(sequences)

    def check_open(self) -> None:
        """Raises RuntimeError if the engine was closed."""
        if self._is_closed:
            raise RuntimeError("this engine is closed")
