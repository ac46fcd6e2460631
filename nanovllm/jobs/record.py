"""What happened in a run of a job, in constant memory: rates over time, lengths, the slowest rows."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.stats import EngineStats
from nanovllm.jobs.readers import Row

_FIRST_INTERVAL = 0.1  # seconds
_MAX_POINTS = 256
_MAX_INTERVALS = 100
_NUM_SLOW_ROWS = 20


class Timeline:
    """The engine's stats at about equal intervals. When there are too many points, every other one is dropped and the
    interval doubles. Since counters rise, the rate between two points stays the exact mean of the time between them."""

    def __init__(self, interval: float = _FIRST_INTERVAL, max_points: int = _MAX_POINTS) -> None:
        """`interval` is in seconds; `max_points` is even, so that the last point is never one that is dropped."""
        self.points: list[tuple[float, EngineStats]] = []  # seconds since the start
        self._interval, self._max_points = interval, max_points

    def is_due(self, seconds: float) -> bool:
        return not self.points or seconds >= self.points[-1][0] + self._interval

    def add(self, seconds: float, stats: EngineStats) -> None:
        self.points.append((seconds, stats))
        if len(self.points) > self._max_points:
            del self.points[1::2]
            self._interval *= 2


@dataclass(frozen=True)
class Bucket:
    """How many lengths are in [low, high)."""

    low: int
    high: int
    number: int


class Histogram:
    """Lengths in tokens, in buckets two for each doubling: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, 16-23, ..."""

    def __init__(self) -> None:
        self.number = self.total = self.longest = 0
        self._counts: Counter[int] = Counter()  # by number of the bucket

    def add(self, length: int) -> None:
        self.number += 1
        self.total += length
        self.longest = max(self.longest, length)
        self._counts[_bucket_of(length)] += 1

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0

    def buckets(self) -> list[Bucket]:
        """From the first that isn't empty to the last."""
        if not self._counts:
            return []
        numbers = range(min(self._counts), max(self._counts) + 1)
        return [Bucket(_lowest_of(number), _lowest_of(number + 1), self._counts[number]) for number in numbers]


def _bucket_of(length: int) -> int:
    if length < 2:
        return length
    doubling = length.bit_length() - 1
    return 2 * doubling + (length >> (doubling - 1) & 1)


def _lowest_of(number: int) -> int:
    """Inverse of `_bucket_of`: the bucket's lowest length."""
    if number < 2:
        return number
    doubling, half = divmod(number, 2)
    return (1 << doubling) + half * (1 << (doubling - 1))


@dataclass(frozen=True, order=True)
class SlowRow:
    """A completed row. `seconds` are those from when the engine was given the row to its result."""

    seconds: float
    index: int
    line: int
    num_prompt_tokens: int
    num_output_tokens: int


class JobRecord:
    """What a run of a job has done so far. `num_before` rows were done by runs before it."""

    def __init__(self, num_rows: int, num_before: int) -> None:
        self.num_rows, self.num_before = num_rows, num_before
        self.num_completed = self.num_failed = 0
        self.timeline = Timeline()
        self.prompt_lengths, self.output_lengths = Histogram(), Histogram()
        self.finish_reasons: Counter[str] = Counter()
        self._slowest: list[SlowRow] = []  # a heap

    @property
    def num_left(self) -> int:
        return self.num_rows - self.num_before - self.num_completed - self.num_failed

    @property
    def slowest(self) -> list[SlowRow]:
        return sorted(self._slowest, reverse=True)

    @property
    def seconds(self) -> float:
        return self.timeline.points[-1][0] if self.timeline.points else 0.0

    @property
    def stats(self) -> EngineStats:
        """As of the last point."""
        return self.timeline.points[-1][1] if self.timeline.points else EngineStats()

    def complete(self, row: Row, output: RequestOutput, seconds: float) -> None:
        """Takes note of a row that has ended; of several samples each counts with its length and its reason."""
        self.num_completed += 1
        samples = output.get("samples") or [output]
        for sample in samples:
            self.output_lengths.add(len(sample["token_ids"]))
            self.finish_reasons[sample["finish_reason"]] += 1
        num_prompt_tokens = len(output["prompt_token_ids"])
        self.prompt_lengths.add(num_prompt_tokens)
        num_output_tokens = sum(len(sample["token_ids"]) for sample in samples)
        one = SlowRow(seconds, row.index, row.line, num_prompt_tokens, num_output_tokens)
        if len(self._slowest) < _NUM_SLOW_ROWS:
            heapq.heappush(self._slowest, one)
        else:
            heapq.heappushpop(self._slowest, one)

    def fail(self, number: int = 1) -> None:
        self.num_failed += number

    def intervals(self) -> Iterator["Interval"]:
        """Of the timeline, without gaps. Neighbours are joined so that there are at most a hundred or so: rates of few
        steps are noise."""
        points = self.timeline.points
        start, before = points[0] if points else (0.0, EngineStats())
        for end, after in points[1:]:
            is_last = end == points[-1][0]
            if end > start and (is_last or end - start >= self.seconds / _MAX_INTERVALS):
                yield Interval(start, end, before, after)
                start, before = end, after


@dataclass(frozen=True)
class Interval:
    """The time between two points of a timeline."""

    start: float
    end: float
    before: EngineStats
    after: EngineStats

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def growth(self, name: str) -> float:
        """Of a counter."""
        return getattr(self.after, name) - getattr(self.before, name)

    def rate(self, name: str) -> float:
        """Of a counter, a second."""
        return self.growth(name) / self.seconds

    def mean(self, name: str) -> float:
        """Of a gauge."""
        return (getattr(self.after, name) + getattr(self.before, name)) / 2

    @property
    def prefix_hit_rate(self) -> float | None:
        """None if nothing was looked up."""
        num_hits = self.growth("num_hit_blocks")
        num_looked_up = num_hits + self.growth("num_missed_blocks")
        return num_hits / num_looked_up if num_looked_up else None

    @property
    def milliseconds_a_step(self) -> float | None:
        """None if there was no step."""
        num_steps = self.growth("num_steps")
        return 1000 * self.growth("step_seconds") / num_steps if num_steps else None
