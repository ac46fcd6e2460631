"""The second level of the prefix cache: what it changes is how much is computed, never what comes out."""

import logging
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from nanovllm import LLM, SamplingParams
from nanovllm.engine import block_copier, memory, model_runner
from nanovllm.engine import block_manager as block_manager_module
from nanovllm.engine.admission import BlockForecast
from nanovllm.engine.block_copier import BlockCopier, make_copier
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.host_cache import BlockCopies, HostCache, max_copies_a_step, min_blocks_worth_copying
from nanovllm.engine.memory import GIB, host_cache_bytes
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.step_memory import StepLimits, StepMemory
from tests.checkpoints import random_prompts
from tests.cpu import test_soak as soak
from tests.cpu.offload_stub import OffloadEngine
from tests.cpu.test_scheduler import REAL_HASH, SchedulerMachine

BLOCK_SIZE = 4
failing = soak.failing  # the fixture


# --- random traffic ---------------------------------------------------------------------------------------------


class OffloadMachine(SchedulerMachine):
    """The scheduler's random requests, steps, aborts and failures, with copies that take any time."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(2, 24),
        num_hashes=st.sampled_from([2**64, 2**64, 3]),
        is_blind=st.booleans(),
        num_slots=st.sampled_from([1, 5, 40, 40]),
        max_copies=st.integers(14, 20),
        min_load_blocks=st.sampled_from([1, 1, 2]),
        speed=st.sampled_from([0.0, 0.4, 1.0, 20.0]),
        seed=st.integers(0, 99),
    )
    def start(self, num_hashes: int, is_blind: bool, **kwargs: Any) -> None:
        def cut_hash(token_bytes: bytes, parent_hash: int) -> int:
            return REAL_HASH(token_bytes, parent_hash) % num_hashes

        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(block_manager_module, "_hash", cut_hash))
        if is_blind:
            self.patches.enter_context(mock.patch.object(BlockForecast, "worst_growth", lambda self: 0))
        self.engine = OffloadEngine(**kwargs)
        self.num_kv_tokens = kwargs["num_blocks"] * kwargs["block_size"]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.speed = max(self.engine.speed, 0.4)
        super().teardown()


def test_random_traffic() -> None:
    """Every token that a sequence attends to is the right one behind the right prefix, on both ranks, whatever was
    overwritten, given up or aborted while it was copied."""
    run_state_machine_as_test(
        OffloadMachine,
        settings=settings(max_examples=300, stateful_step_count=30, deadline=None, database=None, derandomize=True),
    )


@pytest.mark.parametrize("num_slots", [24, 1000])
@pytest.mark.parametrize("speed", [0.5, 3.0, 1000.0])
@pytest.mark.parametrize("is_blind", [False, True])
def test_many_requests(num_slots: int, speed: float, is_blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 prompts behind a few long beginnings that don't fit the pool together."""
    if is_blind:
        monkeypatch.setattr(BlockForecast, "worst_growth", lambda self: 0)
    rng = random.Random(num_slots)
    engine = OffloadEngine(num_blocks=24, num_slots=num_slots, max_num_batched_tokens=32, speed=speed)
    heads = [[rng.randrange(3) for _ in range(24)] for _ in range(8)]
    for _ in range(300):
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        engine.add(rng.choice(heads) + tail, max_tokens=rng.randint(1, 12), stop_ids=rng.choice([(), (0,)]))
    engine.run()
    host = engine.host_cache
    assert host.num_saved_blocks > 100  # where copying is slow, some are saved in time all the same
    assert host.num_loaded_tokens == BLOCK_SIZE * host.num_loaded_blocks
    assert host.num_loaded_blocks > (400 if num_slots == 1000 else 200)
    if is_blind:
        assert engine.num_preemptions > 20


# --- the policy, case by case -----------------------------------------------------------------------------------


def prompt(number: int, num_blocks: int, *tail: int) -> list[int]:
    """Some blocks that are no other number's, and a tail."""
    return [1000 * number + index for index in range(num_blocks * BLOCK_SIZE)] + list(tail)


def make_engine(**kwargs: Any) -> OffloadEngine:
    return OffloadEngine(**{"num_blocks": 8, "num_slots": 40, "speed": 1000.0, **kwargs})


def complete(engine: OffloadEngine, *prompts: list[int], max_tokens: int = 1) -> list[Any]:
    sequences = [engine.add(one, max_tokens=max_tokens) for one in prompts]
    while not engine.is_finished:
        engine.step()
    return sequences


def fill_and_evict(engine: OffloadEngine) -> None:
    """Prompt 0's four blocks were computed, saved, and evicted from a pool of eight."""
    complete(engine, prompt(0, 4, 7))
    complete(engine, prompt(1, 3, 7))
    complete(engine, prompt(2, 4, 7))
    complete(engine, prompt(3, 3, 7))


def test_evicted_prefix_comes_back() -> None:
    engine = make_engine()
    fill_and_evict(engine)
    host = engine.host_cache
    assert host.num_loaded_blocks == 0
    num_computed = engine.num_prefill_tokens
    (seq,) = complete(engine, prompt(0, 4, 8))
    assert seq.num_cached_tokens == 4 * BLOCK_SIZE
    assert engine.num_prefill_tokens - num_computed == 1
    assert (host.num_loaded_blocks, host.num_loaded_tokens) == (4, 4 * BLOCK_SIZE)
    complete(engine, prompt(0, 4, 9))  # it is on the device again
    assert host.num_loaded_blocks == 4
    assert engine.num_prefill_tokens - num_computed == 2


def test_only_the_evicted_part_is_loaded() -> None:
    """A sequence's tail is evicted first: its head is found on the device, and the rest follows from the host."""
    engine = make_engine()
    complete(engine, prompt(0, 4, 7))
    complete(engine, [5], [6])  # time to save
    complete(engine, prompt(1, 5, 7))
    assert 0 < len(engine.manager.find_cached_blocks(engine.add(prompt(0, 4, 8), max_tokens=1))) < 4
    engine.run()
    assert 0 < engine.host_cache.num_loaded_blocks < 4
    assert engine.sequences[-1].num_cached_tokens == 4 * BLOCK_SIZE


def test_an_identity_outlives_the_device() -> None:
    """What is computed again while the host has it is the same content: its children on the host are found behind it.
    With a new identity they would be lost."""
    engine = make_engine(min_load_blocks=3)
    fill_and_evict(engine)
    complete(engine, prompt(0, 1, 7))  # one block is not worth a copy: computed, and published
    assert engine.host_cache.num_loaded_blocks == 0
    (seq,) = complete(engine, prompt(0, 4, 8))
    assert engine.host_cache.num_loaded_blocks == 3
    assert seq.num_cached_tokens == 4 * BLOCK_SIZE


@pytest.mark.parametrize(("min_load_blocks", "num_loaded"), [(4, 4), (5, 0)])
def test_crossover(min_load_blocks: int, num_loaded: int) -> None:
    engine = make_engine(min_load_blocks=min_load_blocks)
    fill_and_evict(engine)
    (seq,) = complete(engine, prompt(0, 4, 8))
    assert engine.host_cache.num_loaded_blocks == num_loaded
    assert seq.num_cached_tokens == num_loaded * BLOCK_SIZE


def test_salts_are_kept_apart() -> None:
    engine = make_engine()
    fill_and_evict(engine)
    engine.add(prompt(0, 4, 8), max_tokens=1, cache_salt=5)
    engine.run()
    assert engine.host_cache.num_loaded_blocks == 0


def test_decode_and_admissions_go_on_during_a_load() -> None:
    """Guards against steps, or requests behind, that wait for a copy."""
    engine = make_engine(num_blocks=16)
    for number in range(6):
        complete(engine, prompt(number, 4, 7))
    engine.speed = -1.0  # nothing is copied any more
    decoding = engine.add([5], max_tokens=12)
    engine.step()
    loading = engine.add(prompt(0, 4, 8), max_tokens=2)
    later = engine.add([6, 6], max_tokens=3)
    for _ in range(16):
        engine.step()
    assert engine.manager.is_loading(loading) and not loading.is_finished and loading.num_cached_tokens == 16
    assert decoding.is_finished and later.is_finished
    engine.speed = 1000.0
    engine.run()


def test_sharers_wait_for_the_same_load() -> None:
    """A beginning on its way is loaded once, and nobody computes behind it before it is there."""
    engine = make_engine(num_blocks=16)
    for number in range(6):
        complete(engine, prompt(number, 4, 7))
    engine.speed = -1.0
    sequences = [engine.add(prompt(0, 4, tail), max_tokens=2) for tail in (8, 9, 9)]
    for _ in range(3):
        engine.step()
    assert all(engine.manager.is_loading(seq) for seq in sequences)
    assert engine.host_cache.num_loaded_blocks == 4
    engine.speed = 1000.0
    engine.run()
    assert engine.host_cache.num_loaded_blocks == 4


def test_what_follows_a_load_is_computed_once() -> None:
    """Samples of one prompt whose beginning is on the host: the others wait for the first, instead of computing the
    rest of the prompt each for itself."""
    engine = make_engine(num_blocks=16)
    for number in range(9):
        complete(engine, prompt(number, 2, 7))
    num_computed = engine.num_prefill_tokens
    samples = complete(engine, *[prompt(0, 2, *range(500, 513))] * 3)
    assert engine.host_cache.num_loaded_blocks == 2
    assert engine.num_prefill_tokens - num_computed == 13 + 1 + 1
    assert [seq.num_cached_tokens for seq in samples] == [8, 20, 20]


def test_no_more_loads_than_a_step_may_begin() -> None:
    engine = make_engine(num_blocks=20, max_copies=5)
    for number in range(8):
        complete(engine, prompt(number, 4, 7))
    before = len(engine.copies)
    complete(engine, *[prompt(number, 4, 8) for number in range(3)])
    assert [len(copies.loads) for copies in engine.copies[before:] if copies.loads] == [4, 4, 4]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_end_of_a_loading_sequence(is_preempted: bool) -> None:
    """Its blocks are free at once, though a copy still writes to them: whoever gets one waits for that. Guards against
    a late copy over somebody's KV."""
    engine = make_engine(num_blocks=8)
    fill_and_evict(engine)
    engine.speed = -1.0
    seq = engine.add(prompt(0, 4, 8), max_tokens=1)
    engine.step()
    assert engine.manager.is_loading(seq)
    if is_preempted:
        engine.scheduler._preempt(seq)
        engine.abort(seq)
    else:
        engine.abort(seq)
    assert engine.manager.num_free_blocks == 8
    engine.manager.check_integrity([])
    other = engine.add(prompt(9, 7, 7), max_tokens=1)  # the whole pool
    engine.step()
    assert engine.manager.is_loading(other) and other.num_computed_tokens == 0
    engine.speed = 1000.0
    engine.run()
    assert other.finish_reason == "length"


def test_a_block_is_reused_before_its_save_is_finished() -> None:
    """The save is given up, and its slot is used again."""
    engine = make_engine(speed=-1.0)
    complete(engine, prompt(0, 4, 7))
    complete(engine, prompt(1, 2, 7))
    assert engine.host_cache._saving
    complete(engine, prompt(2, 7, 7))  # takes the whole pool
    assert not engine.host_cache._kept
    engine.speed = 1000.0
    complete(engine, prompt(0, 4, 8))
    assert engine.host_cache.num_loaded_blocks == 0
    fill_and_evict(engine)
    complete(engine, prompt(0, 4, 9))
    assert engine.host_cache.num_loaded_blocks > 0


def begin(manager: BlockManager, *next_reused: Block) -> BlockCopies:
    assert manager.host_cache is not None
    copies = manager.host_cache.begin(manager.blocks, [block.block_id for block in next_reused])
    assert copies is not None
    return copies


def test_a_slot_is_not_reused_while_it_is_loaded_from() -> None:
    host = HostCache(4, max_copies=4)
    host.lookahead = 4
    manager = BlockManager(8, BLOCK_SIZE, host_cache=host)
    blocks = manager.blocks[:4]
    for block in blocks:
        block.content_id, block.token_bytes = block.block_id + 1, bytes([block.block_id])
    copies = begin(manager, *blocks)
    assert len(copies.saves) == 4
    host.finish(0, copies.ticket)
    for block in blocks:
        kept = host.find(0, block.token_bytes)
        assert kept is not None and kept.slot in {slot for _, slot in copies.saves}
        ticket = host.load(kept, 4 + block.block_id)
    new = manager.blocks[4]
    new.content_id, new.token_bytes = 99, b"new"
    copies = begin(manager, new)
    assert len(copies.loads) == 4 and not copies.saves
    host.finish(ticket, 0)
    assert len(begin(manager, new).saves) == 1


def test_the_least_recently_used_goes_first() -> None:
    """Loaded and evicted contents count as used."""
    host = HostCache(2, max_copies=2)
    manager = BlockManager(3, BLOCK_SIZE, host_cache=host)
    for block in manager.blocks:
        block.content_id, block.token_bytes = block.block_id + 1, bytes([block.block_id])
    first, second, third = manager.blocks
    host.finish(0, begin(manager, second).ticket)
    host.finish(0, begin(manager, first).ticket)
    host.evicted(second)
    assert len(begin(manager, third).saves) == 1
    assert host.find(0, second.token_bytes) is not None and host.find(0, first.token_bytes) is None


def test_a_small_cache_does_not_copy_for_ever() -> None:
    """Guards against saving the next blocks over one another, step by step, while nothing happens to them."""
    engine = make_engine(num_blocks=30, num_slots=3)
    for number in range(5):
        complete(engine, prompt(number, 5, 7))
    num_saved = engine.host_cache.num_saved_blocks
    complete(engine, [5], max_tokens=BLOCK_SIZE - 1)
    assert engine.host_cache.num_saved_blocks <= num_saved + 3


def test_a_full_pool_is_saved_ahead() -> None:
    """Where what is freed is reused at once, it has to be saved before."""
    engine = make_engine(num_blocks=8)
    seq = engine.add(prompt(0, 6, 7), max_tokens=4)
    for _ in range(4):
        engine.step()
    assert not seq.is_finished and engine.host_cache.num_saved_blocks == 6
    later = engine.add(prompt(1, 7, 7), max_tokens=1)  # waits for all blocks, and takes them in one step
    engine.run()
    assert later.is_finished
    (again,) = complete(engine, prompt(0, 6, 8))
    assert again.num_cached_tokens == 6 * BLOCK_SIZE


def test_a_large_pool_is_not_saved_ahead() -> None:
    """As long as there are free blocks, what runs is not copied."""
    engine = make_engine(num_blocks=200, num_slots=400)
    engine.add(prompt(0, 6, 7), max_tokens=4)
    engine.run()
    assert not engine.copies or not any(copies.saves for copies in engine.copies)


def test_reset() -> None:
    """Contents are forgotten, and loads that are still under way do no harm to what is computed next."""
    engine = make_engine()
    fill_and_evict(engine)
    engine.speed = -1.0
    loading = engine.add(prompt(0, 4, 8), max_tokens=1)
    engine.step()
    assert engine.manager.is_loading(loading)
    engine.fail()
    engine.manager.check_integrity([])
    seq = engine.add(prompt(0, 6, 8), max_tokens=6)
    for _ in range(2):
        engine.step()
    engine.speed = 1000.0
    engine.run()
    assert seq.finish_reason == "length" and seq.num_cached_tokens == 0


def lose_slot(host: HostCache) -> None:
    host._free_slots.pop()


def use_slot_twice(host: HostCache) -> None:
    first, second, *_ = host._kept.values()
    first.slot = second.slot


def forget_eviction(host: HostCache) -> None:
    host._unsaved[7] = 0


def change_key(host: HostCache) -> None:
    key, value = host._kept.popitem()
    host._kept[key[0], b"other"] = value


def change_identity(host: HostCache) -> None:
    for value in host._kept.values():
        value.content_id += 1000


@pytest.mark.parametrize("corrupt", [lose_slot, use_slot_twice, forget_eviction, change_key, change_identity])
def test_integrity_check_sees(corrupt: Callable[[HostCache], None]) -> None:
    engine = make_engine()
    fill_and_evict(engine)
    complete(engine, prompt(0, 4, 8))
    engine.manager.check_integrity([])
    corrupt(engine.host_cache)
    with pytest.raises(RuntimeError):
        engine.manager.check_integrity([])


@pytest.mark.parametrize(
    ("latency", "to_copy", "to_compute", "expected"),
    [
        (0.0, 1.0, 2.0, 1),
        (0.0, 2.0, 2.0, None),
        (5.0, 3.0, 2.0, None),
        (1.0, 1.0, 2.0, 2),  # of one block the copy takes as long
        (0.9, 1.0, 2.0, 1),
        (10.0, 1.0, 1.25, 41),
    ],
)
def test_min_blocks_worth_copying(latency: float, to_copy: float, to_compute: float, expected: int | None) -> None:
    number = min_blocks_worth_copying(latency, to_copy, to_compute)
    assert number == expected
    if number is not None:
        assert latency + number * to_copy < number * to_compute
        assert number == 1 or latency + (number - 1) * to_copy >= (number - 1) * to_compute


# --- the engine -------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# By the order of prefixes, hardly any prefix would be evicted before everybody has used it.
TINY = {"kvcache_block_size": 8, "num_kvcache_blocks": 24, "schedule_policy": "fcfs"}


def job() -> list[list[int]]:
    """60 prompts in random order behind six beginnings of 64 tokens: 48 blocks, twice the pool."""
    rng = random.Random(0)
    heads = random_prompts([64] * 6)
    return [rng.choice(heads) + random_prompts([rng.randint(1, 20)], seed=index)[0] for index in range(60)]


@pytest.fixture(scope="module")
def big(random_llama: Any, make_shared_llm: Any) -> LLM:
    llm: LLM = make_shared_llm(random_llama[0], kvcache_block_size=8, num_kvcache_blocks=800)
    return llm


@pytest.mark.parametrize("budget", [16384, 24])
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, n=2, seed=3)], ids=["greedy", "samples"])
def test_equals_big_pool(
    random_llama: Any, make_llm: Any, drive: Any, big: LLM, assert_idle: Any, params: SamplingParams, budget: int
) -> None:
    prompts = job()
    expected, _ = drive(big, prompts, params)
    _, plain_steps = drive(make_llm(random_llama[0], **TINY), prompts, params)
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, max_num_batched_tokens=budget, **TINY)
    outputs, steps = drive(llm, prompts, params)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert [output.get("samples") == other.get("samples") for output, other in zip(outputs, expected, strict=True)]
    host = llm.host_cache
    assert host.num_saved_blocks >= 24 and host.num_loaded_blocks >= 48
    assert host.num_loaded_tokens == 8 * host.num_loaded_blocks
    if budget == 16384:
        saved = sum(s.num_prefill_tokens for s in plain_steps) - sum(s.num_prefill_tokens for s in steps)
        assert saved > host.num_loaded_tokens / 2
    assert_idle(llm)


@pytest.mark.usefixtures("eager_admission")
def test_preempted_sequences_come_back_by_copy(random_llama: Any, make_llm: Any, drive: Any, big: LLM) -> None:
    prompts = random_prompts([17, 14, 9, 16, 20, 11])
    params = replace(GREEDY, max_tokens=40)
    expected, _ = drive(big, prompts, params)
    llm = make_llm(random_llama[0], kvcache_block_size=4, num_kvcache_blocks=32, kv_offload_gb=0.01)
    outputs, steps = drive(llm, prompts, params)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert sum(step.num_preemptions for step in steps) > 0
    assert llm.host_cache.num_loaded_blocks > 0
    num_prompt_tokens = sum(map(len, prompts))
    recomputed = sum(step.num_prefill_tokens for step in steps) - num_prompt_tokens
    plain = make_llm(random_llama[0], kvcache_block_size=4, num_kvcache_blocks=32)
    _, plain_steps = drive(plain, prompts, params)
    assert recomputed < (sum(step.num_prefill_tokens for step in plain_steps) - num_prompt_tokens) / 2


def test_prompt_logprobs(random_llama: Any, make_llm: Any, drive: Any, big: LLM) -> None:
    """Logits of a loaded token don't exist: those who want them compute their prompt, and get blocks of their own."""
    prompts = job()[:30]
    params = [replace(GREEDY, prompt_logprobs=1 if index % 3 else None) for index in range(30)]
    expected, _ = drive(big, prompts, params)
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    outputs, _ = drive(llm, prompts, params)
    for output, other in zip(outputs, expected, strict=True):
        assert output["token_ids"] == other["token_ids"]
        assert len(output.get("prompt_logprobs", ())) == len(other.get("prompt_logprobs", ()))
        if "prompt_logprobs" in output:
            assert output["num_cached_tokens"] == 0
            ours, theirs = (result["prompt_logprobs"].logprobs for result in (output, other))
            assert ours == pytest.approx(theirs, abs=1e-4, nan_ok=True)
    assert llm.host_cache.num_loaded_blocks > 0


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(random_llama: Any, make_llm: Any, drive: Any, big: LLM, assert_idle: Any, size: int) -> None:
    """Every rank copies its own part of each block."""
    prompts = job()
    expected, _ = drive(big, prompts, GREEDY)
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, tensor_parallel_size=size, **TINY)
    single = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    outputs, _ = drive(llm, prompts, GREEDY)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert llm.host_cache.num_loaded_blocks >= 48
    # The ranks share what is given; with four, two of them hold each KV head.
    assert llm.host_cache.num_slots == single.host_cache.num_slots * 2 // size
    assert_idle(llm)


def test_step_that_fails(random_llama: Any, make_llm: Any, big: LLM, assert_idle: Any) -> None:
    """Nothing of either cache is trusted after it, and the engine goes on."""
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    prompts = job()
    expected = [output["token_ids"] for output in big.generate(prompts, GREEDY, use_tqdm=False)]
    for place in ("copy_blocks", "run", "finished_copies"):
        original, calls = getattr(llm.runner, place), 0

        def fail(*args: Any, original: Any = original) -> Any:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise LookupError("injected")
            return original(*args)

        with mock.patch.object(llm.runner, place, fail), pytest.raises(LookupError):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        while not llm.is_finished():
            llm.step()
        assert_idle(llm)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected


def test_soak(byte_llama: Path, make_llm: Any, assert_idle: Any, failing: Any, eager_admission: None) -> None:
    """Calls of every kind, whole, streamed and left, aborted, failing."""
    pytest.importorskip("llguidance")
    rng = random.Random(5)
    llm = make_llm(byte_llama, kv_offload_gb=0.01, **soak.SETTINGS)
    for _ in range(40):
        soak.call(llm, rng, failing)
        while not llm.is_finished():
            llm.step()
        assert_idle(llm)
    assert llm.host_cache.num_loaded_blocks > 40


def test_off_by_default(random_llama: Any, make_llm: Any) -> None:
    llm = make_llm(random_llama[0])
    assert llm.host_cache is None and llm.runner.num_host_blocks == 0


def test_never_worth_it(
    random_llama: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine whose copies are slower than its GPU."""
    prepare = ModelRunner._prepare_offload

    def find_useless(self: ModelRunner) -> None:
        prepare(self)
        self.min_load_blocks = None

    monkeypatch.setattr(ModelRunner, "_prepare_offload", find_useless)
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    assert llm.host_cache is None
    assert "kv_offload_gb is of no use here" in caplog.text
    assert len(llm.generate(random_prompts([5]), GREEDY, use_tqdm=False)) == 1


# --- memory and messages ----------------------------------------------------------------------------------------


def test_share_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "physical_memory", lambda: 100 * GIB)
    assert host_cache_bytes(8.0, 1, 1) == 8 * GIB
    assert host_cache_bytes(8.0, 4, 2) == 2 * GIB  # each replica has its own 8
    assert host_cache_bytes(0.0, 2, 1) == 0
    assert host_cache_bytes(90.0, 1, 1) == 90 * GIB
    with pytest.raises(ValueError, match=r"kv_offload_gb=60\.0 with data_parallel_size=2 is 120\.00 GiB.*100\.00 GiB"):
        host_cache_bytes(60.0, 8, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_than_the_machine_has(random_llama: Any, replicas: int) -> None:
    with pytest.raises(ValueError, match=r"kv_offload_gb=1000000\.0 .* at most [0-9.]+ GiB can be had"):
        LLM(str(random_llama[0]), device="cpu", num_kvcache_blocks=8, kv_offload_gb=1e6, data_parallel_size=replicas)


def test_less_than_a_block(random_llama: Any) -> None:
    with pytest.raises(ValueError, match="kv_offload_gb gives a rank 1073 bytes, but one block takes 4096"):
        LLM(str(random_llama[0]), device="cpu", num_kvcache_blocks=8, kvcache_block_size=8, kv_offload_gb=1e-6)


def test_needs_prefix_caching() -> None:
    with pytest.raises(ValueError, match="kv_offload_gb=1 needs enable_prefix_caching"):
        LLM("nowhere", kv_offload_gb=1, enable_prefix_caching=False)


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's refusal names the setting, and the error is not left for a later kernel to raise."""
    cudart = mock.Mock()
    cudart.cudaHostRegister.return_value = 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    zeros = mock.Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ValueError, match=r"kv_offload_gb: 4096 bytes of host memory can't be pinned \(CUDA error 2\)"):
        block_copier._pin(torch.empty(1024), torch.device("cpu"))
    assert zeros.called


def test_copies_are_exact() -> None:
    """[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], of which a block is one slice of each layer."""
    kv_cache = torch.randn(3, 2, 5, 4, 2, 8)
    before = kv_cache.clone()
    copier = make_copier(kv_cache, num_bytes=4 * 3 * 2 * 4 * 2 * 8 * 4 + 100)
    assert copier.num_slots == 4
    copier.begin(BlockCopies(1, 0, 0, [], [(1, 3), (4, 0)]))
    kv_cache.zero_()
    copier.begin(BlockCopies(2, 0, 1, [(0, 2), (3, 4)], []))
    assert copier.finished() == (2, 2)
    assert torch.equal(kv_cache[:, :, 2], before[:, :, 4]) and torch.equal(kv_cache[:, :, 4], before[:, :, 1])
    assert not kv_cache[:, :, [0, 1, 3]].any()


def test_step_memory_holds_the_most_copies() -> None:
    """Between steps, which are left as they are by the size of what came before."""
    num_copies = max_copies_a_step(8, 16, 1)
    assert num_copies == 16
    memory_of_steps = StepMemory(StepLimits(num_tokens=8, num_seqs=1, table_width=1, num_copies=num_copies))
    pairs = [(index, 1000 + index) for index in range(num_copies)]
    for loads, saves in ((pairs, pairs[::-1]), ([], pairs), (pairs[:3], []), ([], [])):
        copies = BlockCopies(7, 5, 6, loads, saves)
        memory_of_steps.write_copies(copies)
        assert memory_of_steps.read_copies() == copies


def test_size_is_logged(random_llama: Any, make_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """2 layers * 2 * 8 tokens * 2 heads * 16 floats are 4096 bytes a block."""
    with caplog.at_level(logging.INFO):
        make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    assert "KV offload: 2621 blocks; prefixes are copied from 8 tokens on" in caplog.text


class SlowCopier(block_copier.BlockCopier):
    """Takes 1 ms a copy and 0.5 ms a block by its own clock."""

    now = 0.0

    def begin(self, copies: BlockCopies) -> None:
        super().begin(copies)
        self.now += 1e-3 + 0.5e-3 * len(copies.loads)


@pytest.mark.parametrize(("tokens_a_second", "expected"), [(10_000, 4), (13_000, 9), (16_001, None)])
def test_crossover_is_measured(
    tokens_a_second: int, expected: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of 8 tokens: 16,000 tokens/s by copy. The log has both rates."""
    copier = SlowCopier(torch.zeros(2, 1, 2, 8, 1, 4), torch.zeros(2, 1, 2, 8, 1, 4))
    monkeypatch.setattr(block_copier.time, "perf_counter", lambda: copier.now)
    with caplog.at_level(logging.INFO):
        assert block_copier.find_crossover(copier, 1 / tokens_a_second) == expected
    assert f"16000 tokens/s and 1000 us a copy; computing makes {tokens_a_second} tokens/s" in caplog.text


def test_scores(random_llama: Any, make_llm: Any, big: LLM) -> None:
    prompts, continuations = zip(*((prompt[:60], prompt[60:]) for prompt in job()), strict=True)
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    ours, theirs = (engine.score(prompts, continuations, use_tqdm=False) for engine in (llm, big))
    for score, other in zip(ours, theirs, strict=True):
        assert score["token_ids"] == other["token_ids"]
        assert score["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    assert llm.host_cache.num_loaded_blocks > 40


def test_constraints_over_ranks(byte_llama: Path, make_llm: Any, drive: Any) -> None:
    """Copies begin between the sampling of the step before, which waits for its masks, and the next step."""
    pytest.importorskip("llguidance")
    rng = random.Random(1)
    heads = ["".join(rng.choice("abcdefgh") for _ in range(64)) for _ in range(6)]
    prompts = [rng.choice(heads) + str(index) for index in range(40)]
    params = SamplingParams(regex="[a-f]{3}-[0-9]{5,30}!", max_tokens=12, temperature=1.0, seed=3)
    expected, _ = drive(make_llm(byte_llama, kvcache_block_size=8, num_kvcache_blocks=800), prompts, params)
    llm = make_llm(byte_llama, kv_offload_gb=0.01, tensor_parallel_size=2, **TINY)
    outputs, _ = drive(llm, prompts, params)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert llm.host_cache.num_loaded_blocks > 40


def test_replicas(random_llama: Any, big: LLM) -> None:
    """Each has its own memory."""
    prompts = job()
    expected = [output["token_ids"] for output in big.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(str(random_llama[0]), device="cpu", data_parallel_size=2, kv_offload_gb=0.01, **TINY) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected


def test_memory_of_no_use_is_given_back(random_llama: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is copied faster than computed, as may be on a GPU."""
    llm = make_llm(random_llama[0], kv_offload_gb=0.01, **TINY)
    runner, closed = llm.runner, []
    close = BlockCopier.close
    monkeypatch.setattr(BlockCopier, "close", lambda copier: (closed.append(copier), close(copier)))
    monkeypatch.setattr(model_runner, "find_crossover", lambda *figures: None)
    monkeypatch.setattr(runner, "_measure_prefill", lambda: 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "device", SimpleNamespace(type="a GPU"))
        runner._prepare_offload()
    assert runner._copier is None and runner.num_host_blocks == 0 and len(closed) == 1
    assert llm._make_host_cache() is None
