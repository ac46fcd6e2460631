"""Which sequences attend to which prefixes together: random trees against what the block tables say."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import prefix_groups
from nanovllm.engine.prefix_groups import MAX_LEVELS, IntArray, PrefixGrouper, PrefixGroups, max_num_groups
from tests.checkpoints import prompts_that_begin_alike
from tests.cpu.policies import StubEngine

BLOCK_SIZE = 16


@pytest.fixture
def free_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group that saves a read is worth it."""
    monkeypatch.setattr(prefix_groups, "_GROUP_COST", 0)
    monkeypatch.setattr(prefix_groups, "_MEMBER_COST", 0)


def random_tables(rng: random.Random, num_seqs: int, max_blocks: int = 6) -> list[list[int]]:
    """Each sequence begins like some earlier one, or not, and ends with at least one block of its own."""
    tables: list[list[int]] = []
    ids = iter(rng.sample(range(10_000), num_seqs * (max_blocks + 1)))
    for _ in range(num_seqs):
        parent = rng.choice(tables) if tables and rng.random() < 0.8 else []
        shared = parent[: rng.randint(0, max(len(parent) - 1, 0))]
        tables.append(shared + [next(ids) for _ in range(rng.randint(1, max_blocks))])
    return tables


def as_arrays(tables: list[list[int]], rng: random.Random) -> tuple[IntArray, IntArray]:
    """Padded tables, and contexts that end anywhere in the last block."""
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    lens = [(len(blocks) - 1) * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE) for blocks in tables]
    return table, np.array(lens, dtype=np.int32)


def check(groups: PrefixGroups, tables: list[list[int]], context_lens: IntArray, capacity: int) -> None:
    """What each sequence attends to, through its groups and alone, is its context, each block once; everything else
    about the groups is as their docstring says."""
    num_groups = len(groups.lens)
    assert num_groups <= max_num_groups(len(tables))
    assert groups.members.shape == (num_groups, capacity)
    for row, table in enumerate(tables):
        end = 0
        for place in groups.places[row].tolist():
            if place >= 0:
                group, index = divmod(place, capacity)
                assert groups.members[group, index] == row
                assert groups.starts[group] == end and groups.lens[group] > 0
                first = tables[groups.members[group, 0]]
                blocks = slice(end // BLOCK_SIZE, (end + groups.lens[group]) // BLOCK_SIZE)
                assert first[blocks] == table[blocks]
                end += int(groups.lens[group])
        assert groups.shared_lens[row] == end and end % BLOCK_SIZE == 0
        assert groups.own_lens[row] == context_lens[row] - end >= 1
    places = groups.places[groups.places >= 0]
    assert len(set(places.tolist())) == len(places) == (groups.members >= 0).sum()
    for array in vars(groups).values():
        assert array.dtype == np.int32


def most_savings(tables: list[list[int]]) -> int:
    """Block reads saved if every block were read once."""
    blocks = [block for table in tables for block in table]
    return len(blocks) - len(set(blocks))


def savings(groups: PrefixGroups) -> int:
    num_members = (groups.members >= 0).sum(axis=1)
    return int(((num_members - 1) * (groups.lens // BLOCK_SIZE)).sum())


@pytest.mark.parametrize("capacity", [2, 3, 64])
def test_random_trees(capacity: int, free_groups: None, rng: random.Random) -> None:
    num_saved = num_possible = 0
    for _ in range(200):
        tables = random_tables(rng, rng.randint(1, 30))
        table, lens = as_arrays(tables, rng)
        groups = PrefixGrouper(BLOCK_SIZE, capacity).find(list(range(len(table))), table, lens)
        check(groups, tables, lens, capacity)
        num_saved += savings(groups)
        num_possible += most_savings(tables)
    assert num_saved > (0.75 if capacity == 64 else 0.3) * num_possible


def test_costs_decide(rng: random.Random) -> None:
    """With the real costs, too, everything is attended to, and what would cost more than it saves is left alone."""
    for _ in range(50):
        tables = random_tables(rng, 20, max_blocks=30)
        table, lens = as_arrays(tables, rng)
        check(PrefixGrouper(BLOCK_SIZE, 32).find(list(range(len(table))), table, lens), tables, lens, 32)
    short = [[0, 1], [0, 2], [0, 3]]
    table, lens = as_arrays(short, rng)
    assert not len(PrefixGrouper(BLOCK_SIZE, 32).find(list(range(len(table))), table, lens).lens)
    long = [[*range(20), 100 + row] for row in range(3)]
    table, lens = as_arrays(long, rng)
    assert PrefixGrouper(BLOCK_SIZE, 32).find(list(range(len(table))), table, lens).lens.tolist() == [20 * BLOCK_SIZE]


def test_one_prompt_many_samples(rng: random.Random) -> None:
    tables = [[*range(40), 100 + row] for row in range(100)]
    table, lens = as_arrays(tables, rng)
    groups = PrefixGrouper(BLOCK_SIZE, 32).find(list(range(len(table))), table, lens)
    check(groups, tables, lens, 32)
    assert (groups.members >= 0).sum(axis=1).tolist() == [32, 32, 32, 4]


def test_deep_trees_end_at_the_last_level(free_groups: None, rng: random.Random) -> None:
    """Each sequence shares one block more than the one before."""
    tables = [[*range(row), 100 + row] for row in range(12)]
    table, lens = as_arrays(tables, rng)
    groups = PrefixGrouper(BLOCK_SIZE, 16).find(list(range(len(table))), table, lens)
    check(groups, tables, lens, 16)
    assert (groups.places[-1] >= 0).sum() == MAX_LEVELS


def test_too_many_groups_are_left_to_what_saves_most(free_groups: None, rng: random.Random) -> None:
    """Pairs within fours within eights: more nodes than groups are allowed."""
    tables = [[row // 8, 100 + row // 8, 200 + row // 4, 300 + row // 2, 400 + row] for row in range(16)]
    table, lens = as_arrays(tables, rng)
    groups = PrefixGrouper(BLOCK_SIZE, 16).find(list(range(len(table))), table, lens)
    check(groups, tables, lens, 16)
    assert savings(groups) >= 2 * 7 * 2, "at least what the eights share"


@pytest.mark.parametrize("capacity", [0, 1])
def test_no_groups_without_room_for_two(capacity: int, rng: random.Random) -> None:
    tables = [[*range(40), 100 + row] for row in range(9)]
    table, lens = as_arrays(tables, rng)
    groups = PrefixGrouper(BLOCK_SIZE, capacity).find(list(range(len(table))), table, lens)
    assert not len(groups.lens) and (groups.own_lens == lens).all() and (groups.places == -1).all()


def test_groups_are_kept_while_the_sequences_go_on(
    free_groups: None, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they grow into new blocks, nothing is computed anew; whenever the batch changes, it is."""
    num_computed = 0
    compute = prefix_groups._make_groups

    def count(*args: object) -> PrefixGroups:
        nonlocal num_computed
        num_computed += 1
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prefix_groups, "_make_groups", count)
    grouper = PrefixGrouper(BLOCK_SIZE, 4)
    tables = random_tables(rng, 12)
    seq_ids = list(range(12))
    table, lens = as_arrays(tables, rng)
    for step in range(40):
        check(grouper.find(list(seq_ids), table, lens), tables, lens, 4)
        lens = lens + 1
        for row, blocks in enumerate(tables):
            if lens[row] > len(blocks) * BLOCK_SIZE:
                blocks.append(20_000 + 100 * step + row)
        table = as_arrays(tables, rng)[0]
    assert num_computed == 1

    def replace(row: int, blocks: list[int]) -> None:
        tables[row], seq_ids[row] = blocks, 100 + len(set(seq_ids))

    changes: list[Callable[[], object]] = [
        lambda: (tables.pop(3), seq_ids.pop(3)),
        lambda: (tables.insert(2, [*tables[5][:-1], 30_000]), seq_ids.insert(2, 50)),
        lambda: (tables.reverse(), seq_ids.reverse()),
        lambda: replace(0, [*tables[1][:-1], 30_001]),
        lambda: replace(4, [30_002, 30_003]),
    ]
    for number, change in enumerate(changes):
        change()
        table, lens = as_arrays(tables, rng)
        check(grouper.find(list(seq_ids), table, lens), tables, lens, 4)
        assert num_computed == number + 2


def test_blocks_of_other_sequences_after_the_end_mean_nothing(free_groups: None) -> None:
    """Tables are padded with 0, which is a block like any other, and their last block is being written."""
    table = np.array([[0, 0, 0], [0, 5, 0], [3, 0, 0], [3, 0, 7]], dtype=np.int32)
    lens = np.array([16, 20, 16, 33], dtype=np.int32)
    groups = PrefixGrouper(BLOCK_SIZE, 4).find(list(range(len(table))), table, lens)
    assert groups.shared_lens.tolist() == [0, 0, 0, 0]


def test_engine_reads_through_groups(free_groups: None, rng: random.Random) -> None:
    """Random requests with few distinct beginnings, in a tight pool: with chunks, preemptions and hits, all that a
    sequence attends to is its own (`StubEngine` looks at every row of every step)."""
    engine = StubEngine(num_blocks=60, block_size=4, max_num_batched_tokens=24)
    beginnings = [[rng.randrange(3) for _ in range(rng.choice([8, 17, 30]))] for _ in range(3)]
    for _ in range(60):
        beginning = rng.choice(beginnings)
        prompt = beginning[: rng.randint(1, len(beginning))] + [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        engine.add(prompt, max_tokens=rng.randint(1, 20))
    engine.run()
    assert engine.device.num_shared_tokens > 1000


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_tokens_are_those_of_whole_contexts(
    tensor_parallel_size: int, random_llama: Any, make_llm: Callable[..., LLM]
) -> None:
    """Prompts and samples with common beginnings, nested ones, decoded together, by one rank and by two."""
    llm = make_llm(random_llama[0], kvcache_block_size=16, tensor_parallel_size=tensor_parallel_size)
    prompts = prompts_that_begin_alike(seed=3)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * len(prompts)
    params[3] = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, n=4, seed=5)
    outputs, num_groups = [], []
    for capacity in (llm._grouper.capacity, 0):
        llm._grouper.capacity = capacity
        for prompt, param in zip(prompts, params, strict=True):
            llm.add_request(prompt, param)
        finished: dict[int, Any] = {}
        num_groups.append(0)
        while not llm.is_finished():
            finished.update(llm.step().finished)
            num_groups[-1] = max(num_groups[-1], len(llm._grouper._groups.lens))
        results = [finished[seq_id] for seq_id in sorted(finished)]
        outputs.append([[s["token_ids"] for s in result.get("samples", [result])] for result in results])
    assert outputs[0] == outputs[1]
    assert num_groups[0] >= 2 and num_groups[1] == 0
