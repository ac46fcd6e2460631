"""Runs a job: rows in, requests to the engine, results out; and checks one without running it."""

import gc
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nanovllm.engine.outputs import StepOutput
from nanovllm.jobs.engine import EndedRow, JobEngine
from nanovllm.jobs.errors import JobError, RowError, one_line
from nanovllm.jobs.formats import RowFormat
from nanovllm.jobs.job import Job
from nanovllm.jobs.prepare import BadRow, PreparedRow, Preparer, check_rows, grammar_error
from nanovllm.jobs.progress import JobProgress
from nanovllm.jobs.readers import Row
from nanovllm.jobs.results import ResultFile
from nanovllm.jobs.signals import StopSignals
from nanovllm.jobs.watch import JobWatch

_OBJECTS_BETWEEN_COLLECTIONS = 50_000  # those of some thousand rows


def run_job(job: Job) -> int:
    """Completes the rows that have no result yet; returns the exit status: 1 if there are rows, and all have failed.

    Raises:
        JobError: it can't go on. What was written stays, and can be resumed.
    """
    settings, watch = job.settings, JobWatch(job)
    results, done, seed, warnings = job.open_results()
    for warning in warnings:
        print(f"nanovllm: warning: {settings.output} was begun with other settings: {warning}", file=sys.stderr)
    try:
        if len(done.rows) == job.num_own_rows:
            what = f"all {job.num_own_rows} rows are done" if job.num_own_rows else f"{settings.input}: has no rows"
            failed = f", {done.num_failed} of them with an error" if done.num_failed else ""
            print(f"{what}{failed}; {settings.output}", file=sys.stderr)
            watch.skip(len(done.rows))
            return _status(len(done.rows) - done.num_failed, done.num_failed)
        with watch.over_loading(len(done.rows)):
            engine = JobEngine(settings.model, **settings.config)
        with (
            engine,
            StopSignals() as signals,
            _young_heap(),
            JobProgress(job.num_own_rows, len(done.rows), done.num_failed, is_shown=settings.show_progress) as progress,
            watch.over(engine, signals),
        ):
            job.check_params(engine.inputs)
            form = job.make_format(engine.tokenizer)
            preparer = Preparer(engine.inputs, form, job.make_params(seed))
            rows = job.input.rows(lambda index: not job.has(index) or index in done.rows)
            loop = _Loop(job, engine, form, preparer, rows, results, progress, watch)
            while loop.has_work and signals.received is None:
                loop.turn()
    finally:
        results.close()
    print(_summary(job, progress, loop.first_failure), file=sys.stderr)
    if signals.received is None:
        num_before = len(done.rows) - done.num_failed
        return _status(num_before + progress.num_completed, progress.num_failed)
    hint = "; --resume goes on with it" if results.is_resumable else ""
    print(f"nanovllm: stopped by {signals.received.name}{hint}", file=sys.stderr)
    return 128 + signals.received


def check_job(job: Job) -> int:
    """Checks every row without loading weights, and prints what is wrong where; returns the exit status."""
    inputs = job.make_inputs()
    job.check_params(inputs)
    preparer = Preparer(inputs, job.make_format(None), job.make_params(seed=0))
    num_rows = num_bad = num_tokens = longest = 0
    for one in check_rows(job.input.rows(lambda index: not job.has(index)), preparer):
        num_rows += 1
        if isinstance(one, BadRow):
            num_bad += 1
            print(locate(job, one.row, one.error))
        else:
            num_tokens += len(one.token_ids)
            longest = max(longest, len(one.token_ids))
    print(f"{job.input.path}: {num_rows} rows, {num_bad} of them bad; "
          f"{num_tokens} prompt tokens in the others, at most {longest} in one")  # fmt: skip
    return 1 if num_bad else 0


def locate(job: Job, row: Row, error: RowError) -> str:
    """The error with file, line and field, on one line."""
    return one_line(f"{job.input.path}:{row.line}: {error}")


@contextmanager
def _young_heap() -> Iterator[None]:
    """What has been made so far, such as all modules, is no garbage: collections in this context leave it out. Going
    through it takes longer than through all that a job holds, and every few thousand rows are a reason to. What a job
    holds is gone through more rarely, too: rows come and go by the thousand, and none is part of a cycle."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@dataclass
class _Loop:
    """Keeps the engine full, and writes what comes out. Holds a chunk of prepared rows beside those in the engine."""

    job: Job
    engine: JobEngine
    form: RowFormat
    preparer: Preparer
    rows: Iterator[Row]
    results: ResultFile
    progress: JobProgress
    watch: JobWatch

    def __post_init__(self) -> None:
        self._ready: deque[PreparedRow] = deque()
        self._is_read = False
        self.first_failure = ""  # of this run

    @property
    def has_work(self) -> bool:
        return not self._is_read or bool(self._ready) or self.engine.num_rows > 0

    def turn(self) -> None:
        """Prepares at most a chunk of rows, lets the engine have what it wants, and computes a step."""
        if not self._ready and not self._is_read and not self.engine.is_full:
            self._prepare()
        while self._ready and not self.engine.is_full:
            self._add(self._ready.popleft())
        if self.engine.num_rows:
            self._write(*self._step())
        self.watch.look()

    def _step(self) -> tuple[StepOutput, list[EndedRow]]:
        try:
            return self.engine.step()
        except Exception as error:
            hint = "; --resume goes on with what is there" if self.results.is_resumable else ""
            raise JobError(f"the engine failed: {type(error).__name__}: {str(error).rstrip()}{hint}") from error

    def _add(self, prepared: PreparedRow) -> None:
        is_known = prepared.grammar is not None and prepared.grammar.done()
        error = grammar_error(prepared) if is_known else None
        if error is None:
            self.engine.add(prepared)
            return
        # A constraint that takes long to compile has turned out to be wrong.
        self.results.append([self._failed(prepared.row, error)])
        self.watch.fail()
        self.progress.update(None, 0, 1)

    def _prepare(self) -> None:
        chunk = self.preparer.prepare(self.rows, self.engine.max_rows)
        self._is_read = not chunk
        self._ready.extend(one for one in chunk if isinstance(one, PreparedRow))
        bad = [one for one in chunk if isinstance(one, BadRow)]
        self.results.append([self._failed(one.row, one.error) for one in bad])
        self.watch.fail(len(bad))
        self.progress.update(None, 0, len(bad))

    def _write(self, step: StepOutput, ended: list[EndedRow]) -> None:
        records, num_failed = [], 0
        for one in ended:
            row, output = one.prepared.row, one.output
            if output is not None and output["finish_reason"] != "abort":
                records.append(self.form.completed(row, output))
                self.watch.complete(row, output, one.seconds)
                continue
            error = grammar_error(one.prepared) or RowError(None, "the engine ended this request")
            if one.error is not None:
                error = RowError(None, f"its result can't be decoded: {one.error}")
            records.append(self._failed(row, error))
            self.watch.fail()
            num_failed += 1
        self.results.append(records)
        self.progress.update(step, len(ended) - num_failed, num_failed)

    def _failed(self, row: Row, error: RowError) -> dict[str, object]:
        message = locate(self.job, row, error)
        if self.job.settings.fail_fast:
            raise JobError(message)
        self.first_failure = self.first_failure or message
        return self.form.failed(row, error, message)


def _status(num_completed: int, num_failed: int) -> int:
    """Of a job that has come to its end."""
    return 1 if num_failed and not num_completed else 0


def _summary(job: Job, progress: JobProgress, first_failure: str) -> str:
    failed = f", {progress.num_failed} rows failed" if progress.num_failed else ""
    if first_failure:
        failed += f" (one of them: {first_failure})"
    return (
        f"{progress.num_completed} rows in {progress.seconds:.1f} s: {progress.num_output_tokens} output tokens, "
        f"{progress.tokens_per_second:,.0f} tok/s{failed}; {job.settings.output}"
    )
