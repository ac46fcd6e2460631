"""Conversations: rendered as the tokenizer does, with one beginning-of-sequence token, or refused by index."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.checkpoints import save_byte_tokenizer, save_random_model

BOS = 256
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# Roles must alternate, as those of many models must.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools | map(attribute='function.name') | join(',') }}]{% endif %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% for m in messages %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}{{ raise_exception('roles!') }}{% endif %}"
    "<{{ m.role }}>{{ m.content or m.tool_calls }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "hé"}]
LONGER = [*HELLO, {"role": "assistant", "content": "yes "}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """Its tokenizer begins every text with <s>, and so does its template."""
    folder = tmp_path_factory.mktemp("chat")
    save_random_model(folder)
    tokenizer = save_byte_tokenizer(folder, add_bos=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    llm: LLM = make_shared_llm(folder, max_model_len=100)
    return llm


@pytest.fixture
def llm(shared_llm: LLM, assert_idle: Any) -> Iterator[LLM]:
    yield shared_llm
    assert_idle(shared_llm)


def prompts_of(llm: LLM, conversations: Any, **kwargs: Any) -> list[list[int]]:
    """The prompts as the model saw them."""
    return [out["prompt_token_ids"] for out in llm.chat(conversations, GREEDY, use_tqdm=False, **kwargs)]


def ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


# Prompts


def test_one_bos(llm: LLM) -> None:
    """Guards against a second <s>: chat-templated text gets the template's only, raw text the tokenizer's, token ids
    are untouched."""
    expected = ids("<user>hé|<assistant>")
    assert prompts_of(llm, HELLO) == [expected]
    text = llm.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)  # type: ignore
    outputs = llm.generate([text, "hé", [104]], GREEDY, use_tqdm=False)
    assert [output["prompt_token_ids"] for output in outputs] == [expected, ids("hé"), [104]]


def test_template_without_bos(llm: LLM) -> None:
    """The template decides, as in transformers: none is added to what it writes."""
    assert prompts_of(llm, HELLO, chat_template="{{ messages[0].content }}") == [list("hé".encode())]
    assert prompts_of(llm, HELLO, chat_template="<s><s>a") == [[BOS, BOS, 97]]


def test_several_conversations(llm: LLM) -> None:
    """In their order, each with its own params; tuples and mappings do as well; the caller's objects are unchanged."""
    conversations: Any = [LONGER, tuple(HELLO), [MappingProxyType(HELLO[0])]]
    before = copy.deepcopy(conversations[:2])
    params = [replace(GREEDY, max_tokens=num_tokens) for num_tokens in (3, 1, 2)]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    assert conversations[:2] == before
    assert [output["prompt_token_ids"] for output in outputs] == [
        ids("<user>hé|<assistant>yes |<assistant>"),
        ids("<user>hé|<assistant>"),
        ids("<user>hé|<assistant>"),
    ]
    assert [len(output["token_ids"]) for output in outputs] == [3, 1, 2]
    assert outputs == [
        out | {"num_cached_tokens": outputs[i]["num_cached_tokens"]}
        for i, out in enumerate(
            llm.generate([output["prompt_token_ids"] for output in outputs], params, use_tqdm=False)
        )
    ]
    assert llm.chat([], GREEDY) == []


def test_how_a_prompt_ends(llm: LLM) -> None:
    assert prompts_of(llm, HELLO, add_generation_prompt=False) == [ids("<user>hé|")]
    before = copy.deepcopy(LONGER)
    continued = prompts_of(llm, LONGER, add_generation_prompt=False, continue_final_message=True)
    assert continued == [ids("<user>hé|<assistant>yes ")]
    assert before == LONGER
    with pytest.raises(ValueError, match="continue_final_message=True needs add_generation_prompt=False"):
        llm.chat(LONGER, GREEDY, continue_final_message=True)


def test_tools_and_variables(llm: LLM) -> None:
    def sub(a: int) -> int:
        """Subtracts.

        Args:
            a: a number
        """
        return -a

    assert prompts_of(llm, HELLO, tools=[TOOL, sub]) == [ids("[add,sub]<user>hé|<assistant>")]
    assert prompts_of(llm, HELLO, chat_template_kwargs={"mood": "sad"}) == [ids("(sad)<user>hé|<assistant>")]
    call = [*HELLO, {"role": "assistant", "tool_calls": "x"}, {"role": "tool", "content": "3"}]
    assert prompts_of(llm, call) == [ids("<user>hé|<assistant>x|<tool>3|<assistant>")]


def test_samples(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert len(output["samples"]) == 3


# Refusals


@pytest.mark.parametrize(
    ("conversation", "error", "message"),
    [
        ([], ValueError, "conversation 1: is empty"),
        ("hi", TypeError, "conversation 1: must be a list"),
        (None, TypeError, "conversation 1: must be a list"),
        (HELLO[0], TypeError, "conversation 1: must be a list"),
        (["hi"], TypeError, "conversation 1, message 0: must be a dict"),
        ([*HELLO, {"content": "a"}], ValueError, "conversation 1, message 1: has no 'role'"),
        ([*HELLO, {"role": "user"}], ValueError, "conversation 1, message 1: has no 'content'"),
        ([{"role": 5, "content": "a"}], TypeError, "conversation 1, message 0: its 'role' must be a string, got 5"),
        ([{"role": "user", "content": None}], TypeError, "conversation 1, message 0: its 'content' .* got None"),
        ([{"role": "user", "content": ["a"]}], TypeError, "conversation 1, message 0: its 'content' .*'a'"),
        ([{"role": "user", "content": "\ud800"}], ValueError, "conversation 1, message 0: .*surrogate"),
        ([{"role": "\ud800", "content": "a"}], ValueError, "conversation 1: .*surrogate"),
        (HELLO * 2, ValueError, "conversation 1: the chat template fails on it: roles!"),
        ([{"role": "user", "content": "x" * 100}], ValueError, "conversation 1: has 119 tokens, .*max_model_len=100"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_conversation(llm: LLM, conversation: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat([HELLO, conversation, HELLO], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "conversations", [None, "hi", HELLO[0], {}, 5, iter(HELLO)], ids=lambda value: repr(value)[:20]
)
def test_what_is_no_list(llm: LLM, conversations: Any) -> None:
    with pytest.raises(TypeError, match="conversations must be a list"):
        llm.chat(conversations, GREEDY)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"tools": TOOL}, TypeError, "tools must be a list"),
        ({"tools": [5]}, ValueError, "conversation 0"),
        ({"add_generation_prompt": 1}, TypeError, "add_generation_prompt must be a bool"),
        ({"continue_final_message": "content"}, TypeError, "continue_final_message must be a bool"),
        ({"chat_template": 5}, TypeError, "chat_template must be a string"),
        ({"chat_template": "{% if"}, ValueError, "conversation 0: the chat template fails"),
        ({"chat_template": " "[1:]}, ValueError, "conversation 0"),
        ({"chat_template_kwargs": ["mood"]}, TypeError, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {5: 1}}, TypeError, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "chat_template_kwargs can't hold 'tokenize'"),
    ],
    ids=str,
)
def test_wrong_arguments(llm: LLM, kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat(HELLO, GREEDY, use_tqdm=False, **kwargs)


def test_no_template(byte_llama: Path, random_llama: Any, make_llm: Any) -> None:
    llm = make_llm(byte_llama)
    with pytest.raises(ValueError, match=r"no chat template: pass chat_template, or use generate\(\)"):
        llm.chat(HELLO, GREEDY)
    assert len(llm.chat(HELLO, GREEDY, chat_template=TEMPLATE, use_tqdm=False)) == 1
    with pytest.raises(ValueError, match="no tokenizer"):
        make_llm(random_llama[0]).chat(HELLO, GREEDY)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.chat(HELLO, GREEDY)
