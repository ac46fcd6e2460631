"""What a row asks for, and what is written about it: the contract, and rows with a column for the prompt."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.outputs import LogprobList, RequestOutput, SampleOutput
from nanovllm.jobs.errors import RowError
from nanovllm.jobs.readers import Row

# What this module writes into an output row. Columns of the input that have these names move into `input`.
RESERVED = ("index", "output", "error", "input")


@dataclass(frozen=True)
class RowRequest:
    """What a row asks for.

    Attributes:
        prompt: a text, token ids, or the messages of a conversation.
        place: where in the row that is, for messages.
        params: fields of `SamplingParams` that the row sets itself.
        params_place: where in the row those are.
        defaults: fields that its format sets where nobody else does.
    """

    prompt: str | list[Any]
    place: str
    params: Mapping[str, Any] = field(default_factory=dict)
    params_place: str = "sampling_params"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and any(isinstance(message, Mapping) for message in self.prompt)


class RowFormat(ABC):
    """How rows are read and results written. Every record tells the index of its row."""

    @abstractmethod
    def parse(self, row: Row) -> RowRequest:
        """Raises RowError."""

    @abstractmethod
    def completed(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        """The record of a completed row."""

    @abstractmethod
    def failed(self, row: Row, error: RowError, message: str) -> dict[str, Any]:
        """The record of a row that can't be completed; the message has file and line, too."""

    @staticmethod
    @abstractmethod
    def index_of(record: Mapping[str, Any]) -> int | None:
        """The index of the row that a record is about; None if it isn't a record of this format."""

    @staticmethod
    @abstractmethod
    def is_failure(record: Mapping[str, Any]) -> bool:
        """Whether a record is one of a row that couldn't be completed."""


class ColumnFormat(RowFormat):
    """Rows with a column for the prompt; the other columns pass through."""

    def __init__(
        self,
        prompt_column: str | None = None,
        *,
        as_chat: bool = False,
        keep_prompt: bool = False,
        with_token_ids: bool = False,
    ) -> None:
        """
        Args:
            prompt_column: None is `prompt`, or `messages` in rows without that.
            as_chat: a text is the user's message of a conversation.
            keep_prompt: the prompt's column passes through, too.
            with_token_ids: report token ids.
        """
        self._prompt_column = prompt_column
        self._as_chat, self._keep_prompt, self._with_token_ids = as_chat, keep_prompt, with_token_ids

    def parse(self, row: Row) -> RowRequest:
        column = self._column_of(row)
        if column not in row.data:
            wanted = f"has no column {column!r}" if self._prompt_column else "has neither 'prompt' nor 'messages'"
            raise RowError(column, wanted + (f"; it has {', '.join(map(repr, row.data))}"[:200] if row.data else ""))
        prompt = row.data[column]
        if not isinstance(prompt, str | list):
            raise RowError(column, f"must be a string, a list of token ids or a list of messages, got {prompt!r:.80}")
        if self._as_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        params = row.data.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise RowError("sampling_params", f"must be an object, got {params!r:.80}")
        return RowRequest(prompt, column, params)

    def completed(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        samples = output.get("samples")
        first = {
            **self._sample(output),
            "num_prompt_tokens": len(output["prompt_token_ids"]),
            "num_cached_tokens": output["num_cached_tokens"],
        }
        if self._with_token_ids:
            first["prompt_token_ids"] = output["prompt_token_ids"]
        if "prompt_logprobs" in output:
            first["prompt_logprobs"] = _plain_logprobs(output["prompt_logprobs"])
        if samples is not None:
            first["samples"] = [self._sample(sample) for sample in samples]
        return {"index": row.index, **self._passed_through(row), "output": first}

    def failed(self, row: Row, error: RowError, message: str) -> dict[str, Any]:
        details = {"message": message, "line": row.line, "field": error.field}
        return {"index": row.index, **self._passed_through(row), "error": details}

    @staticmethod
    def index_of(record: Mapping[str, Any]) -> int | None:
        index = record.get("index")
        is_record = type(index) is int and ("output" in record or "error" in record)
        return index if is_record else None

    @staticmethod
    def is_failure(record: Mapping[str, Any]) -> bool:
        return "error" in record

    def _column_of(self, row: Row) -> str:
        if self._prompt_column is not None:
            return self._prompt_column
        return "messages" if "messages" in row.data and "prompt" not in row.data else "prompt"

    def _passed_through(self, row: Row) -> dict[str, Any]:
        dropped = () if self._keep_prompt else (self._column_of(row), "sampling_params")
        kept = {name: value for name, value in row.data.items() if name not in dropped}
        moved = {name: kept.pop(name) for name in RESERVED if name in kept}
        return {**kept, "input": moved} if moved else kept

    def _sample(self, sample: SampleOutput) -> dict[str, Any]:
        record: dict[str, Any] = {
            "text": sample["text"],
            "finish_reason": sample["finish_reason"],
            "stop_reason": sample["stop_reason"],
            "num_output_tokens": len(sample["token_ids"]),
        }
        if self._with_token_ids:
            record["token_ids"] = sample["token_ids"]
        if "logprobs" in sample:
            record["logprobs"] = _plain_logprobs(sample["logprobs"])
        return record


def _plain_logprobs(logprobs: LogprobList) -> list[Any]:
    """For each position `[[token id, log-probability, rank], ...]`, the token that is there first; or None."""
    return [
        None if entries is None else [[token_id, *entry] for token_id, entry in entries.items()]
        for entries in logprobs
    ]  # fmt: skip
