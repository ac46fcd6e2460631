"""From rows to requests that an engine takes: parsed, rendered, tokenised and checked, some at a time."""

import re
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.chat import ChatRenderer, check_conversations
from nanovllm.engine.inputs import InputProcessor, RequestParams
from nanovllm.jobs.errors import JobError, RowError
from nanovllm.jobs.formats import RowFormat, RowRequest
from nanovllm.jobs.params import RowParams, field_of
from nanovllm.jobs.readers import Row
from nanovllm.sampling_params import SamplingParams

# As much as `generate` tokenises between two steps: tens of milliseconds of work.
_CHUNK_CHARACTERS = 1 << 17
# Rows that ask for the same share what is made of that; the latest so many kinds are remembered.
_MAX_SHARED_PARAMS = 64
# How the engine names the only prompt, conversation or params that it is given at a time.
_ENGINE_PREFIX = re.compile(r"(?:prompt|conversation|sampling params) \d+(?:, message (?P<message>\d+))?:? ")


@dataclass(frozen=True)
class PreparedRow:
    """A row that is ready for the engine.

    Attributes:
        request: its params, and what they mean to the engine.
        params_place: where in the row those are.
    """

    row: Row
    token_ids: "array[int]"
    request: RequestParams
    params_place: str

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def grammar(self) -> "Future[Any] | None":
        """What its constraint is compiled to, or will be; None if it has none."""
        return self.request.grammar


@dataclass(frozen=True)
class BadRow:
    row: Row
    error: RowError


@dataclass(frozen=True)
class _Parsed:
    row: Row
    asked: RowRequest
    request: RequestParams
    text: str | None  # None: the prompt is token ids


class Preparer:
    """Checks everything about a row that can be known without the model's weights."""

    def __init__(self, inputs: InputProcessor, format: RowFormat, params: RowParams) -> None:
        self._inputs, self._format, self._params = inputs, format, params
        self._renderer: ChatRenderer | None = None
        self._shared_params: dict[str, RequestParams] = {}

    def prepare(self, rows: Iterator[Row], max_rows: int) -> list[PreparedRow | BadRow]:
        """The next rows, a chunk of them, in their order; none if there are no more.

        Raises:
            JobError: the model can't do what the row wants, and no other row either.
        """
        parsed: list[_Parsed | BadRow] = []
        num_characters = 0
        while len(parsed) < max_rows and num_characters < _CHUNK_CHARACTERS:
            row = next(rows, None)
            if row is None:
                break
            try:
                one = self._parse(row)
            except RowError as error:
                parsed.append(BadRow(row, error))
            else:
                parsed.append(one)
                num_characters += len(one.text or "")
        return self._encode(parsed)

    def _parse(self, row: Row) -> _Parsed:
        if row.error is not None:
            raise row.error
        asked = self._format.parse(row)
        return _Parsed(row, asked, self._params_of(row, asked), self._text_of(asked))

    def _params_of(self, row: Row, asked: RowRequest) -> RequestParams:
        kind = _kind_of(asked)
        if (shared := self._shared_params.get(kind)) is not None:
            return shared.with_seed(self._params.seed_of(row.index))
        params = self._params.make(row.index, asked.params, asked.defaults, asked.params_place)
        try:
            (prepared,) = self._inputs.process_params(params, 1)
        except ImportError as error:
            raise JobError(str(error)) from error
        except ValueError as error:
            place = field_of(str(error), asked.params, asked.params_place)
            raise _row_error(place, error) from error
        if kind and prepared.grammar is None:  # a grammar may still turn out to be wrong
            if len(self._shared_params) == _MAX_SHARED_PARAMS:
                self._shared_params.clear()
            self._shared_params[kind] = prepared
        return prepared

    def _text_of(self, request: RowRequest) -> str | None:
        try:
            if request.is_chat:
                return self._render(request.prompt)
            if isinstance(request.prompt, str):
                return self._inputs.check_text(request.prompt)
            return None
        except (TypeError, ValueError) as error:
            raise _row_error(request.place, error) from error

    def _render(self, conversation: Any) -> str:
        tokenizer = self._inputs.tokenizer
        if self._renderer is None:
            if not getattr(tokenizer, "chat_template", None):
                raise ValueError("a conversation needs a chat template, and this model has none")
            self._renderer = ChatRenderer(tokenizer)
        (text,) = self._renderer.render(check_conversations([conversation]))
        return text

    def _encode(self, parsed: list[_Parsed | BadRow]) -> list[PreparedRow | BadRow]:
        token_ids: dict[int, list[int]] = {}
        for is_chat in (False, True):  # a chat template has written the special tokens
            group = [
                (place, one.text)
                for place, one in enumerate(parsed)
                if isinstance(one, _Parsed) and one.text is not None and one.asked.is_chat == is_chat
            ]
            if group:
                encoded = self._inputs.tokenise([text for _, text in group], add_special_tokens=not is_chat)
                token_ids.update(zip([place for place, _ in group], encoded, strict=True))
        return [
            one if isinstance(one, BadRow) else self._finish(one, token_ids.get(place))
            for place, one in enumerate(parsed)
        ]

    def _finish(self, parsed: _Parsed, tokenised: list[int] | None) -> PreparedRow | BadRow:
        try:
            if tokenised is None:
                checked = self._inputs.check_prompt_ids(parsed.asked.prompt, "prompt 0")
            else:
                checked = self._inputs.check_tokenised(tokenised, "prompt 0")
        except (TypeError, ValueError) as error:
            return BadRow(parsed.row, _row_error(parsed.asked.place, error))
        return PreparedRow(parsed.row, checked, parsed.request, parsed.asked.params_place)


def _kind_of(asked: RowRequest) -> str:
    """Equal for rows that ask for the same params, and empty where that isn't worth looking for."""
    if asked.params.get("seed") is not None:
        return ""
    try:
        return repr((asked.params, asked.defaults))  # tells true from 1, which are equal
    except RecursionError:
        return ""


def check_rows(rows: Iterable[Row], preparer: Preparer) -> Iterator[PreparedRow | BadRow]:
    """All rows, checked as far as that is possible without the model's weights, constraints included."""
    iterator = iter(rows)
    while chunk := preparer.prepare(iterator, max_rows=256):
        for one in chunk:
            error = grammar_error(one) if isinstance(one, PreparedRow) else None
            yield one if error is None else BadRow(one.row, error)


def grammar_error(prepared: PreparedRow) -> RowError | None:
    """What is wrong with the row's constraint, once it is compiled."""
    if prepared.grammar is None:
        return None
    error = prepared.grammar.exception()
    constraint = prepared.params.constraint
    if error is None or constraint is None:
        return None
    return RowError(f"{prepared.params_place}.{constraint.kind}", str(error))


def _row_error(field: str, error: Exception) -> RowError:
    """The engine's error about the only thing it was given, under the name that this has in the row."""
    message = str(error)
    match = _ENGINE_PREFIX.match(message)
    if match is None:
        return RowError(field, message)
    place = match.group("message")
    return RowError(field if place is None else f"{field}[{place}]", message[match.end() :])
