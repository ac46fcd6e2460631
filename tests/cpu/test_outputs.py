"""What comes back: one dict a prompt, in order, with the tokens up to the one that ended it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.outputs import RequestOutput
from tests.checkpoints import save_byte_tokenizer, save_markov_model, write_json

VOCAB_SIZE = 300
TOKENIZER_EOS = 257
GENERATION_EOS = (50, 70)
CONFIG_EOS = 90
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts: after token t comes t + 1, and t + 2 if that is banned. It has four end-of-sequence tokens:
    two of the generation config, one of the model's config and one of the tokenizer."""
    folder = tmp_path_factory.mktemp("counting")
    logits = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        logits[token, (token + 1) % VOCAB_SIZE] = 20.0
        logits[token, (token + 2) % VOCAB_SIZE] = 10.0
    save_markov_model(folder, logits)
    save_byte_tokenizer(folder, num_specials=VOCAB_SIZE - 256)
    write_json(folder, "config.json", eos_token_id=CONFIG_EOS)
    write_json(folder, "generation_config.json", eos_token_id=list(GENERATION_EOS))
    return folder


@pytest.fixture(scope="module")
def llm(counting_model: Path, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(counting_model, num_kvcache_blocks=256)
    return engine


def run(llm: LLM, first: int, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate([[first]], params, use_tqdm=False)
    return output


# Order


def test_order(llm: LLM) -> None:
    """Guards against outputs in the order in which they finish: descending lengths, duplicates, and a hundred calls
    on one engine with leftovers of the calls before."""
    rng = random.Random(6)
    for _ in range(100):
        lengths = sorted((rng.randint(1, 8) for _ in range(rng.randint(1, 8))), reverse=True)
        firsts = [rng.choice((100, 100, 105, 150)) for _ in lengths]
        params = [replace(GREEDY, max_tokens=length) for length in lengths]
        outputs = llm.generate([[7, first] for first in firsts], params, use_tqdm=False)
        assert len(outputs) == len(lengths)
        for output, first, length in zip(outputs, firsts, lengths, strict=True):
            assert output["prompt_token_ids"] == [7, first]
            assert output["token_ids"] == list(range(first + 1, first + length + 1))
    assert llm.is_finished()


def test_order_with_few_sequences_at_once(counting_model: Path, make_llm: Any) -> None:
    """Guards against order lost between the queue and the running sequences."""
    llm = make_llm(counting_model, max_num_seqs=3, max_num_batched_tokens=5)
    firsts = list(range(100, 140))
    params = [replace(GREEDY, max_tokens=1 + (first * 7) % 5) for first in firsts]
    outputs = llm.generate([[first] * (first % 9 + 1) for first in firsts], params, use_tqdm=False)
    for output, first, one in zip(outputs, firsts, params, strict=True):
        assert output["token_ids"] == list(range(first + 1, first + one.max_tokens + 1))


# Keys and types


def test_keys(llm: LLM) -> None:
    """The documented keys and nothing else, of plain types that json can write."""
    outputs = llm.generate([[48], [60], "ab"], [GREEDY, replace(GREEDY, max_tokens=2), GREEDY], use_tqdm=False)
    assert isinstance(outputs, list)
    for output in outputs:
        assert set(output) == RequestOutput.__required_keys__
        assert type(output) is dict
        assert type(output["text"]) is str
        for key in ("token_ids", "prompt_token_ids"):
            assert type(output[key]) is list
            assert all(type(token_id) is int for token_id in output[key])
        assert type(output["num_cached_tokens"]) is int
        assert type(output["stop_reason"]) in (int, type(None))
    assert [output["finish_reason"] for output in outputs] == ["stop", "length", "length"]
    assert [output["stop_reason"] for output in outputs] == [50, None, None]
    assert outputs[2]["prompt_token_ids"] == [97, 98]
    assert outputs[2]["text"] == "cdefghijkl"


def test_outputs_are_separate_objects(llm: LLM) -> None:
    """Guards against duplicates that share one list."""
    first, second = llm.generate([[100], [100]], GREEDY, use_tqdm=False)
    first["token_ids"].clear()
    first["prompt_token_ids"].clear()
    assert second["token_ids"] == list(range(101, 111))
    assert second["prompt_token_ids"] == [100]


# Ends


@pytest.mark.parametrize("eos", [*GENERATION_EOS, CONFIG_EOS, TOKENIZER_EOS])
def test_every_eos_stops(llm: LLM, eos: int) -> None:
    """Guards against knowing one end-of-sequence token only: those of the generation config, of the model's config and
    of the tokenizer all count. The token is part of the output."""
    output = run(llm, eos - 4, GREEDY)
    assert output["token_ids"] == [eos - 3, eos - 2, eos - 1, eos]
    assert output["finish_reason"] == "stop"
    assert output["stop_reason"] == eos


@pytest.mark.parametrize("eos", [*GENERATION_EOS, CONFIG_EOS, TOKENIZER_EOS])
def test_ignore_eos(llm: LLM, eos: int) -> None:
    output = run(llm, eos - 4, replace(GREEDY, ignore_eos=True))
    assert output["token_ids"] == list(range(eos - 3, eos + 7))
    assert output["finish_reason"] == "length"
    assert output["stop_reason"] is None


@pytest.mark.parametrize(
    ("eos", "expected"),
    [([5, 7], {5, 7, TOKENIZER_EOS}), (5, {5, TOKENIZER_EOS}), (None, {TOKENIZER_EOS}), (..., {TOKENIZER_EOS})],
    ids=str,
)
def test_forms_of_eos(tmp_path: Path, make_llm: Any, eos: int | list[int] | None, expected: set[int]) -> None:
    """Guards against one form only of what a generation config says: a list, a number, null, nothing."""
    logits = torch.eye(VOCAB_SIZE).roll(1, dims=1) * 20
    save_markov_model(tmp_path, logits)
    save_byte_tokenizer(tmp_path, num_specials=VOCAB_SIZE - 256)
    write_json(tmp_path, "generation_config.json", eos_token_id=eos)
    llm = make_llm(tmp_path)
    assert llm.eos_token_ids == frozenset(expected)
    output = run(llm, 0, GREEDY)
    assert output["token_ids"] == list(range(1, min([10, *expected]) + 1))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids(llm: LLM, ignore_eos: bool) -> None:
    """Guards against stop tokens being switched off together with the end-of-sequence tokens."""
    params = replace(GREEDY, stop_token_ids=(104, 107), ignore_eos=ignore_eos)
    output = run(llm, 100, params)
    assert output["token_ids"] == [101, 102, 103, 104]
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", 104)
    output = run(llm, 104, params)
    assert output["token_ids"] == [105, 106, 107]
    assert output["stop_reason"] == 107


def test_stop_token_in_the_prompt(llm: LLM) -> None:
    """Only what is emitted ends a request."""
    (output,) = llm.generate(
        [[104, 50, TOKENIZER_EOS, 107]], replace(GREEDY, stop_token_ids=(104, 107)), use_tqdm=False
    )
    assert output["token_ids"] == list(range(108, 118))
    assert output["finish_reason"] == "length"


def test_stop_tokens_of_others(llm: LLM) -> None:
    """Guards against one request's stop tokens ending another in the same batch."""
    params = [replace(GREEDY, stop_token_ids=(stop,)) for stop in (103, 105, 200)]
    outputs = llm.generate([[100]] * 3, params, use_tqdm=False)
    assert [output["token_ids"][-1] for output in outputs] == [103, 105, 110]
    assert [output["stop_reason"] for output in outputs] == [103, 105, None]


def test_stop_on_the_last_token(llm: LLM) -> None:
    """A stop token that is also the last token allowed: the reason is the stop."""
    output = run(llm, 40, GREEDY)
    assert len(output["token_ids"]) == GREEDY.max_tokens
    assert (output["finish_reason"], output["stop_reason"]) == ("stop", 50)


def test_stop_on_the_first_token(llm: LLM) -> None:
    output = run(llm, 49, GREEDY)
    assert (output["token_ids"], output["finish_reason"], output["stop_reason"]) == ([50], "stop", 50)
    output = run(llm, 49, replace(GREEDY, max_tokens=1))
    assert (output["token_ids"], output["finish_reason"], output["stop_reason"]) == ([50], "stop", 50)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stop", ["eos", "stop_token_ids"])
def test_min_tokens(llm: LLM, stop: str, temperature: float) -> None:
    """Guards against an off-by-one, and against blocking only one kind of token: until four tokens are out neither an
    end-of-sequence nor a stop token is sampled, and right after them either may be."""
    params = replace(GREEDY, temperature=temperature, min_tokens=4, seed=1)
    eos = 50
    if stop == "stop_token_ids":
        eos, params = 150, replace(params, stop_token_ids=(150,), ignore_eos=True)
    # Before: the model's second choice takes its place, and it counts on from there.
    for num_before in (0, 1, 2, 3):
        output = run(llm, eos - num_before - 1, params)
        skipped = [eos - num_before + i for i in range(num_before)] + [eos + 1 + i for i in range(10 - num_before)]
        assert output["token_ids"] == skipped
        assert output["finish_reason"] == "length"
    # After: it ends the request as the fifth.
    output = run(llm, eos - 5, params)
    assert output["token_ids"] == [eos - 4, eos - 3, eos - 2, eos - 1, eos]
    assert output["stop_reason"] == eos


def test_min_tokens_with_filters(llm: LLM) -> None:
    """Guards against a filter that was computed before the ban and leaves nothing."""
    for settings in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        params = replace(GREEDY, temperature=1.0, min_tokens=4, seed=1, **settings)
        assert run(llm, 49, params)["token_ids"] == list(range(51, 61))


def test_min_tokens_of_others(llm: LLM) -> None:
    """Guards against a ban that reaches another request's row."""
    params = [GREEDY, replace(GREEDY, min_tokens=3), GREEDY, replace(GREEDY, ignore_eos=True)]
    outputs = llm.generate([[48]] * 4, params, use_tqdm=False)
    assert [output["token_ids"][:3] for output in outputs] == [[49, 50], [49, 51, 52], [49, 50], [49, 50, 51]]


def test_abort_reason(llm: LLM) -> None:
    seq_id = llm.add_request([100], GREEDY)
    for _ in range(4):
        llm.step()
    llm.abort(seq_id)
    output = llm.step().finished[seq_id]
    assert output["finish_reason"] == "abort"
    assert output["stop_reason"] is None
    assert output["prompt_token_ids"] == [100]
    assert output["token_ids"] == [101, 102, 103]
    assert output["text"] == bytes([101, 102, 103]).decode()
