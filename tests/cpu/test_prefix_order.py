"""What requests share is computed once, and those that share something start together, at nobody's lasting expense.

Prompts here are of tokens that the stub model never samples, so that nothing but prompts is shared.
"""

import gc
import random
import time
from array import array
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nanovllm import SamplingParams
from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine import waiting_queue
from nanovllm.engine.admission import BlockForecast
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.waiting_queue import WaitingQueue
from nanovllm.jobs.engine import JobEngine
from tests.checkpoints import VOCAB_SIZE as MODEL_VOCAB_SIZE
from tests.cpu.policies import VOCAB_SIZE, StubEngine, make_sequence

BLOCK_SIZE = 4
POLICIES = ("fcfs", "prefix")


class CountingEngine(StubEngine):
    """Counts how often each prompt token is computed: of each block that is the same for several, and of the last block
    of each prompt, which every sequence computes for itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(block_size=BLOCK_SIZE, **kwargs)
        self.num_computed: Counter[tuple[Any, int]] = Counter()  # by the block and the token's position

    def step(self) -> Any:
        batch = super().step()
        for seq, start, count in zip(batch.sequences, batch.starts, batch.num_query_tokens, strict=True):
            prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
            for position in range(start, min(start + count, len(prompt))):
                block = prompt[: position // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE]
                is_own = position >= own_part(prompt)
                self.num_computed[seq.seq_id if is_own else block, position] += 1
        return batch

    def prompts(self) -> list[tuple[int, ...]]:
        return [tuple(seq.token_ids[: seq.num_prompt_tokens]) for seq in self.sequences]


def own_part(prompt: tuple[int, ...]) -> int:
    """Where the block begins that each sequence computes for itself: the one with its last token."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def least_prefill(prompts: list[tuple[int, ...]]) -> int:
    """Tokens to compute for prompts in this order, if every full block is computed once, but the last of each."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for prompt in prompts:
        start = 0
        while start < own_part(prompt) and prompt[: start + BLOCK_SIZE] in known:
            start += BLOCK_SIZE
        total += len(prompt) - start
        known.update(prompt[:end] for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE))
    return total


def random_tree(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Prompts that branch off from one another anywhere, at block boundaries often; some equal or contained."""
    prompts: list[list[int]] = []
    for _ in range(num_prompts):
        stem = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        cut = len(stem) - rng.randint(0, len(stem)) // 2
        if rng.random() < 0.5:
            cut -= cut % BLOCK_SIZE
        own = [VOCAB_SIZE + rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 4, 9, 40]))]
        prompts.append([*stem[:cut], *own] or [VOCAB_SIZE])
    return prompts


# --- computed once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [3, 8, 30, 1000])
def test_tree_of_prefixes_is_computed_once(policy: str, budget: int) -> None:
    """Sharers that come while a prefix is under way, whether it fits a step or not, beside others that decode or
    begin, must wait for it; and a prompt is never computed beside an unfinished one that it shares a block with."""
    num_prefill = num_tokens = 0
    for seed in range(25):
        rng = random.Random(seed)
        engine = CountingEngine(num_blocks=4000, max_num_batched_tokens=budget, schedule_policy=policy, max_num_seqs=8)
        for prompt in random_tree(rng, 30):
            for _ in range(rng.choice([0, 0, 1, 5])):
                if not engine.is_finished:
                    engine.step()
            engine.add(prompt, max_tokens=rng.randint(1, 6))
        engine.run()
        prompts = engine.prompts()
        assert engine.num_prefill_tokens == least_prefill([prompts[seq.seq_id] for seq in engine.admitted])
        assert set(engine.num_computed.values()) == {1}
        # That is the number of distinct tokens, but for blocks that are not wholly equal and each prompt's last.
        num_distinct = len({prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)})
        assert num_distinct <= engine.num_prefill_tokens <= num_distinct + BLOCK_SIZE * len(prompts)
        num_prefill += engine.num_prefill_tokens
        num_tokens += sum(map(len, prompts))
    assert num_prefill < 0.6 * num_tokens, "little is shared"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_in_the_middle_of_a_shared_prefix(policy: str, num_steps: int) -> None:
    """Who waits for a prefix goes on where the aborted sequence stopped, and doesn't wait for ever."""
    engine = CountingEngine(num_blocks=100, max_num_batched_tokens=10, schedule_policy=policy)
    prefix = [VOCAB_SIZE] * 40
    sequences = [engine.add([*prefix, VOCAB_SIZE + 1 + index], max_tokens=3) for index in range(4)]
    for _ in range(num_steps):
        engine.step()
    engine.abort(sequences[0])
    engine.run()
    num_lost = 10 * num_steps - 10 * num_steps // 4 * 4  # of a block that was not full yet
    assert engine.num_prefill_tokens == 40 + 3 + num_lost
    assert all(seq.num_output_tokens == 3 for seq in sequences[1:])


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_in_the_middle_of_a_shared_prefix(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence that computes a prefix gives up its blocks to one that decodes: it comes back before its sharers,
    which find what there is then."""
    monkeypatch.setattr(BlockForecast, "worst_growth", lambda self: 0)
    engine = CountingEngine(num_blocks=16, max_num_batched_tokens=6, schedule_policy=policy)
    engine.add([VOCAB_SIZE + 2] * 4, max_tokens=20)
    engine.step()
    engine.add([VOCAB_SIZE + 2] * 4, max_tokens=20)
    sharers = [engine.add([*[VOCAB_SIZE] * 40, VOCAB_SIZE + 1], max_tokens=2) for _ in range(3)]
    while not engine.num_preemptions:
        engine.step()
    assert next(iter(engine.scheduler.waiting)) == sharers[0].seq_id
    assert sharers[0].num_output_tokens == 0, "the prefix was finished too early for this test"
    engine.run()
    assert max(engine.num_computed.values()) <= 1 + engine.num_preemptions
    assert all(seq.num_output_tokens == 2 for seq in sharers)


def test_unrelated_requests_are_not_held_up() -> None:
    """A prefix of many steps and its sharers; a request behind them begins when its turn comes, in the step that
    finishes the prefix."""
    engine = CountingEngine(num_blocks=100, max_num_batched_tokens=10)
    sharers = [engine.add([VOCAB_SIZE] * 41, max_tokens=2) for _ in range(3)]
    other = engine.add([VOCAB_SIZE + 1] * 3, max_tokens=2)
    for _ in range(5):
        engine.step()
    assert all(seq.status is not SequenceStatus.WAITING for seq in (*sharers, other))
    engine.run()


# --- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [7, 64, 1000])
def test_nothing_shared_is_first_come_first_served(budget: int) -> None:
    """The same steps as ever, token for token, where no two prompts begin with the same block."""
    schedules = []
    for policy in POLICIES:
        rng = random.Random(1)
        engine = StubEngine(num_blocks=60, max_num_batched_tokens=budget, schedule_policy=policy, max_num_seqs=6)
        steps = []
        for index in range(80):
            prompt = [VOCAB_SIZE + index, *[VOCAB_SIZE] * rng.randint(0, 30)]
            engine.add(prompt, max_tokens=rng.randint(1, 12), stop_ids=rng.choice([(), (0,)]))
            for _ in range(rng.choice([0, 0, 2])):
                if not engine.is_finished:
                    batch = engine.step()
                    steps.append(([seq.seq_id for seq in batch.sequences], batch.num_query_tokens))
        while not engine.is_finished:
            batch = engine.step()
            steps.append(([seq.seq_id for seq in batch.sequences], batch.num_query_tokens))
        schedules.append(steps)
    assert schedules[0] == schedules[1]


class WatchedQueue(WaitingQueue):
    """Checks each admission against a search of the whole queue for the longest cached prefix."""

    num_checked: ClassVar[Counter[str]] = Counter()

    def take(self, seq: Sequence) -> None:
        waiting = list(self.values())
        depths = {one.seq_id: len(self._block_manager.find_cached_blocks(one)) for one in waiting}
        longest = max(depths.values())
        if self._num_overtakings == waiting_queue.MAX_OVERTAKINGS or not longest:
            assert seq is waiting[0]
            self.num_checked["oldest"] += 1
        else:
            assert depths[seq.seq_id] == longest
            shared = longest * BLOCK_SIZE
            alike = [one for one in waiting if one.token_ids[:shared] == seq.token_ids[:shared]]
            assert seq is next(one for one in alike if depths[one.seq_id] == longest), "not the oldest of its kind"
            self.num_checked["preferred"] += seq is not waiting[0]
        super().take(seq)


def test_longest_cached_prefix_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trees, arrivals between steps, and a pool that forgets nothing: as a search of the whole queue would."""
    monkeypatch.setattr(scheduler_module, "WaitingQueue", WatchedQueue)
    monkeypatch.setattr(waiting_queue, "MAX_OVERTAKINGS", 5)
    WatchedQueue.num_checked.clear()
    for seed in range(40):
        rng = random.Random(seed)
        engine = StubEngine(num_blocks=4000, max_num_batched_tokens=1000, schedule_policy="prefix", max_num_seqs=3)
        for prompt in random_tree(rng, 40):
            if rng.random() < 0.2 and not engine.is_finished:
                engine.step()
            engine.add(prompt, max_tokens=1)
        engine.run()
    assert min(WatchedQueue.num_checked.values()) > 200


def groups_job(engine: StubEngine, num_groups: int, num_members: int, prefix_len: int) -> list[int]:
    """Adds a shuffled job of groups with a common prefix each; returns each request's group."""
    groups = [group for group in range(num_groups) for _ in range(num_members)]
    random.Random(0).shuffle(groups)
    for index, group in enumerate(groups):
        prefix = [VOCAB_SIZE + group] * prefix_len
        engine.add([*prefix, VOCAB_SIZE + num_groups + index], max_tokens=6)
    return groups


def test_pool_that_holds_few_groups() -> None:
    """Group after group, each prefix is computed once; first come first served computes most of them again and again,
    since none stays in the pool until its next sharer comes."""
    num_prefill, num_steps = {}, {}
    for policy in POLICIES:
        engine = CountingEngine(num_blocks=60, max_num_batched_tokens=64, schedule_policy=policy)
        groups = groups_job(engine, 16, 8, prefix_len=40)
        num_steps[policy] = 0
        while not engine.is_finished:
            engine.step()
            num_steps[policy] += 1
        engine.run()
        num_prefill[policy] = engine.num_prefill_tokens
        walk = [groups[seq.seq_id] for seq in engine.admitted]
        num_changes = sum(a != b for a, b in pairwise(walk))
        assert num_changes == 15 or policy == "fcfs"
    assert num_prefill["prefix"] == 16 * 40 + 16 * 8
    assert num_prefill["fcfs"] > 3 * num_prefill["prefix"]
    assert num_steps["prefix"] < 0.6 * num_steps["fcfs"]


def test_what_an_earlier_call_left_in_the_cache_goes_first() -> None:
    """Requests that come with a cached prefix are served before it is evicted for others."""
    engine = CountingEngine(num_blocks=24, max_num_seqs=1, schedule_policy="prefix")
    cached = [VOCAB_SIZE] * 40
    engine.add([*cached, VOCAB_SIZE + 1], max_tokens=1)
    engine.run()
    other = engine.add([VOCAB_SIZE + 2] * 60, max_tokens=1)
    late = [engine.add([*cached, VOCAB_SIZE + 3 + index], max_tokens=1) for index in range(2)]
    engine.run()
    assert engine.admitted[1:] == [*late, other]
    assert [seq.num_cached_tokens for seq in late] == [40, 40]


@pytest.mark.parametrize("is_stem_left", [True, False])
def test_evicted_prefix_gives_no_precedence(is_stem_left: bool) -> None:
    """What was cached when a request came is asked for again when it is chosen; the part that is left counts."""
    engine = CountingEngine(num_blocks=12, max_num_seqs=1, schedule_policy="prefix")
    stem = [VOCAB_SIZE] * 16
    engine.add([*stem, *[VOCAB_SIZE + 1] * 17], max_tokens=1)
    engine.run()
    # Takes the blocks after the stem, tails before heads, or all there are.
    grower = engine.add([VOCAB_SIZE + 8] * 3, max_tokens=30 if is_stem_left else 46)
    engine.step()
    oldest = engine.add([VOCAB_SIZE + 9] * 5, max_tokens=1)
    deep = engine.add([*stem, *[VOCAB_SIZE + 1] * 16, VOCAB_SIZE + 2], max_tokens=1)
    assert len(engine.manager.find_cached_blocks(deep)) > 4
    while not grower.is_finished:
        engine.step()
    engine.run()
    assert engine.admitted[2:] == ([deep, oldest] if is_stem_left else [oldest, deep])
    assert deep.num_cached_tokens == 16 * is_stem_left


def test_abort_of_the_preferred_one() -> None:
    """Who is left with a shorter part of the cached prefix is preferred then, and nobody who is gone is chosen."""
    engine = CountingEngine(num_blocks=200, max_num_seqs=1, schedule_policy="prefix")
    long = [VOCAB_SIZE] * 16
    first = engine.add([*long, VOCAB_SIZE + 1], max_tokens=4)
    other = engine.add([VOCAB_SIZE + 2] * 9, max_tokens=1)
    half = engine.add([*long[:8], VOCAB_SIZE + 3], max_tokens=1)
    whole = [engine.add([*long, VOCAB_SIZE + 4 + index], max_tokens=1) for index in range(2)]
    engine.step()
    for preferred in (*whole, half):
        assert engine.scheduler.waiting.choose() is preferred
        engine.abort(preferred)
    assert engine.scheduler.waiting.choose() is other
    engine.run()
    assert engine.admitted == [first, other]
    assert not engine.scheduler.waiting._prefixes._root.children and not engine.scheduler.waiting._prefixes._warm


def test_prompt_that_is_scored_shares_nothing() -> None:
    """Its blocks are computed whatever the cache has: to prefer it would be for nothing."""
    queue = WaitingQueue(BlockManager(8, BLOCK_SIZE), "prefix")
    params = SamplingParams(prompt_logprobs=0)
    for seq_id in range(2):
        queue.add(Sequence(seq_id, array("i", range(9)), params, max_total_tokens=20))
    assert not queue.is_sharing
    for seq_id in range(2, 4):
        queue.add(make_sequence(seq_id, range(9)))
    assert queue.is_sharing


# --- fairness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_older", [0, 1, 4])
def test_overtaking_is_bounded(num_older: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a cached prefix come without end; one without begins after no more of them than is promised."""
    monkeypatch.setattr(waiting_queue, "MAX_OVERTAKINGS", 3)
    engine = CountingEngine(num_blocks=100, max_num_seqs=1, schedule_policy="prefix")
    prefix = [VOCAB_SIZE] * 8

    def add_sharer() -> None:
        engine.add([*prefix, VOCAB_SIZE + 1], max_tokens=1)

    for _ in range(2):
        add_sharer()
    engine.step()
    for index in range(num_older + 1):
        last = engine.add([VOCAB_SIZE + 2 + index] * 6, max_tokens=1)
    num_steps = 0
    while last.status is SequenceStatus.WAITING:
        add_sharer()
        engine.step()
        num_steps += 1
        assert num_steps < 200, "starved"
    # Each of the older ones, and the one itself, after three sharers.
    assert engine.num_overtakings[last.seq_id] == 3 * (num_older + 1)
    engine.run()


def test_big_request_is_not_starved_by_sharers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests with a cached prefix would keep a big one out for ever if those that fit might always pass it:
    once it is its turn, all wait until it fits."""
    monkeypatch.setattr(waiting_queue, "MAX_OVERTAKINGS", 4)
    engine = CountingEngine(num_blocks=12, schedule_policy="prefix")
    prefix = [VOCAB_SIZE] * 8
    engine.add([*prefix, VOCAB_SIZE + 1], max_tokens=8)
    engine.step()
    big = engine.add([VOCAB_SIZE + 2] * 40, max_tokens=4)
    for _ in range(40):
        engine.add([*prefix, VOCAB_SIZE + 1], max_tokens=8)
        engine.step()
        if big.status is not SequenceStatus.WAITING:
            break
    assert big.status is SequenceStatus.RUNNING
    assert engine.num_overtakings[big.seq_id] <= 4
    engine.run()


def test_samples_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a request follow one another whatever is preferred or due, and overtake as one request."""
    monkeypatch.setattr(waiting_queue, "MAX_OVERTAKINGS", 1)
    rng = random.Random(3)
    engine = CountingEngine(num_blocks=400, max_num_seqs=3, schedule_policy="prefix")
    for prompt in random_tree(rng, 30):
        request_id = len(engine.sequences)
        for _ in range(rng.randint(1, 5)):
            engine.add(prompt, max_tokens=3, request_id=request_id)
        if rng.random() < 0.5:
            engine.step()
    engine.run()
    requests = [seq.request_id for seq in engine.admitted]
    assert requests != sorted(requests), "nobody was overtaken"
    assert sum(a != b for a, b in pairwise(requests)) == len(set(requests)) - 1
    assert [seq.seq_id for seq in engine.admitted if seq.request_id == requests[-1]] == sorted(
        seq.seq_id for seq in engine.sequences if seq.request_id == requests[-1]
    )


# --- cost -------------------------------------------------------------------------------------------------------


def sharing_scheduler(num_queued: int) -> Scheduler:
    """Requests that all begin with the same block, and in 50 groups with the same two."""
    manager = BlockManager(4096, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=64, max_num_batched_tokens=256, schedule_policy="prefix")
    for seq_id in range(num_queued):
        prompt = [7] * 4 + [seq_id % 50] * 4 + [seq_id % 17, seq_id % 19]
        scheduler.add(make_sequence(seq_id, prompt, max_tokens=1 + seq_id % 37))
    return scheduler


def test_cost_is_independent_of_the_queue() -> None:
    """50,000 requests that share prefixes: neither a step nor an abort may search them."""
    schedulers = [sharing_scheduler(1_000), sharing_scheduler(50_000)]
    gc.collect()
    gc.disable()
    try:
        times = [[step_seconds(scheduler, 10) for scheduler in schedulers] for _ in range(20)]
    finally:
        gc.enable()
    assert min(many for _, many in times[1:]) < 2.5 * min(few for few, _ in times[1:])
    waiting = list(schedulers[1].waiting.values())
    started = time.perf_counter()
    for seq in waiting[10_000:35_000]:
        schedulers[1].finish(seq, "abort")
    assert time.perf_counter() - started < 2


def step_seconds(scheduler: Scheduler, num_steps: int) -> float:
    """Of the processor: other processes must not count."""
    started = time.process_time()
    for _ in range(num_steps):
        batch = scheduler.schedule()
        assert batch.sequences
        scheduler.postprocess(batch, [9] * len(batch.sampled_sequences))
    return time.process_time() - started


# --- the engine -------------------------------------------------------------------------------------------------


def test_engine_returns_results_in_the_prompts_order(random_llama: Any, make_llm: Any, drive: Any) -> None:
    """A shuffled job of groups on a small pool, by both policies: the same results, in order, for less work."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(MODEL_VOCAB_SIZE) for _ in range(64)] for _ in range(8)]
    prompts = [[*prefix, index, group] for group, prefix in enumerate(prefixes) for index in range(6)]
    rng.shuffle(prompts)
    params = [SamplingParams(max_tokens=4, ignore_eos=True, n=1 + index % 2) for index in range(len(prompts))]
    results, num_prefill = {}, {}
    for policy in POLICIES:
        settings = {"num_kvcache_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 100, "seed": 3}
        llm = make_llm(random_llama[0], schedule_policy=policy, **settings)
        results[policy] = llm.generate(prompts, params, use_tqdm=False)
        assert [output["prompt_token_ids"] for output in results[policy]] == prompts
        _, steps = drive(make_llm(random_llama[0], schedule_policy=policy, **settings), prompts, params)
        num_prefill[policy] = sum(step.num_prefill_tokens for step in steps)
    for plain, ordered in zip(results["fcfs"], results["prefix"], strict=True):
        for output in (plain, ordered):
            del output["num_cached_tokens"]
        assert plain == ordered
    num_samples = sum(one.n for one in params)
    assert num_prefill["prefix"] == 8 * 64 + 2 * num_samples < 0.5 * num_prefill["fcfs"]


@pytest.mark.parametrize(("num_groups", "most_expected"), [(10, 40), (10_000, 4)], ids=["shared", "nothing shared"])
def test_generate_looks_ahead_where_that_is_of_use(
    random_llama: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch, num_groups: int, most_expected: int
) -> None:
    """The order has more to choose from than a step may start, but never the whole of a large job; and no more
    than a step may start if no two prompts begin alike."""
    monkeypatch.setattr(scheduler_module, "LOOK_AHEAD", 40)
    most = 0
    add = Scheduler.add

    def recorded_add(self: Scheduler, seq: Any) -> None:
        nonlocal most
        add(self, seq)
        most = max(most, len(self.waiting))

    monkeypatch.setattr(Scheduler, "add", recorded_add)
    llm = make_llm(random_llama[0], max_num_seqs=4, num_kvcache_blocks=16)
    prompts = [[index % num_groups] * 17 + [index] for index in range(150)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0), use_tqdm=False)
    assert [output["prompt_token_ids"] for output in outputs] == prompts
    assert most == most_expected


def test_job_on_a_file_looks_ahead(byte_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nanovllm run` reads as far ahead as `generate`, and no further."""
    monkeypatch.setattr(scheduler_module, "LOOK_AHEAD", 40)
    settings = {"device": "cpu", "num_kvcache_blocks": 16, "kvcache_block_size": 16, "max_num_seqs": 4}
    for num_groups, expected in ((3, 44), (10_000, 8)):
        with JobEngine(str(byte_llama), **settings) as engine:
            (request,) = engine.inputs.process_params(SamplingParams(max_tokens=2, ignore_eos=True), 1)
            for index in range(100):
                if not engine.is_full:
                    prompt = array("i", [index % num_groups] * 17)
                    row: Any = SimpleNamespace(token_ids=prompt, request=request, params=request.params)
                    engine.add(row)
            assert engine.num_rows == expected
