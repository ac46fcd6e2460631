"""A job: what it is, its checks without weights, and the beginning or the continuation of its output file."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.inputs import InputProcessor
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.formats import ColumnFormat, RowFormat
from nanovllm.jobs.manifest import Manifest, differences, fingerprint_file, fingerprint_model, manifest_path
from nanovllm.jobs.openai_batch import OpenAIFormat
from nanovllm.jobs.params import RowParams, check_flags
from nanovllm.jobs.readers import InputFile
from nanovllm.jobs.results import Done, ResultFile, RowSet, is_stream
from nanovllm.models import resolve_architecture
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import Checkpoint, open_checkpoint
from nanovllm.version import __version__

# Names of input files may end so; what is written is none of these.
_UNWRITTEN_SUFFIXES = (".gz", ".zst", ".parquet")


@dataclass(frozen=True)
class JobSettings:
    """What a user says about a job.

    Attributes:
        input, output, model: a path, a path or `-`, and what `LLM` takes.
        format: of the input, one of `readers.FORMATS`.
        prompt_column: None is `prompt`, or `messages`.
        as_chat: a text is a user's message.
        keep_prompt, with_token_ids: what output rows have, too.
        flags: fields of `SamplingParams` for all rows that don't say otherwise.
        seed: of the job; None draws one.
        config: fields of `Config`.
        shard: i and n: only every n-th row, from row i on, as n jobs on as many machines share a file.
        resume: go on with an output file.
        fail_fast: end with the first row that can't be completed.
        show_progress: on standard error.
        report, metrics: files to write about the run.
        command: as it was given, for the report.
    """

    input: str
    output: str
    model: str
    format: str = "auto"
    prompt_column: str | None = None
    as_chat: bool = False
    keep_prompt: bool = False
    with_token_ids: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] = (0, 1)
    resume: bool = False
    fail_fast: bool = False
    show_progress: bool = True
    report: str | None = None
    metrics: str | None = None
    command: str = ""


class Job:
    """A job that has been found possible, as far as that shows without weights.

    Attributes:
        settings: as given.
        input: the rows.
    """

    def __init__(self, settings: JobSettings) -> None:
        """Raises JobError: a setting is wrong, or there is no such input or model."""
        self.settings = settings
        self.input = InputFile(settings.input, settings.format, settings.prompt_column or "prompt")
        self._flags = check_flags(settings.flags)
        self._config = make_config(settings.model, settings.config)
        try:
            with_weights = self._config.load_format != "dummy"
            self._checkpoint: Checkpoint = open_checkpoint(settings.model, with_weights=with_weights)
            _, self._spec = resolve_architecture(self._checkpoint.config)
        except (OSError, TypeError, ValueError) as error:
            raise JobError(str(error)) from error

    @cached_property
    def num_rows(self) -> int:
        """Of the whole input."""
        return self.input.num_rows()

    @cached_property
    def num_own_rows(self) -> int:
        """Of its shard."""
        return len(range(self.settings.shard[0], self.num_rows, self.settings.shard[1]))

    def has(self, index: int) -> bool:
        """Whether a row is in the shard."""
        first, step = self.settings.shard
        return index % step == first

    def make_format(self, tokenizer: Any | None) -> RowFormat:
        if self.input.format == "openai":
            return OpenAIFormat(self.settings.model, tokenizer)
        return ColumnFormat(
            self.settings.prompt_column,
            as_chat=self.settings.as_chat,
            keep_prompt=self.settings.keep_prompt,
            with_token_ids=self.settings.with_token_ids,
        )

    def make_params(self, seed: int) -> RowParams:
        return RowParams(self._flags, seed)

    def check_params(self, inputs: InputProcessor) -> None:
        """Raises JobError: what the flags say, and so what rows ask for that say nothing else, is impossible."""
        try:
            (prepared,) = inputs.process_params(SamplingParams(**self._flags), 1)
            if prepared.grammar is not None:
                prepared.grammar.result()
        except (ImportError, ValueError) as error:
            raise JobError(str(error).removeprefix("sampling params 0: ")) from error

    def make_inputs(self) -> InputProcessor:
        """The checks that an engine would do, under limits that are known without one."""
        try:
            tokenizer = self._checkpoint.load_tokenizer()
        except ValueError as error:
            raise JobError(str(error)) from error
        num_ids = 1 + max(tokenizer.get_vocab().values()) if tokenizer is not None else self._spec.vocab_size
        max_model_len = min(self._config.max_model_len, self._spec.max_model_len)
        return InputProcessor(
            tokenizer,
            vocab_size=self._spec.vocab_size,
            max_model_len=max_model_len,
            num_kv_tokens=max_model_len,
            num_sampled_ids=min(self._spec.vocab_size, num_ids),
            eos_token_ids=self._checkpoint.eos_token_ids(tokenizer),
        )

    def open_results(self) -> tuple[ResultFile, Done, int, list[str]]:
        """The output file, what it holds already, the job's seed, and what to warn the user of.

        Raises:
            JobError: the file may not be written to, or belongs to another job.
        """
        output, seed = self.settings.output, self.settings.seed
        if Path(output).suffix in _UNWRITTEN_SUFFIXES:
            raise JobError(f"{output}: the output is JSON lines, not compressed, and its name would say otherwise")
        if is_stream(output):
            if self.settings.resume:
                raise JobError(f"--resume needs an output file, and {output} is none")
            return ResultFile.open(output), Done(RowSet(self.num_rows), 0), _given_or_drawn(seed), []
        # An empty file is what a job leaves that failed before its first row: nothing of it could be lost.
        if Path(output).exists() and os.path.getsize(output) and not self.settings.resume:
            raise JobError(f"{output}: exists already; --resume goes on with it")
        results = ResultFile.open(output)
        try:
            if results.is_empty:
                seed = _given_or_drawn(seed)
                self._manifest(seed).write(manifest_path(output))
                return results, Done(RowSet(self.num_rows), 0), seed, []
            seed, warnings = self._check_same_job(manifest_path(output))
            form = self.make_format(None)
            return results, results.take_over(self.num_rows, form.index_of, form.is_failure), seed, warnings
        except BaseException:
            results.close()
            raise

    def _check_same_job(self, path: Path) -> tuple[int, list[str]]:
        """The seed that the job began with, and warnings."""
        old = Manifest.read(path)
        if old is None:
            raise JobError(f"{self.settings.output}: can't go on with it, because {path} is not there, "
                           "which says what job it belongs to")  # fmt: skip
        seed: int = old.job["seed"] if self.settings.seed is None else self.settings.seed
        new = self._manifest(seed)
        if found := differences(old.job, new.job):
            raise JobError(f"{self.settings.output}: belongs to another job: {'; '.join(found)}")
        return seed, differences(old.engine, new.engine)

    def _manifest(self, seed: int) -> Manifest:
        settings = self.settings
        job = {
            "input": fingerprint_file(self.input.path),
            "format": self.input.format,
            "prompt_column": settings.prompt_column,
            "chat": settings.as_chat,
            "shard": "{}/{}".format(*settings.shard),
            "keep_prompt": settings.keep_prompt,
            "token_ids": settings.with_token_ids,
            "params": dict(self._flags),
            "seed": seed,
            "model": fingerprint_model(Path(self._checkpoint.location)),
            "load_format": self._config.load_format,
        }
        return Manifest(job, {"version": __version__, **settings.config})


def make_config(model: str, values: Mapping[str, Any]) -> Config:
    """Raises JobError if a value is refused."""
    try:
        return Config.from_kwargs(model, **values)
    except (TypeError, ValueError) as error:
        raise JobError(str(error)) from error


def _given_or_drawn(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed
