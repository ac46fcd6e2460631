"""From token ids and params to the sequences of a request."""

import random
from array import array

import xxhash

from nanovllm.engine.inputs import InputProcessor, RequestParams
from nanovllm.engine.output_text import OutputTexts
from nanovllm.engine.scoring import ScoredIds
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class RequestFactory:
    """Gives requests their ids and seeds, and the lengths and tokens that end them."""

    def __init__(self, inputs: InputProcessor, texts: OutputTexts, *, seed: int | None, salt_above: int | None) -> None:
        """
        Args:
            inputs: the engine's limits.
            texts: follows the outputs whose text is needed while they grow.
            seed: of the requests that bring none; None draws from the operating system.
            salt_above: under a rotary embedding that depends on the prompt's length, the length above which it does.
        """
        self._inputs, self._texts = inputs, texts
        self._salt_above = salt_above
        self._random = random.Random(seed)
        self._next_seq_id = 0

    def seed_of(self, params: SamplingParams) -> int:
        """Seed of the next request: its own, or the next of the engine's."""
        return self._random.getrandbits(64) if params.seed is None else params.seed

    def make(
        self,
        token_ids: "array[int]",
        prepared: RequestParams,
        *,
        seed: int | None = None,
        is_streamed: bool = False,
    ) -> Sequence:
        """The first sample of a request, which holds the others. `seed` is what another engine's `seed_of` gave."""
        params = prepared.params
        if seed is None:
            seed = self.seed_of(params)
        max_total_tokens = self._inputs.max_total_tokens(len(token_ids), params.max_tokens)
        request_id = self._next_seq_id
        self._next_seq_id += params.n
        first, *others = (
            Sequence(
                request_id + index,
                token_ids,
                params,
                request_id=request_id,
                seed=sample_seed(seed, index),
                max_total_tokens=max_total_tokens,
                stop_ids=prepared.stop_ids,
                rules=prepared.rules,
                grammar=prepared.grammar,
                cache_salt=self._cache_salt(len(token_ids)),
                text=self._texts.follow(token_ids, params, is_streamed=is_streamed),
                is_streamed=is_streamed,
            )
            for index in range(params.n)
        )
        first.other_samples = others
        return first

    def make_scored(self, pair: ScoredIds, prepared: RequestParams) -> Sequence:
        """A request that only scores a continuation: the token that ends it is given, as the continuation's last."""
        *token_ids, last = pair.token_ids
        self._next_seq_id += 1
        return Sequence(
            self._next_seq_id - 1,
            array("i", token_ids),
            prepared.params,
            max_total_tokens=len(pair.token_ids),
            cache_salt=self._cache_salt(len(token_ids)),
            first_scored=pair.num_prompt_tokens,
            next_token_id=last,
        )

    def _cache_salt(self, num_tokens: int) -> int:
        """Equal prefixes of prompts of different length are different content where the rotation depends on it."""
        return num_tokens if self._salt_above is not None and num_tokens > self._salt_above else 0


def sample_seed(seed: int, index: int) -> int:
    """Seed of a request's sample: sample 0 has the request's own, as if it were alone."""
    return seed if index == 0 else xxhash.xxh3_64_intdigest(index.to_bytes(8, "little"), seed=seed)
