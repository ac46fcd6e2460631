"""The place where a job talks to the engine."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.outputs import RequestOutput, ResultError, StepOutput
from nanovllm.engine.stats import EngineStats
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.prepare import PreparedRow
from nanovllm.llm import LLM


@dataclass(frozen=True)
class EndedRow:
    """A row that has left the engine, so many seconds after it was added.

    Attributes:
        output: its result, None if that can't be made.
        error: why it can't.
    """

    prepared: PreparedRow
    seconds: float
    output: RequestOutput | None
    error: BaseException | None = None


def load(model: str, **config: Any) -> LLM:
    """An `LLM`. Raises JobError if there is no such model, or it can't be loaded."""
    try:
        return LLM(model, **config)
    except (OSError, TypeError, ValueError, ImportError) as error:
        raise JobError(str(error)) from error
    except Exception as error:  # such as too little memory, or a replica that failed
        raise JobError(f"{model} can't be loaded: {type(error).__name__}: {error}") from error


class JobEngine:
    """Takes prepared rows, and gives them back with their results.

    It wants as many as can run, on all replicas, and as many waiting as the engine has a use for: so a step always
    finds a next prompt, and the number of rows in memory depends on the engine and not on the job. Samples are counted,
    not rows.
    """

    def __init__(self, model: str, **config: Any) -> None:
        """Loads a model; raises like `load`."""
        self._llm = load(model, **config)
        self._max_running = self._llm.config.max_num_seqs * self._llm.config.data_parallel_size
        self._rows: dict[int, tuple[PreparedRow, float]] = {}  # and when they were added
        self._num_samples = 0

    @property
    def inputs(self) -> InputProcessor:
        return self._llm.inputs

    @property
    def tokenizer(self) -> Any | None:
        return self._llm.tokenizer

    @property
    def max_rows(self) -> int:
        """Most rows that are of use at a time."""
        return 2 * self._max_running

    @property
    def num_rows(self) -> int:
        """Rows that it holds."""
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return self._num_samples >= self._max_running + self._llm.num_wanted

    def add(self, row: PreparedRow) -> None:
        """Queues a row. The caller has asked `is_full`."""
        self._rows[self._llm.add_checked(row.token_ids, row.request)] = row, time.monotonic()
        self._num_samples += row.params.n

    def step(self) -> tuple[StepOutput, list[EndedRow]]:
        """Computes a step; returns what it did, and the rows that ended."""
        try:
            step = self._llm.step()
        except ResultError as error:
            return StepOutput(), [self._take(error.seq_id, None, error.__cause__ or error)]
        return step, [self._take(seq_id, output) for seq_id, output in step.finished.items()]

    def stats(self) -> EngineStats:
        return self._llm.stats()

    def describe(self) -> dict[str, str]:
        """What a reader of the job's report may want to know of it."""
        config, runner = self._llm.config, getattr(self._llm, "runner", None)
        facts = {"engines": f"{config.data_parallel_size}, of {config.tensor_parallel_size} ranks each"}
        if runner is None:  # replicas know theirs, or the engine is lost
            return facts
        device = runner.device
        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        facts["device"] = f"{device}{name}, {str(runner.dtype).removeprefix('torch.')}"
        facts["attention"] = f"{runner.attention_name}, in blocks of {runner.block_size} tokens"
        return facts

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> "JobEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, seq_id: int, output: RequestOutput | None, error: BaseException | None = None) -> EndedRow:
        row, added = self._rows.pop(seq_id)
        self._num_samples -= row.params.n
        return EndedRow(row, time.monotonic() - added, output, error)
