"""The text of a request: where a stop string ends it, how much of it may be shown already, and the whole."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanovllm.engine.detokenizer import Detokenizer, IncrementalDetokenizer, decode_output
from nanovllm.engine.outputs import LogprobList, RequestOutput, SampleOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence


class OutputTexts:
    """Makes the texts of an engine's outputs; without a tokenizer there are none."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def follow(self, prompt_token_ids: Any, params: SamplingParams, *, is_streamed: bool) -> "OutputText | None":
        """What follows the text of a new request, if it needs that."""
        if self.tokenizer is None or not (params.stop or is_streamed):
            return None
        detokenizer = IncrementalDetokenizer(self._detokenizer, prompt_token_ids, params.skip_special_tokens)
        return OutputText(detokenizer, params, is_streamed=is_streamed)

    def output_of(self, request: "Sequence") -> RequestOutput:
        """The result of a request, given its first sample."""
        samples = [self.sample_of(seq) for seq in request.samples]
        first = samples[0]
        output = RequestOutput(
            text=first["text"],
            token_ids=list(first["token_ids"]),
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens].tolist(),
            finish_reason=first["finish_reason"],
            stop_reason=first["stop_reason"],
            num_cached_tokens=request.num_cached_tokens or 0,
        )
        if "logprobs" in first:
            output["logprobs"] = first["logprobs"]
        if request.params.prompt_logprobs is not None:
            output["prompt_logprobs"] = LogprobList.join(request.prompt_logprobs, begins_text=True)
        if request.params.n > 1:
            output["samples"] = samples
        return output

    def sample_of(self, seq: "Sequence") -> SampleOutput:
        output = SampleOutput(
            text=self.text_of(seq),
            token_ids=seq.output_token_ids.tolist(),
            finish_reason=seq.finish_reason or "",
            stop_reason=seq.stop_reason,
        )
        if seq.params.logprobs is not None:
            known = seq.logprobs[: seq.num_output_tokens]  # an aborted one may have more
            output["logprobs"] = LogprobList.join(known)
        return output

    def text_of(self, seq: "Sequence") -> str:
        """The text of a sequence's output so far, up to where a stop string ended it."""
        if self.tokenizer is None:
            return ""
        prompt_ids, output_ids = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
        text = decode_output(self.tokenizer, prompt_ids, output_ids, seq.params.skip_special_tokens)
        if isinstance(seq.stop_reason, str):
            assert seq.text is not None
            text = text[: seq.text.end]
        return text

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)


class OutputText:
    """Follows an output token by token. Only requests with stop strings, or that are streamed, have one.

    Among the stop strings that a token completes, the one that begins first counts; of those that begin together, the
    shortest.

    Attributes:
        end: number of characters that stay, once `push` has found a stop string.
    """

    __slots__ = (
        "_detokenizer",
        "_includes_stop",
        "_is_streamed",
        "_last_chars",
        "_max_tail",
        "_num_searched",
        "_num_settled",
        "_num_spared",
        "_stop",
        "_tail",
        "_untaken",
        "end",
    )

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams, *, is_streamed: bool) -> None:
        """
        Args:
            detokenizer: of an output without tokens.
            is_streamed: `take` will be called; else nothing is kept for it.
        """
        self._detokenizer = detokenizer
        self._stop = tuple(params.stop)
        self._includes_stop = params.include_stop_str_in_output
        self._is_streamed = is_streamed
        self._untaken: list[str] = []
        self._num_spared = params.min_tokens  # tokens to come whose text is not searched
        self._num_settled = 0  # characters
        self._num_searched = 0  # characters: a stop string that ends within them is not looked for again
        self._max_tail = max(map(len, self._stop), default=1) - 1
        self._tail = ""  # the settled text's end that a stop string may begin in
        self._last_chars = frozenset(stop[-1] for stop in self._stop)
        self.end: int | None = None

    def push(self, token_id: int) -> str | None:
        """Takes over the next token; returns the stop string that it completes, if any."""
        text = self._detokenizer.push(token_id)
        if self._is_streamed and text:
            self._untaken.append(text)
        if not self._stop:
            return None
        unsettled = self._detokenizer.unsettled
        is_spared = self._num_spared > 0
        self._num_spared -= is_spared
        found = None
        # Most tokens have no character that a stop string ends with.
        if not is_spared and (unsettled or not self._last_chars.isdisjoint(text)):
            found = self._find(self._tail + text + unsettled)
        self._num_settled += len(text)
        self._num_searched = max(self._num_searched, self._num_settled + len(unsettled))
        if text:
            self._tail = (self._tail + text)[-self._max_tail :] if self._max_tail else ""
        return found

    def take(self) -> str:
        """The text since the last call that is certain to stay: without an end that may become a stop string."""
        text = "".join(self._untaken)
        num_held = self._num_held(text)
        self._untaken = [text[len(text) - num_held :]] if num_held else []
        return text[: len(text) - num_held]

    def _find(self, text: str) -> str | None:
        """Looks for stop strings that end after what was searched before, in the text from the tail on."""
        offset = self._num_settled - len(self._tail)
        num_searched = self._num_searched - offset
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(num_searched + 1 - len(stop), 0))
            if start >= 0:
                matches.append((start, len(stop), stop))
        if not matches:
            return None
        start, length, stop = min(matches)
        self.end = offset + start + (length if self._includes_stop else 0)
        return stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
            while start >= 0:
                if stop.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start = text.find(stop[0], start + 1)
        return longest
