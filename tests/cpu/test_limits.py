"""Limits of the engine: each is kept, and none changes a token."""

import random
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import SamplingParams
from tests.checkpoints import VOCAB_SIZE, reference_greedy

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(random_llama: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts of many lengths and 40 greedy tokens of each, by transformers."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 15, 16, 17, 40, 100)]
    return [(prompt, reference_greedy(random_llama[1], prompt, 40)) for prompt in prompts]


# Sequences, tokens, blocks


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 700])
def test_max_num_seqs(
    random_llama: Any, make_llm: Any, drive: Any, requests: list[tuple[list[int], list[int]]], max_num_seqs: int
) -> None:
    """Guards against a limit that is not kept, or kept by running fewer than could run."""
    llm = make_llm(random_llama[0], max_num_seqs=max_num_seqs, num_kvcache_blocks=2000)
    short = [request for request in requests if len(request[0]) < 20]
    chosen = [short[index % len(short)] for index in range(720 if max_num_seqs == 700 else 30)]
    params = replace(GREEDY, max_tokens=3 if max_num_seqs == 700 else 6)
    outputs, steps = drive(llm, [prompt for prompt, _ in chosen], params)
    for output, (_, expected) in zip(outputs, chosen, strict=True):
        assert output["token_ids"] == expected[: params.max_tokens]
    # Every sequence that runs gets one token a step here.
    assert max(len(step.new_token_ids) for step in steps) == min(max_num_seqs, len(chosen))


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(1, 512), (1, 1), (2, 512), (5, 7), (17, 64), (16384, 512)])
def test_max_num_batched_tokens(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    requests: list[tuple[list[int], list[int]]],
    budget: int,
    max_num_seqs: int,
) -> None:
    """Guards against budgets that starve somebody: smaller than the number of sequences, and down to one token."""
    llm = make_llm(random_llama[0], max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    outputs, steps = drive(llm, [prompt for prompt, _ in requests], GREEDY)
    assert [output["token_ids"] for output in outputs] == [tokens[:6] for _, tokens in requests]
    used = [step.num_prefill_tokens + step.num_decode_tokens for step in steps]
    assert max(used) <= budget
    if budget <= 17:
        assert max(used) == budget


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_block_size(
    random_llama: Any, make_llm: Any, drive: Any, requests: list[tuple[list[int], list[int]]], block_size: int
) -> None:
    """Guards against arithmetic that holds for powers of two only, or for blocks larger than a sequence only."""
    llm = make_llm(random_llama[0], kvcache_block_size=block_size, num_kvcache_blocks=1400 // block_size + 7)
    params = replace(GREEDY, max_tokens=40)
    for _ in range(2):  # the second time from the prefix cache
        outputs, steps = drive(llm, [prompt for prompt, _ in requests], params)
        assert [output["token_ids"] for output in outputs] == [tokens for _, tokens in requests]
    num_cached = sum((len(prompt) - 1) // block_size * block_size for prompt, _ in requests)
    assert sum(step.num_cached_tokens for step in steps) == num_cached


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_model_len": 40}], ids=str)
def test_default_number_of_blocks(
    random_llama: Any, make_llm: Any, requests: list[tuple[list[int], list[int]]], settings: dict[str, int]
) -> None:
    """What a CPU takes by default holds a sequence at least, and no more than all sequences can use."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=None, kvcache_block_size=None, **settings)
    num_tokens = llm.block_manager.num_blocks * llm.block_manager.block_size
    blocks_per_sequence = -(-llm.max_model_len // llm.block_manager.block_size)
    assert llm.max_model_len <= num_tokens
    assert llm.block_manager.num_blocks <= llm.config.max_num_seqs * blocks_per_sequence
    assert llm.config.num_kvcache_blocks is None  # a derived size is not written back
    (output,) = llm.generate([requests[1][0]], GREEDY, use_tqdm=False)
    assert output["token_ids"] == requests[1][1][:6]


# Long prompts


@pytest.mark.parametrize("budget", [8, 24])
def test_long_prompt_does_not_stop_others(
    random_llama: Any, make_llm: Any, requests: list[tuple[list[int], list[int]]], budget: int
) -> None:
    """Guards against decoding that waits while a prompt longer than a step's budget is computed."""
    llm = make_llm(random_llama[0], max_num_batched_tokens=budget)
    params = replace(GREEDY, max_tokens=40)
    decoding = [llm.add_request(prompt, params) for prompt, _ in requests[:2]]
    steps = [llm.step(), llm.step()]
    long_prompt, long_tokens = requests[-1]
    assert len(long_prompt) > budget
    late = llm.add_request(long_prompt, params)
    num_steps = 0
    while True:
        steps.append(llm.step())
        if late in steps[-1].new_token_ids:
            break
        num_steps += 1
        assert all(len(steps[-1].new_token_ids[seq_id]) == 1 for seq_id in decoding)
        assert steps[-1].num_prefill_tokens + steps[-1].num_decode_tokens <= budget
    assert num_steps >= len(long_prompt) // budget
    while not llm.is_finished():
        steps.append(llm.step())
    finished = {seq_id: output for step in steps for seq_id, output in step.finished.items()}
    assert finished[late]["token_ids"] == long_tokens
    for seq_id, (_, expected) in zip(decoding, requests, strict=False):
        assert finished[seq_id]["token_ids"] == expected


def test_first_come_first_served(random_llama: Any, make_llm: Any, requests: list[tuple[list[int], list[int]]]) -> None:
    """Guards against short requests overtaking a long one until it starves."""
    llm = make_llm(random_llama[0], max_num_batched_tokens=12, max_num_seqs=2)
    order = [requests[-1], *requests[:3], requests[-2], *requests[:3]]
    seq_ids = [llm.add_request(prompt, GREEDY) for prompt, _ in order]
    first_tokens: list[int] = []
    while not llm.is_finished():
        first_tokens += sorted(seq_id for seq_id in llm.step().new_token_ids if seq_id not in first_tokens)
    assert first_tokens == seq_ids


# Pools


def test_prompt_larger_than_the_pool(
    random_llama: Any, make_llm: Any, assert_idle: Any, requests: list[tuple[list[int], list[int]]]
) -> None:
    """Guards against a request that waits for ever, or that takes others with it."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=2)
    small = [request for request in requests if len(request[0]) < 2 * BLOCK_SIZE]
    waiting = llm.add_request(small[0][0], GREEDY)
    for num_tokens in (2 * BLOCK_SIZE + 1, 300):
        with pytest.raises(ValueError, match=f"prompt 0: has {num_tokens} tokens, .* {2 * BLOCK_SIZE}$"):
            llm.add_request([1] * num_tokens, GREEDY)
        with pytest.raises(ValueError, match=f"prompt 1: has {num_tokens} tokens, .* {2 * BLOCK_SIZE}$"):
            llm.generate([[1], [1] * num_tokens], GREEDY, use_tqdm=False)
    outputs = llm.generate([prompt for prompt, _ in small], GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [tokens[:6] for _, tokens in small]
    assert llm.step().finished[waiting]["token_ids"] == small[0][1][:6]
    assert_idle(llm)


def test_output_larger_than_the_pool(
    random_llama: Any, make_llm: Any, assert_idle: Any, requests: list[tuple[list[int], list[int]]]
) -> None:
    """Guards against a sequence that preempts itself for ever: it ends with a reason when the pool is full, whether
    its end could be foreseen or not. The last token needs no KV, so one more than the pool holds is possible."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=3)
    fitting = [request for request in requests if len(request[0]) < 3 * BLOCK_SIZE]
    stop_ids: tuple[int, ...] = ()
    for _ in range(2):
        params = replace(GREEDY, max_tokens=400, stop_token_ids=stop_ids)
        outputs = llm.generate([prompt for prompt, _ in fitting], params, use_tqdm=False)
        for output, (prompt, expected) in zip(outputs, fitting, strict=True):
            assert len(prompt) + len(output["token_ids"]) == 3 * BLOCK_SIZE + 1
            assert output["finish_reason"] == "length"
            assert output["token_ids"][:40] == expected[: len(output["token_ids"])]
        assert_idle(llm)
        emitted = {token_id for output in outputs for token_id in output["token_ids"]}
        stop_ids = tuple(set(range(VOCAB_SIZE)) - emitted)  # possible, but never come


def test_prompt_as_large_as_the_pool(random_llama: Any, make_llm: Any) -> None:
    llm = make_llm(random_llama[0], num_kvcache_blocks=2)
    (output,) = llm.generate([[1] * 2 * BLOCK_SIZE], GREEDY, use_tqdm=False)
    assert len(output["token_ids"]) == 1
    assert output["finish_reason"] == "length"


@pytest.mark.parametrize("num_prompt_tokens", [12, 16, 17])
def test_pool_of_exactly_the_needed_size(
    random_llama: Any, make_llm: Any, drive: Any, rng: random.Random, num_prompt_tokens: int
) -> None:
    """Guards against asking for one block more than a sequence needs at its end, for one and for three at once."""
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)] for _ in range(3)]
    expected = [reference_greedy(random_llama[1], prompt, 36) for prompt in prompts]
    # 32 tokens of KV after the prompt's: the output's last token has none.
    params = replace(GREEDY, max_tokens=33)
    num_blocks = -(-(num_prompt_tokens + 32) // BLOCK_SIZE)
    for factor in (1, 3):
        llm = make_llm(random_llama[0], num_kvcache_blocks=factor * num_blocks)
        outputs, steps = drive(llm, prompts, params)
        assert [output["token_ids"] for output in outputs] == [tokens[:33] for tokens in expected]
        assert sum(step.num_preemptions for step in steps) == 0
        assert max(step.num_used_blocks for step in steps) == factor * num_blocks
        most_at_once = max(len(step.new_token_ids) for step in steps)
        assert most_at_once == factor


@pytest.mark.parametrize("max_tokens", [32, 33, 34, 10**9])
def test_oversized_max_tokens_is_clipped(
    random_llama: Any, make_llm: Any, requests: list[tuple[list[int], list[int]]], max_tokens: int
) -> None:
    """Guards against running past max_model_len, and against another reason than "length" for it."""
    prompt, expected = requests[3]
    llm = make_llm(random_llama[0], max_model_len=len(prompt) + 33)
    for _ in range(2):
        (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=max_tokens), use_tqdm=False)
        assert output["token_ids"] == expected[: min(max_tokens, 33)]
        assert output["finish_reason"] == "length"
        assert output["stop_reason"] is None


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (ValueError, {"max_num_seqs": 0}),
        (ValueError, {"max_num_batched_tokens": 0}),
        (ValueError, {"max_model_len": 1}),
        (ValueError, {"kvcache_block_size": 0}),
        (ValueError, {"num_kvcache_blocks": 0}),
        (ValueError, {"num_kvcache_blocks": -1}),
        (ValueError, {"num_kvcache_blocks": 10**9}),
        (TypeError, {"max_num_seqs": 1.5}),
        (TypeError, {"max_model_len": "4096"}),
        (TypeError, {"num_kvcache_blocks": True}),
        (TypeError, {"enable_prefix_caching": 1}),
        (ValueError, {"gpu_memory_utilization": 0.0}),
        (ValueError, {"gpu_memory_utilization": 1.5}),
        (ValueError, {"seed": -1}),
        (ValueError, {"dtype": "int8"}),
        (ValueError, {"load_format": "pickle"}),
        (ValueError, {"device": "abacus"}),
        (ValueError, {"device": "meta"}),
        (ValueError, {"attention_backend": "abacus"}),
        (TypeError, {"attention_backend": None}),
    ],
    ids=str,
)
def test_impossible_settings(
    random_llama: Any, make_llm: Any, error: type[Exception], settings: dict[str, Any]
) -> None:
    with pytest.raises(error):
        make_llm(random_llama[0], **settings)
