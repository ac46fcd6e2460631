"""The place where a job talks to the engine."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.outputs import RequestOutput, StepOutput
from nanovllm.jobs.prepare import PreparedRow
from nanovllm.llm import LLM


class JobEngine:
    """Takes prepared rows, and gives them back with their results.

    It wants as many as can run, on all replicas, and as many waiting as the engine has a use for: so a step always
    finds a next prompt, and the number of rows in memory depends on the engine and not on the job. Samples are counted,
    not rows.
    """

    def __init__(self, model: str, **config: Any) -> None:
        """Loads a model; see `LLM`."""
        self._llm = LLM(model, **config)
        self._max_running = self._llm.config.max_num_seqs * self._llm.config.data_parallel_size
        self._rows: dict[int, PreparedRow] = {}
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
        self._rows[self._llm.add_request(row.token_ids, row.params)] = row
        self._num_samples += row.params.n

    def step(self) -> tuple[StepOutput, list[tuple[PreparedRow, RequestOutput]]]:
        """Computes a step; returns what it did, and the rows that ended."""
        output = self._llm.step()
        return output, list(self._take(output.finished.items()))

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> "JobEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, finished: Iterable[tuple[int, RequestOutput]]) -> Iterable[tuple[PreparedRow, RequestOutput]]:
        for seq_id, output in finished:
            row = self._rows.pop(seq_id)
            self._num_samples -= row.params.n
            yield row, output
