"""Rules that requests bring: how words become tokens, what is refused, and how."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.token_rules import TokenRules, check_token_is_left, compile_rules
from tests.checkpoints import VOCAB_SIZE, save_byte_tokenizer, save_markov_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


VOCABULARY = {"dog": [5], " dog": [6], "cat": [7, 8], " cat": [9, 8], "fish": [4], " fish": [2, 4]}


def tokenize(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    """Has other tokens for a word with the space before it, as BPE tokenizers do."""
    assert not add_special_tokens
    return {"input_ids": VOCABULARY.get(text, [])}


def compile_words(*words: Any) -> TokenRules:
    rules = compile_rules(SamplingParams(bad_words=words), tokenize, 20)
    assert rules is not None
    return rules


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """After byte t comes t + 1, else t + 2, else t + 3, ..."""
    folder: Path = tmp_path_factory.mktemp("counting")
    distance = (torch.arange(300) - torch.arange(300)[:, None] - 1) % 300
    save_markov_model(folder, 20.0 - distance.float())
    save_byte_tokenizer(folder, num_specials=44)
    engine: LLM = make_shared_llm(folder)
    return engine


# Words


def test_words_with_and_without_space() -> None:
    """A word is another token after a space, and both are banned, however the word was written."""
    for word in ("dog", " dog"):
        rules = compile_words(word)
        assert dict(zip(rules.bias_ids.tolist(), rules.bias_values.tolist(), strict=True)) == {
            5: -np.inf,
            6: -np.inf,
        }
        assert not len(rules.word_ids)


def test_words_of_several_tokens() -> None:
    """Their last token is banned after the others, which are padded on the left."""
    rules = compile_words("cat", [1, 2, 3], "fish")
    assert rules.word_prefixes.tolist() == [[-1, 7], [-1, 9], [1, 2]]
    assert rules.word_ids.tolist() == [8, 8, 3]
    assert rules.bias_ids.tolist() == [4]  # " fish" ends with "fish", which is banned anyway
    assert rules.needs_history


def test_words_that_never_come() -> None:
    """A word with a token that is never sampled needs no check."""
    rules = compile_words([25, 1], [1, 25], [25], [1, 2])
    assert rules.word_ids.tolist() == [2]


def test_bans_win_over_biases() -> None:
    params = SamplingParams(logit_bias={5: 100.0, 9: 1.0, 30: 1.0}, bad_words=["dog"])  # type: ignore[arg-type]
    rules = compile_rules(params, tokenize, 20)
    assert rules is not None
    assert dict(zip(rules.bias_ids.tolist(), rules.bias_values.tolist(), strict=True)) == {
        5: -np.inf,
        6: -np.inf,
        9: 1.0,
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "bcdefg"),
        (["c"], "bdefgh"),
        (["cd"], "bcefgh"),
        (["cd", "ce", "fg"], "bcfhij"),
        (["abc"], "bcdefg"),  # only the output counts
        (["bcd"], "bcefgh"),
        ([b"bcd"], "bcefgh"),
        (["bcde", "é"], "bcdfgh"),
    ],
    ids=str,
)
def test_text_has_no_bad_word(counting: LLM, words: list[Any], text: str) -> None:
    words = [list(word) if isinstance(word, bytes) else word for word in words]
    (output,) = counting.generate("a", replace(GREEDY, bad_words=tuple(words)), use_tqdm=False)
    assert output["text"] == text


def test_default_params_have_no_rules() -> None:
    assert compile_rules(GREEDY, None, 20) is None
    assert compile_rules(replace(GREEDY, logprobs=5, prompt_logprobs=5, min_tokens=3), None, 20) is None


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "token of logit_bias 320 is outside"),
        ({"bad_words": [[5, VOCAB_SIZE]]}, "token of bad_words 320 is outside"),
        ({"allowed_token_ids": [5, VOCAB_SIZE + 3]}, "token of allowed_token_ids 323 is outside"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop token 320 is outside"),
        ({"bad_words": ["word"]}, "bad_words: this model has no tokenizer, so 'word'"),
    ],
    ids=str,
)
def test_refused_with_index(random_llama: Any, make_llm: Any, settings: dict[str, Any], message: str) -> None:
    """By name, value, range and index, before anything is queued; the engine goes on."""
    llm = make_llm(random_llama[0])
    params = SamplingParams(**settings)
    with pytest.raises(ValueError, match=rf"sampling params 1: {message}"):
        llm.generate([[1], [2]], [GREEDY, params], use_tqdm=False)
    with pytest.raises(ValueError, match=rf"sampling params 0: {message}"):
        llm.add_request([1], params)
    assert llm.is_finished()
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6


def test_words_without_tokens() -> None:
    with pytest.raises(ValueError, match="bad_words: the tokenizer has no token for 'bird'"):
        compile_words("dog", "bird")


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [5], "bad_words": [[5]]},
        {"allowed_token_ids": [5, 6], "bad_words": [[5], [6, 6]]},  # not at first, but after a 6
        {"allowed_token_ids": [5, 6, 7], "bad_words": [[5], [6, 7, 6], [7, 7], [6, 6]]},  # after 6 7
        {"allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]},
        {"bad_words": [[token] for token in range(300)]},
        {"allowed_token_ids": [310]},  # the model has a logit for it, the tokenizer no text
    ],
    ids=lambda settings: ",".join(settings),
)
def test_nothing_left(byte_llama: Path, make_llm: Any, settings: dict[str, Any]) -> None:
    """With every logit at -inf, an argmax would give token 0: somebody's banned token."""
    llm = make_llm(byte_llama)
    with pytest.raises(ValueError, match="can leave none of the 300 tokens"):
        llm.generate([[1]], replace(GREEDY, **settings), use_tqdm=False)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ([5, 6], [[5], [7, 6]]),  # no 7 will come, and those of the prompt don't count
        ([5, 6], [[5, 6], [6, 5]]),
        ([5, 6], [[5, 5, 6], [5, 5], [6, 5, 5]]),
    ],
)
def test_something_is_left(byte_llama: Path, make_llm: Any, allowed: list[int], words: list[list[int]]) -> None:
    """Words that ban every allowed token, but never at the same time."""
    llm = make_llm(byte_llama)
    params = replace(GREEDY, temperature=1.0, seed=1, allowed_token_ids=allowed, bad_words=words, max_tokens=30)
    (output,) = llm.generate([[7]], params, use_tqdm=False)
    tokens = output["token_ids"]
    assert len(tokens) == 30 and set(tokens) <= set(allowed)
    assert not any(tokens[start : start + len(word)] == word for word in words for start in range(30))


def test_what_is_left_by_trying() -> None:
    """A request is refused exactly if some output leads to where every token is banned."""
    rng = random.Random(0)
    num_refused = 0
    for _ in range(2000):
        num_ids = rng.randint(2, 4)
        allowed = rng.choice([None, rng.sample(range(num_ids), rng.randint(1, num_ids))])
        words = [[rng.randrange(num_ids) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 6))]
        params = SamplingParams(bad_words=words, allowed_token_ids=allowed)
        rules = compile_rules(params, None, num_ids)
        # Words are of three tokens at most, so an output's last two say what can't come next.
        outputs, is_dead = [()], False
        for output in outputs:
            nexts = [
                token
                for token in (range(num_ids) if allowed is None else allowed)
                if not any((*output, token)[-len(word) :] == tuple(word) for word in words)
            ]
            is_dead |= not nexts
            outputs += [end for token in nexts if (end := (*output, token)[-2:]) not in outputs]
        try:
            check_token_is_left(params, rules, frozenset(), num_ids)
        except ValueError:
            assert is_dead, params
            num_refused += 1
        else:
            assert not is_dead, params
    assert 200 < num_refused < 1800


def test_ids_that_are_never_sampled(byte_llama: Path, make_llm: Any) -> None:
    """Prompts may have ids beyond the tokenizer, and rules may name them; outputs never do."""
    llm = make_llm(byte_llama)
    params = replace(
        GREEDY,
        repetition_penalty=2.0,
        logit_bias={310: 100.0, 7: 90.0},
        allowed_token_ids=[7, 8, 310],
        bad_words=[[310, 8]],
    )
    (output,) = llm.generate([[310, 319, 5]], params, use_tqdm=False)
    assert output["token_ids"] == [7] * 6


def test_tokenizer_that_begins_texts_with_a_space() -> None:
    """Guards against words that are banned at the beginning of a text alone, where such a tokenizer puts a space."""
    pieces = {"_cat": 1, "cat": 2, "\n": 3, "_": 4, "_(": 5}

    def tokenize(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        text, ids = "_" + text.replace(" ", "_"), []
        while text:
            piece = max((piece for piece in pieces if text.startswith(piece)), key=len)
            ids.append(pieces[piece])
            text = text[len(piece) :]
        return {"input_ids": ids}

    rules = compile_rules(SamplingParams(bad_words=["cat", "\n"]), tokenize, 20)
    assert rules is not None
    assert {1, 2, 3} <= set(rules.bias_ids.tolist())


def test_surrogates_are_refused_by_name(counting: LLM) -> None:
    with pytest.raises(ValueError, match=r"sampling params 0: bad_words: .*surrogate"):
        counting.generate([[1]], replace(GREEDY, bad_words=["\ud800"]), use_tqdm=False)
