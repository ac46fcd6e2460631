"""Watches a run of a job, and writes its report and its metrics."""

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.stats import EngineStats, family
from nanovllm.jobs.engine import JobEngine
from nanovllm.jobs.errors import JobError, one_line
from nanovllm.jobs.files import check_writable, write_whole
from nanovllm.jobs.job import Job
from nanovllm.jobs.manifest import manifest_path
from nanovllm.jobs.readers import Row
from nanovllm.jobs.record import JobRecord
from nanovllm.jobs.report import render
from nanovllm.jobs.results import is_stream
from nanovllm.jobs.signals import StopSignals
from nanovllm.version import __version__

_SECONDS_BETWEEN_METRICS = 5.0
_SECONDS_BETWEEN_REPORTS = 60.0  # so that a run that is killed leaves one, too


class JobWatch:
    """Takes note of what a run does, while it is entered. What can't be written then is a warning: results count more.

    If the job has neither a report nor metrics, it does nothing.
    """

    def __init__(self, job: Job) -> None:
        """Raises JobError: a report or metrics can't be written where they are to be."""
        self._job = job
        settings = job.settings
        self._report = None if settings.report is None else Path(settings.report)
        self._metrics = None if settings.metrics is None else Path(settings.metrics)
        self._is_on = self._report is not None or self._metrics is not None
        self._engine: JobEngine | None = None
        self._start = self._load_seconds = 0.0
        self._next_metrics, self._next_report = 0.0, _SECONDS_BETWEEN_REPORTS
        taken = {os.path.realpath(settings.input): "the input"}
        if not is_stream(settings.output):
            taken[os.path.realpath(settings.output)] = "the output"
            taken[os.path.realpath(manifest_path(settings.output))] = "the output's description"
        for flag, path in (("--report", self._report), ("--metrics", self._metrics)):
            if path is None:
                continue
            if str(path) == "-":
                raise JobError(f"{flag} needs a file, not standard output")
            if (other := taken.setdefault(os.path.realpath(path), flag)) != flag:
                raise JobError(f"{path}: can't be both {other} and {flag}")
            check_writable(path)

    def skip(self, num_before: int) -> None:
        """All rows were done before. The report of how stays, but metrics that speak of rows that are left, as those of
        a run that was killed do, are made true."""
        self._record = JobRecord(self._job.num_own_rows, num_before)
        self._write_metrics()

    @contextmanager
    def over_loading(self, num_before: int) -> Iterator[None]:
        """While the engine is made. If that fails, there is nothing else to report.

        Args:
            num_before: rows that were done before.
        """
        self._record = JobRecord(self._job.num_own_rows, num_before)
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._write_metrics()
            self._write_report(_status(error))
            raise
        finally:
            self._load_seconds = time.monotonic() - started

    def over(self, engine: JobEngine, signals: StopSignals) -> "JobWatch":
        """Enter what this returns. `signals` may end the run."""
        self._engine, self._signals = engine, signals
        return self

    def complete(self, row: Row, output: RequestOutput, seconds: float) -> None:
        if self._is_on:
            self._record.complete(row, output, seconds)

    def fail(self, number: int = 1) -> None:
        if self._is_on:
            self._record.fail(number)

    def look(self) -> None:
        """To be called often."""
        if not self._is_on:
            return
        seconds = time.monotonic() - self._start
        if self._record.timeline.is_due(seconds):
            self._record.timeline.add(seconds, self._stats())
        if self._metrics is not None and seconds >= self._next_metrics:
            self._next_metrics = seconds + _SECONDS_BETWEEN_METRICS
            self._write_metrics()
        if self._report is not None and seconds >= self._next_report:
            self._next_report = seconds + _SECONDS_BETWEEN_REPORTS
            self._write_report("still running")

    def __enter__(self) -> "JobWatch":
        self._start = time.monotonic()
        self.look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_on:
            return
        self._record.timeline.add(time.monotonic() - self._start, self._stats())
        self._write_metrics()
        self._write_report(_status(error, self._signals))

    def _stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    def _write_metrics(self) -> None:
        if self._metrics is None:
            return
        record, settings = self._record, self._job.settings
        labels = {"model": settings.model, "output": settings.output}
        states = {
            "state=before": record.num_before,
            "state=completed": record.num_completed,
            "state=failed": record.num_failed,
            "state=left": record.num_left,
        }
        rows = family("job_rows", "gauge", "Rows of the job, by what has become of them.", states, labels)
        self._write(self._metrics, self._stats().prometheus(labels) + rows)

    def _write_report(self, status: str) -> None:
        if self._report is not None:
            facts = {**_settings(self._job), **({} if self._engine is None else self._engine.describe())}
            self._write(self._report, render(self._record, status, facts, self._load_seconds))

    def _write(self, path: Path, text: str) -> None:
        try:
            write_whole(path, text, is_durable=False)
        except JobError as error:
            print(f"nanovllm: warning: {error}", file=sys.stderr)


def _status(error: BaseException | None, signals: StopSignals | None = None) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if error is not None:
        return one_line(f"failed: {error}")
    return "completed" if signals is None or signals.received is None else f"stopped by {signals.received.name}"


def _settings(job: Job) -> dict[str, str]:
    settings = job.settings
    given: dict[str, Any] = {**settings.flags, **settings.config}
    return {
        "command": settings.command,
        "model": settings.model,
        "input": f"{settings.input} ({job.input.format})",
        "output": settings.output,
        "shard": "{}/{}".format(*settings.shard),
        **{name: str(value) for name, value in given.items()},
        "versions": f"nanovllm {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.node()}: {platform.machine()}, {os.cpu_count()} cores",
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
