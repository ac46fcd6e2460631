"""One sample of a request on its way through the engine: its tokens, its progress, and the KV blocks it holds."""

from array import array
from concurrent.futures import Future
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nanovllm.engine.grammar_matcher import Matcher
from nanovllm.engine.output_text import OutputText
from nanovllm.engine.token_rules import TokenRules
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.grammar_compiler import Grammar


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """State of one sample of a request. The scheduler and the block manager own every field that changes, but `text`,
    `matcher`, `logprobs`, `prompt_logprobs` and `num_ended_samples`, which are the engine's.

    The samples of a request (`SamplingParams.n`) have consecutive seq_ids, and the first one's is the request's.
    To the scheduler they are sequences like any others; their first sample holds them together.

    Progress is one number: `num_computed_tokens` (tokens whose KV is in the cache once the launched steps have
    run) chases `num_tokens`. The tokens of launched steps that the host has not read yet are counted in
    `num_in_flight`; their ids are on the device only, so `len(token_ids) == num_tokens - num_in_flight`.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "cache_salt",
        "finish_reason",
        "grammar",
        "is_streamed",
        "last_content_id",
        "load_ticket",
        "logprobs",
        "matcher",
        "max_total_tokens",
        "next_token_id",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_ended_samples",
        "num_in_flight",
        "num_lost_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scored_tokens",
        "other_samples",
        "params",
        "prompt_logprobs",
        "request_id",
        "rules",
        "seed",
        "seq_id",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: "array[int]",
        params: SamplingParams,
        *,
        request_id: int | None = None,
        seed: int = 0,
        max_total_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        cache_salt: int = 0,
        text: OutputText | None = None,
        is_streamed: bool = False,
        rules: TokenRules | None = None,
        grammar: "Future[Grammar] | None" = None,
        first_scored: int = 1,
        next_token_id: int | None = None,
    ) -> None:
        """Makes a waiting sequence.

        Args:
            seq_id: unique in the engine, increasing with arrival.
            prompt_token_ids: `array("i")` of at least one token; the sequence keeps its own copy.
            request_id: seq_id of the request's first sample; None is this one's.
            seed: of the request's random numbers, in [0, 2**64).
            max_total_tokens: the sequence ends when prompt and output reach this many tokens.
            stop_ids: tokens that end the sequence.
            cache_salt: sequences share prefix blocks only under the same salt.
            text: follows the output, where stop strings or a stream need that.
            is_streamed: whoever asked for it looks at the sequence itself: no step reports it.
            rules: what changes its logits, beside `params`' temperature, filters and min_tokens.
            grammar: of the constraint that the output is under, as soon as it is compiled.
            first_scored: position of the first token whose log-probability is wanted, if the prompt's are.
            next_token_id: the token after the prompt, of a sequence that is only scored: this one is the last to be,
                and nothing is sampled.
        """
        self.seq_id = seq_id
        self.request_id = seq_id if request_id is None else request_id
        self.other_samples: list[Sequence] = []  # of the same request; held by its first sample alone
        self.num_ended_samples = 0  # leading ones of the other samples
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.max_total_tokens = max_total_tokens
        self.stop_ids = stop_ids
        self.cache_salt = cache_salt
        self.text = text
        self.is_streamed = is_streamed
        self.rules = rules
        self.grammar = grammar
        self.matcher: Matcher | None = None  # where the output stands in the grammar, once a token is to be sampled
        self.next_token_id = next_token_id

        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_lost_tokens = 0  # had been computed when it was preempted
        self.num_cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_scored_tokens = first_scored - 1  # log-probabilities up to this position are scheduled, or unwanted
        # Scores [3, n, 1 + K] as in a `LogprobList`, if asked for: of each output token, and of the prompt's from
        # `first_scored` on, as they come.
        self.logprobs: list[npt.NDArray[np.int32]] = []
        self.prompt_logprobs: list[npt.NDArray[np.int32]] = []

        self.slot = -1  # row of the device's table of last sampled tokens; held while running
        self.block_table = array("i")
        self.load_ticket = 0  # of the last load from host memory into one of them (see `HostCache`)
        self.num_published_blocks = 0  # leading blocks whose content the cache knows
        self.last_content_id = -cache_salt  # identity of the last of them; the root's is the negated salt
        self.block_hashes: list[int] = []  # chained hash of each full block of known tokens, filled on demand

    def end(self, reason: str) -> None:
        """Marks the sequence finished; tokens in flight are dropped."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.num_in_flight = 0
        self.matcher = None

    def has_ended(self) -> bool:
        """Whether all samples of the request have, whose first one this is."""
        # Asked whenever one has: those found to have ended are not looked at again.
        samples = self.other_samples
        while self.num_ended_samples < len(samples) and samples[self.num_ended_samples].is_finished:
            self.num_ended_samples += 1
        return self.is_finished and self.num_ended_samples == len(samples)

    @property
    def samples(self) -> "list[Sequence]":
        """All samples of the request whose first one this is."""
        return [self, *self.other_samples]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> "array[int]":
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def can_stop_early(self) -> bool:
        """Whether anything but its length can end the sequence."""
        return bool(self.stop_ids or self.params.stop or self.grammar is not None)

    @property
    def is_ready(self) -> bool:
        """Whether its constraint, if it has one, is compiled, or has failed to."""
        return self.grammar is None or self.grammar.done()

    @property
    def is_complete(self) -> bool:
        """Whether the output matches the constraint as it is, and nothing may follow."""
        return self.matcher is not None and self.matcher.is_terminated

    @property
    def is_decoding(self) -> bool:
        """All that is left to compute is the token sampled last."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.num_computed_tokens > 0

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether this sequence gets the log-probabilities of the prompt; of several samples, the first does."""
        return self.params.prompt_logprobs is not None and self.seq_id == self.request_id

    @property
    def is_only_scored(self) -> bool:
        """Nothing is sampled: the sequence ends when the log-probabilities that it wants are known."""
        return self.next_token_id is not None

    @property
    def last_scored(self) -> int:
        """Position of the last token whose log-probability is wanted, if any is."""
        return self.num_prompt_tokens - 1 + self.is_only_scored

    def scored_ids(self, positions: range) -> "array[int]":
        """The tokens at positions up to `last_scored`."""
        token_ids = self.token_ids[positions.start : positions.stop]
        if self.next_token_id is not None and positions.stop > self.num_prompt_tokens:
            token_ids.append(self.next_token_id)
        return token_ids

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: the logits after the others are wanted."""
        if self.wants_prompt_scores and self.num_scored_tokens < self.last_scored:
            return self.num_scored_tokens
        return len(self.token_ids) - 1

    @property
    def has_reached_limit(self) -> bool:
        """No token may follow those sampled or in flight."""
        return self.num_tokens >= self.max_total_tokens
