"""What the engine gives back."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict


class TokenLogprob(NamedTuple):
    """A token at one position. `logprob` is its log-softmax among all tokens by the model's own logits; `rank` is one
    more than the number of tokens with a larger logit, so that equally likely ones share it."""

    logprob: float
    rank: int


# By token id: first the token that is there, then the best ones in order; of equal ones the lower ids come first.
TokenLogprobs = dict[int, TokenLogprob]


class Logprobs(TypedDict, total=False):
    """What a result has only if its request asked for it.

    Keys:
        logprobs: of each output token, and of the `logprobs` best at its position.
        prompt_logprobs: of each prompt token likewise, None for the first. Shorter than the prompt if the request was
            aborted before the end of it was computed.
    """

    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]


class RequestOutput(Logprobs):
    """The result of one request.

    Keys:
        text: the decoded output, without the prompt.
        token_ids: the output tokens, a token that ended the request included.
        prompt_token_ids: the prompt as the model saw it.
        finish_reason: "stop" (an end-of-sequence or stop token), "length" or "abort".
        stop_reason: the token id that ended the request, None unless the reason is "stop".
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    num_cached_tokens: int


@dataclass
class StepOutput:
    """What one `step()` did. The counts are of the step launched; tokens and finished requests are those of the
    step before, which is read while the new one runs.

    Attributes:
        finished: seq_id -> result of each request that ended.
        new_token_ids: seq_id -> tokens that became known.
        num_prefill_tokens: prompt tokens computed (or computed again after a preemption).
        num_decode_tokens: output tokens computed.
        num_cached_tokens: prompt tokens found in the prefix cache instead.
        num_preemptions: sequences that gave their blocks up.
        num_used_blocks, num_free_blocks: KV blocks held by sequences, and the rest.
    """

    finished: dict[int, RequestOutput] = field(default_factory=dict)
    new_token_ids: dict[int, list[int]] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_used_blocks: int = 0
    num_free_blocks: int = 0
