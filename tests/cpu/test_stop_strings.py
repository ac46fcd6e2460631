"""Stop strings: found in the text as it grows, whatever tokens it comes in, and cut where they begin or end."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import Detokenizer, IncrementalDetokenizer, decode_output
from nanovllm.engine.output_text import OutputTexts
from tests.checkpoints import save_byte_tokenizer, save_markov_model

BOS, EOS = 256, 257
WORDS = ("Once", " upon", " a ti", "me.", " STOP now", "\n", "abcd", "STOP", " a", "b")
FIRST_WORD = 258
VOCAB_SIZE = FIRST_WORD + len(WORDS)
# What the model says after each first token: every token is followed by one other only.
SCRIPT = [*range(FIRST_WORD, FIRST_WORD + 6), *"é漢🙂".encode(), EOS]
TEXT = "Once upon a time. STOP now\né漢🙂"
GREEDY = SamplingParams(temperature=0, max_tokens=len(SCRIPT))
REPLACEMENT = "\ufffd"


def save_word_tokenizer(folder: Path) -> Any:
    """One token a byte, and the words."""
    tokenizer = save_byte_tokenizer(folder, num_specials=2)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_piece_tokenizer(*, strips: bool) -> Any:
    """One of text pieces with "▁" for a space, that spells other characters in tokens <0x00> to <0xFF> = 3 to 258."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab.é", "▁a", "▁STOP", "ST", "OP"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """A model that says TEXT, then </s>, after "!"."""
    folder = tmp_path_factory.mktemp("speaker")
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for before, after in zip([ord("!"), *SCRIPT], [*SCRIPT, EOS], strict=True):
        logits[before, after] = 20.0
    save_markov_model(folder, logits)
    save_word_tokenizer(folder)
    engine: LLM = make_shared_llm(folder)
    return engine


def run(llm: LLM, stop: Any, prompt: str = "say!", **changes: Any) -> tuple[str, int, Any]:
    """Text, number of tokens and the string that stopped it (None: it ran to its end)."""
    (output,) = llm.generate([prompt], replace(GREEDY, stop=stop, **changes), use_tqdm=False)
    num_tokens = len(output["token_ids"])
    assert output["token_ids"] == SCRIPT[:num_tokens]
    if isinstance(output["stop_reason"], str):
        assert output["finish_reason"] == "stop"
        return output["text"], num_tokens, output["stop_reason"]
    return output["text"], num_tokens, None


def test_whole_text(llm: LLM) -> None:
    """Without a match nothing changes: neither the text nor the reason."""
    for stop in ((), "nowhere", ["Once upon a Time", "漢!"]):
        (output,) = llm.generate(["say!"], replace(GREEDY, stop=stop), use_tqdm=False)
        assert (output["text"], output["token_ids"]) == (TEXT, SCRIPT)
        assert (output["finish_reason"], output["stop_reason"]) == ("stop", EOS)


@pytest.mark.parametrize(
    "stop, num_tokens",
    {
        "time": 4,  # over a token border
        "ce upon a t": 3,  # over several
        "Once": 1,
        "upon": 2,  # within a token
        "STOP": 5,  # text of the same token follows
        "\n": 6,
        "é": 8,  # two bytes
        "漢🙂": 15,
        ". STOP now\né": 8,
    }.items(),
)
def test_one_string(llm: LLM, stop: str, num_tokens: int) -> None:
    """Guards against matches lost at token borders or within characters, and against text that stays or goes with the
    rest of a token."""
    start = TEXT.index(stop)
    assert run(llm, stop) == (TEXT[:start], num_tokens, stop)
    assert run(llm, [stop], include_stop_str_in_output=True) == (TEXT[: start + len(stop)], num_tokens, stop)


def test_several_strings(llm: LLM) -> None:
    """The one that begins first counts, whatever its place in the list; then the shortest."""
    for stops in (["now", "TOP"], ["TOP", "now"]):
        assert run(llm, stops) == ("Once upon a time. S", 5, "TOP")
    assert run(llm, ["STOP n", "STOP"], include_stop_str_in_output=True) == ("Once upon a time. STOP", 5, "STOP")
    assert run(llm, ["OP", "STOP now"]) == ("Once upon a time. ", 5, "STOP now")  # one token brings both
    assert run(llm, ["n a time. STOP", "a"]) == ("Once upon ", 3, "a")


def test_on_the_last_token(llm: LLM) -> None:
    """Guards against "length" where the last token that is allowed completes a stop string."""
    assert run(llm, "time", max_tokens=4) == ("Once upon a ", 4, "time")
    assert run(llm, "time", max_tokens=3) == ("Once upon a ti", 3, None)
    (output,) = llm.generate(["say!"], replace(GREEDY, stop="time", max_tokens=3), use_tqdm=False)
    assert output["finish_reason"] == "length"


def test_in_the_prompt(llm: LLM) -> None:
    """Guards against the prompt's text being searched, or joined to the output's."""
    assert run(llm, ["say", "y!", "!Once", "!"], prompt="say!") == (TEXT, len(SCRIPT), None)
    assert run(llm, "Once", prompt="Once!") == ("", 1, "Once")


def test_min_tokens(llm: LLM) -> None:
    """What ends within the first min_tokens tokens is not looked for, ever; what only begins there counts."""
    first, second, never = ("", 1, "O"), ("Once upon a time. ST", 5, "O"), (TEXT, len(SCRIPT), None)
    for min_tokens, expected in ((0, first), (1, second), (4, second), (5, never)):
        assert run(llm, "O", min_tokens=min_tokens) == expected
    assert run(llm, "n a time", min_tokens=3) == ("Once upo", 4, "n a time")
    assert run(llm, "n a time", min_tokens=4) == (TEXT, len(SCRIPT), None)
    assert run(llm, ["upon", "n a time"], min_tokens=3) == ("Once upo", 4, "n a time")


def test_stop_token_that_completes_a_string(llm: LLM) -> None:
    """Guards against text that holds a stop string since its token is a stop token, too."""
    assert run(llm, "me", stop_token_ids=(FIRST_WORD + 3,)) == ("Once upon a ti", 4, "me")


def test_special_tokens(llm: LLM) -> None:
    """Only text that is shown is searched."""
    assert run(llm, "</s>") == (TEXT, len(SCRIPT), None)
    assert run(llm, "🙂</s>", skip_special_tokens=False) == (TEXT[:-1], len(SCRIPT), "🙂</s>")


def test_of_others(llm: LLM) -> None:
    """Guards against one request's stop strings ending another in the same batch."""
    params = [replace(GREEDY, stop=stop) for stop in ("upon", "STOP", ())]
    outputs = llm.generate(["say!"] * 3, params, use_tqdm=False)
    assert [output["text"] for output in outputs] == ["Once ", "Once upon a time. ", TEXT]
    assert llm.block_manager.num_used_blocks == 0


def test_needs_a_tokenizer(random_llama: Any, make_llm: Any) -> None:
    llm = make_llm(random_llama[0])
    with pytest.raises(ValueError, match=r"sampling params 1: stop=.*tokenizer"):
        llm.generate([[1], [2]], [GREEDY, replace(GREEDY, stop="a")], use_tqdm=False)
    assert llm.is_finished()


def test_admission_expects_early_ends(llm: LLM) -> None:
    """Guards against the forecast taking a request for one that only its length ends."""
    prompt = array("i", [1])
    both = [replace(GREEDY, ignore_eos=True), replace(GREEDY, ignore_eos=True, stop="x")]
    plain, stopped = (llm.requests.make(prompt, prepared) for prepared in llm.inputs.process_params(both, 2))
    assert (plain.can_stop_early, stopped.can_stop_early) == (False, True)


# Against a naive search of what decoding the whole gives


def naive(tokenizer: Any, prompt: list[int], tokens: Sequence[int], params: SamplingParams) -> tuple[int, str, Any]:
    """Number of tokens, text and stop string of an output, searched anew from the beginning after every token."""
    num_searched = 0
    for count in range(1, len(tokens) + 1):
        text = decode_output(tokenizer, prompt, tokens[:count], params.skip_special_tokens)
        known = text.rstrip(REPLACEMENT)  # the end may become characters
        matches = [
            (start, len(stop), stop)
            for stop in params.stop
            for start in range(len(known))
            if known.startswith(stop, start) and start + len(stop) > num_searched
        ]
        if matches and count > params.min_tokens:
            start, length, stop = min(matches)
            return count, text[: start + (length if params.include_stop_str_in_output else 0)], stop
        num_searched = max(num_searched, len(known))
    return len(tokens), decode_output(tokenizer, prompt, tokens, params.skip_special_tokens), None


def check(tokenizer: Any, prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
    expected = naive(tokenizer, prompt, tokens, params)
    text = OutputTexts(tokenizer).follow(prompt, params, is_streamed=False)
    assert text is not None
    for count, token_id in enumerate(tokens, 1):
        if (stop := text.push(token_id)) is not None:
            whole = decode_output(tokenizer, prompt, tokens[:count], params.skip_special_tokens)
            assert (count, whole[: text.end], stop) == expected
            return
    assert expected[2] is None


def params_of(stops: st.SearchStrategy[Any]) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        stop=stops,
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
        min_tokens=st.integers(0, 6),
    )


STOPS = st.lists(st.text("aSTOPé漢 b<", min_size=1, max_size=4) | st.sampled_from(["STOP", " a", "</s>"]), min_size=1)
BYTES = st.sampled_from([*b"ab", *"é漢🙂".encode(), 0x80, BOS, EOS, *range(FIRST_WORD, VOCAB_SIZE)])
CHARACTERS = st.lists(st.sampled_from([*"aSTOPé漢🙂 b"])).map(lambda text: list("".join(text).encode()))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(BYTES, min_size=1, max_size=10), st.lists(BYTES, max_size=20) | CHARACTERS, params_of(STOPS))
@example([97], [*b"aab"], SamplingParams(stop=["ab"]))
@example([0xE6, 0xBC], [0xA2, 97], SamplingParams(stop=["漢"]))
def test_any_bytes(words: Any, prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
    """Guards against everything else that can go wrong with one token a byte, and with words."""
    check(words, prompt, tokens, params)


def test_bytes_without_end(words: Any) -> None:
    """Guards against a character that is lost where older bytes are forgotten: those before it are no text, however
    many."""
    shared = Detokenizer(words)
    for num_bytes in range(40):
        tokens = [0x80] * num_bytes + list("漢🙂".encode())
        one = IncrementalDetokenizer(shared, [97], True)
        assert "".join(map(one.push, tokens)) == bytes(tokens).decode(errors="replace")
        assert len(one._token_ids) < 20


PIECES = st.sampled_from([1, 2, *range(259, 268)]).map(lambda token_id: [token_id])
SPELLED = st.sampled_from([*"é漢🙂a"]).map(lambda text: [3 + byte for byte in text.encode()])
OUTPUTS = st.lists(PIECES | SPELLED | st.integers(3, 258).map(lambda token_id: [token_id]), max_size=12).map(
    lambda parts: [token_id for part in parts for token_id in part]
)


@pytest.mark.parametrize("strips", [True, False])
def test_any_pieces(strips: bool) -> None:
    """The same for text pieces, where one wrong byte changes a run of bytes as a whole, and where the first token of a
    text has no space. What `push` has returned must be in the text of every continuation."""
    tokenizer = make_piece_tokenizer(strips=strips)
    shared = Detokenizer(tokenizer)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(OUTPUTS.filter(bool), OUTPUTS, params_of(STOPS))
    @example([260, 1], [264], SamplingParams(stop=" a"))  # the special token is left out, but not the space after it
    @example([1], [3 + byte for byte in "漢🙂".encode()], SamplingParams(stop="漢"))
    def test(prompt: list[int], tokens: list[int], params: SamplingParams) -> None:
        check(tokenizer, prompt, tokens, params)
        one = IncrementalDetokenizer(shared, prompt, params.skip_special_tokens)
        settled = "".join(map(one.push, tokens))
        whole = decode_output(tokenizer, prompt, tokens, params.skip_special_tokens)
        assert whole.startswith(settled)
        assert whole[len(settled) :].strip(REPLACEMENT) == one.unsettled

    test()
