"""The class that users import: the engine, chat, and streams of outputs."""

from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nanovllm.engine.chat import ChatRenderer, Conversation, check_conversations
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.inputs import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import OutputDelta, RequestOutput, ScoreOutput, StepOutput
from nanovllm.engine.scoring import SCORING_PARAMS, check_pairs, encode_pairs, score_of
from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.streaming import RequestStream
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """A model, ready to complete prompts: `LLM(model).generate(prompts, sampling_params)`. Not thread-safe.

    With `data_parallel_size` above 1 it is a `DataParallelLLM`.
    """

    def __new__(cls, *args: Any, data_parallel_size: Any = 1, **kwargs: Any) -> "LLM":
        if cls is LLM and data_parallel_size != 1:
            from nanovllm.data_parallel import DataParallelLLM  # which is an LLM

            return super().__new__(DataParallelLLM)
        return super().__new__(cls)

    def __init__(self, model: str, **kwargs: Any) -> None:
        self._is_stepping = False
        self._abandoned: list[TokenSequence] = []
        super().__init__(model, **kwargs)

    __init__.__doc__ = LLMEngine.__init__.__doc__

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations, written as prompts by the tokenizer's chat template.

        The template writes all special tokens, the one that begins a sequence included; none are added to its text.

        Args:
            conversations: one conversation or a list of them, each a list of `{"role": ..., "content": ...}`.
            sampling_params: one for all conversations, or one each.
            tools: functions that the model may call, as JSON schemas or annotated Python functions.
            add_generation_prompt: end the prompt with the beginning of an assistant's message.
            continue_final_message: let the model go on with the last message instead of answering it.
            chat_template: a Jinja template in the place of the tokenizer's own, or the name of one of its own.
            chat_template_kwargs: more variables of the template.
            use_tqdm: show a progress bar.

        Returns:
            One result a conversation, in their order, as `generate` returns them.

        Raises:
            TypeError, ValueError: like `generate`; a malformed conversation is named by its index and the message's.
        """
        self.check_open()
        renderer = ChatRenderer(
            self.tokenizer,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        checked = check_conversations(conversations)
        params = self.inputs.process_params(sampling_params, len(checked))

        def encode(part: list[Any], first_index: int) -> list["array[int]"]:
            texts = renderer.render(part, first_index)
            return self.inputs.encode(texts, first_index, name="conversation", add_special_tokens=False)

        return self._complete(PromptFeed(checked, params, encode), use_tqdm, self.requests.make, self.texts.output_of)

    def score(
        self, prompts: str | Iterable[Prompt], continuations: str | Iterable[Prompt], *, use_tqdm: bool = True
    ) -> list[ScoreOutput]:
        """Log-probabilities of continuations, each given its prompt. Nothing is generated.

        To compare several continuations of a prompt, pass it once with each, one after the other: KV blocks that pairs
        have in common are computed once, and only the continuation's tokens are turned into logits.

        A pair of strings is tokenised as evaluation harnesses do it: whitespace that ends the prompt belongs to the
        continuation, and of the tokens of both together, the continuation's are those beyond the number of the
        prompt's own.

        Args:
            prompts: strings or lists of token ids, each of at least one token (one that the tokenizer begins every
                text with counts). A single string is a list of one.
            continuations: one for each prompt, of the same kind, with at least one token.
            use_tqdm: show a progress bar.

        Returns:
            One result a pair, in their order.

        Raises:
            TypeError, ValueError: as `generate`. A pair may have `max_model_len` + 1 tokens: its last is not computed.
        """
        self.check_open()
        pairs = check_pairs(self.inputs, prompts, continuations)
        params = self.inputs.process_params(SCORING_PARAMS, len(pairs))
        feed = PromptFeed(pairs, params, partial(encode_pairs, self.inputs))
        return self._complete(feed, use_tqdm, self.requests.make_scored, score_of)

    def default_sampling_params(self) -> SamplingParams:
        """The sampling settings that the model's authors recommend in its `generation_config.json`.

        They are used only if they are passed on: `generate(prompts, llm.default_sampling_params())`. What the file
        does not say is as in `SamplingParams()`.

        Raises:
            ValueError: the file holds a value that `SamplingParams` refuses.
        """
        try:
            return SamplingParams.from_generation_config(self.generation_config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.config.model}: generation_config.json: {error}") from error

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
            A generator of `OutputDelta`s. For each sample of a prompt their texts and token ids, joined, are what
            `generate` returns; only the last has a finish_reason.

        Raises:
            TypeError, ValueError: as `generate`, at the call.
            RuntimeError: while iterating: the engine was closed.
        """
        self.check_open()
        token_ids = self.inputs.process_prompts(prompts)
        params = self.inputs.process_params(sampling_params, len(token_ids))
        requests = zip(token_ids, params, strict=True)
        return self._stream([self.requests.make(ids, one, is_streamed=True) for ids, one in requests])

    def open_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Queues one request for a caller who drives the engine: `step` computes, `take` of what is returned here gives
        what is new, and no step reports the request. Raises like `generate`, and for more than one sample."""
        self.check_open()
        (token_ids,) = self.inputs.process_prompts([prompt])
        (params,) = self.inputs.process_params(sampling_params, 1)
        if params.params.n != 1:
            raise ValueError(f"n must be 1 for a request that is streamed alone, got {params.params.n}")
        seq = self.requests.make(token_ids, params, is_streamed=True)
        self._enqueue(seq)
        return RequestStream(seq, self.texts)

    def close_stream(self, stream: RequestStream) -> None:
        """Aborts a request if it is unfinished."""
        self._forget([stream.seq])

    def _stream(self, sequences: list[TokenSequence]) -> Generator[OutputDelta, None, None]:
        live = [
            RequestStream(sample, self.texts, index, number)
            for index, seq in enumerate(sequences)
            for number, sample in enumerate(seq.samples)
        ]
        try:
            for seq in sequences:
                self._enqueue(seq)
            while live:
                self.check_open()
                self._step()
                for stream in live:
                    self.check_open()  # while a delta was out, anything may have happened
                    if (delta := stream.take()) is not None:
                        yield delta
                live = [stream for stream in live if not stream.is_over]
        finally:
            if self._is_stepping:  # the garbage collector closes a generator at any time: here within a step
                self._abandoned += sequences
            else:
                self._forget(sequences)

    def _step(self) -> StepOutput:
        if self._is_stepping:
            raise RuntimeError("a step is running: an engine serves one thread, and not from inside its own steps")
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            self._forget(abandoned)
        try:
            self._is_stepping = True
            return super()._step()
        finally:
            self._is_stepping = False
