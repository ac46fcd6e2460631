"""Constrained output, token by token: which may come next, so that a request's output matches its constraint."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_BITS = 32  # token ids of a word of a mask
_ALL = 0xFFFFFFFF  # a word that allows all of them
_MOST_THREADS = 8

# Makes an array of two sizes, its contents undefined.
Allocate = Callable[[int, int], npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens, as the library knows them.

    Attributes:
        num_ids: tokens of a mask.
        end_id: the token by which the library says that the output may end.
        eos_token_ids: of the model.
    """

    tokenizer: "LLTokenizer"
    num_ids: int
    end_id: int
    eos_token_ids: frozenset[int]

    def is_textless(self, token_id: int) -> bool:
        return token_id in self.eos_token_ids or self.tokenizer.is_special_token(token_id)


class Matcher:
    """Where one sequence's output stands in its grammar. Its owner tells it every token, in order.

    Attributes:
        error: why it gave up, else None: a token that the grammar doesn't allow, or a limit of the library.
    """

    def __init__(self, state: "LLMatcher", vocabulary: Vocabulary, stop_ids: Iterable[int], min_tokens: int) -> None:
        self.vocabulary = vocabulary
        self.state = state
        self.error: str | None = None
        self._stop_ids = frozenset(stop_ids)
        self._end_ids = frozenset(filter(vocabulary.is_textless, self._stop_ids))
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._has_ended = False

    @property
    def is_terminated(self) -> bool:
        """Whether no token may follow: the output is complete and can't be extended, an end token came, or `error`."""
        return self._has_ended or self.error is not None or self.state.is_stopped()

    def accept(self, token_id: int) -> bool:
        """Moves past a sampled token. False if the grammar doesn't allow it; `error` then says so."""
        self._num_tokens += 1
        self._has_ended = token_id in self._end_ids
        if not (self._has_ended and self.state.is_accepting()):  # a grammar can name an end token, too
            self.state.consume_token(token_id)
        self._take_error()
        return self.error is None

    def settle(self, words: npt.NDArray[np.uint32], may_end: bool, is_empty: bool) -> None:
        """Settles in a filled mask the tokens that the library knows nothing of: those that end the request.

        Args:
            words: the mask, without the library's own end token.
            may_end: whether it had that.
            is_empty: whether it has no other.
        """
        self._take_error()
        if is_empty and not self.is_terminated:
            self._has_ended = may_end
            self.error = None if may_end else "the grammar allows none of the model's tokens here"
        if self.is_terminated:
            words.fill(_ALL)
        elif self._num_tokens >= self._min_tokens:
            if may_end:
                _set_bits(words, self._end_ids)
        elif self._stop_ids:
            before = words.copy()
            _clear_bits(words, self._stop_ids)
            if not words.any():  # the grammar goes before min_tokens
                words[:] = before

    def _take_error(self) -> None:
        if self.error is None and self.state.is_error():
            self.error = _reason(self.state.get_error())


def new_array(*shape: int) -> npt.NDArray[np.int32]:
    return np.empty(shape, dtype=np.int32)


def fill_bitmasks(matchers: Sequence[Matcher], allocate: Allocate = new_array) -> npt.NDArray[np.int32]:
    """Which tokens may come next: [len(matchers), ceil(num_ids / 32)], bit i % 32 of word i // 32 for token i.

    A matcher can find out here that it is terminated; to it all are allowed, since the token concerns nobody. Fills in
    several threads.

    Args:
        allocate: makes the array of a shape; its rows are contiguous.
    """
    from llguidance.numpy import fill_next_token_bitmask_par

    if not matchers:
        return np.zeros((0, 0), dtype=np.int32)
    vocabulary = matchers[0].vocabulary
    masks = allocate(len(matchers), -(-vocabulary.num_ids // _BITS))
    live = [(matcher.state, row) for row, matcher in enumerate(matchers) if not matcher.is_terminated]
    if live:
        fill_next_token_bitmask_par(_executor(), live, masks)
    words = masks.view(np.uint32)
    # The library allows its own end token exactly where the output may end.
    column, end_bit = vocabulary.end_id // _BITS, np.uint32(1 << vocabulary.end_id % _BITS)
    may_end = (words[:, column] & end_bit) != 0
    words[:, column] &= ~end_bit
    is_empty = words.max(axis=1) == 0
    for matcher, row, *found in zip(matchers, words, may_end.tolist(), is_empty.tolist(), strict=True):
        matcher.settle(row, *found)
    return masks


@cache
def _executor() -> "LLExecutor":
    """Threads that fill masks. A mask takes some microseconds: with many more threads they wait for one another."""
    from llguidance import LLExecutor

    return LLExecutor(min(_MOST_THREADS, os.cpu_count() or 1))


def _reason(message: str) -> str:
    """What a user can make of an error of the library: less its dump, and its excerpt of the grammar."""
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    message = message.replace("<non-verbose/>", "").replace("failed to compile JSON schema: ", "")
    return re.sub(r"\n +\d+ \| .*", "", message, flags=re.DOTALL).strip()


def _set_bits(words: npt.NDArray[np.uint32], token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // _BITS] |= np.uint32(1 << token_id % _BITS)


def _clear_bits(words: npt.NDArray[np.uint32], token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // _BITS] &= ~np.uint32(1 << token_id % _BITS)
