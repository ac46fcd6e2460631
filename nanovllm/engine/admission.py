"""Look-ahead admission: may one more sequence start without somebody being preempted later?"""

from collections.abc import Iterable

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# A finished sequence gives its blocks back up to two steps after its last token was launched.
_RELEASE_LAG = 2
# Points in time at which the future use is evaluated: enough that what falls between two of them is small.
_MAX_EVALUATED_TIMES = 128
# Weight of the newest finished sequence in the running mean of output lengths.
_SMOOTHING = 1 / 32


class LengthEstimator:
    """Predicts how long sequences get: exactly when nothing but their limit can end them, else from those
    that finished before (a running mean of output lengths)."""

    def __init__(self) -> None:
        self._mean_output_tokens: float | None = None

    def observe(self, seq: Sequence) -> None:
        """Learns from a finished sequence."""
        if not seq.can_stop_early:
            return
        if self._mean_output_tokens is None:
            self._mean_output_tokens = float(seq.num_output_tokens)
        self._mean_output_tokens += _SMOOTHING * (seq.num_output_tokens - self._mean_output_tokens)

    def expected_total_tokens(self, seq: Sequence) -> int:
        """Prompt and output tokens at the end; at least one more than now unless the limit is reached."""
        if not seq.can_stop_early or self._mean_output_tokens is None:
            return seq.max_total_tokens
        # One that has outlived the mean is expected to go on for half of it again.
        outlived = seq.num_output_tokens + self._mean_output_tokens / 2
        expected = seq.num_prompt_tokens + max(self._mean_output_tokens, outlived)
        return min(seq.max_total_tokens, max(int(expected), seq.num_tokens + 1))


class BlockForecast:
    """The KV blocks that a set of running sequences will use while each grows by one token a step to its
    expected end, and then gives its own blocks back."""

    def __init__(self, sequences: Iterable[Sequence], estimator: LengthEstimator, manager: BlockManager) -> None:
        self._estimator = estimator
        self._block_size = manager.block_size
        rows = [self._row(seq, len(seq.block_table), manager.num_shared_blocks(seq)) for seq in sequences]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 4)

    def add(self, seq: Sequence, num_held: int, num_shared: int) -> None:
        """Adds a sequence that counts as holding `num_held` blocks, the first `num_shared` of them not its own."""
        self._rows = np.vstack((self._rows, self._row(seq, num_held, num_shared)))

    def discard_last(self) -> None:
        self._rows = self._rows[:-1]

    def peak_growth(self) -> int:
        """Most blocks that will be in use at once, less those in use now."""
        num_tokens, remaining, num_held, num_shared = self._rows.T
        final_growth = -(-(num_tokens + remaining) // self._block_size) - num_held
        if len(self._rows) <= 1:
            return int(final_growth.sum())
        # The use rises while sequences grow and falls when one ends: it peaks just before some release.
        times = np.sort(remaining)
        if len(times) > _MAX_EVALUATED_TIMES:
            times = times[np.linspace(0, len(times) - 1, _MAX_EVALUATED_TIMES).astype(np.int64)]
        times = times[:, None] + _RELEASE_LAG  # [num_times, 1]
        grown = np.minimum(times, remaining) + (num_tokens + self._block_size - 1)  # [num_times, num_sequences]
        growth = np.where(times <= remaining + _RELEASE_LAG, grown // self._block_size - num_held, 0)
        released = np.where(times > remaining + _RELEASE_LAG, num_held - num_shared, 0)
        return int((growth - released).sum(axis=1).max())

    def worst_growth(self) -> int:
        """Blocks still to be taken if nobody gave any back: an upper bound of `peak_growth`, and cheaper."""
        num_tokens, remaining, num_held, _ = self._rows.T
        return int((-(-(num_tokens + remaining) // self._block_size) - num_held).sum())

    def _row(self, seq: Sequence, num_held: int, num_shared: int) -> tuple[int, int, int, int]:
        # The KV of a sequence's last token is never computed.
        final_tokens = self._estimator.expected_total_tokens(seq) - 1
        num_tokens = min(seq.num_tokens, final_tokens)
        return num_tokens, final_tokens - num_tokens, num_held, num_shared
