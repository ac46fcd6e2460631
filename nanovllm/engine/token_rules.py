"""What a request's `SamplingParams` say about its logits, made ready once: ids, arrays, bit masks. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.sampling_params import LogitsProcessor, SamplingParams
from nanovllm.utils.checks import check_unicode

# Beyond these a float32 logit times or over the penalty would not be a finite number.
_PENALTY_RANGE = (1e-30, 1e30)


@dataclass(frozen=True)
class TokenRules:
    """What changes one request's logits, beside temperature, filters and min_tokens.

    Attributes:
        bias_ids, bias_values: [B] int32 and float32, distinct tokens and what is added to their logits (-inf: never).
        word_prefixes, word_ids: [W, P] and [W] int32: `word_ids[i]` is banned where the newest output tokens are
            `word_prefixes[i]`, which is padded with -1 on its left.
        allowed_mask: [ceil(V / 32)] int32, bit i % 32 of word i // 32 says whether token i may come; None allows all.
        repetition_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 are off.
        processor: the user's own function.
        allowed_ids: the tokens of `allowed_mask`.
        banned_together: sets of tokens that words can ban at the same time.
        is_constrained: whether the output is under a constraint, whose masks come with each step.
    """

    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    word_prefixes: npt.NDArray[np.int32]
    word_ids: npt.NDArray[np.int32]
    allowed_mask: npt.NDArray[np.int32] | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    processor: LogitsProcessor | None
    allowed_ids: frozenset[int] | None
    banned_together: list[frozenset[int]]
    is_constrained: bool

    @property
    def has_penalty(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty)

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far matter."""
        return len(self.word_ids) > 0 or self.has_penalty or self.processor is not None


def compile_rules(params: SamplingParams, tokenizer: Any | None, num_ids: int) -> TokenRules | None:
    """The rules of a request, None if it has none. Ids from `num_ids` on are never sampled, and left out.

    Raises:
        ValueError: bad_words has a string that there is no tokenizer for, or that it has no tokens for.
    """
    if not params.changes_logits:
        return None
    biases = {token_id: value for token_id, value in _pairs(params) if token_id < num_ids}
    words = [word for word in _word_ids(params, tokenizer) if max(word) < num_ids]
    biases.update((word[0], -np.inf) for word in words if len(word) == 1)
    longer = [word for word in words if len(word) > 1]
    allowed_ids = None
    if params.allowed_token_ids is not None:
        allowed_ids = frozenset(token_id for token_id in params.allowed_token_ids if token_id < num_ids)
    low, high = _PENALTY_RANGE
    return TokenRules(
        bias_ids=np.array(list(biases), dtype=np.int32),
        bias_values=np.array(list(biases.values()), dtype=np.float32),
        word_prefixes=_pad_left([word[:-1] for word in longer]),
        word_ids=np.array([word[-1] for word in longer], dtype=np.int32),
        allowed_mask=None if allowed_ids is None else _bit_mask(allowed_ids, num_ids),
        repetition_penalty=min(max(params.repetition_penalty, low), high),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        processor=params.logits_processor,
        allowed_ids=allowed_ids,
        banned_together=_banned_together(words, allowed_ids),
        is_constrained=params.constraint is not None,
    )


def check_token_is_left(
    params: SamplingParams, rules: TokenRules | None, stop_ids: frozenset[int], num_ids: int
) -> None:
    """Raises ValueError unless some of the `num_ids` tokens can be sampled at any time."""
    too_early = stop_ids if params.min_tokens else frozenset()
    allowed_ids = None if rules is None else rules.allowed_ids
    for banned_by_words in [frozenset[int]()] if rules is None else rules.banned_together:
        banned_ids = too_early | banned_by_words
        num_left = num_ids - len(banned_ids) if allowed_ids is None else len(allowed_ids - banned_ids)
        if num_left == 0:
            raise ValueError(
                f"min_tokens={params.min_tokens}, bad_words and allowed_token_ids can leave none of the {num_ids} "
                f"tokens that this model can sample: {len(banned_ids)} may be banned"
                + ("" if allowed_ids is None else f", {len(allowed_ids)} are allowed")
            )


def _pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    assert isinstance(params.logit_bias, tuple)  # as SamplingParams keeps it
    return params.logit_bias


def _word_ids(params: SamplingParams, tokenizer: Any | None) -> list[tuple[int, ...]]:
    """Token ids of each bad word, a string's in its forms. Those that end with another one are left out."""
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            words[word] = None
            continue
        if tokenizer is None:
            raise ValueError(f"bad_words: this model has no tokenizer, so {word!r} must be given as token ids")
        check_unicode(word, "bad_words")
        stripped = word.lstrip(" ")
        for form in (stripped, " " + stripped) if stripped else (word,):
            token_ids = _encode(tokenizer, form)
            if not token_ids:
                raise ValueError(f"bad_words: the tokenizer has no token for {form!r}")
            words[token_ids] = None
            # Some tokenizers begin every text with a space: the word's tokens in the middle of a text are others.
            before, both = _encode(tokenizer, "("), _encode(tokenizer, "(" + form)
            if before and both[: len(before)] == before and len(both) > len(before):
                words[both[len(before) :]] = None
    return [word for word in words if not any(word[start:] in words for start in range(1, len(word)))]


def _banned_together(words: list[tuple[int, ...]], allowed_ids: frozenset[int] | None) -> list[frozenset[int]]:
    """For each way in which an output can end, as far as words care, the tokens that can't come next."""
    # Ends are beginnings of words: what may follow in the word, and what may not because it would complete it.
    followers: dict[tuple[int, ...], set[int]] = {(): set()}
    last_ids: dict[tuple[int, ...], set[int]] = {}
    for word in words:
        for length, token_id in enumerate(word[:-1]):
            followers.setdefault(word[:length], set()).add(token_id)
        followers.setdefault(word[:-1], set())
        last_ids.setdefault(word[:-1], set()).add(word[-1])
    seen: set[tuple[int, ...]] = {()}
    unseen: list[tuple[int, ...]] = [()]
    result = []
    while unseen:
        end = unseen.pop()
        parts = [part for part in _endings(end) if part in followers]
        banned = frozenset(token_id for part in parts for token_id in last_ids.get(part, ()))
        result.append(banned)
        for token_id in {token_id for part in parts for token_id in followers[part]} - banned:
            if allowed_ids is None or token_id in allowed_ids:
                longer = next(part for part in _endings((*end, token_id)) if part in followers)
                if longer not in seen:
                    seen.add(longer)
                    unseen.append(longer)
    return result


def _endings(ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The longest first, the empty one last."""
    return (ids[start:] for start in range(len(ids) + 1))


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _bit_mask(token_ids: frozenset[int], num_ids: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-num_ids // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _pad_left(prefixes: list[tuple[int, ...]]) -> npt.NDArray[np.int32]:
    width = max(map(len, prefixes), default=0)
    padded = np.full((len(prefixes), width), -1, dtype=np.int32)
    for row, prefix in zip(padded, prefixes, strict=True):
        row[width - len(prefix) :] = prefix
    return padded
