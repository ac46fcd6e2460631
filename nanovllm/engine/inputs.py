"""Checks and tokenises what users hand in. What needs no tokeniser is checked before any work is queued."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.grammar_compiler import Grammar, GrammarCompiler
from nanovllm.engine.token_rules import TokenRules, check_token_is_left, compile_rules
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_unicode

Prompt = str | Sequence[int]
IdArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class RequestParams:
    """A request's params, and what they mean to this engine: the tokens that end the request, less those that are never
    sampled, what changes its logits, and the grammar of its constraint, which may still be on its way."""

    params: SamplingParams
    stop_ids: frozenset[int]
    rules: TokenRules | None
    grammar: "Future[Grammar] | None"

    def with_seed(self, seed: int) -> "RequestParams":
        """The same of params that differ in their seed."""
        return RequestParams(self.params.with_seed(seed), self.stop_ids, self.rules, self.grammar)


class InputProcessor:
    """Turns prompts into token ids, under the limits of one engine."""

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        vocab_size: int,
        max_model_len: int,
        num_kv_tokens: int,
        num_sampled_ids: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer, or None: then prompts must be token ids.
            vocab_size: token ids are below this.
            max_model_len: most tokens of prompt and output together.
            num_kv_tokens: tokens that the whole KV cache holds.
            num_sampled_ids: ids that are sampled are below this; None is the vocabulary.
            eos_token_ids: tokens that end a request unless it ignores them.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_kv_tokens = num_kv_tokens
        self.num_sampled_ids = vocab_size if num_sampled_ids is None else num_sampled_ids
        self.eos_token_ids = eos_token_ids
        self.grammars = GrammarCompiler(tokenizer, self.num_sampled_ids, eos_token_ids)

    def process_prompts(self, prompts: Any) -> list["array[int]"]:
        """Token ids of each prompt: `check_prompts` and `encode` in one go."""
        return self.encode(self.check_prompts(prompts))

    def check_prompts(self, prompts: Any) -> list["str | array[int]"]:
        """The prompts as strings and checked token ids. A string's own ids are checked when it is encoded.

        Raises:
            TypeError: a prompt is neither a string nor a flat list of integers; its index is named.
            ValueError: a prompt is empty, too long, or has ids outside the vocabulary; index and limit are named.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, dict | bytes) or not hasattr(prompts, "__iter__"):
            raise TypeError(f"prompts must be a list of strings or lists of token ids, got {prompts!r:.80}")
        return [
            self.check_text(prompt, index)
            if isinstance(prompt, str)
            else self.check_prompt_ids(prompt, f"prompt {index}")
            for index, prompt in enumerate(prompts)
        ]

    def encode(
        self,
        prompts: Sequence["str | array[int]"],
        first_index: int = 0,
        *,
        name: str = "prompt",
        add_special_tokens: bool = True,
    ) -> list["array[int]"]:
        """Token ids of checked prompts; the strings are tokenised together.

        Args:
            prompts: what `check_prompts` returned, or a part of it.
            first_index: index of the first of them in the caller's list, for messages.
            name: of a prompt, for messages.
            add_special_tokens: False for text that already has them, as a chat template's.

        Raises:
            ValueError: a string is empty, too long, or has ids outside the vocabulary, once it is tokenised.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenise(texts, add_special_tokens) if texts else ())
        return [
            self.check_tokenised(next(encoded), f"{name} {index}") if isinstance(prompt, str) else prompt
            for index, prompt in enumerate(prompts, first_index)
        ]

    def process_params(self, sampling_params: Any, num_prompts: int) -> list[RequestParams]:
        """What each prompt's SamplingParams mean to this engine, from one for all, a list, or None.

        Raises:
            TypeError: something is not a SamplingParams.
            ValueError: the list's length is not the number of prompts, or params ask for what this model can't do: ids
                outside the vocabulary, strings without a tokenizer, no token that may be sampled, a constraint that is
                wrong or not supported.
            ImportError: a constraint needs the grammar library, which is not installed.
        """
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * num_prompts
        if isinstance(sampling_params, str | bytes | Mapping) or not isinstance(sampling_params, Iterable):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r:.80}")
        params = list(sampling_params)
        prepared: dict[int, RequestParams] = {}  # once for all that are the same object
        for index, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling params {index}: must be a SamplingParams, got {one!r:.80}")
            if id(one) not in prepared:
                try:
                    prepared[id(one)] = self._prepare(one)
                except ValueError as error:
                    raise ValueError(f"sampling params {index}: {error}") from error
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling params")
        return [prepared[id(one)] for one in params]

    def _prepare(self, params: SamplingParams) -> RequestParams:
        for name, token_id in params.token_ids():
            if token_id >= self.vocab_size:
                raise ValueError(f"{name} {token_id} is outside [0, {self.vocab_size})")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r:.80} needs a tokenizer, and this model has none: use stop_token_ids")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        stop_ids = frozenset(token_id for token_id in stop_ids if token_id < self.num_sampled_ids)
        rules = compile_rules(params, self.tokenizer, self.num_sampled_ids)
        check_token_is_left(params, rules, stop_ids, self.num_sampled_ids)
        grammar = self.grammars.compile(params.constraint) if params.constraint is not None else None
        return RequestParams(params, stop_ids, rules, grammar)

    def close(self) -> None:
        """Drops what is still being compiled."""
        self.grammars.close()

    def max_total_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Length at which a sequence ends: what it asked for, or what fits. Its last token needs no KV."""
        return min(num_prompt_tokens + max_tokens, self.max_model_len, self.num_kv_tokens + 1)

    def check_text(self, text: str, index: int = 0) -> str:
        """The text itself. Raises ValueError like `check_prompts`."""
        if self.tokenizer is None:
            raise ValueError(f"prompt {index}: this model has no tokenizer, prompts must be lists of token ids")
        check_unicode(text, f"prompt {index}")
        if not text:
            self.encode([text], index)  # raises unless the tokenizer makes something of it
        return text

    def check_ids(self, ids: Any, name: str) -> "array[int]":
        """Token ids of the vocabulary, any number of them. Raises like `check_prompts`."""
        return array("i", ids) if self._are_plain(ids) else self._in_range(_as_array(ids, name), name)

    def check_prompt_ids(self, prompt: Any, name: str) -> "array[int]":
        """Token ids of the vocabulary, as many as a prompt may have. Raises like `check_prompts`."""
        is_plain = self._are_plain(prompt)
        ids = prompt if is_plain else _as_array(prompt, name)
        self._check_length(len(ids), name)
        return array("i", ids) if is_plain else self._in_range(ids, name)

    def check_tokenised(self, ids: list[int], name: str) -> "array[int]":
        """The same of what `tokenise` gave for a prompt: integers, and not negative."""
        self._check_length(len(ids), name)
        if None in ids:
            raise ValueError(f"{name}: the tokenizer has no token for some of this text, and none for the unknown")
        return array("i", ids) if max(ids) < self.vocab_size else self._in_range(_as_array(ids, name), name)

    def _are_plain(self, ids: Any) -> bool:
        """Whether it is a list of integers of the vocabulary, as most are: others take longer to look at."""
        if type(ids) is not list or set(map(type, ids)) != {int}:
            return False
        return min(ids) >= 0 and max(ids) < self.vocab_size

    def tokenise(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of texts, not checked."""
        assert self.tokenizer is not None  # strings are refused before
        encoded = self._encode_texts(texts, add_special_tokens)
        bos_token, bos_id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        for text, ids in zip(texts, encoded, strict=True):
            # A chat template has written its own beginning-of-sequence token.
            if add_special_tokens and bos_token and text.startswith(bos_token) and ids[:2] == [bos_id, bos_id]:
                del ids[0]
        return encoded

    def _encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        tokenizer: Any = self.tokenizer
        is_plain = self._has_plain_backend and not getattr(tokenizer, "split_special_tokens", False)
        backend = tokenizer.backend_tokenizer if is_plain else None
        # Truncation and padding are the backend's own state, which others may have set.
        if backend is not None and not (backend.truncation or backend.padding or backend.encode_special_tokens):
            # "Fast" leaves out which characters became which token: two thirds of the time.
            return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        settings = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
        encoded: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, **settings)["input_ids"]
        return encoded

    @cached_property
    def _has_plain_backend(self) -> bool:
        """Whether calling the tokenizer does no more than its backend, which takes a fifth less time."""
        from transformers import PreTrainedTokenizerFast

        kind = type(self.tokenizer)
        methods = ("__call__", "_encode_plus", "_batch_encode_plus")  # some kinds have their own
        return issubclass(kind, PreTrainedTokenizerFast) and all(
            getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in methods
        )

    def _in_range(self, ids: IdArray, name: str) -> "array[int]":
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(outside):
            position = int(outside[0])
            raise ValueError(
                f"{name}: token id {ids[position]} at position {position} is outside [0, {self.vocab_size})"
            )
        return array("i", ids.astype(np.int32).tobytes())

    def _check_length(self, num_tokens: int, name: str) -> None:
        if num_tokens == 0:
            raise ValueError(f"{name}: is empty")
        if num_tokens >= self.max_model_len:
            raise ValueError(
                f"{name}: has {num_tokens} tokens, but max_model_len={self.max_model_len} "
                f"leaves room for {self.max_model_len - 1} and one output token"
            )
        if num_tokens > self.num_kv_tokens:
            raise ValueError(f"{name}: has {num_tokens} tokens, but the whole KV cache holds {self.num_kv_tokens}")


def _as_array(prompt: Any, name: str) -> IdArray:
    """A prompt of token ids as an integer array [num_tokens]."""
    is_sequence = isinstance(prompt, np.ndarray | Sequence) or hasattr(prompt, "__array__")
    if isinstance(prompt, str | bytes | bytearray) or not is_sequence:
        raise TypeError(f"{name}: must be a string or a list of token ids, got {prompt!r:.80}")
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # ragged nesting
        raise TypeError(f"{name}: must be a flat list of token ids") from error
    if ids.shape == (0,):
        ids = ids.astype(np.int64)
    has_bool = not isinstance(prompt, np.ndarray) and ids.ndim == 1 and bool in set(map(type, prompt))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or has_bool:
        raise TypeError(f"{name}: must be a flat list of integers, got {prompt!r:.80}")
    return ids
