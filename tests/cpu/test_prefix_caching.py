"""The prefix cache changes how much is computed, never what comes out."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, save_random_model

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1)


@pytest.fixture(scope="module")
def cold(random_llama: Any, make_shared_llm: Any) -> LLM:
    """An engine whose prefix cache is off."""
    llm: LLM = make_shared_llm(random_llama[0], enable_prefix_caching=False, num_kvcache_blocks=512)
    return llm


@pytest.fixture
def random_prompt(rng: random.Random) -> Callable[[int], list[int]]:
    return lambda length: [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def token_ids(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def full_blocks(num_tokens: int) -> int:
    """Tokens in the full blocks of so many tokens."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, seed=5)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", LENGTHS)
def test_fully_cached_prompt(
    random_llama: Any,
    cold: LLM,
    make_llm: Any,
    random_prompt: Any,
    length: int,
    params: SamplingParams,
) -> None:
    """Guards against a step without query tokens, and against a KV row written twice, when all of a prompt is cached:
    alone, three times over, three at once, and longer by a suffix."""
    llm = make_llm(random_llama[0])
    prompt = random_prompt(length)
    (expected,) = token_ids(cold, [prompt], params)
    reusable = full_blocks(length - 1)
    for num_cached in (0, reusable, reusable):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output["token_ids"] == expected
        assert output["num_cached_tokens"] == num_cached
    for output in llm.generate([prompt] * 3, params, use_tqdm=False):
        assert output["token_ids"] == expected
        assert output["num_cached_tokens"] == reusable
    for suffix_length in (1, 2, BLOCK_SIZE + 3):
        suffix = random_prompt(suffix_length)
        suffix[0] = (expected[0] + suffix_length) % VOCAB_SIZE  # new: only blocks of the prompt are cached
        (output,) = llm.generate([prompt + suffix], params, use_tqdm=False)
        assert output["token_ids"] == token_ids(cold, [prompt + suffix], params)[0]
        assert output["num_cached_tokens"] == full_blocks(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_duplicates_in_one_step(random_llama: Any, cold: LLM, make_llm: Any, random_prompt: Any, length: int) -> None:
    """Guards against blocks shared within a step being read before they are written."""
    llm = make_llm(random_llama[0])
    prompt = random_prompt(length)
    outputs = llm.generate([prompt] * 4, GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == token_ids(cold, [prompt], GREEDY) * 4
    assert [output["num_cached_tokens"] for output in outputs] == [0] + [full_blocks(length - 1)] * 3


@pytest.mark.parametrize("block_size", [1, 4])
def test_tiny_pool_with_two_token_alphabet(tmp_path: Any, make_llm: Any, rng: random.Random, block_size: int) -> None:
    """Guards against stale hash entries of reused blocks: prompts and outputs over a tiny vocabulary hit each other's
    blocks all the time, the pool is so small that every block is reused again and again, and stops end sequences
    in the middle of a block."""
    save_random_model(tmp_path, "qwen3", vocab_size=5, seed=3)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 24))] for _ in range(200)]
    params = [
        SamplingParams(temperature=3.0, max_tokens=rng.randint(1, 9), seed=rng.randrange(9), stop_token_ids=stop)
        for stop in rng.choices([(), (4,), (3, 4)], k=len(prompts))
    ]
    expected = make_llm(tmp_path, enable_prefix_caching=False, num_kvcache_blocks=512).generate(
        prompts, params, use_tqdm=False
    )
    assert {output["finish_reason"] for output in expected} == {"stop", "length"}
    assert len({tuple(output["token_ids"]) for output in expected}) > 100

    llm = make_llm(tmp_path, kvcache_block_size=block_size, num_kvcache_blocks=48 // block_size, max_num_seqs=4)
    first = 0
    num_cached = 0
    while first < len(prompts):
        chosen = slice(first, first + rng.randint(1, 12))
        first = chosen.stop
        outputs = llm.generate(prompts[chosen], params[chosen], use_tqdm=False)
        for output, reference in zip(outputs, expected[chosen], strict=True):
            assert output["token_ids"] == reference["token_ids"]
            assert output["finish_reason"] == reference["finish_reason"]
            num_cached += output["num_cached_tokens"]
        llm.block_manager.check_integrity(llm.scheduler.unfinished())
    assert num_cached > 100  # else nothing has been tested


def test_reused_blocks_forget_their_content(random_llama: Any, cold: LLM, make_llm: Any, random_prompt: Any) -> None:
    """Guards against a hit on a block that was given to another sequence since."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=4)
    first, second = random_prompt(3 * BLOCK_SIZE), random_prompt(3 * BLOCK_SIZE)
    for prompt in (first, second, first, second[: BLOCK_SIZE + 2], first, first[:BLOCK_SIZE] + second, second):
        assert token_ids(llm, [prompt[: 3 * BLOCK_SIZE]], GREEDY) == token_ids(cold, [prompt[: 3 * BLOCK_SIZE]], GREEDY)


def test_shared_prefix_is_computed_once(
    random_llama: Any, cold: LLM, make_llm: Any, drive: Any, random_prompt: Any
) -> None:
    """Guards against sequences of one step each computing the prefix that they share."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=512)
    prefix, num_rest, num_own = random_prompt(2 * BLOCK_SIZE + 5), 5, 4
    prompts = [[*prefix, index, *random_prompt(num_own - 1)] for index in range(64)]
    expected = token_ids(cold, prompts, GREEDY)
    # The second call finds the prompts' own blocks too, of which none is full here.
    for num_prefill in (2 * BLOCK_SIZE + 64 * (num_rest + num_own), 64 * (num_rest + num_own)):
        outputs, steps = drive(llm, prompts, GREEDY)
        assert [output["token_ids"] for output in outputs] == expected
        assert sum(step.num_prefill_tokens for step in steps) == num_prefill
        num_cached = sum(output["num_cached_tokens"] for output in outputs)
        assert num_cached == sum(step.num_cached_tokens for step in steps)
        assert num_cached == sum(len(prompt) for prompt in prompts) - num_prefill


@pytest.mark.parametrize("budget", [BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 50])
def test_prefix_longer_than_a_step_is_computed_once(
    random_llama: Any, cold: LLM, make_llm: Any, drive: Any, random_prompt: Any, budget: int
) -> None:
    """Guards against sequences that wait while a chunked prefix is under way not sharing it in the end."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=512, max_num_batched_tokens=budget)
    prefix = random_prompt(8 * BLOCK_SIZE)
    prompts = [[*prefix, index, index, index] for index in range(10)]
    outputs, steps = drive(llm, prompts, GREEDY)
    assert [output["token_ids"] for output in outputs] == token_ids(cold, prompts, GREEDY)
    assert sum(step.num_prefill_tokens for step in steps) == len(prefix) + 3 * len(prompts)
    assert max(step.num_prefill_tokens + step.num_decode_tokens for step in steps) <= budget


@pytest.mark.parametrize("num_turn_tokens", [1, BLOCK_SIZE + 1])
def test_conversation_reuses_outputs(
    random_llama: Any, cold: LLM, make_llm: Any, random_prompt: Any, num_turn_tokens: int
) -> None:
    """Guards against blocks filled by decoding not being published, or published under wrong tokens."""
    llm = make_llm(random_llama[0])
    params = replace(GREEDY, max_tokens=2 * BLOCK_SIZE + 3)
    conversation, num_known = random_prompt(10), 0
    for _ in range(4):
        (output,) = llm.generate([conversation], params, use_tqdm=False)
        assert output["token_ids"] == token_ids(cold, [conversation], params)[0]
        assert output["num_cached_tokens"] == full_blocks(num_known)
        conversation = conversation + output["token_ids"] + random_prompt(num_turn_tokens)
        num_known = len(conversation) - num_turn_tokens - 1  # the KV of the last output was never computed


def test_conversation_after_a_stop(random_llama: Any, cold: LLM, make_llm: Any, random_prompt: Any) -> None:
    """Guards against publishing a block whose end holds the token that was sampled after a stop, and dropped."""
    llm = make_llm(random_llama[0])
    for length in range(BLOCK_SIZE - 6, BLOCK_SIZE + 2):
        prompt = random_prompt(length)
        (continuation,) = token_ids(cold, [prompt], replace(GREEDY, max_tokens=12))
        params = replace(GREEDY, max_tokens=12, stop_token_ids=(continuation[4],))
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output["finish_reason"] == "stop"
        turn = prompt + output["token_ids"] + random_prompt(BLOCK_SIZE)
        (output,) = llm.generate([turn], GREEDY, use_tqdm=False)
        assert output["token_ids"] == token_ids(cold, [turn], GREEDY)[0]


def test_shares_with_running_sequences(
    random_llama: Any, cold: LLM, make_llm: Any, drive: Any, random_prompt: Any
) -> None:
    """Guards against blocks that two sequences hold being freed with the first of them."""
    llm = make_llm(random_llama[0])
    prompt = random_prompt(2 * BLOCK_SIZE + 1)
    long = replace(GREEDY, max_tokens=3 * BLOCK_SIZE)
    first = llm.add_request(prompt, replace(GREEDY, max_tokens=4))
    finished = dict(llm.step().finished)
    second = llm.add_request(prompt, long)
    finished.update(llm.step().finished)
    third = llm.add_request([*prompt[:BLOCK_SIZE], 1, 2], long)
    while first not in finished:
        finished.update(llm.step().finished)
    filler = llm.add_request(random_prompt(5 * BLOCK_SIZE), long)  # takes what the first gave back
    while not llm.is_finished():
        finished.update(llm.step().finished)
    (expected,) = token_ids(cold, [prompt], long)
    assert finished[first]["token_ids"] == expected[:4]
    assert finished[second]["token_ids"] == expected
    assert finished[second]["num_cached_tokens"] == 2 * BLOCK_SIZE
    assert finished[third]["token_ids"] == token_ids(cold, [[*prompt[:BLOCK_SIZE], 1, 2]], long)[0]
    assert finished[third]["num_cached_tokens"] == BLOCK_SIZE
    assert filler in finished


@pytest.mark.parametrize("has_parent", [False, True], ids=["all_collide", "parent_ignored"])
def test_hash_is_not_trusted(
    random_llama: Any,
    cold: LLM,
    make_llm: Any,
    random_prompt: Any,
    monkeypatch: pytest.MonkeyPatch,
    has_parent: bool,
) -> None:
    """Guards against a hit by hash alone, by a hash that collides: all blocks have one hash, or equal tokens after
    different beginnings have."""
    hash_of_tokens = (lambda tokens, parent: xxhash.xxh3_64_intdigest(tokens)) if has_parent else (lambda *_: 1)
    monkeypatch.setattr("nanovllm.engine.block_manager._hash", hash_of_tokens)
    llm = make_llm(random_llama[0])
    heads = [random_prompt(BLOCK_SIZE) for _ in range(3)]
    body = random_prompt(BLOCK_SIZE + 1)
    prompts = [head + body for head in heads]
    expected = token_ids(cold, [*prompts, body], GREEDY)
    for _ in range(2):
        assert token_ids(llm, [*prompts, body], GREEDY) == expected  # in one step
        for prompt, tokens in zip([*prompts, body], expected, strict=True):  # and one after another
            assert token_ids(llm, [prompt], GREEDY) == [tokens]
            llm.block_manager.check_integrity([])


def test_cache_off(random_llama: Any, make_llm: Any, drive: Any, random_prompt: Any) -> None:
    """With the cache off nothing is ever taken from it, not within a step either."""
    llm = make_llm(random_llama[0], enable_prefix_caching=False)
    prompt = random_prompt(3 * BLOCK_SIZE)
    for _ in range(2):
        outputs, steps = drive(llm, [prompt] * 3, GREEDY)
        assert [output["num_cached_tokens"] for output in outputs] == [0, 0, 0]
        assert sum(step.num_cached_tokens for step in steps) == 0
        assert sum(step.num_prefill_tokens for step in steps) == 3 * len(prompt)
