"""`stats()` against values worked out by hand, or by counting again from what steps say."""

import asyncio
import dataclasses
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.launched_step import LaunchedStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.stats import EngineStats
from tests.checkpoints import random_prompts
from tests.cpu.policies import StubEngine, make_sequence

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
MakeLLM = Callable[..., LLM]


def _cache_counts(manager: BlockManager) -> tuple[int, int, int, int]:
    """Hits, misses, evictions; and the free blocks that can be found."""
    counts = manager.counts
    return counts.num_hit_blocks, counts.num_missed_blocks, counts.num_evicted_blocks, manager.num_cached_free_blocks


def _admit(manager: BlockManager, seq_id: int, prompt: range | list[int]) -> Any:
    seq = make_sequence(seq_id, prompt)
    manager.allocate(seq, manager.find_cached_blocks(seq))
    seq.num_computed_tokens = seq.num_tokens
    manager.publish(seq)
    return seq


# --- the prefix cache, in blocks of four tokens -----------------------------------------------------------------


def test_hits_misses_and_evictions() -> None:
    """The last block of a prompt is no miss: nobody looks for it. A block is evicted when its content goes, not when
    it is freed."""
    manager = BlockManager(num_blocks=6, block_size=4)
    first = _admit(manager, 0, range(10))  # two full blocks, and one of two tokens
    assert _cache_counts(manager) == (0, 2, 0, 0)
    second = _admit(manager, 1, [*range(8), 50, 51])
    assert _cache_counts(manager) == (2, 2, 0, 0)
    manager.free(first)
    assert _cache_counts(manager) == (2, 2, 0, 0)  # the second holds what can be found
    manager.free(second)
    assert _cache_counts(manager) == (2, 2, 0, 2)
    third = _admit(manager, 2, range(8))  # its second block holds its last token
    assert _cache_counts(manager) == (3, 2, 0, 1)
    manager.free(third)
    assert _cache_counts(manager) == (3, 2, 0, 2)
    # 23 // 4 = 5 blocks are looked up; of the six that are free two have content.
    _admit(manager, 3, range(100, 124))
    assert _cache_counts(manager) == (3, 7, 2, 0)
    manager.reset()
    assert _cache_counts(manager) == (3, 7, 2, 0)


def test_without_prefix_caching() -> None:
    manager = BlockManager(num_blocks=6, block_size=4, enable_prefix_caching=False)
    for seq_id in range(4):
        manager.free(_admit(manager, seq_id, range(20)))
    assert _cache_counts(manager) == (0, 0, 0, 0)


def test_integrity_check_counts_again() -> None:
    """The state machine of the block manager's tests calls it after every operation."""
    manager = BlockManager(num_blocks=6, block_size=4)
    manager.free(_admit(manager, 0, range(10)))
    manager.check_integrity([])
    manager.num_cached_free_blocks += 1
    with pytest.raises(RuntimeError, match="2 free blocks are published, counted as 3"):
        manager.check_integrity([])


def test_a_prompt_that_waits_is_counted_once() -> None:
    """It is looked up in every step until there is room."""
    engine = StubEngine(num_blocks=6, max_num_seqs=2)
    engine.add(range(16), max_tokens=6)
    engine.add([*range(8), *range(50, 58)], max_tokens=3)
    with mock.patch.object(BlockManager, "find_cached_blocks", autospec=True, side_effect=_find) as find:
        while not engine.is_finished:
            engine.step()
    assert find.call_count > 2
    assert _cache_counts(engine.manager)[:2] == (2, 3 + 1)


_find = BlockManager.find_cached_blocks


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("budget", [7, 64])
def test_preemptions_and_recomputed_tokens(budget: int) -> None:
    """Counted again from the batches: a position that is computed for the second time was recomputed. What preempted
    sequences find of their own is no hit."""
    engine = StubEngine(num_blocks=9, max_num_seqs=6, max_num_batched_tokens=budget)
    prompts = [[seq_id, *range(10, 10 + 3 * seq_id)] for seq_id in range(1, 6)]
    sequences = [engine.add(prompt, max_tokens=12) for prompt in prompts]
    computed: Counter[tuple[int, int]] = Counter()
    num_prefill = num_steps = 0
    while not engine.is_finished:
        batch = engine.step()
        num_steps += bool(batch.sequences)
        num_prefill += batch.num_prefill_tokens
        for seq, start, num_tokens in zip(batch.sequences, batch.starts, batch.num_query_tokens, strict=True):
            computed.update((seq.seq_id, position) for position in range(start, start + num_tokens))
    counts = engine.scheduler.counts
    assert counts.num_preemptions == engine.num_preemptions > 2
    assert counts.num_recomputed_tokens == sum(times - 1 for times in computed.values()) > 0
    assert (counts.num_steps, counts.num_prefill_tokens) == (num_steps, num_prefill)
    assert counts.num_output_tokens == sum(len(seq.output_token_ids) for seq in sequences) == 5 * 12
    assert (counts.num_cached_tokens, engine.manager.counts.num_hit_blocks) == (0, 0)
    assert engine.manager.counts.num_missed_blocks == sum((len(prompt) - 1) // 4 for prompt in prompts)
    engine.scheduler.reset()
    assert engine.scheduler.counts.num_steps == num_steps


# --- the engine, in blocks of sixteen ---------------------------------------------------------------------------


def test_a_shared_prefix(byte_llama: Path, make_llm: MakeLLM) -> None:
    llm = make_llm(byte_llama)
    assert llm.stats() == EngineStats(max_num_seqs=512, num_blocks=64, num_engines=1)
    shared = [1 + index % 250 for index in range(40)]
    prompts = [[*shared, 60 + index, 2, 3] for index in range(4)]  # 43 tokens: blocks 0 and 1 are shared
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_requests, stats.num_finished_length, stats.num_finished, stats.num_unfinished) == (4, 4, 4, 0)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (4 * 43, 4 * 5)
    assert (stats.num_hit_blocks, stats.num_missed_blocks) == (3 * 2, 2)
    assert stats.num_cached_tokens == sum(output["num_cached_tokens"] for output in outputs) == 3 * 32
    assert stats.num_prefill_tokens == 4 * 43 - 3 * 32
    assert stats.prefix_hit_rate == 6 / 8
    assert (stats.num_preemptions, stats.num_recomputed_tokens, stats.num_evicted_blocks) == (0, 0, 0)
    assert stats.num_steps == 5 and stats.step_seconds > 0
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_free_blocks) == (0, 0, 0, 64)
    assert stats.num_cached_free_blocks == 2
    llm.close()
    assert dataclasses.replace(llm.stats(), step_seconds=stats.step_seconds, num_cached_free_blocks=2) == stats


def test_gauges(byte_llama: Path, make_llm: MakeLLM) -> None:
    llm = make_llm(byte_llama, max_num_seqs=2)
    seq_ids = [llm.add_request([1 + index] * 20, GREEDY) for index in range(5)]
    assert (llm.stats().num_running, llm.stats().num_waiting) == (0, 5)
    llm.step()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_unfinished) == (2, 3, 5)
    assert (stats.batch_occupancy, stats.kv_use) == (1.0, 4 / 64)
    llm.abort(seq_ids[0])
    llm.abort(seq_ids[-1])
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished_abort) == (1, 2, 2)
    while not llm.is_finished():
        llm.step()
    stats = llm.stats()
    assert (stats.num_finished_length, stats.num_finished_abort, stats.num_unfinished) == (3, 2, 0)
    assert stats.num_output_tokens == 3 * 5


def test_samples_scores_and_prompt_logprobs(byte_llama: Path, make_llm: MakeLLM) -> None:
    """A request is one whatever its samples, and each sample looks the prompt up. Blocks whose logits are wanted are
    neither hits nor misses."""
    prompt = [1 + index for index in range(40)]
    llm = make_llm(byte_llama)
    llm.generate([prompt], SamplingParams(n=3, max_tokens=4, ignore_eos=True), use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_output_tokens) == (1, 40, 3 * 4)
    assert (stats.num_hit_blocks, stats.num_missed_blocks, stats.num_cached_tokens) == (2 * 2, 2, 2 * 32)
    assert stats.num_prefill_tokens == 40 + 2 * 8

    llm.generate([prompt], dataclasses.replace(GREEDY, prompt_logprobs=1), use_tqdm=False)
    after = llm.stats()
    assert (after.num_hit_blocks, after.num_missed_blocks) == (4, 2)
    assert after.num_prefill_tokens - stats.num_prefill_tokens == 40

    llm.score([prompt] * 2, [[250, 251], [252]], use_tqdm=False)  # blocks 0 and 1 come before what is scored
    stats = llm.stats()
    assert (stats.num_finished_scored, stats.num_finished_length, stats.num_finished) == (2, 2, 4)
    assert stats.num_prompt_tokens - after.num_prompt_tokens == 41 + 40
    assert (stats.num_hit_blocks, stats.num_missed_blocks) == (8, 2)
    assert stats.num_output_tokens == after.num_output_tokens


def test_reasons_and_evictions(byte_llama: Path, make_llm: MakeLLM) -> None:
    """Streams and stop tokens count, too; a pool of four blocks keeps little."""
    llm = make_llm(byte_llama, num_kvcache_blocks=4)
    always = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=tuple(range(300)))
    llm.generate([[1] * 20], always, use_tqdm=False)
    assert llm.stats().num_finished_stop == 1 and llm.stats().num_output_tokens == 1
    for number in range(2, 6):
        list(llm.stream([[number] * 33], dataclasses.replace(GREEDY, max_tokens=2)))
    stream = llm.stream([[9] * 20], GREEDY)
    next(stream)
    stream.close()
    stats = llm.stats()
    assert (stats.num_finished_stop, stats.num_finished_length, stats.num_finished_abort) == (1, 4, 1)
    # Of four blocks the first prompt leaves one published. The next takes the three others, and leaves two of them
    # published: each that follows finds a single one that isn't, and drops the content of two. The last needs two.
    assert (stats.num_evicted_blocks, stats.num_missed_blocks) == (0 + 3 * 2 + 1, 1 + 4 * 2 + 1)


def test_counters_survive_a_failed_step(byte_llama: Path, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(byte_llama)
    llm.generate([[1] * 40] * 2, GREEDY, use_tqdm=False)
    before = llm.stats()
    with monkeypatch.context() as patch:
        patch.setattr(LaunchedStep, "read", mock.Mock(side_effect=LookupError))
        with pytest.raises(LookupError):
            llm.generate([[2] * 40] * 2, GREEDY, use_tqdm=False)
    after = llm.stats()
    assert (after.num_failures, after.num_finished_abort, after.num_unfinished, after.num_running) == (1, 2, 0, 0)
    assert after.num_hit_blocks == before.num_hit_blocks + 2 and after.num_cached_free_blocks == 0
    assert after.num_steps == before.num_steps + 2
    llm.generate([[1] * 40], GREEDY, use_tqdm=False)
    assert llm.stats().num_missed_blocks == after.num_missed_blocks + 2


def test_from_other_threads(byte_llama: Path, make_async_llm: Callable[[], AsyncLLM]) -> None:
    engine = make_async_llm()

    async def run() -> int:
        tasks = [asyncio.create_task(engine.generate([1 + index] * 20, GREEDY)) for index in range(8)]
        unfinished = set()
        while not all(task.done() for task in tasks):
            unfinished.add(engine.stats().num_unfinished)
            await asyncio.sleep(0)
        return max(unfinished)

    assert asyncio.run(run()) > 0
    stats = engine.stats()
    assert (stats.num_requests, stats.num_finished_length, stats.num_output_tokens) == (8, 8, 40)
    engine.close()
    assert engine.stats().num_requests == 8


# --- replicas ---------------------------------------------------------------------------------------------------


def test_sum_over_replicas(byte_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever replica computes them; a request that is dropped, or done again, is still one."""
    settings: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_seqs": 8}
    prompts = random_prompts(range(3, 43))
    with LLM(str(byte_llama), data_parallel_size=2, **settings) as llm:
        assert llm.stats() == EngineStats(max_num_seqs=16, num_blocks=128, num_engines=2)
        llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert (stats.num_requests, stats.num_finished_length, stats.num_output_tokens) == (40, 40, 200)
        num_prompt_tokens = sum(map(len, prompts))
        assert stats.num_prompt_tokens == stats.num_prefill_tokens + stats.num_cached_tokens == num_prompt_tokens
        num_full = sum((len(prompt) - 1) // 16 for prompt in prompts)
        assert stats.num_hit_blocks + stats.num_missed_blocks == num_full
        assert (stats.num_blocks, stats.max_num_seqs, stats.num_engines) == (128, 16, 2)
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        per_replica = [replica.stats for replica in llm._replicas._replicas]  # type: ignore[attr-defined]
        assert stats.num_steps == sum(one.num_steps for one in per_replica) > max(one.num_steps for one in per_replica)

        llm.score([[1, 2, 3]], [[4]], use_tqdm=False)
        ids = [llm.add_request([5] * 30, dataclasses.replace(GREEDY, max_tokens=400)) for _ in range(20)]
        assert llm.stats().num_unfinished == 20
        for request_id in ids:
            llm.abort(request_id)
        stats = llm.stats()
        assert (stats.num_finished_scored, stats.num_finished_abort, stats.num_unfinished) == (1, 20, 0)

        os.kill(llm._replicas.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        llm.generate(prompts, GREEDY, use_tqdm=False)
        assert "replica 1 of 2 is restarted" in caplog.text
        after = llm.stats()
        assert after.num_finished_length == 80 and after.num_requests == 40 + 1 + 20 + 40
        assert after.num_steps > stats.num_steps
        while any(replica.num_kv_tokens is None for replica in llm._replicas._replicas):  # type: ignore[attr-defined]
            llm._replicas.poll()  # type: ignore[attr-defined]
        assert llm.stats().num_engines == 2
        llm.add_request([5] * 30, dataclasses.replace(GREEDY, max_tokens=400))
    assert (llm.stats().num_finished_abort, llm.stats().num_unfinished) == (21, 0)


# --- as text ----------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'(nanovllm_\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (\S+)')


def parse(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """The samples of a Prometheus text, after asserting that it follows the format."""
    samples: dict[tuple[str, tuple[str, ...]], float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in kinds, "a metric is there twice"
            _, kind, same_name, kinds[name] = next(lines).split(" ")
            assert (kind, same_name) == ("TYPE", name)
            assert (kinds[name] == "counter") == name.endswith("_total")
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == name, "samples of a metric follow its TYPE"
        labels = tuple(re.findall(r'\w+="(?:[^"\\]|\\.)*"', match[2] or ""))
        assert (name, labels) not in samples
        samples[name, labels] = float(match[3])
    return samples


def test_prometheus_text() -> None:
    values: dict[str, Any] = {field.name: 10 + index for index, field in enumerate(dataclasses.fields(EngineStats))}
    values["step_seconds"] = 0.25
    stats = EngineStats(**values)
    samples = parse(stats.prometheus())
    assert sorted(samples.values()) == sorted(values.values())  # each is there, once
    assert samples["nanovllm_output_tokens_total", ()] == stats.num_output_tokens
    assert samples["nanovllm_requests_finished_total", ('reason="abort"',)] == stats.num_finished_abort
    assert samples["nanovllm_prefix_blocks_total", ('result="hit"',)] == stats.num_hit_blocks
    labelled = parse(stats.prometheus({"model": 'a"b\\c\nd', "n": "1"}))
    assert len(labelled) == len(samples)
    assert labelled["nanovllm_steps_total", (r'model="a\"b\\c\nd"', 'n="1"')] == stats.num_steps


def test_sum_of_stats() -> None:
    first = EngineStats(num_requests=3, step_seconds=0.5, num_running=2, num_engines=1)
    assert first + EngineStats(num_requests=4, num_blocks=5) == EngineStats(
        num_requests=7, step_seconds=0.5, num_running=2, num_engines=1, num_blocks=5
    )
    assert first.counters() == EngineStats(num_requests=3, step_seconds=0.5)
    nothing = EngineStats()
    assert (nothing.prefix_hit_rate, nothing.batch_occupancy, nothing.kv_use) == (0, 0, 0)


def test_scheduler_without_sequences_counts_no_step() -> None:
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.schedule()
    assert scheduler.counts.num_steps == 0
