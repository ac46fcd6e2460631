"""Log-probabilities of output and prompt tokens are those of transformers."""

import copy
import json
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine import extra_sampler
from nanovllm.engine.outputs import TokenLogprob
from nanovllm.layers.logprobs import score_tokens
from tests.checkpoints import VOCAB_SIZE, load_reference, save_markov_model
from tests.cpu.naive import check_logprobs
from tests.cpu.scored_job import BLOCK_SIZE, PARAMS, generate, make_prompts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


def test_equals_transformers(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """Guards against a row or a position of somebody else's, against a missing last entry, and, in the second call,
    against prompts of which the prefix cache has a part: its logits have never been computed."""
    for num_best in (0, 1, 20):
        params = replace(PARAMS, logprobs=num_best, prompt_logprobs=num_best)
        outputs = generate(llm, prompts, params)
        check_logprobs(random_llama[1], outputs, params)
        assert [output["num_cached_tokens"] for output in outputs] == [0] * len(prompts)


def test_checker_sees_faults(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """A list that is a position off, and one that lacks its end, must fail the comparison."""
    outputs = generate(llm, prompts[-1:], PARAMS)
    entries = outputs[0]["logprobs"]
    for wrong in (entries[1:] + entries[:1], entries[:-1]):
        with pytest.raises(AssertionError):
            check_logprobs(random_llama[1], [{**outputs[0], "logprobs": wrong}], PARAMS)
    entries = outputs[0]["prompt_logprobs"]
    with pytest.raises(AssertionError):
        check_logprobs(random_llama[1], [{**outputs[0], "prompt_logprobs": [None, *entries[2:], entries[1]]}], PARAMS)


def test_sampled_tokens(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """Log-probabilities are of the raw logits, before temperature, filters, penalties and bans, which change the logits
    in place; and asking for them changes no token."""
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 2.0},
        {"top_k": 5, "top_p": 0.9},
        {"min_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "bad_words": [[3], [4, 5]]},
        {"allowed_token_ids": range(100), "min_p": 0.1},
        {"logit_bias": {7: 50.0}},
    ]
    base = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    plain = [replace(base, seed=index, **change) for index, change in enumerate(changes)]
    asking = [replace(one, logprobs=index % 4, prompt_logprobs=1) for index, one in enumerate(plain)]
    expected = [output["token_ids"] for output in generate(llm, prompts, plain)]
    outputs = generate(llm, prompts, asking)
    assert [output["token_ids"] for output in outputs] == expected
    check_logprobs(random_llama[1], outputs, asking)
    for prompt, one, tokens in zip(prompts, asking, expected, strict=True):  # without the copy that others force
        outputs_of_one = generate(llm, [prompt], one)
        check_logprobs(random_llama[1], outputs_of_one, one)
        assert outputs_of_one[0]["token_ids"] == tokens
    assert outputs[6]["token_ids"] == [7] * 12
    assert outputs[6]["logprobs"][0][7].rank > 1  # chosen by its bias, not by the model


def test_some_rows_ask(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """Guards against rows that are mixed up when only some of a batch ask, and for different numbers."""
    counts = [(None, None), (0, None), (None, 0), (5, 1), (None, None), (1, 5), (20, None)]
    params = [replace(PARAMS, logprobs=own, prompt_logprobs=prompt) for own, prompt in counts]
    expected = [output["token_ids"] for output in generate(llm, prompts, SamplingParams(temperature=0, max_tokens=12))]
    for seed in range(3):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        outputs = generate(llm, [prompts[i] for i in order], [params[i] for i in order])
        check_logprobs(random_llama[1], outputs, [params[i] for i in order])
        assert [output["token_ids"] for output in outputs] == [expected[i] for i in order]


def test_memory_of_prompt_logprobs(
    random_llama: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    """Guards against the logits of a whole prompt existing at once: with 152k tokens, those of 16,384 are 10 GB."""
    monkeypatch.setattr(extra_sampler, "PROMPT_ROWS", 16)
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE)
    compute_logits, num_rows = llm.runner.model.compute_logits, []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute_logits(hidden)

    llm.runner.model.compute_logits = compute
    outputs = generate(llm, prompts, PARAMS)
    check_logprobs(random_llama[1], outputs, PARAMS)
    assert max(num_rows) == 16
    assert num_rows[:7] == [16, 16, 16, 16, 13, 7, 7]  # 77 prompt tokens but the first ones, then the seven samples


def test_vocabulary_beyond_the_tokenizer(byte_llama: Any, make_llm: Any) -> None:
    """The log-softmax is over all that the model has logits for, also ids that are never sampled."""
    outputs = generate(make_llm(byte_llama), [[1, 2, 319, 4]], replace(PARAMS, logprobs=20, prompt_logprobs=20))
    check_logprobs(load_reference(byte_llama), outputs, replace(PARAMS, logprobs=20, prompt_logprobs=20))


def test_ties_and_small_vocabularies(tmp_path: Any, make_llm: Any) -> None:
    """Equally likely tokens share a rank and come in the order of their ids; no more than there are."""
    save_markov_model(tmp_path, torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 4))
    (output,) = generate(make_llm(tmp_path), [[3, 0]], replace(PARAMS, max_tokens=2, logprobs=20))
    total = torch.tensor([0.0, 1.0, 1.0, 0.0]).logsumexp(0).item()
    assert output["token_ids"] == [1, 1]
    for entry in output["logprobs"]:
        assert list(entry) == [1, 2, 0, 3]
        assert [value.rank for value in entry.values()] == [1, 1, 3, 3]
        assert [value.logprob for value in entry.values()] == pytest.approx([1 - total, 1 - total, -total, -total])
    assert list(output["prompt_logprobs"][1]) == [0, 1, 2]
    assert isinstance(entry[1], TokenLogprob)


LOGIT = st.one_of(st.floats(-60, 60, width=32), st.integers(-2, 2).map(float), st.just(-torch.inf))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(LOGIT, min_size=1, max_size=300).filter(lambda row: max(row) > -torch.inf),
    st.integers(0, 20),
    st.integers(0, 299),
)
def test_scores_equal_sorting(row: list[float], num_best: int, token: int) -> None:
    """Ties and -inf, over more than two segments."""
    token %= len(row)
    scores = score_tokens(torch.tensor([row]), None, torch.tensor([token]), num_best)[:, 0]
    order = sorted(range(len(row)), key=lambda one: (-row[one], one))
    ids = [token, *order[:num_best]]
    assert scores[0].tolist() == ids
    assert scores[1].tolist() == [1 + sum(value > row[one] for value in row) for one in ids]
    exact = torch.tensor(row, dtype=torch.float64).log_softmax(-1)[ids]
    torch.testing.assert_close(scores[2].view(torch.float32).double(), exact, rtol=1e-6, atol=1e-5)


def test_list_of_arrays(llm: LLM, prompts: list[list[int]]) -> None:
    """What a user does with a list: look, slice, join, compare, print, copy; and with the arrays behind it."""
    output = generate(llm, prompts[-1:], PARAMS)[0]
    own, prompt = output["logprobs"], output["prompt_logprobs"]
    assert len(own) == PARAMS.max_tokens and len(prompt) == len(prompts[-1])
    assert prompt[0] is None and prompt[-1] == list(prompt)[-1] and own[-2:] == list(own)[-2:]
    assert own[:3] + own[3:] == own == list(own) and own != own[:-1] and repr(own) == repr(list(own))
    assert [None, *prompt[1:]] == list(prompt) == pickle.loads(pickle.dumps(prompt)) == copy.deepcopy(prompt)
    assert own.token_ids[:, 0].tolist() == output["token_ids"]
    assert own.token_ids.shape == own.ranks.shape == own.logprobs.shape == (PARAMS.max_tokens, 4)
    for entry, ids, ranks, values in zip(own, own.token_ids, own.ranks, own.logprobs, strict=True):
        rows = zip(ids.tolist(), zip(values.tolist(), ranks.tolist(), strict=True), strict=True)
        assert entry == dict(rows)
    with pytest.raises(IndexError):
        own[len(own)]
    with pytest.raises(TypeError):
        own[0] = own[1]
    assert json.loads(json.dumps(list(own)))[0][str(output["token_ids"][0])] == list(own[0][output["token_ids"][0]])
