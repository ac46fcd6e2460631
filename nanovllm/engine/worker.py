"""The process of a rank that is not the first: makes its part of the model, then follows rank 0 step by step.

It ends when rank 0 says so, when rank 0's process is gone, or when anything fails, which it reports.
"""

from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.config import Config
from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.child_process import run_child
from nanovllm.engine.extra_sampler import PROMPT_ROWS
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.placement import resolve_device
from nanovllm.engine.step_memory import StepLimits, StepMemory
from nanovllm.engine.step_tensors import upload, view_flat
from nanovllm.layers.parallel import Parallel, connect
from nanovllm.utils.checkpoint import open_checkpoint

# Rank 0 is the one that keeps time. The others wait for it however long it takes, and end when its process does.
_PATIENCE_SECONDS = 30 * 24 * 3600.0
# What rank 0 says when something is in the step memory.
STEP, COPIES = "step", "copies"


@dataclass(frozen=True)
class WorkerSetup:
    """What rank 0 tells the workers once: the model, and the port of its store on this machine."""

    config: Config
    model: str
    max_model_len: int
    num_sampled_ids: int
    limits: StepLimits
    port: int


class FollowingRunner(ModelRunner):
    """Computes its part of each step, and takes the sampled tokens from rank 0."""

    def __init__(self, setup: WorkerSetup, parallel: Parallel, connection: Connection) -> None:
        self._connection = connection
        checkpoint = open_checkpoint(setup.model)
        super().__init__(setup.config, checkpoint, setup.max_model_len, setup.num_sampled_ids, parallel)

    @torch.inference_mode()
    def follow(self, batch: PackedBatch, prompt_rows: npt.NDArray[np.int32] | None) -> None:
        """Launches what `run` does on rank 0, up to the choice of tokens.

        Args:
            prompt_rows: rows of the batch's tokens whose logits rank 0 scores; None if its sampling is plain.
        """
        with self._current_device():
            is_replayed = self.graphs is not None and batch.is_pure_decode
            hidden = self.graphs.replay_forward(batch) if is_replayed else None  # type: ignore[union-attr]
            if is_replayed and prompt_rows is None:
                self.graphs.replay_sampling(batch)  # type: ignore[union-attr]
                self._flush_copies()
                return
            inputs = view_flat(upload(batch, self.device), batch)
            if hidden is None:
                hidden = self._forward(inputs)
            rows = torch.from_numpy(np.zeros(0, np.int32) if prompt_rows is None else prompt_rows).to(self.device)
            for first in range(0, len(rows), PROMPT_ROWS):
                self.model.compute_logits(hidden[rows[first : first + PROMPT_ROWS]])
            self._sample(hidden, inputs)
            self._flush_copies()

    def _agree(self, number: int) -> int:
        self._connection.send(number)
        answer = self._connection.recv()
        if answer is None:
            raise SystemExit
        return int(answer)


def main() -> None:
    run_child(_serve)


def _serve(rank: int, connection: Connection, memory_fd: int) -> None:
    """`memory_fd` is the descriptor of the step memory."""
    connection.send(True)
    setup: WorkerSetup | None = connection.recv()
    if setup is None:
        return
    size = setup.config.tensor_parallel_size
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    memory = StepMemory(setup.limits, memory_fd)
    memory.close_file()
    device = resolve_device(setup.config.device, rank)
    parallel = connect(device, setup.port, rank, size, _PATIENCE_SECONDS)
    runner = FollowingRunner(setup, parallel, connection)
    connection.send(True)
    while (message := connection.recv()) is not None:
        if message == COPIES:
            copies = memory.read_copies()
            connection.send(True)
            runner.copy_blocks(copies)
            continue
        step = memory.read()
        connection.send(True)  # rank 0 may write the next
        runner.follow(*step)
    runner.close()  # when the device has done what it was asked for: it may be in an exchange with rank 0's
