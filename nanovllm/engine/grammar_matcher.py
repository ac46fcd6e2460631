"""Constrained output, token by token: which may come next, so that a request's output matches its constraint."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_BITS = 32  # token ids of a word of a mask
_ALL = 0xFFFFFFFF  # a word that allows all of them
_MOST_THREADS = 4

# Makes an array of two sizes, its contents undefined.
Allocate = Callable[[int, int], npt.NDArray[np.int32]]


def new_array(*shape: int) -> npt.NDArray[np.int32]:
    return np.empty(shape, dtype=np.int32)


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
        # Whether no token may follow: the output is complete and can't be extended, an end token came, or `error`.
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        """Moves past a sampled token. False if the grammar doesn't allow it; `error` then says so."""
        self._num_tokens += 1
        is_end = token_id in self._end_ids
        if not (is_end and self.state.is_accepting()):  # a grammar can name an end token, too
            self.state.consume_token(token_id)
        self._take_state()
        self.is_terminated |= is_end
        return self.error is None

    def settle(self, words: npt.NDArray[np.uint32], may_end: bool, is_empty: bool) -> None:
        """Settles in a filled mask the tokens that the library knows nothing of: those that end the request.

        Args:
            words: the mask, without the library's own end token.
            may_end: whether it had that.
            is_empty: whether it has no other.
        """
        self._take_state()
        if is_empty and not self.is_terminated:
            self.is_terminated = True
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

    def _take_state(self) -> None:
        """Not while a mask is filled in another thread: the library would refuse."""
        if self.error is None and self.state.is_error():
            self.error = _reason(self.state.get_error())
        self.is_terminated |= self.error is not None or self.state.is_stopped()


class MaskFilling:
    """Masks that are being filled: which tokens may come next, bit i % 32 of word i // 32 for token i.

    Other threads begin with it as soon as this exists, without the GIL. Until `result` the matchers are theirs.
    """

    def __init__(self, matchers: Sequence[Matcher | None], allocate: Allocate = new_array) -> None:
        """One mask a matcher, of which there is one at least; in the place of None, as of one that is terminated, all
        tokens are allowed, since the token concerns nobody.

        Args:
            allocate: makes the array of the masks; its rows are contiguous.
        """
        self._matchers = matchers
        self._vocabulary = next(matcher.vocabulary for matcher in matchers if matcher is not None)
        self._masks = allocate(len(matchers), -(-self._vocabulary.num_ids // _BITS))
        live = [(m.state, row) for row, m in enumerate(matchers) if m is not None and not m.is_terminated]
        started = threading.Event()
        self._filled = _filler().submit(_fill, live, self._masks, started)
        started.wait()  # hands over the GIL, which the thread would get some milliseconds later else

    def result(self) -> npt.NDArray[np.int32]:
        """[len(matchers), ceil(num_ids / 32)]. A matcher can find out here that it is terminated. Call it once."""
        self._filled.result()
        words = self._masks.view(np.uint32)
        # The library allows its own end token exactly where the output may end.
        end_id = self._vocabulary.end_id
        column, end_bit = end_id // _BITS, np.uint32(1 << end_id % _BITS)
        may_end = (words[:, column] & end_bit) != 0
        words[:, column] &= ~end_bit
        is_empty = words.max(axis=1) == 0
        for matcher, row, *found in zip(self._matchers, words, may_end.tolist(), is_empty.tolist(), strict=True):
            if matcher is None:
                row.fill(_ALL)
            else:
                matcher.settle(row, *found)
        return self._masks


def fill_bitmasks(matchers: Sequence[Matcher]) -> npt.NDArray[np.int32]:
    """Masks of what may come next; see `MaskFilling`."""
    return MaskFilling(matchers).result() if matchers else np.zeros((0, 0), dtype=np.int32)


def _fill(live: list[tuple["LLMatcher", int]], masks: npt.NDArray[np.int32], started: threading.Event) -> None:
    started.set()
    from llguidance.numpy import fill_next_token_bitmask_par

    if live:
        fill_next_token_bitmask_par(_executor(), live, masks)


@cache
def _filler() -> ThreadPoolExecutor:
    """The thread that waits for those that fill masks."""
    return ThreadPoolExecutor(1, thread_name_prefix="nanovllm-masks")


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
