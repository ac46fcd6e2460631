"""The progress bar of a job."""

import sys
import time
from types import TracebackType

from tqdm.auto import tqdm

from nanovllm.engine.outputs import StepOutput

# A terminal is redrawn; in a log, each refresh is a new line.
_REFRESH_SECONDS = {True: 0.25, False: 30.0}


class JobProgress:
    """Rows done, the time that is left, output tokens a second since the start of this run, and rows that failed."""

    def __init__(self, num_rows: int, num_done: int, num_failed: int, *, is_shown: bool) -> None:
        self.num_completed = self.num_output_tokens = 0
        self.num_failed = num_failed
        self._interval = _REFRESH_SECONDS[sys.stderr.isatty()]
        self._bar = tqdm(total=num_rows, initial=num_done, desc="Rows", unit="row", disable=not is_shown)
        self._num_shown = num_done
        self._num_done = num_done
        self._start = self._last_refresh = time.perf_counter()
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._start

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / max(self.seconds, 1e-9)

    def update(self, step: StepOutput | None, num_completed: int, num_failed: int) -> None:
        """Counts rows, and the tokens of a step if there was one."""
        self.num_completed += num_completed
        self.num_failed += num_failed
        self._num_done += num_completed + num_failed
        if step is not None:
            self.num_output_tokens += sum(map(len, step.new_token_ids.values()))
        if time.perf_counter() - self._last_refresh >= self._interval:
            self._refresh()

    def _refresh(self) -> None:
        self._bar.set_postfix_str(f"{self.tokens_per_second:,.0f} tok/s, {self.num_failed} failed", refresh=False)
        self._bar.update(self._num_done - self._num_shown)
        self._num_shown = self._num_done
        self._last_refresh = time.perf_counter()

    def __enter__(self) -> "JobProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = time.perf_counter()
        self._refresh()
        self._bar.close()
