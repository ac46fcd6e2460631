"""A seeded request draws the same tokens wherever and whenever it runs; others don't."""

import random
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 8
UNSEEDED = SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True)
SETTINGS = (
    {"seed": 0},
    {"seed": 1},
    {"seed": 2**64 - 1, "top_p": 0.9},
    {"seed": 7, "top_k": 20, "temperature": 0.8},
    {"seed": 7, "min_p": 0.05},
)
SEEDED = [replace(UNSEEDED, **one) for one in SETTINGS]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """One for each of SEEDED."""
    rng = random.Random(5)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 8, 15, 17)]


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


@pytest.fixture(scope="module")
def solo(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of each seeded request alone in the engine."""
    return [token_ids(llm, [prompt], [one])[0] for prompt, one in zip(prompts, SEEDED, strict=True)]


def token_ids(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_fixture_sees_faults(solo: list[list[int]]) -> None:
    """Outputs must be random enough for a lost seed to show."""
    assert all(len(set(tokens)) > 10 for tokens in solo)
    assert len({tuple(tokens) for tokens in solo}) == len(solo)


def test_again(llm: LLM, prompts: list[list[int]], solo: list[list[int]]) -> None:
    """Guards against noise that depends on what ran before."""
    assert [token_ids(llm, [prompt], [one])[0] for prompt, one in zip(prompts, SEEDED, strict=True)] == solo


@pytest.mark.parametrize("shuffle_seed", range(3))
def test_among_others(llm: LLM, prompts: list[list[int]], solo: list[list[int]], shuffle_seed: int) -> None:
    """Guards against noise that depends on a request's place in the batch: mixed with unseeded and greedy requests,
    some with filters, in any order."""
    rng = random.Random(shuffle_seed)
    requests = list(zip(prompts, SEEDED, solo, strict=True))
    others = [replace(UNSEEDED, max_tokens=5), replace(UNSEEDED, temperature=0), replace(UNSEEDED, top_k=3)]
    requests += [(rng.choice(prompts), rng.choice(others), []) for _ in range(9)]
    rng.shuffle(requests)
    outputs = token_ids(llm, [request[0] for request in requests], [request[1] for request in requests])
    for output, (_, params, expected) in zip(outputs, requests, strict=True):
        assert params.seed is None or output == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        {"max_num_seqs": 3, "max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False},
        {"kvcache_block_size": 3},
        {"seed": 1234},
    ],
    ids=str,
)
def test_other_engine_settings(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], solo: list[list[int]], settings: dict[str, Any]
) -> None:
    """Guards against noise that depends on how the work was cut up, or on the engine's own seed."""
    assert token_ids(make_llm(random_llama[0], **settings), prompts, SEEDED) == solo


def test_preempted(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    solo: list[list[int]],
) -> None:
    """Guards against noise that depends on the step instead of the position."""

    def fits(self: Scheduler, seq: Any, cached_block_ids: list[int], forecast: Any) -> bool:
        return self.block_manager.num_new_blocks(seq, cached_block_ids) <= self.block_manager.num_free_blocks

    monkeypatch.setattr(Scheduler, "_fits", fits)
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=8)
    outputs, steps = drive(llm, prompts, SEEDED)
    assert sum(step.num_preemptions for step in steps) > 0
    assert [output["token_ids"] for output in outputs] == solo


def test_other_seed_differs(llm: LLM, prompts: list[list[int]], solo: list[list[int]]) -> None:
    """Guards against a seed being cut short: the neighbour, and seeds equal in their lower half, draw other tokens."""
    for prompt, params, expected in zip(prompts, SEEDED, solo, strict=True):
        assert params.seed is not None
        others = [params.seed ^ 1, params.seed ^ 2**31, params.seed ^ 2**32, params.seed ^ 2**63]
        outputs = token_ids(llm, [prompt] * len(others), [replace(params, seed=seed) for seed in others])
        assert len({tuple(tokens) for tokens in [*outputs, expected]}) == len(others) + 1


def test_positions_differ(llm: LLM) -> None:
    """Guards against noise that is the same at every position, or that repeats a neighbouring seed's one later: at a
    very high temperature the noise alone decides."""
    params = [SamplingParams(temperature=1e6, max_tokens=40, ignore_eos=True, seed=seed) for seed in range(6)]
    outputs = token_ids(llm, [[1]] * len(params), params)
    pairs = [(tokens[i], tokens[i + 1]) for tokens in outputs for i in range(39)]
    assert len(set(pairs)) >= len(pairs) - 2
    assert all(len(set(tokens)) > 30 for tokens in outputs)


def test_same_seed_twice_in_a_call(llm: LLM, prompts: list[list[int]], solo: list[list[int]]) -> None:
    """A request is its prompt, params and seed: two equal ones give equal tokens."""
    assert token_ids(llm, [prompts[1], prompts[1], prompts[0]], [SEEDED[1], SEEDED[1], SEEDED[0]]) == [
        solo[1],
        solo[1],
        solo[0],
    ]


def test_unseeded_differ(llm: LLM, prompts: list[list[int]]) -> None:
    """Guards against unseeded requests sharing one seed: within a call, and from call to call."""
    outputs = token_ids(llm, [prompts[0]] * 3, UNSEEDED) + token_ids(llm, [prompts[0]] * 3, UNSEEDED)
    assert len({tuple(tokens) for tokens in outputs}) == 6


def test_engine_seed(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """The engine's seed makes a whole run repeatable; another one, or none, gives another run."""

    def run(**settings: Any) -> list[list[int]]:
        llm = make_llm(random_llama[0], **settings)
        outputs = token_ids(llm, prompts, UNSEEDED)
        with pytest.raises(ValueError):
            llm.generate([[]], UNSEEDED, use_tqdm=False)  # a refused call draws nothing
        return outputs + token_ids(llm, prompts, UNSEEDED)

    first = run(seed=3)
    assert len({tuple(tokens) for tokens in first}) == len(first)
    assert run(seed=3) == first
    assert run(seed=3, max_num_seqs=2, max_num_batched_tokens=8) == first
    for other in (run(seed=4), run(), run()):
        assert all(tokens != expected for tokens, expected in zip(other, first, strict=True))
        first = other
