"""A sequence that gave its KV blocks up and computes them again must not show it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from tests.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 8
NUM_PROMPTS = 6
LONGEST = 17 + 40
# What a pool must have to hold two of the sequences to their end.
SMALL_POOL = 2 * -(-LONGEST // BLOCK_SIZE)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
MIXED = [  # settings of the six prompts
    replace(GREEDY, temperature=1.0, seed=1),
    replace(GREEDY, max_tokens=33),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
    replace(GREEDY, temperature=1.5, top_k=50, min_p=0.01, seed=2),
    replace(GREEDY, stop_token_ids=(7, 11), min_tokens=38, temperature=1.0, seed=3),
    replace(GREEDY, temperature=2.0, max_tokens=39, seed=4),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Lengths around a block's; some share beginnings."""
    rng = random.Random(4)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE + 2)]
    lengths = (1, BLOCK_SIZE - 1, BLOCK_SIZE, 17, 14, 17)
    heads: list[list[int]] = [[], [], shared[:3], shared, shared, []]
    return [
        head + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(head))]
        for head, length in zip(heads, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def big(random_llama: Any, make_shared_llm: Any) -> LLM:
    """An engine whose pool holds everything."""
    llm: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return llm


def num_preemptions(steps: list[Any]) -> int:
    return sum(step.num_preemptions for step in steps)


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("budget", [16384, 23, 6])
@pytest.mark.parametrize("params", [[GREEDY] * NUM_PROMPTS, MIXED], ids=["greedy", "mixed"])
def test_equals_big_pool(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    big: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    budget: int,
    enable_prefix_caching: bool,
) -> None:
    """Guards against recomputing the prompt without the outputs, appending a token twice, losing the token in flight,
    and drawing other random numbers after a preemption."""
    expected, steps = drive(big, prompts, params)
    assert num_preemptions(steps) == 0
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=SMALL_POOL,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs, steps = drive(llm, prompts, params)
    assert num_preemptions(steps) > 0
    for output, reference, one in zip(outputs, expected, params, strict=True):
        assert output["token_ids"] == reference["token_ids"]
        assert output["finish_reason"] == reference["finish_reason"]
        if not one.stop_token_ids:
            assert len(output["token_ids"]) == one.max_tokens
    # What is found in the cache after a preemption is not the prompt's merit: two prompts share a block, nobody else.
    assert [output["num_cached_tokens"] for output in outputs[:4]] == [0, 0, 0, 0]
    assert outputs[5]["num_cached_tokens"] == 0
    assert sum(step.num_cached_tokens for step in steps) == outputs[4]["num_cached_tokens"] <= BLOCK_SIZE
    # Every token was reported once, whatever was recomputed.
    assert sum(len(ids) for step in steps for ids in step.new_token_ids.values()) == sum(
        len(output["token_ids"]) for output in outputs
    )


def test_misjudged_lengths(random_llama: Any, make_llm: Any, drive: Any, big: LLM, prompts: list[list[int]]) -> None:
    """Guards against preemptions that nobody forced: sequences that could stop are expected to be as short as those
    before them, and are not."""
    stop = replace(GREEDY, temperature=1.0, stop_token_ids=(3,))
    params = [replace(stop, seed=seed) for seed in range(100, 100 + NUM_PROMPTS)]
    expected, _ = drive(big, prompts, params)
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=SMALL_POOL)
    llm.generate([[1]] * 4, replace(stop, max_tokens=1), use_tqdm=False)
    outputs, steps = drive(llm, prompts, params)
    assert num_preemptions(steps) > 0
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_stops(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    big: LLM,
    prompts: list[list[int]],
    enable_prefix_caching: bool,
) -> None:
    """Guards against a stop being missed, or its extra token kept, among preempted sequences."""
    free_running, _ = drive(big, prompts, GREEDY)
    params = [
        replace(GREEDY, stop_token_ids=(output["token_ids"][num_tokens],))
        for output, num_tokens in zip(free_running, (39, 30, 36, 25, 39, 37), strict=True)
    ]
    expected, _ = drive(big, prompts, params)
    assert sum(output["finish_reason"] == "stop" for output in expected) == NUM_PROMPTS
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=SMALL_POOL - 2,
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs, steps = drive(llm, prompts, params)
    assert num_preemptions(steps) > 0
    for output, reference in zip(outputs, expected, strict=True):
        assert output["token_ids"] == reference["token_ids"]
        assert output["stop_reason"] == reference["stop_reason"]


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Records (seq_id, number of outputs with those in flight, number in flight) of each preemption."""
    records = []
    original = Scheduler._preempt

    def preempt(self: Scheduler, seq: Sequence) -> None:
        records.append((seq.seq_id, seq.num_output_tokens, seq.num_in_flight))
        original(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    yield records


@pytest.mark.usefixtures("eager_admission")
def test_step_that_only_preempts_is_counted(random_llama: Any, make_llm: Any, drive: Any, preempted: Any) -> None:
    """Guards against counts that are lost with a step in which nothing was left to launch: the first request's last
    token is not read yet, and the second one needs a block."""
    llm = make_llm(random_llama[0], kvcache_block_size=2, num_kvcache_blocks=3)
    params = [replace(GREEDY, max_tokens=num_tokens) for num_tokens in (2, 4)]
    outputs, steps = drive(llm, [[1, 1, 1], [2]], params)
    assert [len(output["token_ids"]) for output in outputs] == [2, 4]
    assert num_preemptions(steps) == len(preempted) > 0
    (step,) = (step for step in steps if step.num_preemptions)
    assert step.num_prefill_tokens == step.num_decode_tokens == 0


@pytest.mark.usefixtures("eager_admission")
def test_token_in_flight_ends_a_preempted_sequence(
    random_llama: Any, make_llm: Any, drive: Any, prompts: list[list[int]], preempted: Any
) -> None:
    """Guards against a sequence that goes on, or is lost, when the token that ends it was still on the device as it
    was preempted: it ends while it waits."""
    settings = {"kvcache_block_size": BLOCK_SIZE, "num_kvcache_blocks": SMALL_POOL}
    free_running, _ = drive(make_llm(random_llama[0], **settings), prompts, GREEDY)
    num_tested = 0
    for index, num_outputs, num_in_flight in list(preempted):
        tokens = free_running[index]["token_ids"][:num_outputs]
        if not num_in_flight or tokens[-1] in tokens[:-1]:
            continue
        for one in (replace(GREEDY, stop_token_ids=(tokens[-1],)), replace(GREEDY, max_tokens=num_outputs)):
            params = [GREEDY] * NUM_PROMPTS
            params[index] = one
            preempted.clear()
            llm = make_llm(random_llama[0], **settings)
            outputs, _ = drive(llm, prompts, params)
            assert outputs[index]["token_ids"] == tokens
            assert outputs[index]["finish_reason"] == ("stop" if one.stop_token_ids else "length")
            others = [output for other, output in enumerate(outputs) if other != index]
            assert all(len(output["token_ids"]) == GREEDY.max_tokens for output in others)
            num_tested += (index, num_outputs, 1) in preempted
    assert num_tested >= 2


@pytest.mark.usefixtures("eager_admission")
def test_abort_of_a_preempted_sequence(
    random_llama: Any, make_llm: Any, big: LLM, prompts: list[list[int]], preempted: Any, assert_idle: Any
) -> None:
    """Guards against blocks or queue entries left by a request that is aborted while it waits to be computed again."""
    expected = [output["token_ids"] for output in big.generate(prompts, GREEDY, use_tqdm=False)]
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=SMALL_POOL)
    seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    finished: dict[int, Any] = {}
    aborted: set[int] = set()
    while not llm.is_finished():
        finished.update(llm.step().finished)
        if preempted and not aborted:
            aborted.add(preempted[0][0])
            assert llm.abort(preempted[0][0])
            llm.block_manager.check_integrity(llm.scheduler.unfinished())
    assert aborted
    for seq_id, tokens in zip(seq_ids, expected, strict=True):
        output = finished[seq_id]
        if seq_id in aborted:
            assert output["finish_reason"] == "abort"
            assert 0 < len(output["token_ids"]) < len(tokens)
            assert output["token_ids"] == tokens[: len(output["token_ids"])]
        else:
            assert output["token_ids"] == tokens
    assert_idle(llm)


@pytest.mark.usefixtures("eager_admission")
def test_order_of_arrival(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """Guards against the oldest being preempted, and against a preempted sequence standing in line behind those that
    came after it: with such rules somebody may wait for ever."""
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=SMALL_POOL,
        max_num_seqs=4,
        schedule_policy="fcfs",  # every prompt comes twice
    )
    seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts * 2]
    order_of_ends: list[int] = []
    total = 0
    while not llm.is_finished():
        step = llm.step()
        total += step.num_preemptions
        order_of_ends += step.finished
        in_line = [*llm.scheduler.running, *llm.scheduler.waiting]
        assert in_line == sorted(in_line)
    assert total > 0
    assert order_of_ends == seq_ids  # all have the same number of tokens


def test_known_lengths_are_not_preempted(
    random_llama: Any, make_llm: Any, drive: Any, prompts: list[list[int]]
) -> None:
    """Guards against admitting sequences whose ends are known and don't fit together."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=3 * SMALL_POOL // 2)
    outputs, steps = drive(llm, prompts * 3, GREEDY)
    assert all(len(output["token_ids"]) == GREEDY.max_tokens for output in outputs)
    assert num_preemptions(steps) == 0
