"""The prompts of one call, tokenised a chunk at a time ahead of the engine."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.engine.inputs import RequestParams

# A chunk holds about so many characters: more tokens than a step of the default budget computes, and tens of
# milliseconds of work.
_CHUNK_CHARACTERS = 1 << 17
# What a text costs whatever its length, in characters.
_TEXT_OVERHEAD = 100


class PromptFeed:
    """Hands out the prompts of one call as token ids, in their order.

    Tokenising 100,000 texts takes longer than many steps. So it is done in chunks, one between any two steps, while
    the device computes: the first step waits for one chunk only, and a text that turns out to be too long is still
    found early in the job.
    """

    def __init__(
        self,
        prompts: list[Any],
        params: list[RequestParams],
        encode: Callable[[list[Any], int], list[Any]],
    ) -> None:
        """
        Args:
            prompts: checked prompts.
            params: of each prompt.
            encode: token ids of a part of the prompts, given the index of the first of them; or whatever a request is
                made from.
        """
        self.num_prompts = len(prompts)
        self._prompts = list(prompts)  # those below `_num_encoded` are replaced by their token ids, then dropped
        self.params = params
        self._encode = encode
        self._num_encoded = 0
        self.num_taken = 0

    @property
    def can_take(self) -> bool:
        return self.num_taken < self._num_encoded

    @property
    def is_encoded(self) -> bool:
        return self._num_encoded == self.num_prompts

    @property
    def is_taken(self) -> bool:
        return self.num_taken == self.num_prompts

    def take(self) -> tuple[Any, RequestParams]:
        """Token ids (what `encode` gave) and params of the next prompt; the caller has asked `can_take`."""
        index = self.num_taken
        self.num_taken += 1
        token_ids, self._prompts[index] = self._prompts[index], None
        return token_ids, self.params[index]

    def encode_chunk(self) -> None:
        """Tokenises the next chunk, if anything is left. Raises like `encode`."""
        start = end = self._num_encoded
        num_characters = 0
        while end < self.num_prompts and num_characters < _CHUNK_CHARACTERS:
            num_characters += _cost(self._prompts[end])
            end += 1
        if end > start:
            self._prompts[start:end] = self._encode(self._prompts[start:end], start)
            self._num_encoded = end


def _cost(prompt: Any) -> int:
    """What it takes to tokenise a string, some strings or a conversation, in characters; token ids take nothing."""
    if isinstance(prompt, str):
        return _TEXT_OVERHEAD + len(prompt)
    if isinstance(prompt, Mapping):  # a message
        return _cost(prompt.get("content") or "")
    return sum(map(_cost, prompt)) if isinstance(prompt, list | tuple) else 0
