"""The report of a job: one HTML file, which needs nothing else to be looked at, and holds its numbers as JSON, too."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nanovllm.jobs.charts import Line, bar_chart, line_chart, short_number, short_time
from nanovllm.jobs.record import Histogram, JobRecord

_STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --faint: #5d6878; --grid: #dfe4ea; --page: #fff; --panel: #f5f7f9;
  --s1: #1f6feb; --s2: #d9730d; --s3: #1a8a5a; --limit: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --faint: #9aa5b4; --grid: #333b47; --page: #14181e;
  --panel: #1c222a; --s1: #62a0ff; --s2: #f0a04b; --s3: #4fc38d; --limit: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.status, .empty, .note { color: var(--faint); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); padding: .75rem; border-radius: 6px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg .x { text-anchor: middle; } svg .y { text-anchor: end; }
.grid { stroke: var(--grid); } .limit { stroke: var(--limit); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 1.6; stroke-linecap: round; stroke-linejoin: round; } .bar { fill: var(--s1); }
.line.s1 { stroke: var(--s1); } .line.s2 { stroke: var(--s2); } .line.s3 { stroke: var(--s3); }
.key { margin-left: .8em; font-size: .85rem; } .key.s1 { color: var(--s1); } .key.s2 { color: var(--s2); }
.key.s3 { color: var(--s3); }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
th { font-weight: 500; color: var(--faint); } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.numbers td, .numbers th { text-align: right; }
"""


def render(record: JobRecord, status: str, settings: Mapping[str, str], load_seconds: float) -> str:
    """The page.

    Args:
        status: how the run ended, in some words.
        settings: what to say about it, by name.
        load_seconds: what it took to load the model, before the record begins.
    """
    totals = _totals(record, load_seconds)
    rows = f"{record.num_completed:,} rows completed in {short_time(record.seconds)}"
    title = f"nanovllm run: {rows}"
    slow_columns = ("row", "line", "seconds", "prompt tokens", "output tokens")
    slowest = [
        (one.index, one.line, round(one.seconds, 2), one.num_prompt_tokens, one.num_output_tokens)
        for one in record.slowest
    ]
    data = {
        "status": status,
        "settings": settings,
        "totals": totals,
        "finish_reasons": record.finish_reasons,
        "timeline": _timeline(record),
        "prompt_lengths": _histogram(record.prompt_lengths),
        "output_lengths": _histogram(record.output_lengths),
        "slowest_rows": [dict(zip(slow_columns, one, strict=True)) for one in slowest],
    }
    reasons = sorted(record.finish_reasons.items(), key=lambda item: -item[1])
    body = [
        f'<h1>{escape(title)}</h1><p class="status">{escape(status)}</p>',
        _findings(record, load_seconds),
        f'<h2>Over time</h2><div class="charts">{"".join(_charts(record))}</div>',
        f'<h2>Lengths</h2><div class="charts">{_lengths("Prompt tokens", record.prompt_lengths)}'
        f"{_lengths('Output tokens', record.output_lengths)}</div>",
        _table("totals", "Totals", totals.items()),
        _table("reasons", "Finish reasons of samples", reasons),
        _table("slowest", "Slowest rows", slowest, slow_columns),
        '<p class="note">Rows are numbered from 0, as <code>index</code> in the output. Seconds are those from when '
        "the engine was given a row to its result, the wait for a place in the batch included.</p>",
        _table("settings", "Settings", settings.items()),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n<body>'
        + "\n".join(body)
        + f'\n<script type="application/json" id="data">{_json(data)}</script></body></html>\n'
    )


def _totals(record: JobRecord, load_seconds: float) -> dict[str, float]:
    stats, seconds = record.stats, max(record.seconds, 1e-9)
    return {
        "rows of the job": record.num_rows,
        "rows done before this run": record.num_before,
        "rows completed": record.num_completed,
        "rows failed": record.num_failed,
        "rows left": record.num_left,
        "seconds": round(record.seconds, 2),
        "seconds to load the model": round(load_seconds, 2),
        "seconds in steps": round(stats.step_seconds, 2),
        "prompt tokens of completed rows": record.prompt_lengths.total,
        "output tokens of completed rows": record.output_lengths.total,
        "output tokens sampled": stats.num_output_tokens,
        "output tokens a second": round(stats.num_output_tokens / seconds, 1),
        "prompt tokens computed": stats.num_prefill_tokens,
        "prompt tokens from the prefix cache": stats.num_cached_tokens,
        "prefix cache hit rate": round(stats.prefix_hit_rate, 4),
        "prefix cache hits (blocks)": stats.num_hit_blocks,
        "prefix cache misses (blocks)": stats.num_missed_blocks,
        "cached blocks evicted": stats.num_evicted_blocks,
        "preemptions": stats.num_preemptions,
        "tokens recomputed after preemptions": stats.num_recomputed_tokens,
        "steps": stats.num_steps,
        "sequences that can run": stats.max_num_seqs,
        "KV blocks": stats.num_blocks,
    }


def _findings(record: JobRecord, load_seconds: float) -> str:
    found = list(findings(record, load_seconds))
    items = "".join(f"<li>{escape(one)}</li>" for one in found) or "<li>Nothing: the batch was full.</li>"
    return f'<h2>What stands out</h2><ul id="findings">{items}</ul>'


def findings(record: JobRecord, load_seconds: float) -> Iterable[str]:
    """What a slow job may have been slow for, in sentences."""
    stats, intervals, seconds = record.stats, list(record.intervals()), record.seconds
    if not stats.num_engines:
        yield "The model was not loaded."
    if load_seconds > max(seconds, 1.0):
        yield f"Loading the model took {short_time(load_seconds)}, and the rows {short_time(seconds)}."
    if record.num_failed:
        yield f"Rows that failed: {record.num_failed:,}; their messages are in the output."
    if not intervals or not stats.max_num_seqs:
        return
    running = sum(one.mean("num_running") * one.seconds for one in intervals) / seconds
    kv_use = sum(one.mean("kv_use") * one.seconds for one in intervals) / seconds
    waited = sum(one.seconds for one in intervals if one.mean("num_waiting") > 0) / seconds
    if running < stats.max_num_seqs / 2:
        counted = f"On average {running:.0f} of {stats.max_num_seqs} sequences ran"
        if waited < 0.5:
            yield f"{counted}: for most of the time no row was waiting."
        elif kv_use > 0.7:
            yield f"{counted}, with {kv_use:.0%} of the KV cache in use: it has no room for more."
        else:
            yield f"{counted}, though rows were waiting and {1 - kv_use:.0%} of the KV cache was free."
    peak = max(one.after.num_running for one in intervals)
    full = [one.end for one in intervals if one.after.num_running > peak / 2]
    tail = seconds - max(full, default=seconds)
    if tail > 0.2 * seconds:
        yield (
            f"The last {short_time(tail)} ({tail / seconds:.0%} of the time) had half of the largest batch or less: it "
            "waited for the longest outputs."
        )
    if stats.num_recomputed_tokens > 0.05 * stats.num_prefill_tokens:
        share = stats.num_recomputed_tokens / stats.num_prefill_tokens
        yield f"{share:.0%} of the prefill was recomputation after {stats.num_preemptions:,} preemptions."
    outside = 1 - stats.step_seconds / (seconds * stats.num_engines)
    if stats.num_engines == 1 and outside > 0.2:
        yield f"{outside:.0%} of the time was spent outside of steps: with reading, tokenising and writing rows."
    if stats.num_evicted_blocks > stats.num_hit_blocks and stats.prefix_hit_rate > 0.05:
        yield (
            f"Cached blocks were evicted {stats.num_evicted_blocks:,} times, and found {stats.num_hit_blocks:,} times: "
            "rows with the same beginning may be too far apart."
        )


def _charts(record: JobRecord) -> Iterable[str]:
    intervals, points = list(record.intervals()), record.timeline.points

    def rate(name: str) -> list[tuple[float, float | None]]:
        return [(one.end, one.rate(name)) for one in intervals]

    def gauge(name: str) -> list[tuple[float, float | None]]:
        return [(seconds, getattr(stats, name)) for seconds, stats in points]

    rates = [
        Line("output", rate("num_output_tokens")),
        Line("prompt, computed", rate("num_prefill_tokens")),
        Line("prompt, from the cache", rate("num_cached_tokens")),
    ]
    yield line_chart("Tokens a second", rates, unit=short_number)
    stats = record.stats
    batch = [Line("running", gauge("num_running")), Line("waiting", gauge("num_waiting"))]
    yield line_chart(
        f"Sequences (at most {stats.max_num_seqs} run)",
        batch,
        unit=short_number,
        top=stats.max_num_seqs,
    )
    held = [(seconds, 100 * one.kv_use) for seconds, one in points]
    share = 100 / max(stats.num_blocks, 1)
    cached = [(seconds, share * (one.num_used_blocks + one.num_cached_free_blocks)) for seconds, one in points]
    kv = [Line("held by sequences", held), Line("and cached", cached)]
    yield line_chart(f"KV cache, % of {stats.num_blocks:,} blocks", kv, unit=short_number, top=100)
    hits = [(one.end, None if one.prefix_hit_rate is None else 100 * one.prefix_hit_rate) for one in intervals]
    yield line_chart("Prefix cache, % of blocks found", [Line("hit rate", hits)], unit=short_number, top=100)
    preempted = [Line("preemptions", rate("num_preemptions")), Line("blocks evicted", rate("num_evicted_blocks"))]
    yield line_chart("Preemptions and evictions a second", preempted, unit=short_number)
    steps = [(one.end, one.milliseconds_a_step) for one in intervals]
    yield line_chart("Milliseconds a step", [Line("mean", steps)], unit=short_number)


def _timeline(record: JobRecord) -> dict[str, list[float]]:
    """A list for each number, at the same points in time."""
    points = record.timeline.points
    names = (
        "num_prefill_tokens", "num_cached_tokens", "num_output_tokens", "num_hit_blocks", "num_missed_blocks",
        "num_evicted_blocks", "num_preemptions", "num_running", "num_waiting", "num_used_blocks",
        "num_cached_free_blocks", "num_steps",
    )  # fmt: skip
    columns = {name: [getattr(stats, name) for _, stats in points] for name in names}
    return {"seconds": [round(seconds, 3) for seconds, _ in points], **columns}


def _histogram(lengths: Histogram) -> list[list[int]]:
    return [[bucket.low, bucket.high - 1, bucket.number] for bucket in lengths.buckets()]


def _lengths(title: str, lengths: Histogram) -> str:
    bars = []
    for low, high, number in _histogram(lengths):
        bars.append((str(low) if low == high else f"{low}-{high}", number))
    note = f"mean {lengths.mean:,.0f}, longest {lengths.longest:,}" if lengths.number else ""
    return bar_chart(title, bars, note)


def _table(name: str, title: str, rows: Iterable[Sequence[Any]], columns: Sequence[str] = ()) -> str:
    """With columns, of numbers; else of names and values."""
    head = f"<tr>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr>" if columns else ""
    lines = []
    for first, *rest in rows:
        tag = "td" if columns else "th"
        cells = "".join(f"<td>{escape(_text(value))}</td>" for value in rest)
        lines.append(f"<tr><{tag}>{escape(_text(first))}</{tag}>{cells}</tr>")
    kind = ' class="numbers"' if columns else ""
    return f'<h2>{escape(title)}</h2><table id="{name}"{kind}>{head}{"".join(lines)}</table>'


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _json(data: Any) -> str:
    """Nothing in it can end the element that it is in."""
    return json.dumps(data).replace("<", "\\u003c")
