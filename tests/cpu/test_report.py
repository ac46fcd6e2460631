"""`nanovllm run --report` and `--metrics`: numbers of the job, whatever ends it, on a page that needs nothing else."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.engine.stats import EngineStats
from nanovllm.jobs import watch as watch_module
from nanovllm.jobs.charts import Line, bar_chart, line_chart, nice_above, short_number, short_time
from nanovllm.jobs.engine import JobEngine
from nanovllm.jobs.readers import Row
from nanovllm.jobs.record import Histogram, JobRecord, SlowRow, Timeline
from nanovllm.jobs.report import findings, render
from tests.cpu.command_line import ENVIRONMENT, cli, command, here, read_rows, run_args, write_rows
from tests.cpu.test_stats import parse as parse_metrics

VOID = {"meta"}


class Page(HTMLParser):
    """Tables by id as lists of rows of cells, the items of lists, the charts by title, and the JSON; asserts that every
    element is closed and that nothing is loaded from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.items: list[str] = []
        self.charts: dict[str, Counter[str]] = {}
        self.status = self.title = ""
        self.data: Any = None
        self._open: list[tuple[str, dict[str, str | None]]] = []
        text = path.read_text()
        self.feed(text)
        self.close()
        assert not self._open
        assert "http" not in text and "@import" not in text and "url(" not in text

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert not values.keys() & {"src", "href", "onload", "onclick"}
        if tag == "script":
            assert values["type"] == "application/json"
        elif tag == "table":
            self.tables[values["id"] or ""] = self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "svg":
            self._chart = self.charts[values["aria-label"] or ""] = Counter()
        elif tag in ("rect", "polyline"):
            self._chart[tag] += 1
        if tag not in VOID:
            self._open.append((tag, values))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, values = self._open[-1]
        if tag in ("td", "th"):
            self._rows[-1][-1] += data
        elif tag == "li":
            self.items.append(data)
        elif tag == "script":
            self.data = json.loads(data)
        elif tag == "title" and not self.title:
            self.title = data
        elif values.get("class") == "status":
            self.status = data

    def numbers(self, table: str) -> dict[str, float]:
        return {name: float(value.replace(",", "")) for name, value in self.tables[table]}


def _samples(record: dict[str, Any]) -> list[dict[str, Any]]:
    return record["output"].get("samples", [record["output"]])


def _check(page: Page, records: list[dict[str, Any]]) -> dict[str, float]:
    """Everything that the output file says about the rows of this run; returns the totals."""
    good = [record for record in records if "output" in record]
    samples = [sample for record in good for sample in _samples(record)]
    totals = page.numbers("totals")
    assert totals["rows completed"] == len(good)
    assert totals["rows failed"] == len(records) - len(good)
    prompt_lengths = [record["output"]["num_prompt_tokens"] for record in good]
    output_lengths = [sample["num_output_tokens"] for sample in samples]
    assert totals["prompt tokens of completed rows"] == sum(prompt_lengths)
    assert totals["output tokens of completed rows"] == sum(output_lengths)
    reasons = Counter(sample["finish_reason"] for sample in samples)
    assert page.numbers("reasons") == reasons == page.data["finish_reasons"]
    for name, lengths in (("prompt_lengths", prompt_lengths), ("output_lengths", output_lengths)):
        for low, high, number in page.data[name]:
            assert number == sum(low <= length <= high for length in lengths)
        assert sum(bucket[2] for bucket in page.data[name]) == len(lengths)
    _, *slowest = page.tables["slowest"]
    assert len(slowest) == min(20, len(good))
    by_index = {record["index"]: record for record in good}
    for index, _, seconds, num_prompt_tokens, num_output_tokens in slowest:
        record = by_index[int(index)]
        assert int(num_prompt_tokens) == record["output"]["num_prompt_tokens"]
        assert int(num_output_tokens) == sum(sample["num_output_tokens"] for sample in _samples(record))
        assert 0 <= float(seconds) <= totals["seconds"] + 0.01
    return totals


def _rows(number: int) -> list[Any]:
    """Each begins alike; one in ten is bad, one in ten has two samples."""
    rows: list[Any] = [{"prompt": f"{'the same beginning ' * 2}{index}"} for index in range(number)]
    rows[3::10] = [{"prompt": ""} for _ in rows[3::10]]
    rows[5::10] = [{**row, "sampling_params": {"n": 2, "max_tokens": 7}} for row in rows[5::10]]
    return rows


def test_numbers_are_those_of_the_job(byte_llama: Path, tmp_path: Path) -> None:
    """By a real command; names that are HTML are only names."""
    folder = tmp_path / '<b>&"'
    folder.mkdir()
    source, output, report = write_rows(folder / "in.jsonl", _rows(50)), folder / "o.jsonl", folder / "r.html"
    metrics = folder / "job.prom"
    args = ("--max-num-seqs", 4, "--max-tokens", 12, "--seed", 1, "--report", report, "--metrics", metrics)
    cli(*run_args(byte_llama, source, output, *args))
    page, records = Page(report), read_rows(output)
    totals = _check(page, records)
    assert (page.status, totals["rows of the job"], totals["rows left"]) == ("completed", 50, 0)
    assert "45 rows completed" in page.title
    assert totals["output tokens sampled"] == totals["output tokens of completed rows"]
    cached = sum(record["output"]["num_cached_tokens"] for record in records if "output" in record)
    # Second samples find the prompt, too: 4 + 5 of 10 rows have one, and 38 tokens are two full blocks.
    assert totals["prompt tokens from the prefix cache"] == cached + 5 * 32
    assert (
        totals["prompt tokens computed"]
        == totals["prompt tokens of completed rows"]
        + _second_prompts(records)
        - (totals["prompt tokens from the prefix cache"])
    )
    hits, misses = totals["prefix cache hits (blocks)"], totals["prefix cache misses (blocks)"]
    assert hits * 16 == totals["prompt tokens from the prefix cache"] and hits + misses == 50 * 2
    assert totals["prefix cache hit rate"] == pytest.approx(hits / 100)
    assert (totals["sequences that can run"], totals["KV blocks"], totals["preemptions"]) == (4, 128, 0)

    timeline = page.data["timeline"]
    assert len({len(column) for column in timeline.values()}) == 1
    assert timeline["seconds"] == sorted(timeline["seconds"]) and timeline["num_output_tokens"][0] == 0
    assert timeline["num_output_tokens"][-1] == totals["output tokens sampled"]
    assert max(timeline["num_running"]) <= 4 and timeline["num_running"][-1] == 0
    assert page.charts["Tokens a second"]["polyline"] == 3
    assert page.charts["Prompt tokens"]["rect"] == len(page.data["prompt_lengths"])
    settings = dict(page.tables["settings"])
    assert settings["model"] == str(byte_llama) and settings["max_tokens"] == "12"
    assert settings["command"].startswith("nanovllm run ") and "'--report'" not in settings["command"]
    assert f"--report '{report}'" in settings["command"]
    assert "torch" in settings["versions"] and settings["device"] == "cpu, float32"
    assert any("failed: 5" in item for item in page.items)

    samples = {(name, labels[2:]): value for (name, labels), value in parse_metrics(metrics.read_text()).items()}
    assert samples["nanovllm_output_tokens_total", ()] == totals["output tokens sampled"]
    assert samples["nanovllm_job_rows", ('state="completed"',)] == 45
    assert samples["nanovllm_job_rows", ('state="failed"',)] == 5
    assert samples["nanovllm_requests_total", ()] == 45
    assert {path.name for path in folder.iterdir()} == {"in.jsonl", "job.prom", "o.jsonl", "o.jsonl.job", "r.html"}


def _second_prompts(records: list[dict[str, Any]]) -> int:
    """Tokens that second samples add to the prompts."""
    return sum(record["output"]["num_prompt_tokens"] for record in records if "samples" in record.get("output", {}))


def test_two_replicas(byte_llama: Path, tmp_path: Path) -> None:
    source, output, report = write_rows(tmp_path / "in.jsonl", _rows(50)), tmp_path / "o.jsonl", tmp_path / "r.html"
    args = ("--data-parallel-size", 2, "--max-num-seqs", 4, "--max-tokens", 12, "--report", report)
    cli(*run_args(byte_llama, source, output, *args))
    page, records = Page(report), read_rows(output)
    totals = _check(page, records)
    assert (page.status, totals["sequences that can run"], totals["KV blocks"]) == ("completed", 8, 256)
    assert totals["output tokens sampled"] == totals["output tokens of completed rows"]
    looked_up = totals["prompt tokens computed"] + totals["prompt tokens from the prefix cache"]
    assert looked_up == totals["prompt tokens of completed rows"] + _second_prompts(records)
    assert page.data["timeline"]["num_output_tokens"][-1] == totals["output tokens sampled"]
    assert dict(page.tables["settings"])["engines"] == "2, of 1 ranks each"


def _children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_replica_that_dies_twice(byte_llama: Path, tmp_path: Path) -> None:
    """Killed once, it is restarted; killed again, the job ends with one line, and a report about every row once."""
    source, output, report = write_rows(tmp_path / "in.jsonl", _rows(400)), tmp_path / "o.jsonl", tmp_path / "r.html"
    args = ("--data-parallel-size", 2, "--max-num-seqs", 2, "--max-tokens", 300, "--ignore-eos", "--report", report)
    process = subprocess.Popen(
        command(*run_args(byte_llama, source, output, *args)), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") > 50):
        time.sleep(0.01)  # the bad rows of the first chunk are there at once
    first, second = sorted(_children(process.pid))
    os.kill(second, signal.SIGKILL)
    while process.poll() is None and not (restarted := _children(process.pid) - {first, second}):
        time.sleep(0.01)
    os.kill(*restarted, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(
        "nanovllm: error: the engine failed: WorkerError: data parallelism: replica 1"
    )
    assert "Traceback" not in errors
    page = Page(report)
    totals = _check(page, read_rows(output))
    assert page.status.startswith("failed: the engine failed") and totals["rows left"] > 0
    assert totals["output tokens sampled"] >= totals["output tokens of completed rows"]


def _row_counts(metrics: str) -> dict[str, float]:
    """What the metrics say has become of the job's rows."""
    samples = parse_metrics(metrics).items()
    return {labels[-1][7:-1]: value for (name, labels), value in samples if name == "nanovllm_job_rows"}


def test_stopped_and_resumed(byte_llama: Path, tmp_path: Path) -> None:
    """Each run's report covers its own rows, and says how many were done before; with none to do, there is none."""
    source, output, report = write_rows(tmp_path / "in.jsonl", _rows(40)), tmp_path / "o.jsonl", tmp_path / "r.html"
    metrics = tmp_path / "job.prom"
    args = run_args(byte_llama, source, output, "--max-num-seqs", 2, "--max-tokens", 100, "--ignore-eos", "--seed", 2)
    args = (*args, "--resume", "--report", report, "--metrics", metrics)
    process = subprocess.Popen(command(*args), env=ENVIRONMENT, stderr=subprocess.PIPE)
    while not (output.exists() and output.read_bytes().count(b"\n") > 3):
        time.sleep(0.01)
    process.terminate()
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    first, done = Page(report), read_rows(output)
    totals = _check(first, done)
    assert first.status == "stopped by SIGTERM"
    assert totals["rows left"] == 40 - len(done) > 0 and totals["rows done before this run"] == 0
    num_good = sum("output" in record for record in done)
    before_last = metrics.read_text()
    assert _row_counts(before_last) == {
        "before": 0, "completed": num_good, "failed": len(done) - num_good, "left": 40 - len(done)
    }  # fmt: skip
    assert totals["output tokens sampled"] >= totals["output tokens of completed rows"]

    cli(*args)
    second, before = Page(report), {record["index"] for record in done}
    totals = _check(second, [record for record in read_rows(output) if record["index"] not in before])
    assert (second.status, totals["rows left"]) == ("completed", 0)
    assert totals["rows done before this run"] == len(done)

    assert _row_counts(metrics.read_text())["left"] == 0

    report.unlink()
    metrics.write_text(before_last)  # as it is after SIGKILL between the last row and the end
    assert "all 40 rows are done" in cli(*args).stderr
    assert not report.exists()
    assert _row_counts(metrics.read_text()) == {"before": 40, "completed": 0, "failed": 0, "left": 0}


def test_failed_job(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception of the engine is one line. What was done is in the output and the report, and the job can go on."""
    source, output, report = write_rows(tmp_path / "in.txt", ["a"] * 30), tmp_path / "o.jsonl", tmp_path / "r.html"
    flags = ("--max-num-seqs", 2, "--max-tokens", 3, "--ignore-eos", "--report", report)
    args = run_args(byte_llama, source, output, *flags)
    step, calls = LLM.step, Counter[str]()

    def failing(self: LLM) -> Any:
        calls["step"] += 1
        if calls["step"] == 20:
            raise RuntimeError("CUDA error:\nan illegal memory access\n")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "step", failing)
        error = here(capsys, *args, status=1)
    reason = "the engine failed: RuntimeError: CUDA error: an illegal memory access"
    assert error == f"nanovllm: error: {reason}; --resume goes on with what is there\n"
    page, records = Page(report), read_rows(output)
    assert 0 < len(records) < 30
    _check(page, records)
    assert page.status.startswith(f"failed: {reason}")
    here(capsys, *args, "--resume")
    assert [record["index"] for record in read_rows(output)] == list(range(30))


@pytest.mark.parametrize("error, status", [(MemoryError("not enough"), 1), (KeyboardInterrupt(), 130)])
def test_model_that_is_not_loaded(
    byte_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
) -> None:
    """That is reported, too: what an earlier run has left says something else."""
    source, report, metrics = write_rows(tmp_path / "in.txt", ["a"] * 3), tmp_path / "r.html", tmp_path / "job.prom"
    for path in (report, metrics):
        path.write_text("of an earlier run")

    def load(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("nanovllm.jobs.engine.LLM", load)
    flags = ("--report", report, "--metrics", metrics)
    here(capsys, *run_args(byte_llama, source, tmp_path / "o.jsonl", *flags), status=status)
    page = Page(report)
    reason = f"failed: {byte_llama} can't be loaded: MemoryError: not enough"
    assert page.status == ("interrupted" if status == 130 else reason)
    assert "The model was not loaded." in page.items and _check(page, [])["rows left"] == 3
    assert _row_counts(metrics.read_text()) == {"before": 0, "completed": 0, "failed": 0, "left": 3}


def test_stopped_before_the_first_row(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between loading and the rows, where the garbage is collected for some tenths of a second."""
    source, report = write_rows(tmp_path / "in.txt", ["a"] * 3), tmp_path / "r.html"
    monkeypatch.setattr("nanovllm.jobs.run.gc.freeze", lambda: signal.raise_signal(signal.SIGINT))
    here(capsys, *run_args(byte_llama, source, tmp_path / "o.jsonl", "--report", report), status=130)
    page = Page(report)
    assert page.status == "stopped by SIGINT" and _check(page, [])["rows left"] == 3


def test_fail_fast(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, report = write_rows(tmp_path / "in.jsonl", [{"prompt": ""}]), tmp_path / "r.html"
    here(capsys, *run_args(byte_llama, source, tmp_path / "o.jsonl", "--fail-fast", "--report", report), status=1)
    page = Page(report)
    assert page.status == f"failed: {source}:1: prompt: is empty"
    assert _check(page, [])["rows left"] == 1


def test_impossible_paths(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before the model is loaded, and before there is an output file."""

    def loading(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(JobEngine, "__init__", loading)
    source, output = write_rows(tmp_path / "in.jsonl", _rows(3)), tmp_path / "o.jsonl"
    (tmp_path / "link").symlink_to(output)
    for flags, reason in {
        ("--report", tmp_path / "none" / "r.html"): "none/r.html: can't write it: No such file or directory",
        ("--metrics", tmp_path / "none" / "m"): "none/m: can't write it: No such file or directory",
        ("--metrics", source / "m"): "in.jsonl/m: can't write it: Not a directory",
        ("--report", tmp_path / ("x" * 300)): "x: can't write it: File name too long",
        ("--report", tmp_path): f"{tmp_path}: is not a regular file",
        ("--report", "/dev/null"): "/dev/null: is not a regular file",
        ("--report", "-"): "--report needs a file, not standard output",
        ("--report", source): "can't be both the input and --report",
        ("--report", tmp_path / "link"): "can't be both the output and --report",
        ("--metrics", tmp_path / "o.jsonl.job"): "can't be both the output's description and --metrics",
        ("--report", tmp_path / "x", "--metrics", tmp_path / "x"): "can't be both --report and --metrics",
        ("--report", tmp_path / "x", "--dry-run"): "--report is about a run, and --dry-run is none",
    }.items():
        error = here(capsys, *run_args(byte_llama, source, output, *flags), status=1)
        assert error.startswith("nanovllm: error: ") and reason in error and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link"]
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        args = run_args(byte_llama, source, "-", "--report", tmp_path / "r")
        assert "Permission denied" in here(capsys, *args, status=1)


def test_report_that_cannot_be_written_any_more(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Costs a warning; the results are there. And long jobs write it now and then."""
    source, output, report = write_rows(tmp_path / "in.txt", ["a"] * 5), tmp_path / "o.jsonl", tmp_path / "r.html"
    args = ("--max-tokens", 3, "--report", report)
    seen: list[str] = []

    def write(path: Path, text: str, *, is_durable: bool) -> None:
        seen.append(text)
        if len(seen) == 2:
            raise watch_module.JobError(f"{path}: can't write it: No space left on device")

    monkeypatch.setattr(watch_module, "write_whole", write)
    monkeypatch.setattr(watch_module, "_SECONDS_BETWEEN_REPORTS", 1e-9)
    error = here(capsys, *run_args(byte_llama, source, output, *args))
    assert error.count(f"nanovllm: warning: {report}: can't write it: No space left on device\n") == 1
    assert len(read_rows(output)) == 5
    assert all("still running" in text for text in seen[:-1]) and "still running" not in seen[-1] and len(seen) > 2


@pytest.mark.parametrize("is_file", [False, True], ids=["gone", "file"])
def test_folder_that_vanishes(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_file: bool
) -> None:
    """Costs warnings, too: also if there is no way to look for what is left of the file."""
    source, output, folder = write_rows(tmp_path / "in.txt", ["a"] * 5), tmp_path / "o.jsonl", tmp_path / "folder"
    folder.mkdir()
    over = watch_module.JobWatch.over

    def vanish(*args: Any) -> Any:
        folder.rmdir()
        if is_file:
            folder.touch()
        return over(*args)

    monkeypatch.setattr(watch_module.JobWatch, "over", vanish)
    flags = ("--max-tokens", 3, "--report", folder / "r.html", "--metrics", folder / "m")
    error = here(capsys, *run_args(byte_llama, source, output, *flags))
    reason = "Not a directory" if is_file else "No such file or directory"
    for name in ("r.html", "m"):
        assert f"nanovllm: warning: {folder / name}: can't write it: {reason}\n" in error
    assert len(read_rows(output)) == 5


# --- the record, in constant memory -----------------------------------------------------------------------------


def test_timeline_halves() -> None:
    """The points of any job are few, they reach from its beginning to its end, and rates between them are exact."""
    timeline = Timeline(interval=1.0, max_points=16)
    num_points = 0
    for number in range(10_000):
        seconds = number / 4
        if timeline.is_due(seconds):
            num_points += 1
            timeline.add(seconds, EngineStats(num_output_tokens=number * number))
            assert len(timeline.points) <= 16
            assert timeline.points[0][0] == 0 and timeline.points[-1][0] == seconds
    assert num_points < 200
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(timeline.points)]
    assert len(timeline.points) >= 8 and max(gaps) <= 2 * min(gaps[:-1])
    for seconds, stats in timeline.points:
        assert stats.num_output_tokens == (4 * seconds) ** 2


def test_histogram() -> None:
    lengths = Histogram()
    for length in [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 131072]:
        lengths.add(length)
    buckets = lengths.buckets()
    assert [(one.low, one.high, one.number) for one in buckets[:9]] == [
        (0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 6, 2), (6, 8, 2), (8, 12, 2), (12, 16, 2), (16, 24, 1),
    ]  # fmt: skip
    assert (buckets[-1].low, buckets[-1].high, buckets[-1].number) == (131072, 196608, 1)
    assert all(one.high == other.low for one, other in pairwise(buckets))
    assert (lengths.number, lengths.longest, lengths.mean) == (14, 131072, (90 + 131072) / 14)
    assert Histogram().buckets() == [] and Histogram().mean == 0


def _output(num_prompt_tokens: int, num_output_tokens: int) -> Any:
    return {"prompt_token_ids": [0] * num_prompt_tokens, "token_ids": [0] * num_output_tokens, "finish_reason": "stop"}


def test_record_keeps_the_slowest() -> None:
    record = JobRecord(num_rows=100_000, num_before=7)
    for index in range(1000):
        record.complete(Row(index, index + 1, {}), _output(3, 2), seconds=(index * 7919) % 1000)
    record.fail(3)
    assert (record.num_completed, record.num_failed, record.num_left) == (1000, 3, 100_000 - 1010)
    assert [one.seconds for one in record.slowest] == list(range(999, 979, -1))
    (index,) = (index for index in range(1000) if index * 7919 % 1000 == 999)
    assert record.slowest[0] == SlowRow(999, index, index + 1, 3, 2)


def _recorded(*points: tuple[float, EngineStats]) -> JobRecord:
    record = JobRecord(num_rows=10, num_before=0)
    for seconds, stats in points:
        record.timeline.add(seconds, stats)
    return record


def _found(record: JobRecord, load_seconds: float = 0.0) -> str:
    return " ".join(findings(record, load_seconds))


def test_findings() -> None:
    """One sentence for each reason, and none for a full batch."""
    full = EngineStats(
        num_running=10, num_waiting=5, max_num_seqs=10, num_blocks=100, num_used_blocks=50, num_engines=1
    )
    good = replace(full, step_seconds=95.0, num_steps=1000)
    assert _found(_recorded((0, full), (100, good))) == ""
    assert "Loading the model took 3.17 min" in _found(_recorded((0, full), (100, good)), load_seconds=190)
    few, idle = {"num_running": 2}, {"num_waiting": 0}
    assert "2 of 10 sequences ran, though rows were waiting and 50% of" in _found(
        _recorded((0, replace(full, **few)), (100, replace(good, **few)))
    )
    assert "2 of 10 sequences ran, with 96% of the KV cache in use" in _found(
        _recorded((0, replace(full, **few, num_used_blocks=96)), (100, replace(good, **few, num_used_blocks=96)))
    )
    assert "2 of 10 sequences ran: for most of the time no row was waiting" in _found(
        _recorded((0, replace(full, **few, **idle)), (100, replace(good, **few, **idle)))
    )
    tail = _found(_recorded((0, full), (60, replace(good, step_seconds=59.0)), (100, replace(good, **few))))
    assert tail.startswith("The last 40 s (40% of the time) had half of the largest batch or less")
    preempted = replace(good, num_prefill_tokens=100, num_recomputed_tokens=40, num_preemptions=12)
    assert _found(_recorded((0, full), (100, preempted))) == (
        "40% of the prefill was recomputation after 12 preemptions."
    )
    elsewhere = replace(good, step_seconds=30.0)
    assert "70% of the time was spent outside of steps" in _found(_recorded((0, full), (100, elsewhere)))
    evicted = replace(good, num_evicted_blocks=90, num_hit_blocks=10, num_missed_blocks=80)
    assert "evicted 90 times, and found 10 times" in _found(_recorded((0, full), (100, evicted)))


def test_intervals() -> None:
    """Joined to some hundred, without gaps, up to the last point."""
    record = _recorded(*((number / 10, EngineStats(num_output_tokens=number * 5)) for number in range(256)))
    intervals = list(record.intervals())
    assert 80 <= len(intervals) <= 101
    assert intervals[0].start == 0 and intervals[-1].end == 25.5
    assert all(one.end == other.start for one, other in pairwise(intervals))
    assert all(one.rate("num_output_tokens") == pytest.approx(50) for one in intervals)
    assert intervals[0].prefix_hit_rate is None and intervals[0].milliseconds_a_step is None
    assert list(JobRecord(1, 0).intervals()) == []


# --- charts -----------------------------------------------------------------------------------------------------


def test_line_chart() -> None:
    """Points are where they belong: the picture is 652 by 180 inside, from (56, 12)."""
    chart = line_chart("a < b", [Line("x", [(0, 0), (5, 50), (7, None), (10, 100)])], unit=short_number)
    lines = re.findall(r'<polyline class="line s1" points="([^"]*)"', chart)
    assert lines == ["56.0,192.0 382.0,102.0", "708.0,12.0 708.0,12.0"]
    assert "a &lt; b" in chart and "<b>a < b" not in chart
    limited = line_chart("t", [Line("x", [(0, 1), (1, 2)])], unit=short_number, top=8)
    assert 'class="limit"' in limited
    for nothing in ([], [(0.0, None)], [(0.0, 1.0)]):
        assert "nothing to show" in line_chart("t", [Line("x", nothing)], unit=short_number)


def test_bar_chart() -> None:
    chart = bar_chart("t", [("1", 10), ("2", 5), ("3", 0)])
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', chart)]
    assert heights == [180, 90, 0]
    assert "nothing to show" in bar_chart("t", [])


def test_numbers_on_axes() -> None:
    assert [nice_above(value) for value in (0, 0.3, 1, 1.1, 4.9, 99, 101)] == [1, 0.5, 1, 2, 5, 100, 200]
    assert [short_number(value) for value in (0, 0.25, 12, 1200, 3_500_000, 2e9)] == [
        "0",
        "0.25",
        "12",
        "1.2k",
        "3.5M",
        "2G",
    ]
    assert [short_time(seconds) for seconds in (0.5, 90, 600, 7200)] == ["0.5 s", "90 s", "10 min", "2 h"]


def test_page_of_a_run_without_anything() -> None:
    text = render(JobRecord(0, 0), "</script><b>", {"model": "</script>"}, 0.0)
    assert text.count("</script>") == 1 and "</script><b>" not in text
