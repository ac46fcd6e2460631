"""What the engine gives back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt


class TokenLogprob(NamedTuple):
    """A token at one position. `logprob` is its log-softmax among all tokens by the model's own logits; `rank` is one
    more than the number of tokens with a larger logit, so that equally likely ones share it."""

    logprob: float
    rank: int


# By token id: first the token that is there, then the best ones in order; of equal ones the lower ids come first.
TokenLogprobs = dict[int, TokenLogprob]


class LogprobList(Sequence[Any]):
    """The log-probabilities of T consecutive positions: a read-only list of `TokenLogprobs`, or of None where a text
    begins and nothing comes before its first token.

    It is made of arrays, from which a dict is made when one is asked for: 12 bytes an entry, where a dict takes some
    hundred and keeps the garbage collector busy. `list(...)` turns it into plain dicts, for JSON say.

    Attributes:
        token_ids: [T, 1 + K] int32, first the token that is there, then the K best ones; -1 where there is none.
        ranks: [T, 1 + K] int32.
        logprobs: [T, 1 + K] float32.
    """

    def __init__(self, scores: npt.NDArray[np.int32]) -> None:
        """`scores` [3, T, 1 + K]: ids, ranks, and bit patterns of float32 log-probabilities."""
        self._scores = scores

    @classmethod
    def join(cls, parts: Iterable[npt.NDArray[np.int32]], *, begins_text: bool = False) -> "LogprobList":
        """Of the scores of parts that follow one another, behind None if they begin a text."""
        parts = list(parts)
        width = parts[0].shape[2] if parts else 1
        start = np.full((3, int(begins_text), width), -1, dtype=np.int32)
        return cls(np.concatenate([start, *parts], axis=1))

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self._scores[0]

    @property
    def ranks(self) -> npt.NDArray[np.int32]:
        return self._scores[1]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        return self._scores[2].view(np.float32)

    def __len__(self) -> int:
        return self._scores.shape[1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LogprobList(self._scores[:, index])
        token_ids, ranks = self.token_ids[index].tolist(), self.ranks[index].tolist()
        if token_ids[0] < 0:
            return None
        return dict(zip(token_ids, map(TokenLogprob, self.logprobs[index].tolist(), ranks), strict=True))

    def __add__(self, other: "LogprobList") -> "LogprobList":
        if not isinstance(other, LogprobList):
            return NotImplemented
        return LogprobList.join((self._scores, other._scores))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobList | list):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class _Logprobs(TypedDict, total=False):
    """What a result has only if its request asked for it."""

    logprobs: LogprobList


class SampleOutput(_Logprobs):
    """One sample of a request.

    Keys:
        text: the decoded output, without the prompt; cut before (or after) the stop string that ended it.
        token_ids: the output tokens, a token that ended the sample included.
        finish_reason: "stop" (an end-of-sequence or stop token, or a stop string), "length" or "abort".
        stop_reason: the token id or the stop string that ended the sample, None unless the reason is "stop".
        logprobs: of each output token, and of the so many best at its position, as a `LogprobList`; only if the request
            asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


class _Result(SampleOutput):
    prompt_token_ids: list[int]
    num_cached_tokens: int


class RequestOutput(_Result, total=False):
    """The result of one request: the keys of its first sample (see `SampleOutput`), and of the prompt.

    Keys:
        prompt_token_ids: the prompt as the model saw it.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache, by the first sample.
        samples: all samples, the first included; only if more than one was asked for.
        prompt_logprobs: of each prompt token as `logprobs`, None for the first token; only if the request asked for
            them. Shorter than the prompt if the request was aborted before the end of it was computed.
    """

    samples: list[SampleOutput]
    prompt_logprobs: LogprobList


class ScoreOutput(TypedDict):
    """The log-probabilities of a continuation, given its prompt, by the model's own logits.

    Keys:
        logprob: that of the whole continuation: the sum over its tokens.
        token_ids, token_logprobs: of each of its tokens.
        is_greedy: whether every token is the most likely one at its position (of equally likely ones, the lowest id).
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    """

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    num_cached_tokens: int


class _DeltaLogprobs(_Logprobs, total=False):
    prompt_logprobs: LogprobList


class OutputDelta(_DeltaLogprobs):
    """What became known of a sample since its last delta. The deltas of a sample add up to its output.

    Keys:
        index: of the prompt in the call.
        sample: index of the sample, 0 unless several were asked for.
        text: new text, in whole characters. Text that may be the beginning of a stop string comes once it isn't.
        token_ids: new output tokens. Their text may come with a later delta.
        finish_reason, stop_reason: those of `SampleOutput` in the last delta; None before.
        logprobs: of the new tokens, as in `SampleOutput`.
        prompt_logprobs: as in `RequestOutput`, in the first delta of sample 0.
    """

    index: int
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


class ResultError(RuntimeError):
    """The result of the request `seq_id` can't be made, for the reason that is this error's cause."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(f"the result of request {seq_id} can't be made")
        self.seq_id = seq_id


@dataclass
class StepOutput:
    """What one `step()` did. The counts are of the step launched; tokens and finished requests are those of the
    step before, which is read while the new one runs.

    Attributes:
        finished: seq_id -> result of each request that ended, with all its samples, save streamed ones.
        new_token_ids: seq_id -> tokens that became known, save streamed ones. Sample i of a request is under the
            request's seq_id + i.
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
