"""The name that users import."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanovllm.engine.chat import ChatRenderer, Conversation, check_conversations
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """A model, ready to complete prompts: `LLM(model).generate(prompts, sampling_params)`."""

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
        self._check_open()
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

        return self._complete(PromptFeed(checked, params, encode), use_tqdm)

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
