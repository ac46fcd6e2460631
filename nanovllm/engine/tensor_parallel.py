"""Several ranks for one model: rank 0, which the engine calls. The others are in `worker.py`."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import torch

from nanovllm.config import Config
from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.child_process import interrupts_put_off
from nanovllm.engine.host_cache import BlockCopies, max_copies_a_step
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.placement import resolve_device
from nanovllm.engine.step_handle import StepHandle
from nanovllm.engine.step_memory import StepLimits, StepMemory
from nanovllm.engine.step_runner import Masks
from nanovllm.engine.step_tensors import StepTensors
from nanovllm.engine.worker import COPIES, STEP, WorkerSetup
from nanovllm.engine.workers import STEP_TIMEOUT_SECONDS, Workers
from nanovllm.layers.parallel import SINGLE, ExchangeError, Parallel, connect, make_store
from nanovllm.models import resolve_architecture
from nanovllm.utils.checkpoint import Checkpoint

_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_ABORT = 5.0

_Handle = TypeVar("_Handle", StepHandle, StepHandle | None)


def make_runner(config: Config, checkpoint: Checkpoint, max_model_len: int, num_sampled_ids: int) -> ModelRunner:
    """The runner that an engine needs; see `ModelRunner` for arguments and errors."""
    runner = ModelRunner if config.tensor_parallel_size == 1 else TensorParallelRunner
    return runner(config, checkpoint, max_model_len, num_sampled_ids)


class TensorParallelRunner(ModelRunner):
    """Rank 0, which leads the others. A step's arrays go to them through shared memory; then all ranks launch the same
    forward pass. Rank 0 gets the logits, samples, and sends the tokens from device to device, where each rank's next
    step finds them: no host is in between. What decides about sampling never leaves rank 0.

    If a rank is lost in the middle of a step, the others are ended, and the engine has to close.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint, max_model_len: int, num_sampled_ids: int) -> None:
        """Raises WorkerError, beside what `ModelRunner` raises: another rank has failed."""
        size = config.tensor_parallel_size
        resolve_architecture(checkpoint.config)[1].head_share(Parallel(0, size))
        resolve_device(config.device, size - 1)
        min_block_size = config.kvcache_block_size or 1
        limits = StepLimits(
            num_tokens=config.max_num_batched_tokens,
            num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            table_width=-(-max_model_len // min_block_size),
            num_copies=max_copies_a_step(config.max_num_batched_tokens, max_model_len, min_block_size),
        )
        # Tokens that the others wait for in the step that is being launched; None while it is not known.
        self._num_awaited: int | None = None
        self._memory = StepMemory(limits)
        self.parallel = SINGLE  # until the ranks are connected
        try:
            self._workers = Workers(size, self._memory.file_descriptor)
        finally:
            self._memory.close_file()
        try:
            self._workers.hear()
            self._store = store = make_store()  # NCCL looks into it for as long as its group lives
            setup = WorkerSetup(config, checkpoint.location, max_model_len, num_sampled_ids, limits, store.port)
            self._workers.tell(setup)
            self.device = resolve_device(config.device)
            self.parallel = connect(self.device, store.port, 0, size, STEP_TIMEOUT_SECONDS)
            with self._aborting_exchanges():
                super().__init__(config, checkpoint, max_model_len, num_sampled_ids, self.parallel)
                self._workers.hear()
        except BaseException as error:
            # Another rank's end shows in an exchange; on a GPU it can show wherever this rank waits for the device.
            is_waiting = isinstance(error, RuntimeError) and self._workers.has_dead() and not self.is_lost
            failure = self._workers.fail() if isinstance(error, ExchangeError) or is_waiting else None
            self._workers.kill()
            self._end_exchanges()
            if failure is not None:
                raise failure from error
            raise

    @property
    def is_lost(self) -> bool:
        return self._workers.is_closed

    def run(self, batch: PackedBatch) -> StepHandle | None:
        """Launches a step on all ranks.

        Raises:
            WorkerError: a rank is lost.
        """
        with interrupts_put_off():  # cut off halfway, a step would leave the others waiting
            self._workers.settle()
            self._release_others()  # from a step that was given up before it sampled
            self._memory.write(batch)
            self._workers.tell(STEP)
            self._num_awaited = None
            with self._completing():
                return self._watch(super().run(batch))

    def sample(self, masks: Masks | None) -> StepHandle:
        """Raises WorkerError if a rank is lost."""
        with interrupts_put_off(), self._completing():
            return self._watch(super().sample(masks))

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Raises WorkerError if a rank is lost."""
        with interrupts_put_off(), self._completing():
            self._workers.settle()
            self._release_others()
            self._memory.write_copies(copies)
            self._workers.tell(COPIES)
            super().copy_blocks(copies)

    def close(self) -> None:
        """Ends the other ranks, too."""
        if not self.is_lost:
            with suppress(ExchangeError):  # if one has died meanwhile, so be it
                self._release_others()
        self._workers.close()
        self._end_exchanges()
        super().close()
        self.parallel = SINGLE  # the group ends before the store that it looks into
        del self._store

    def _end_exchanges(self) -> None:
        """Of this rank's GPU: what still waits there for a rank that is gone, and would be waited for. On a CPU an
        exchange fails by itself."""
        if self.parallel.group is None or self.device.type == "cpu":
            return
        # NCCL waits for graphs that hold its exchanges, and those for it if they run: so both at the same time. If an
        # exception holds the graphs, they end with it.
        aborting = threading.Thread(target=self.parallel.abort, daemon=True)
        aborting.start()
        self.graphs = None
        aborting.join(_SECONDS_TO_ABORT)

    @contextmanager
    def _aborting_exchanges(self) -> Iterator[None]:
        """While the model is made: if another rank dies, the GPU would wait for it in an exchange, and this thread for
        the GPU."""
        if self.device.type == "cpu":
            yield
            return
        is_made = threading.Event()

        def watch() -> None:
            while not is_made.wait(_SECONDS_BETWEEN_LOOKS):
                if self._workers.has_dead():
                    self.parallel.abort()  # again and again: others may not have come as far, and live on

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_made.set()
            watcher.join(_SECONDS_TO_ABORT)

    def _agree(self, number: int) -> int:
        smallest = min(number, *self._workers.hear())
        self._workers.tell(smallest)
        return smallest

    def _logits(self, hidden: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        logits = super()._logits(hidden, inputs)
        self._num_awaited = len(logits)
        return logits

    def _sample_for_capture(self, hidden: torch.Tensor, inputs: StepTensors) -> torch.Tensor:
        try:
            return super()._sample_for_capture(hidden, inputs)
        finally:
            self._num_awaited = None  # the others are in the midst of a step, whatever happens here

    def _keep(self, tokens: torch.Tensor, inputs: StepTensors) -> None:
        super()._keep(tokens, inputs)
        self._num_awaited = 0

    @contextmanager
    def _completing(self) -> Iterator[None]:
        """An error of sampling, as a user's function may raise, leaves the others waiting for tokens alone: they get
        some, and all are ready for the next step. Any other loses the others. Raises WorkerError if one of them was the
        cause."""
        try:
            yield
        except ExchangeError as error:
            raise self._workers.fail() from error
        except BaseException:
            if self._num_awaited is None or self.is_lost:
                self._workers.kill()
            else:
                self._release_others()
            raise

    def _release_others(self) -> None:
        """Gives the others some tokens for those that they wait for, if any."""
        if self._num_awaited:
            with self._current_device():
                self.parallel.from_first(torch.zeros(self._num_awaited, dtype=torch.int64, device=self.device))
            self._num_awaited = 0

    def _watch(self, handle: _Handle) -> _Handle:
        """The handle, which waits as `_wait` does where it has to."""
        return handle if handle is None or handle.done is None else replace(handle, wait=self._wait)

    def _wait(self, done: torch.cuda.Event) -> None:
        """Waits for a step on the device, unless a rank is lost: the device would wait for it for ever."""
        deadline = time.monotonic() + STEP_TIMEOUT_SECONDS
        look = 0.0
        while not done.query():
            now = time.monotonic()
            if now > deadline:
                raise self._workers.fail()
            if now > look:
                look = now + _SECONDS_BETWEEN_LOOKS
                if self._workers.has_dead():
                    raise self._workers.fail()
            time.sleep(20e-6)
