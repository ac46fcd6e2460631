"""Text: what decoding prompt and output as a whole adds to the prompt, and nothing of the prompt."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import decode_output
from tests.checkpoints import save_byte_tokenizer, save_markov_model

TEXT = "é漢🙂"
BYTES = TEXT.encode()
BOS, EOS = 256, 257
VOCAB_SIZE = 300
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """A model that says the bytes of TEXT one after another, then </s>."""
    folder = tmp_path_factory.mktemp("speaker")
    assert len(set(BYTES)) == len(BYTES)
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for before, after in zip([ord("!"), *BYTES], [*BYTES, EOS], strict=True):
        logits[before, after] = 20.0
    save_markov_model(folder, logits)
    save_byte_tokenizer(folder, num_specials=VOCAB_SIZE - 256)
    engine: LLM = make_shared_llm(folder)
    return engine


def expected_text(prompt: bytes, output: bytes) -> str:
    """The whole decoded, less what its beginning has in common with the decoded prompt: a character that the output
    completes differs from what the prompt alone showed, and is the output's."""
    before, whole = prompt.decode(errors="replace"), (prompt + output).decode(errors="replace")
    num_common = 0
    while num_common < min(len(before), len(whole)) and before[num_common] == whole[num_common]:
        num_common += 1
    return whole[num_common:]


# The engine


@pytest.mark.parametrize("num_tokens", range(1, len(BYTES) + 2))
def test_cut_by_max_tokens(llm: LLM, num_tokens: int) -> None:
    """Guards against bytes lost or doubled when the output ends in the middle of a character."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    (output,) = llm.generate(["hi!"], params, use_tqdm=False)
    assert output["token_ids"] == [*BYTES, EOS][:num_tokens]
    assert output["text"] == BYTES[:num_tokens].decode(errors="replace")


@pytest.mark.parametrize("num_bytes", range(1, len(BYTES)))
def test_prompt_ends_within_a_character(llm: LLM, num_bytes: int) -> None:
    """Guards against replacement characters where prompt and output share a character."""
    prompt = list(b"hello " + BYTES[:num_bytes])
    (output,) = llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)
    assert bytes(output["token_ids"][:-1]) == BYTES[num_bytes:]
    assert output["text"] == expected_text(bytes(prompt), BYTES[num_bytes:])
    assert "hello" not in output["text"]
    assert REPLACEMENT not in output["text"]


def test_long_prompt_is_not_repeated(llm: LLM) -> None:
    """Guards against prompt text in the output, however long and strange the prompt is."""
    for prompt in ("x" * 200 + "!", TEXT * 20 + "!", "<s>!</s>!", " !", "\n\n  !", "hi<x2>!"):
        (output,) = llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)
        assert output["text"] == TEXT


def test_special_tokens(llm: LLM) -> None:
    """Special tokens are left out unless they are asked for; the ids have them in any case."""
    for skip, text in ((True, TEXT), (False, TEXT + "</s>")):
        params = SamplingParams(temperature=0, skip_special_tokens=skip)
        (output,) = llm.generate(["<s>hi!"], params, use_tqdm=False)
        assert output["text"] == text
        assert output["token_ids"] == [*BYTES, EOS]


def test_nothing_but_a_special_token(llm: LLM) -> None:
    """An output without text gives an empty text."""
    (output,) = llm.generate([[0x82]], SamplingParams(temperature=0), use_tqdm=False)
    assert (output["token_ids"], output["text"]) == ([EOS], "")


# The function


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*"aé漢🙂 ", "\ufffd", "\n"]), max_size=12).map(lambda text: "".join(text).encode()),
    st.integers(0, 3),
    st.lists(st.sampled_from([*"aé漢🙂 ", "\n"]), max_size=6).map(lambda text: "".join(text).encode()),
    st.integers(0, 3),
)
@example(prompt="漢".encode(), num_cut=1, output=b"", num_missing=0)
@example(prompt=b"a\xef\xbf\xbd", num_cut=0, output=b"b", num_missing=0)
def test_equals_whole_decode(tokenizer: Any, prompt: bytes, num_cut: int, output: bytes, num_missing: int) -> None:
    """Guards against a boundary in the wrong place: valid text, split anywhere between prompt and output, and ended
    anywhere. A replacement character of the prompt itself is prompt text, too."""
    whole = prompt + output
    split = max(len(prompt) - num_cut, 1)
    end = max(len(whole) - num_missing, split)
    head, tail = whole[:split], whole[split:end]
    if not head or (b"\xef\xbf\xbd" in whole[max(split - 2, 0) : split + 2] and not head.endswith(b"\xef\xbf\xbd")):
        return  # a split within U+FFFD itself can't be told from an incomplete character
    assert decode_output(tokenizer, list(head), list(tail), True) == expected_text(head, tail)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=30), st.lists(st.integers(0, 255), max_size=10))
@example([0xE6], [ord("a")])
@example([0x80] * 9, [ord("a")])
@example([ord("a"), 0xF0, 0x9F], [0x99])
def test_bytes_that_are_no_text(tokenizer: Any, prompt: list[int], output: list[int]) -> None:
    """Guards against the prompt's undecodable bytes showing up as the output's."""
    text = decode_output(tokenizer, prompt, output, True)
    if not any(byte >= 0x80 for byte in output):
        assert text == bytes(output).decode()
    whole = bytes(prompt + output).decode(errors="replace")
    assert whole.endswith(text)
    assert len(text) <= len(output) or text == whole[len(whole) - len(text) :]
    assert text == expected_text(bytes(prompt), bytes(output))


@pytest.mark.parametrize("skip", [True, False])
def test_specials_around_the_boundary(tokenizer: Any, skip: bool) -> None:
    """Guards against specials of the prompt leaking into the text, or those of the output being lost."""
    for prompt in ([BOS], [97, BOS], [BOS, 97], [BOS, EOS, BOS, EOS] * 5):
        assert decode_output(tokenizer, prompt, [98, EOS], skip) == ("b" if skip else "b</s>")
        assert decode_output(tokenizer, prompt, [BOS, 98], skip) == ("b" if skip else "<s>b")
        assert decode_output(tokenizer, prompt, [BOS], skip) == ("" if skip else "<s>")


def test_leading_spaces_are_kept(tokenizer: Any) -> None:
    """Guards against clean-up of white space and punctuation, which no longer matches the tokens."""
    for text in (" a", "  a", " .", " n't", "\t", "\n\n", " , ", "a ."):
        assert decode_output(tokenizer, list(b"word"), list(text.encode()), True) == text
        assert decode_output(tokenizer, list(b"word "), list(text.encode()), True) == text
