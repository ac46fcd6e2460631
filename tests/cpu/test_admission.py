"""The look-ahead of admission: its arithmetic against a simulation block by block, and what it learns of lengths."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.engine.admission import _MAX_EVALUATED_TIMES, _RELEASE_LAG, BlockForecast, LengthEstimator
from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.sequence import Sequence
from tests.cpu.policies import StubEngine, make_sequence

BLOCK_SIZE = 4

SHARED: dict[Sequence, int] = {}  # leading blocks that others hold too


def running_sequence(rng: random.Random, *, max_len: int = 60) -> Sequence:
    """A sequence in the middle of its life, with the blocks that it holds and shares then."""
    num_prompt, num_output = rng.randint(1, max_len), rng.randint(1, max_len)
    seq = make_sequence(0, [0] * num_prompt, max_tokens=num_output)
    num_known = rng.randint(0, num_output - 1)
    seq.token_ids.extend([0] * num_known)
    seq.num_in_flight = 1
    if seq.num_tokens >= seq.max_total_tokens:  # its last token is in flight: nothing is left to take
        num_kv_tokens = seq.max_total_tokens - 1
    else:  # the block of the newest token is held already, or taken in the step to come
        num_kv_tokens = seq.num_tokens - rng.randint(0, 1)
    num_held = max(1, -(-num_kv_tokens // BLOCK_SIZE))
    seq.block_table = array("i", range(num_held))
    SHARED[seq] = rng.randint(0, (num_prompt - 1) // BLOCK_SIZE)
    return seq


def simulated_peak_growth(sequences: list[Sequence]) -> int:
    """The same question as `BlockForecast.peak_growth`, step by step and sequence by sequence."""
    last_step = max(seq.max_total_tokens for seq in sequences) + _RELEASE_LAG + 1
    peak = None
    for step in range(last_step):
        growth = 0
        for seq in sequences:
            num_kv_tokens = seq.max_total_tokens - 1  # at the end: the last token's KV is never computed
            remaining = max(0, num_kv_tokens - seq.num_tokens)
            if step > remaining + _RELEASE_LAG:
                growth -= len(seq.block_table) - SHARED[seq]
            else:
                num_tokens = min(seq.num_tokens + step, num_kv_tokens)
                growth += -(-num_tokens // BLOCK_SIZE) - len(seq.block_table)
        peak = growth if peak is None else max(peak, growth)
    assert peak is not None
    return peak


def forecast_of(sequences: list[Sequence]) -> BlockForecast:
    manager: Any = SimpleNamespace(block_size=BLOCK_SIZE, num_shared_blocks=lambda seq: SHARED.get(seq, 0))
    return BlockForecast(sequences, LengthEstimator(), manager)


@pytest.mark.parametrize("num_sequences", [1, 2, 5, 40, _MAX_EVALUATED_TIMES])
def test_peak_equals_simulation(num_sequences: int, rng: random.Random) -> None:
    """One block too few preempts somebody later, one too many leaves room unused."""
    for _ in range(60 if num_sequences <= 5 else 4):
        sequences = [running_sequence(rng) for _ in range(num_sequences)]
        forecast = forecast_of(sequences)
        assert forecast.peak_growth() == simulated_peak_growth(sequences)
        assert forecast.worst_growth() >= forecast.peak_growth()


def test_peak_of_many_sequences_is_close(rng: random.Random) -> None:
    """With more sequences than evaluated times the peak may be missed, but only by what a few steps add."""
    sequences = [running_sequence(rng, max_len=800) for _ in range(500)]
    num_held = sum(len(seq.block_table) for seq in sequences)
    peak = simulated_peak_growth(sequences)
    assert 0.99 * (num_held + peak) <= num_held + forecast_of(sequences).peak_growth() <= num_held + peak


def test_forecast_of_a_candidate() -> None:
    """A candidate counts with all blocks that it would take, and only until it is withdrawn."""
    old = make_sequence(0, [0] * 6, max_tokens=7)  # 12 tokens of KV at the end: 3 blocks
    old.num_in_flight = 1
    old.block_table = array("i", [0, 1])
    forecast = forecast_of([old])
    assert forecast.peak_growth() == forecast.worst_growth() == 1
    candidate = make_sequence(1, [0] * 9, max_tokens=40)
    forecast.add(candidate, 2, 2)  # two of its blocks are shared
    # At the end it holds 12 blocks, 10 of them new; the old sequence has given back its two by then.
    assert forecast.worst_growth() == 1 + 10
    assert forecast.peak_growth() == 10 - 2
    forecast.discard_last()
    assert forecast.peak_growth() == forecast.worst_growth() == 1


def test_shared_blocks_are_not_given_back() -> None:
    """A sequence that ends gives back its own blocks; counting the shared ones too promises room that never comes."""
    short = make_sequence(0, [0] * 16, max_tokens=2)
    short.block_table = array("i", range(4))
    long = make_sequence(1, [0] * 4, max_tokens=41)  # 11 blocks at the end
    long.block_table = array("i", [9])
    private = forecast_of([short, long]).peak_growth()
    SHARED[short] = 3
    assert forecast_of([short, long]).peak_growth() == private + 3 == 10 - 1


def test_nothing_running() -> None:
    forecast = forecast_of([])
    assert forecast.worst_growth() == 0
    forecast.add(make_sequence(0, [0] * 6, max_tokens=3), 0, 0)
    assert forecast.peak_growth() == forecast.worst_growth() == 2


def test_known_lengths_never_preempt(rng: random.Random) -> None:
    """When nothing but the limit ends a sequence, and prompts are not cut, the forecast is exact. The pool is used
    well all the same: requests overlap although not all of them fit at their full length."""
    engine = StubEngine(num_blocks=40, block_size=4, max_num_batched_tokens=1000, enable_prefix_caching=False)
    for _ in range(60):
        engine.add([rng.randrange(3) for _ in range(rng.randint(1, 40))], max_tokens=rng.randint(1, 40))
    most_promised = 0
    while not engine.is_finished:
        engine.step()
        promised = sum(-(-(seq.max_total_tokens - 1) // 4) for seq in engine.scheduler.running.values())
        most_promised = max(most_promised, promised)
    engine.run()
    assert engine.num_preemptions == 0
    assert most_promised > 40, "reserving everybody's full length would do no worse"


# --- lengths ----------------------------------------------------------------------------------------------------


def finished_sequence(num_output: int, *, stop_ids: tuple[int, ...] = (1,)) -> Sequence:
    seq = make_sequence(0, [0] * 10, max_tokens=1000, stop_ids=stop_ids)
    seq.token_ids.extend([0] * num_output)
    return seq


def test_length_is_exact_without_stop_tokens() -> None:
    """Only its limit can end such a sequence, whatever others did."""
    estimator = LengthEstimator()
    estimator.observe(finished_sequence(5))
    assert estimator.expected_total_tokens(make_sequence(1, [0] * 10, max_tokens=500)) == 510


def test_length_is_the_limit_before_anything_is_known() -> None:
    assert LengthEstimator().expected_total_tokens(make_sequence(1, [0], max_tokens=500, stop_ids=[1])) == 501


def test_length_follows_what_was_seen() -> None:
    """The first observation counts in full; later ones move the mean, so that a change of workload gets through."""
    estimator = LengthEstimator()
    waiting = make_sequence(1, [0] * 10, max_tokens=500, stop_ids=[1])
    estimator.observe(finished_sequence(40))
    assert estimator.expected_total_tokens(waiting) == 50
    estimator.observe(finished_sequence(200))
    assert 50 < estimator.expected_total_tokens(waiting) < 70
    for _ in range(300):
        estimator.observe(finished_sequence(200))
    assert estimator.expected_total_tokens(waiting) == pytest.approx(210, abs=2)


def test_sequences_without_stop_tokens_teach_nothing() -> None:
    """Where they end says nothing about where others stop."""
    estimator = LengthEstimator()
    estimator.observe(finished_sequence(900, stop_ids=()))
    estimator.observe(finished_sequence(40))
    estimator.observe(finished_sequence(900, stop_ids=()))
    assert estimator.expected_total_tokens(make_sequence(1, [0] * 10, max_tokens=500, stop_ids=[1])) == 50


@pytest.mark.parametrize("num_output", [0, 1, 39, 40, 100, 498, 499])
def test_expected_length_is_possible(num_output: int) -> None:
    """Longer than now, since it still runs, but within its limit."""
    estimator = LengthEstimator()
    estimator.observe(finished_sequence(40))
    seq = make_sequence(1, [0] * 10, max_tokens=500, stop_ids=[1])
    seq.token_ids.extend([0] * num_output)
    assert seq.num_tokens < estimator.expected_total_tokens(seq) <= 510
    if num_output in (40, 100):
        assert estimator.expected_total_tokens(seq) == 10 + num_output + 20, "it has outlived the mean"


# --- requests that can never fit --------------------------------------------------------------------------------


def test_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    """Queued, it would block the queue for ever."""
    inputs = InputProcessor(None, vocab_size=10, max_model_len=100, num_kv_tokens=64)
    inputs.process_prompts([[1] * 64])
    with pytest.raises(ValueError, match=r"prompt 1: has 65 tokens.* holds 64"):
        inputs.process_prompts([[1] * 64, [1] * 65])
    with pytest.raises(ValueError, match=r"prompt 0: has 100 tokens.*max_model_len=100"):
        inputs.process_prompts([[1] * 100])


def test_output_is_clipped_to_the_pool() -> None:
    """A prompt that fits but whose output can't: the request ends by length, with one token that needs no KV."""
    inputs = InputProcessor(None, vocab_size=10, max_model_len=100, num_kv_tokens=64)
    assert inputs.max_total_tokens(64, 10) == 65
    assert inputs.max_total_tokens(10, 10) == 20
    assert InputProcessor(None, vocab_size=10, max_model_len=30, num_kv_tokens=64).max_total_tokens(10, 99) == 30
