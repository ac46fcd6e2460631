"""Checks and tokenises what users hand in. Everything raises before any work is queued."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.token_rules import TokenRules, compile_rules
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int]
IdArray = npt.NDArray[np.integer[Any]]


class InputProcessor:
    """Turns prompts into token ids, under the limits of one engine."""

    def __init__(self, tokenizer: Any | None, *, vocab_size: int, max_model_len: int, num_kv_tokens: int) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer, or None: then prompts must be token ids.
            vocab_size: token ids are below this.
            max_model_len: most tokens of prompt and output together.
            num_kv_tokens: tokens that the whole KV cache holds.
        """
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_kv_tokens = num_kv_tokens

    def process_prompts(self, prompts: Any) -> list["array[int]"]:
        """Token ids of each prompt.

        Raises:
            TypeError: a prompt is neither a string nor a flat list of integers; its index is named.
            ValueError: a prompt is empty, too long, or has ids outside the vocabulary; index and limit are named.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, dict | bytes) or not hasattr(prompts, "__iter__"):
            raise TypeError(f"prompts must be a list of strings or lists of token ids, got {prompts!r:.80}")
        prompts = list(prompts)
        texts = {index: prompt for index, prompt in enumerate(prompts) if isinstance(prompt, str)}
        for index, text in texts.items():
            if not text.isascii() and not _is_unicode(text):
                raise ValueError(f"prompt {index}: is not valid Unicode, it holds a lone surrogate")
        encoded = dict(zip(texts, self._encode(list(texts.values())), strict=True))
        token_ids = []
        for index, prompt in enumerate(prompts):
            ids = encoded[index] if index in encoded else _as_array(prompt, index)
            self._check_length(len(ids), index)
            self._check_range(ids, index)
            token_ids.append(array("i", ids.astype(np.int32).tobytes()))
        return token_ids

    def process_params(self, sampling_params: Any, num_prompts: int) -> list[SamplingParams]:
        """One SamplingParams a prompt, from one for all, a list, or None.

        Raises:
            TypeError: something is not a SamplingParams.
            ValueError: the list's length is not the number of prompts, or a token id is not in the vocabulary.
        """
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * num_prompts
        if not isinstance(sampling_params, Iterable):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r:.80}")
        params = list(sampling_params)
        checked: set[int] = set()
        for index, one in enumerate(params):
            if id(one) in checked:
                continue
            checked.add(id(one))
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling params {index}: must be a SamplingParams, got {one!r:.80}")
            for name, token_id in one.token_ids():
                if token_id >= self.vocab_size:
                    raise ValueError(f"sampling params {index}: {name} {token_id} is outside [0, {self.vocab_size})")
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts, but {len(params)} sampling params")
        return params

    def compile_rules(self, params: list[SamplingParams], num_ids: int) -> list[TokenRules | None]:
        """What each of the params says about logits, compiled once for all that are the same object.

        Raises:
            ValueError: bad words that the tokenizer can't handle; the index is named.
        """
        compiled: dict[int, TokenRules | None] = {}
        for index, one in enumerate(params):
            if id(one) in compiled:
                continue
            try:
                compiled[id(one)] = compile_rules(one, self.tokenizer, num_ids)
            except ValueError as error:
                raise ValueError(f"sampling params {index}: {error}") from error
        return [compiled[id(one)] for one in params]

    def max_total_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Length at which a sequence ends: what it asked for, or what fits. Its last token needs no KV."""
        return min(num_prompt_tokens + max_tokens, self.max_model_len, self.num_kv_tokens + 1)

    def _encode(self, texts: list[str]) -> list[IdArray]:
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: prompts must be lists of token ids")
        encoded = self.tokenizer(texts, padding=False, truncation=False, verbose=False)["input_ids"]
        bos_token, bos_id = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        for text, ids in zip(texts, encoded, strict=True):
            # A chat template has written its own beginning-of-sequence token.
            if bos_token and text.startswith(bos_token) and ids[:2] == [bos_id, bos_id]:
                del ids[0]
        return [np.array(ids, dtype=np.int64) for ids in encoded]

    def _check_range(self, ids: IdArray, index: int) -> None:
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(outside):
            position = int(outside[0])
            raise ValueError(
                f"prompt {index}: token id {ids[position]} at position {position} is outside [0, {self.vocab_size})"
            )

    def _check_length(self, num_tokens: int, index: int) -> None:
        if num_tokens == 0:
            raise ValueError(f"prompt {index}: is empty")
        if num_tokens >= self.max_model_len:
            raise ValueError(
                f"prompt {index}: has {num_tokens} tokens, but max_model_len={self.max_model_len} "
                f"leaves room for {self.max_model_len - 1} and one output token"
            )
        if num_tokens > self.num_kv_tokens:
            raise ValueError(
                f"prompt {index}: has {num_tokens} tokens, but the whole KV cache holds {self.num_kv_tokens}"
            )


def _as_array(prompt: Any, index: int) -> IdArray:
    """A prompt of token ids as an integer array [num_tokens]."""
    is_sequence = isinstance(prompt, np.ndarray | Sequence) or hasattr(prompt, "__array__")
    if isinstance(prompt, str | bytes | bytearray) or not is_sequence:
        raise TypeError(f"prompt {index}: must be a string or a list of token ids, got {prompt!r:.80}")
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # ragged nesting
        raise TypeError(f"prompt {index}: must be a flat list of token ids") from error
    if ids.shape == (0,):
        ids = ids.astype(np.int64)
    has_bool = not isinstance(prompt, np.ndarray) and ids.ndim == 1 and any(type(one) is bool for one in prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or has_bool:
        raise TypeError(f"prompt {index}: must be a flat list of integers, got {prompt!r:.80}")
    return ids


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
