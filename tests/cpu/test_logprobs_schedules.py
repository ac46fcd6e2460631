"""Log-probabilities when prompts are cut up, cached, preempted or aborted: complete, in order, and the same."""

import random
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.engine.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE
from tests.cpu.naive import check_logprobs
from tests.cpu.scored_job import BLOCK_SIZE, PARAMS, generate, make_prompts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


@pytest.mark.parametrize("budget", [1, 3, BLOCK_SIZE, 30])
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_chunked_prompts(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], budget: int, enable_prefix_caching: bool
) -> None:
    """Guards against entries that are lost or doubled where one chunk ends, and at prompts of one chunk and a token."""
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    check_logprobs(random_llama[1], generate(llm, prompts, PARAMS), PARAMS)


def test_shared_blocks_are_left_alone(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """Guards against a prompt that is scored writing into blocks that others read: it gets its own, and they stay
    private. Requests that don't ask go on using the cache, at the same time."""
    prompt = prompts[-1]
    first = generate(llm, [prompt], replace(PARAMS, prompt_logprobs=None))[0]
    cached = generate(llm, [prompt], replace(PARAMS, prompt_logprobs=None))[0]
    num_cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert cached["num_cached_tokens"] == num_cached
    published = dict(llm.block_manager.hash_to_block_id)
    params = [PARAMS, replace(PARAMS, prompt_logprobs=None)] * 2
    outputs = generate(llm, [prompt] * 4, params)
    assert [output["num_cached_tokens"] for output in outputs] == [0, num_cached] * 2
    check_logprobs(random_llama[1], outputs, params)
    assert [output["token_ids"] for output in outputs] == [first["token_ids"]] * 4
    assert {key: llm.block_manager.hash_to_block_id[key] for key in published} == published
    llm.block_manager.check_integrity([])


@pytest.mark.parametrize(("num_scored", "num_found"), [(0, 0), (7, 0), (8, 1), (39, 4), (40, 5)])
def test_cache_as_far_as_it_was_scored(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], num_scored: int, num_found: int
) -> None:
    """After a preemption, blocks whose logits are not wanted any more come from the cache."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE)
    generate(llm, prompts[-1:], replace(PARAMS, prompt_logprobs=None))
    llm.add_request(prompts[-1], PARAMS)
    (seq,) = llm.scheduler.waiting.values()
    seq.num_scored_tokens = num_scored
    assert len(llm.block_manager.find_cached_blocks(seq)) == num_found
    llm.abort(seq.seq_id)


def test_scored_prompt_fills_the_cache(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """What a scored prompt has computed is there for the next one, if that is not scored itself."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE)
    generate(llm, prompts[-1:], PARAMS)
    output = generate(llm, prompts[-1:], replace(PARAMS, prompt_logprobs=None))[0]
    assert output["num_cached_tokens"] == (len(prompts[-1]) - 1) // BLOCK_SIZE * BLOCK_SIZE
    check_logprobs(random_llama[1], [output], replace(PARAMS, prompt_logprobs=None))


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("budget", [16384, 11, 5])
def test_preempted(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    prompts: list[list[int]],
    budget: int,
    enable_prefix_caching: bool,
) -> None:
    """A sequence that computes its prompt again, or the rest of one that it had begun, gives each entry once."""
    params = replace(PARAMS, max_tokens=40)
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=14,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs, steps = drive(llm, prompts, params)
    assert sum(step.num_preemptions for step in steps) > 0
    assert [len(output["logprobs"]) for output in outputs] == [40] * len(prompts)
    check_logprobs(random_llama[1], outputs, params)


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("budget", [5, 6, 7, 9])
def test_preempted_within_its_prompt(
    random_llama: Any, make_llm: Any, drive: Any, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """A prompt that loses its blocks half-way goes on from what the cache has left of it, but not beyond what it has
    scored."""
    rng = random.Random(8)
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=16, max_num_batched_tokens=budget)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3 * BLOCK_SIZE, 7, 60)]
    starts: list[int] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler,
        "_preempt",
        lambda self, seq: (starts.append(seq.num_scored_tokens), preempt(self, seq))[1],
    )
    params = replace(PARAMS, max_tokens=50)
    outputs, _ = drive(llm, prompts, [params, params, replace(params, max_tokens=3)])
    assert any(0 < start < 59 for start in starts), "no prompt was cut short"
    check_logprobs(random_llama[1], outputs, [params, params, replace(params, max_tokens=3)])


def test_stopped_and_aborted(llm: LLM, random_llama: Any, prompts: list[list[int]]) -> None:
    """The token that ends a request has its entry, the one in flight behind it has none; an aborted request has the
    entries of the tokens it has."""
    plain = generate(llm, [prompts[0]], PARAMS)[0]["token_ids"]
    stop = plain[5]
    (output,) = generate(llm, [prompts[0]], replace(PARAMS, stop_token_ids=(stop,)))
    assert output["token_ids"] == plain[: plain.index(stop) + 1]
    check_logprobs(random_llama[1], [output], PARAMS)

    seq_ids = [llm.add_request(prompt, replace(PARAMS, max_tokens=30)) for prompt in prompts[-2:]]
    for _ in range(6):
        llm.step()
    seq = llm.scheduler.find(seq_ids[0])
    llm.abort(seq_ids[0])  # its step in flight is read nevertheless: the other one's is the same
    output = llm.step().finished[seq_ids[0]]
    assert output["finish_reason"] == "abort" and 0 < len(output["token_ids"]) < 30
    check_logprobs(random_llama[1], [output], PARAMS)
    assert seq is not None and len(seq.logprobs) == len(output["token_ids"])
    while not llm.is_finished():
        finished = llm.step().finished
    check_logprobs(random_llama[1], [finished[seq_ids[1]]], PARAMS)


def test_aborted_within_its_prompt(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """What it has by then, and nothing is added to a result that was handed out."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, max_num_batched_tokens=10)
    llm.add_request(prompts[0], replace(PARAMS, max_tokens=30))
    seq_id = llm.add_request(prompts[-1], PARAMS)
    for _ in range(3):
        llm.step()
    llm.abort(seq_id)
    entries = llm.step().finished[seq_id]["prompt_logprobs"]
    num_entries = len(entries)
    assert 1 < num_entries < len(prompts[-1])
    llm.step()
    assert len(entries) == num_entries
