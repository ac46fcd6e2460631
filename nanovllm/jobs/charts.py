"""Charts as SVG text: lines over time, and bars. Colours and fonts are the page's (`report.py`)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# In units of the picture, which the page scales to its width.
_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_STEPS_OF_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_NUM_TICKS = 5


@dataclass(frozen=True)
class Line:
    """Points (seconds, value) of one line. Where the value is None, the line is interrupted."""

    name: str
    points: Sequence[tuple[float, float | None]]


def line_chart(title: str, lines: Sequence[Line], *, unit: Callable[[float], str], top: float | None = None) -> str:
    """A figure with a legend.

    Args:
        title: says what the values are.
        unit: writes a value.
        top: of the vertical axis, if it doesn't go by the values; a line is drawn there.
    """
    times = [time for line in lines for time, _ in line.points]
    values = [value for line in lines for _, value in line.points if value is not None]
    if len(values) < 1 or max(times) <= 0:
        return _figure(title, "", '<p class="empty">nothing to show</p>')
    end, highest = max(times), nice_above(max(values)) if top is None else max(top, *values) * 1.04
    axes = _Axes(end, highest, unit)
    parts = [axes.draw()]
    if top is not None:
        parts.append(f'<path class="limit" d="M{_LEFT} {axes.y(top)}h{_INNER_WIDTH}"/>')
    for number, line in enumerate(lines, 1):
        for run in _runs(line.points):
            # A run of one point is drawn as a dot, by the line's round end.
            places = " ".join(f"{axes.x(time)},{axes.y(value)}" for time, value in (run if run[1:] else run * 2))
            parts.append(f'<polyline class="line s{number}" points="{places}"/>')
    legend = "".join(f'<span class="key s{number}">{escape(line.name)}</span>' for number, line in enumerate(lines, 1))
    return _figure(title, legend, _picture(title, parts))


def bar_chart(title: str, bars: Sequence[tuple[str, int]], note: str = "") -> str:
    """A figure with a bar for each (label, number)."""
    if not bars:
        return _figure(title, note, '<p class="empty">nothing to show</p>')
    highest = nice_above(max(number for _, number in bars))
    width = _INNER_WIDTH / len(bars)
    parts = [_Axes(0.0, highest, short_number).draw()]
    every = -(-len(bars) // 12)  # a label needs some room
    for place, (label, number) in enumerate(bars):
        left, height = _LEFT + place * width, _INNER_HEIGHT * number / highest
        parts.append(
            f'<rect class="bar" x="{left + 1:.1f}" y="{_TOP + _INNER_HEIGHT - height:.1f}" '
            f'width="{max(width - 2, 1):.1f}" height="{height:.1f}">'
            f"<title>{escape(label)}: {number:,}</title></rect>"
        )
        if place % every == 0:
            parts.append(f'<text x="{left + width / 2:.1f}" y="{_HEIGHT - 10}" class="x">{escape(label)}</text>')
    return _figure(title, escape(note), _picture(title, parts))


def short_number(value: float) -> str:
    """`12k`, `3.5M`, `0.25`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """`1.5 s`, `12 min`, `3 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def nice_above(value: float) -> float:
    """The lowest of 1, 2, 5, 10, 20, 50, ... (or 0.5, 0.2, ...) that is no less than the value; 1 for 0."""
    if value <= 0:
        return 1.0
    size: float = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= value * (1 - 1e-9))


@dataclass(frozen=True)
class _Axes:
    end: float  # seconds; 0 has no ticks
    highest: float
    unit: Callable[[float], str]

    def x(self, seconds: float) -> float:
        return round(_LEFT + _INNER_WIDTH * seconds / self.end, 1)

    def y(self, value: float) -> float:
        return round(_TOP + _INNER_HEIGHT * (1 - value / self.highest), 1)

    def draw(self) -> str:
        parts = []
        step = nice_above(self.highest / _NUM_TICKS)
        for number in range(int(self.highest / step + 1e-9) + 1):
            height = self.y(number * step)
            parts.append(f'<path class="grid" d="M{_LEFT} {height}h{_INNER_WIDTH}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{height + 4}" class="y">{escape(self.unit(number * step))}</text>')
        if self.end:
            step = _time_step(self.end)
            for number in range(int(self.end / step + 1e-9) + 1):
                label = short_time(number * step) if number else "0"
                parts.append(f'<text x="{self.x(number * step)}" y="{_HEIGHT - 10}" class="x">{label}</text>')
        return "".join(parts)


def _time_step(end: float) -> float:
    """Seconds between two marks, so that there are few of them, at full seconds, minutes or hours if possible."""
    if end < _NUM_TICKS:
        return nice_above(end / _NUM_TICKS)
    found = next((step for step in _STEPS_OF_SECONDS if step * (_NUM_TICKS + 2) >= end), None)
    return found or 86400 * nice_above(end / 86400 / _NUM_TICKS)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The parts of a line between its interruptions."""
    runs: list[list[tuple[float, float]]] = [[]]
    for time, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((time, value))
    return [run for run in runs if run]


def _picture(title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _figure(title: str, legend: str, content: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b> {legend}</figcaption>{content}</figure>"
