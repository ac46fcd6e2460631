"""Conversations to prompts, by the tokenizer's chat template."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.utils.checks import check_bool, check_unicode

Message = Mapping[str, Any]
Conversation = Sequence[Message]


class ChatRenderer:
    """Writes conversations as the text that a model was trained on, special tokens included."""

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """See `LLM.chat`.

        Raises:
            TypeError: an argument of a wrong type.
            ValueError: there is no tokenizer or no template, or arguments that contradict each other.
        """
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, and so no chat template: use generate() with token ids")
        if chat_template is not None and not isinstance(chat_template, str):
            raise TypeError(f"chat_template must be a string, got {chat_template!r:.80}")
        if chat_template is None and not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template: pass chat_template, or use generate()")
        if tools is not None and not isinstance(tools, list | tuple):
            raise TypeError(f"tools must be a list, got {tools!r:.80}")
        check_bool("add_generation_prompt", add_generation_prompt)
        check_bool("continue_final_message", continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False: one of them can be next")
        self._render = tokenizer.apply_chat_template
        self._kwargs = {
            **_check_kwargs(chat_template_kwargs, self._render),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tokenize": False,
        }

    def render(self, conversations: list[list[Message]], first_index: int = 0) -> list[str]:
        """The text of checked conversations; `first_index` is that of the first in the caller's list, for messages.

        Raises:
            ValueError: the template refuses a conversation; its index is named.
        """
        texts = []
        for index, conversation in enumerate(conversations, first_index):
            try:
                text = self._render(conversation, **self._kwargs)
            except Exception as error:  # a template can fail in any way
                raise ValueError(f"conversation {index}: the chat template fails on it: {error}") from error
            check_unicode(text, f"conversation {index}")
            texts.append(text)
        return texts


def check_conversations(conversations: Any) -> list[list[Message]]:
    """A list of conversations, from one or a list of them.

    Raises:
        TypeError: something has a wrong type; the indices of conversation and message are named.
        ValueError: a conversation without messages, or a message without role or content.
    """
    if not isinstance(conversations, list | tuple):
        raise TypeError(f"conversations must be a list of messages, or a list of such lists, got {conversations!r:.80}")
    if conversations and isinstance(conversations[0], Mapping):
        conversations = [conversations]
    for index, conversation in enumerate(conversations):
        if not isinstance(conversation, list | tuple):
            raise TypeError(f"conversation {index}: must be a list of messages, got {conversation!r:.80}")
        if not conversation:
            raise ValueError(f"conversation {index}: is empty")
        for position, message in enumerate(conversation):
            _check_message(message, f"conversation {index}, message {position}")
    return [[dict(message) for message in conversation] for conversation in conversations]


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name}: must be a dict with 'role' and 'content', got {message!r:.80}")
    if "role" not in message:
        raise ValueError(f"{name}: has no 'role'")
    if not isinstance(message["role"], str):
        raise TypeError(f"{name}: its 'role' must be a string, got {message['role']!r:.80}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return  # a model that only calls tools says nothing
    if "content" not in message:
        raise ValueError(f"{name}: has no 'content'")
    if not isinstance(content, str):
        raise TypeError(f"{name}: its 'content' must be a string, got {content!r:.80}")
    check_unicode(content, name)


def _check_kwargs(kwargs: Any, render: Any) -> dict[str, Any]:
    """More variables for the template, none of which is an argument of the tokenizer's method."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise TypeError(f"chat_template_kwargs must be a dict with names as keys, got {kwargs!r:.80}")
    arguments = (inspect.signature(render).parameters.keys() | {"messages"}) - {"documents"}
    if clashes := sorted(arguments & kwargs.keys()):
        raise ValueError(f"chat_template_kwargs can't hold {clashes[0]!r}: it is no variable of a template")
    return dict(kwargs)
