"""One sample of a request, whose output is taken piece by piece."""

from nanovllm.engine.output_text import OutputTexts
from nanovllm.engine.outputs import LogprobList, OutputDelta
from nanovllm.engine.sequence import Sequence


class RequestStream:
    """Hands out what is new of a streamed sequence. It computes nothing: the engine's steps do."""

    def __init__(self, seq: Sequence, texts: OutputTexts, index: int = 0, sample: int = 0) -> None:
        self.seq = seq
        self.is_over = False  # the last delta was taken
        self._texts = texts
        self._index, self._sample = index, sample
        self._has_begun = False
        self._num_tokens = 0  # taken
        self._num_chars = 0

    def take(self) -> OutputDelta | None:
        """Everything since the last call as one delta; None if there is no new token, and the end was not reached."""
        seq = self.seq
        token_ids = seq.token_ids[seq.num_prompt_tokens + self._num_tokens :].tolist()
        if self.is_over or not (token_ids or seq.is_finished):
            return None
        if seq.is_finished:
            text = self._texts.text_of(seq)[self._num_chars :]
        else:
            text = seq.text.take() if seq.text is not None else ""
        delta = OutputDelta(
            index=self._index,
            sample=self._sample,
            text=text,
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )
        if seq.params.logprobs is not None:
            new = seq.logprobs[self._num_tokens : self._num_tokens + len(token_ids)]
            delta["logprobs"] = LogprobList.join(new)
        if seq.wants_prompt_scores and not self._has_begun:
            delta["prompt_logprobs"] = LogprobList.join(seq.prompt_logprobs, begins_text=True)
        self._has_begun = True
        self._num_tokens += len(token_ids)
        self._num_chars += len(text)
        self.is_over = seq.is_finished
        return delta
