"""Constrained output, token by token: which may come next, so that a request's output matches its constraint."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_BITS = 32  # token ids of a word of a mask


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

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Sets bit i % 32 of word i // 32 for each token i that may come next; `row` is contiguous.

        If the matcher is terminated, or finds out here that it is, all are allowed: the token concerns nobody.
        """
        if not self.is_terminated:
            self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._finish(row)

    def _finish(self, row: npt.NDArray[np.int32]) -> None:
        """Settles the tokens that the library knows nothing of: those that end the request."""
        self._take_error()
        words = row.view(np.uint32)
        # The library allows its own end token exactly where the output may end.
        may_end = _get_bit(words, self.vocabulary.end_id)
        _clear_bits(words, [self.vocabulary.end_id])
        if not self.is_terminated and not words.any():
            self._has_ended = may_end
            self.error = None if may_end else "the grammar allows none of the model's tokens here"
        if self.is_terminated:
            row.fill(-1)
        elif self._num_tokens >= self._min_tokens:
            _set_bits(words, self._end_ids if may_end else ())
        elif self._stop_ids:
            before = words.copy()
            _clear_bits(words, self._stop_ids)
            if not words.any():  # the grammar goes before min_tokens
                words[:] = before

    def _take_error(self) -> None:
        if self.error is None and self.state.is_error():
            self.error = _reason(self.state.get_error())


def fill_bitmasks(matchers: Sequence[Matcher]) -> npt.NDArray[np.int32]:
    """Which tokens may come next: [len(matchers), ceil(num_ids / 32)], see `Matcher.fill`. Fills in several threads.

    A matcher can find out here that it is terminated.
    """
    from llguidance.numpy import fill_next_token_bitmask_par

    if not matchers:
        return np.zeros((0, 0), dtype=np.int32)
    num_ids = matchers[0].vocabulary.num_ids
    masks = np.empty((len(matchers), -(-num_ids // _BITS)), dtype=np.int32)
    live = [(matcher.state, row) for row, matcher in enumerate(matchers) if not matcher.is_terminated]
    if live:
        fill_next_token_bitmask_par(_executor(), live, masks)
    for matcher, row in zip(matchers, masks, strict=True):
        matcher._finish(row)
    return masks


@cache
def _executor() -> "LLExecutor":
    """Threads that fill masks: 80 % of the cores, at most 32."""
    from llguidance import LLExecutor

    return LLExecutor()


def _reason(message: str) -> str:
    """What a user can make of an error of the library: less its dump, and its excerpt of the grammar."""
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    message = message.replace("<non-verbose/>", "").replace("failed to compile JSON schema: ", "")
    return re.sub(r"\n +\d+ \| .*", "", message, flags=re.DOTALL).strip()


def _get_bit(words: npt.NDArray[np.uint32], token_id: int) -> bool:
    return bool(words[token_id // _BITS] >> np.uint32(token_id % _BITS) & np.uint32(1))


def _set_bits(words: npt.NDArray[np.uint32], token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // _BITS] |= np.uint32(1 << token_id % _BITS)


def _clear_bits(words: npt.NDArray[np.uint32], token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // _BITS] &= ~np.uint32(1 << token_id % _BITS)
