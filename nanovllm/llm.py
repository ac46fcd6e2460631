"""The class that users import: the engine, and streams of its outputs."""

from collections.abc import Generator, Iterable
from typing import Any

from nanovllm.engine.inputs import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import OutputDelta, StepOutput
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.streaming import RequestStream
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """A model, ready to complete prompts: `LLM(model).generate(prompts, sampling_params)`. Not thread-safe."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._is_stepping = False
        self._abandoned: list[Sequence] = []
        super().__init__(model, **kwargs)

    __init__.__doc__ = LLMEngine.__init__.__doc__

    def stream(
        self,
        prompts: str | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Generator[OutputDelta, None, None]:
        """Completes prompts and yields what is new of each after every step, until all have ended.

        The work begins with the first `next`, and goes on only while the generator is iterated (or somebody else steps
        the engine). Closing the generator, or dropping it, aborts what is unfinished of this call and nothing else.
        Requests added by `add_request` progress with it; their results wait for the next `step`.

        Args:
            prompts, sampling_params: as in `generate`.

        Returns:
            A generator of `OutputDelta`s. For each prompt their texts and token ids, joined, are what `generate`
            returns; only the last has a finish_reason.

        Raises:
            TypeError, ValueError: as `generate`, at the call.
            RuntimeError: while iterating: the engine was closed.
        """
        self._check_open()
        return self._stream(self._make_sequences(prompts, sampling_params, is_streamed=True))

    def open_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Queues one request for a caller who drives the engine: `step` computes, `take` of what is returned here gives
        what is new, and no step reports the request. Raises like `generate`."""
        self._check_open()
        (seq,) = self._make_sequences([prompt], sampling_params, is_streamed=True)
        self._enqueue(seq)
        return RequestStream(seq, self.texts)

    def close_stream(self, stream: RequestStream) -> None:
        """Aborts a request if it is unfinished."""
        self._forget([stream.seq])

    def _stream(self, sequences: list[Sequence]) -> Generator[OutputDelta, None, None]:
        live = [RequestStream(seq, self.texts, index) for index, seq in enumerate(sequences)]
        try:
            for seq in sequences:
                self._enqueue(seq)
            while live:
                self._check_open()
                self._step()
                for stream in live:
                    self._check_open()  # while a delta was out, anything may have happened
                    if (delta := stream.take()) is not None:
                        yield delta
                live = [stream for stream in live if not stream.is_over]
        finally:
            if self._is_stepping:  # the garbage collector closes a generator at any time: here within a step
                self._abandoned += sequences
            else:
                self._forget(sequences)

    def _step(self) -> StepOutput:
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            self._forget(abandoned)
        self._is_stepping = True
        try:
            return super()._step()
        finally:
            self._is_stepping = False
