"""The progress bar of `generate`."""

import time
from types import TracebackType

from tqdm.auto import tqdm

_REFRESH_SECONDS = 0.25


class ProgressBar:
    """Finished requests, and the average rates of prompt and output tokens since the start.

    Between refreshes a step costs a few additions.
    """

    def __init__(self, num_requests: int, enabled: bool) -> None:
        self._bar = tqdm(total=num_requests, desc="Generating", unit="req", disable=not enabled)
        self._num_prefill_tokens = self._num_decode_tokens = self._num_finished = 0
        self._start = self._last_refresh = time.perf_counter()

    def update(self, num_prefill_tokens: int, num_decode_tokens: int, num_finished: int) -> None:
        """Counts tokens that were computed, and how many of the bar's requests finished."""
        self._num_prefill_tokens += num_prefill_tokens
        self._num_decode_tokens += num_decode_tokens
        self._num_finished += num_finished
        now = time.perf_counter()
        if now - self._last_refresh >= _REFRESH_SECONDS:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        elapsed = max(now - self._start, 1e-9)
        prefill, decode = self._num_prefill_tokens / elapsed, self._num_decode_tokens / elapsed
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)
        self._bar.update(self._num_finished)
        self._num_finished = 0
        self._last_refresh = now

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refresh(time.perf_counter())
        self._bar.close()
