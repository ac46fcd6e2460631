"""Packing of scheduled batches, against a construction token by token."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine import batch as batch_module
from nanovllm.engine import prefix_groups
from nanovllm.engine.batch import UNKNOWN_TOKEN, PackedBatch, dummy_batch, noise_keys, pack, pad_decode
from nanovllm.engine.prefix_groups import PrefixGrouper
from nanovllm.engine.scheduler import ScheduledBatch
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_tensors import flatten, view_flat
from tests.cpu.policies import StubEngine, make_sequence

MASK = 2**64 - 1
INT_FIELDS = (
    "token_ids",
    "positions",
    "kv_slots",
    "query_starts",
    "context_lens",
    "block_tables",
    "slots",
    "rope_lens",
    "logits_indices",
    "sampled_slots",
)
SAMPLING_FIELDS = (
    "temperature",
    "keys",
    "filter_rows",
    "top_k",
    "top_p",
    "min_p",
    "banned_rows",
    "banned_ids",
)


def pack_sampling(sequences: list[Sequence]) -> SimpleNamespace:
    return SimpleNamespace(**batch_module.pack_sampling(sequences))


def splitmix64(x: int) -> int:
    """First output of the generator of Steele, Lea and Flood (2014) seeded with x."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise_key(seed: int, position: int) -> list[int]:
    """Low and high half of the key, as the int32 of the same bits."""
    key = splitmix64((splitmix64(seed) + position) & MASK)
    return [half - 2**32 if half >= 2**31 else half for half in (key & 0xFFFFFFFF, key >> 32)]


def pack_naively(batch: ScheduledBatch, block_size: int) -> dict[str, list[Any]]:
    """The integer arrays of `PackedBatch`, one append at a time."""
    packed: dict[str, list[Any]] = {name: [] for name in INT_FIELDS}
    packed["query_starts"].append(0)
    width = max(len(seq.block_table) for seq in batch.sequences)
    for row, seq in enumerate(batch.sequences):
        start, count = batch.starts[row], batch.num_query_tokens[row]
        for position in range(start, start + count):
            is_known = position < len(seq.token_ids)
            packed["token_ids"].append(seq.token_ids[position] if is_known else UNKNOWN_TOKEN)
            packed["positions"].append(position)
            packed["rope_lens"].append(max(seq.num_prompt_tokens, position + 1))
            block_id = seq.block_table[position // block_size]
            packed["kv_slots"].append(block_id * block_size + position % block_size)
        packed["query_starts"].append(packed["query_starts"][-1] + count)
        packed["context_lens"].append(start + count)
        packed["block_tables"].append(list(seq.block_table) + [0] * (width - len(seq.block_table)))
        packed["slots"].append(seq.slot)
        if batch.is_sampled[row]:
            packed["logits_indices"].append(packed["query_starts"][-1] - 1)
            packed["sampled_slots"].append(seq.slot)
    return packed


def check_pack(batch: ScheduledBatch, block_size: int) -> PackedBatch:
    packed = pack(batch, block_size)
    for name, expected in pack_naively(batch, block_size).items():
        array = getattr(packed, name)
        assert array.dtype == np.int32, name
        assert array.tolist() == expected, name
    is_single = [count == 1 for count in batch.num_query_tokens]
    assert packed.num_decode_seqs == sum(is_single)
    assert packed.max_query_len == max((count for count in batch.num_query_tokens if count > 1), default=0)
    assert packed.max_context_len == max(seq.num_computed_tokens for seq in batch.sequences)
    num_sampled = len(batch.sampled_sequences)
    assert packed.is_pure_decode == (all(is_single) and num_sampled == len(is_single))
    assert all(is_single[: packed.num_decode_seqs]), "decode rows are not the first"
    keys = [noise_key(seq.seed, seq.num_tokens - 1) for seq in batch.sampled_sequences]
    assert packed.keys.tolist() == keys
    return packed


def random_batch(rng: random.Random, block_size: int) -> ScheduledBatch:
    """Sequences in all states, with scattered block tables: decodes of known and unknown tokens, whole prompts,
    first, middle and last chunks, recomputations of prompt and output."""
    batch = ScheduledBatch()
    block_ids = list(range(400))
    rng.shuffle(block_ids)
    num_rows = rng.randint(1, 12)
    slots = rng.sample(range(50), num_rows)
    for row in range(num_rows):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
        seq = make_sequence(row, prompt, max_tokens=100)
        seq.seed, seq.slot = rng.getrandbits(64), slots[row]
        seq.token_ids.extend(rng.randrange(1000) for _ in range(rng.choice([0, 0, 7])))
        kind = rng.choice(["known", "unknown", "chunk"])
        if kind == "unknown":  # the token of the step in flight
            seq.num_in_flight = 1
        seq.num_computed_tokens = seq.num_tokens - 1 if kind != "chunk" else rng.randrange(seq.num_tokens)
        for _ in range(-(-seq.num_tokens // block_size)):
            seq.block_table.append(block_ids.pop())
        num_left = seq.num_tokens - seq.num_computed_tokens
        batch.add(seq, rng.choice([num_left, rng.randint(1, num_left)]))
    batch.move_single_tokens_first()
    return batch


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_batches(block_size: int, rng: random.Random) -> None:
    """An index off by one anywhere reads or writes another token's KV."""
    num_unknown = num_sampled = num_rows = 0
    for _ in range(150):
        batch = random_batch(rng, block_size)
        packed = check_pack(batch, block_size)
        num_unknown += packed.token_ids.tolist().count(UNKNOWN_TOKEN)
        num_sampled += len(packed.sampled_slots)
        num_rows += len(packed.slots)
    assert num_unknown > 50 and 50 < num_sampled < num_rows


@pytest.mark.parametrize("num_blocks", [10, 40])
def test_batches_of_the_scheduler(num_blocks: int, rng: random.Random) -> None:
    """The same on what the scheduler really makes, preemptions and shared blocks included. Only the token that the
    step before samples is unknown, and only in a row of its own."""
    engine = StubEngine(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=12)
    engine.scheduler.estimator._mean_output_tokens = 1.0
    for _ in range(40):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        engine.add(prompt, max_tokens=12, min_tokens=rng.choice([0, 12]), stop_ids=(0,))
    num_unknown = 0
    run_device = engine.device.run

    def run(packed: PackedBatch) -> Any:
        nonlocal num_unknown
        unknown = np.flatnonzero(packed.token_ids == UNKNOWN_TOKEN)
        num_unknown += len(unknown)
        assert (unknown < packed.num_decode_seqs).all()
        return run_device(packed)

    engine.device.run = run  # type: ignore[method-assign]
    schedule = engine.scheduler.schedule

    def schedule_and_check() -> ScheduledBatch:
        batch = schedule()
        if batch.sequences:
            check_pack(batch, 4)
        return batch

    engine.scheduler.schedule = schedule_and_check  # type: ignore[method-assign]
    engine.run()
    assert num_unknown > 100
    assert engine.num_preemptions > 0 or num_blocks == 40


def test_small_batch_by_hand() -> None:
    """One decode of an unknown token beside the last chunk of a prompt."""
    decoding = make_sequence(0, [5, 6, 7], max_tokens=9)
    decoding.slot, decoding.num_in_flight, decoding.num_computed_tokens = 2, 1, 3
    decoding.block_table.extend([8, 3])
    chunked = make_sequence(1, [10, 11, 12, 13, 14], max_tokens=9)
    chunked.slot, chunked.num_computed_tokens = 0, 2
    chunked.block_table.extend([4, 1, 6])
    batch = ScheduledBatch()
    batch.add(chunked, 3)
    batch.add(decoding, 1)
    batch.move_single_tokens_first()
    packed = pack(batch, 2)
    assert packed.token_ids.tolist() == [UNKNOWN_TOKEN, 12, 13, 14]
    assert packed.positions.tolist() == [3, 2, 3, 4]
    assert packed.kv_slots.tolist() == [3 * 2 + 1, 1 * 2, 1 * 2 + 1, 6 * 2]
    assert packed.query_starts.tolist() == [0, 1, 4]
    assert packed.context_lens.tolist() == [4, 5]
    assert packed.block_tables.tolist() == [[8, 3, 0], [4, 1, 6]]
    assert packed.slots.tolist() == [2, 0]
    assert packed.logits_indices.tolist() == [0, 3]
    assert packed.sampled_slots.tolist() == [2, 0]
    assert packed.rope_lens.tolist() == [4, 5, 5, 5]
    assert packed.max_query_len == 3
    assert packed.max_context_len == 5
    assert packed.num_decode_seqs == 1


def test_nothing_sampled() -> None:
    """A step of nothing but a first chunk samples nothing; its arrays must be empty, not misshapen."""
    seq = make_sequence(0, [1] * 8)
    seq.slot = 0
    seq.block_table.extend([0, 1])
    batch = ScheduledBatch()
    batch.add(seq, 4)
    packed = check_pack(batch, 4)
    shapes = {name: getattr(packed, name).shape for name in SAMPLING_FIELDS}
    assert shapes.pop("keys") == (0, 2)
    assert set(shapes.values()) == {(0,)}


# --- shapes that a graph was captured for -------------------------------------------------------------------------


def decode_batch(rng: random.Random, num_seqs: int, block_size: int) -> ScheduledBatch:
    """One token of each sequence, with filters here and there."""
    batch = ScheduledBatch()
    block_ids = rng.sample(range(200), 200)
    for row in range(num_seqs):
        seq = make_sequence(row, [rng.randrange(1000) for _ in range(rng.randint(1, 20))], max_tokens=100)
        seq.params = SamplingParams(top_k=rng.choice([0, 5]), temperature=rng.choice([0, 1.0]))
        seq.slot, seq.seed, seq.num_in_flight = row + 3, row, 1
        seq.num_computed_tokens = seq.num_tokens - 1
        seq.block_table.extend(block_ids.pop() for _ in range(-(-seq.num_tokens // block_size)))
        batch.add(seq, 1)
    return batch


@pytest.mark.parametrize("num_seqs, num_padded", [(1, 1), (1, 8), (5, 8), (8, 8)])
def test_padded_decode(num_seqs: int, num_padded: int, rng: random.Random) -> None:
    """Rows that only fill up the shape of a captured graph must leave no trace: no KV stored, no context read, their
    token where nobody looks. The real rows must not change."""
    packed = check_pack(decode_batch(rng, num_seqs, 4), 4)
    padded = pad_decode(packed, num_padded, dummy_slot=77)
    assert padded.is_pure_decode and padded.num_decode_seqs == num_padded
    assert padded.query_starts.tolist() == list(range(num_padded + 1))
    assert padded.logits_indices.tolist() == list(range(num_padded))
    fillers = {
        "token_ids": 0,
        "positions": 0,
        "kv_slots": -1,
        "context_lens": 0,
        "slots": 77,
        "rope_lens": 1,
        "sampled_slots": 77,
        "temperature": 0,
        "keys": [0, 0],
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
    }
    for name, filler in fillers.items():
        before, after = getattr(packed, name), getattr(padded, name)
        assert after.tolist() == before.tolist() + [filler] * (num_padded - num_seqs), name
        assert after.dtype == before.dtype, name
    assert padded.block_tables.shape == (num_padded, packed.block_tables.shape[1])
    assert padded.block_tables[:num_seqs].tolist() == packed.block_tables.tolist()
    assert not padded.block_tables[num_seqs:].any() and padded.block_tables.dtype == np.int32
    num_filters = len(packed.filter_rows)
    assert padded.filter_rows.tolist() == packed.filter_rows.tolist() + [-1] * (num_padded - num_filters)
    assert padded.filter_rows.dtype == np.int32
    assert len(packed.context_lens) == num_seqs, "the packed batch itself is untouched"


@pytest.mark.parametrize("num_beginnings", [1, 100])
def test_a_graph_finds_every_array(num_beginnings: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads where the arrays of the dummy were when it was captured: whatever a batch holds (banned tokens,
    filters, groups, some rows or all), after padding its arrays must be there."""
    for name in ("_GROUP_COST", "_MEMBER_COST"):
        monkeypatch.setattr(prefix_groups, name, 0)
    grouper = PrefixGrouper(4, 3)
    num_banned = 0
    for num_seqs in (2, 5, 8):
        real = decode_batch(rng, num_seqs, 4)
        for row, seq in enumerate(real.sequences):
            seq.stop_ids = frozenset(rng.sample(range(1000), rng.randint(1, 3)))
            seq.params = replace(seq.params, min_tokens=50)
            seq.block_table[0] = 300 + row % num_beginnings
        packed = pack(real, 4, grouper)
        num_banned += len(packed.banned_ids)
        padded = pad_decode(packed, 8, dummy_slot=9)
        dummy = dummy_batch(8, 1, dummy_slot=9, num_filters=8, group_capacity=3, num_groups=int(packed.has_groups))
        captured = pad_decode(dummy, 8, dummy_slot=9)
        flat = torch.from_numpy(flatten(padded))
        seen = view_flat(flat, captured, block_tables=view_flat(flat, padded).block_tables)
        for name in (*INT_FIELDS, *SAMPLING_FIELDS):
            assert getattr(seen, name).tolist() == getattr(padded, name).tolist(), name
        for name, array in vars(padded.groups).items():
            assert getattr(seen.prefixes, name).tolist() == array.tolist(), name
        assert padded.groups.own_lens[:num_seqs].tolist() == packed.groups.own_lens.tolist()
    assert num_banned > 3


@pytest.mark.parametrize("num_seqs, query_len, num_filters", [(1, 1, 0), (4, 1, 4), (3, 7, 2)])
def test_dummy_batch(num_seqs: int, query_len: int, num_filters: int) -> None:
    """It warms up what real batches run, so it must have their types and shapes; and it stores no KV."""
    dummy = dummy_batch(num_seqs, query_len, dummy_slot=5, num_filters=num_filters)
    real = ScheduledBatch()
    for row in range(num_seqs):
        seq = make_sequence(row, [0] * query_len)
        seq.slot = 5
        seq.params = SamplingParams(top_p=0.9) if row < num_filters else SamplingParams()
        seq.block_table.extend([0] * query_len)
        real.add(seq, query_len)
    expected = pack(real, 1)
    for name in (*INT_FIELDS, *SAMPLING_FIELDS):
        theirs, ours = getattr(expected, name), getattr(dummy, name)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        if name not in ("kv_slots", "keys", "top_p", "rope_lens"):
            assert ours.tolist() == theirs.tolist(), name
    assert dummy.kv_slots.tolist() == [-1] * (num_seqs * query_len)
    for name in ("num_decode_seqs", "max_query_len", "max_context_len", "is_pure_decode"):
        assert getattr(dummy, name) == getattr(expected, name), name


# --- sampling ---------------------------------------------------------------------------------------------------


def sampled_sequence(
    params: SamplingParams, *, seed: int = 0, num_output: int = 1, stop_ids: tuple[int, ...] = ()
) -> Sequence:
    """A sequence whose `num_output`-th token is about to be sampled, which is to say in flight."""
    seq = make_sequence(0, [1, 2, 3], max_tokens=50, stop_ids=stop_ids)
    seq.params, seq.seed = params, seed
    seq.token_ids.extend([4] * (num_output - 1))
    seq.num_in_flight = 1
    return seq


def test_filter_rows() -> None:
    """Only rows with a filter are sorted and filtered; a setting in another row's place would go unseen otherwise."""
    params = [
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0, top_k=5, top_p=0.5),  # greedy: no filter changes the best token
        SamplingParams(top_k=-1),
        SamplingParams(top_p=0.25),
        SamplingParams(temperature=0.5, min_p=0.125, top_k=2**40),
    ]
    sampling = pack_sampling([sampled_sequence(one) for one in params])
    assert sampling.temperature.tolist() == [1, 1, 0, 1, 1, 0.5]
    assert sampling.filter_rows.tolist() == [1, 4, 5]
    assert sampling.top_k.tolist() == [0, 5, 5, 0, 0, 2**31 - 1]
    assert sampling.top_p.tolist() == [1, 1, 0.5, 1, 0.25, 1]
    assert sampling.min_p.tolist() == [0, 0, 0, 0, 0, 0.125]


def test_sampling_dtypes() -> None:
    sampling = pack_sampling([sampled_sequence(SamplingParams(top_k=2, min_tokens=3), stop_ids=(1,))])
    for name in SAMPLING_FIELDS:
        is_float = name in ("temperature", "top_p", "min_p")
        assert getattr(sampling, name).dtype == (np.float32 if is_float else np.int32), name


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-7])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """Dividing by it would overflow."""
    assert pack_sampling([sampled_sequence(SamplingParams(temperature=temperature))]).temperature.tolist() == [0]


def test_huge_temperature_stays_finite() -> None:
    """A temperature beyond float32 that became inf there would turn the logit of a banned or filtered token,
    -inf, into NaN: which argmax takes for the largest."""
    with np.errstate(over="raise"):
        sampling = pack_sampling([sampled_sequence(SamplingParams(temperature=1e300))])
    assert np.isfinite(sampling.temperature).all()


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_stop_tokens_are_banned_until_min_tokens(min_tokens: int) -> None:
    """Outputs 1 to `min_tokens` may not be a stop token; the next one may."""
    params = SamplingParams(min_tokens=min_tokens, max_tokens=50)
    for num_output in range(1, 7):
        seq = sampled_sequence(params, num_output=num_output, stop_ids=(11, 12))
        sampling = pack_sampling([sampled_sequence(SamplingParams(), stop_ids=(3,)), seq])
        pairs = sorted(zip(sampling.banned_rows.tolist(), sampling.banned_ids.tolist(), strict=True))
        assert pairs == ([(1, 11), (1, 12)] if num_output <= min_tokens else [])


def test_noise_keys_equal_pure_python(rng: random.Random) -> None:
    """Arithmetic modulo 2**64, carries and signs included."""
    edges = [0, 1, 2**31, 2**32 - 1, 2**63, MASK]
    pairs = [(seed, position) for seed in edges for position in (0, 1, 4095, 2**31 - 1)]
    pairs += [(rng.getrandbits(64), rng.randrange(2**20)) for _ in range(500)]
    seeds, positions = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    keys = noise_keys(seeds, positions)
    assert keys.dtype == np.int32 and keys.shape == (len(pairs), 2)
    assert keys.tolist() == [noise_key(seed, position) for seed, position in pairs]


def test_splitmix64_known_values() -> None:
    """The reference itself: published first outputs of the generator for the seeds 0 and 1234567."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317


def test_noise_keys_of_neighbours_are_unrelated() -> None:
    """Equal or nearly equal keys would give requests with neighbouring seeds the same noise, shifted."""
    seeds, positions = (grid.ravel().astype(np.uint64) for grid in np.meshgrid(np.arange(64), np.arange(64)))
    keys = noise_keys(seeds, positions)
    assert len({tuple(key) for key in keys.tolist()}) == 64 * 64
    bits = np.unpackbits(keys.view(np.uint8), axis=1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.05
    flipped = (bits.reshape(64, 64, -1)[:, 1:] != bits.reshape(64, 64, -1)[:, :-1]).mean()
    assert abs(flipped - 0.5) < 0.01


def test_noise_key_depends_on_seed_and_position_alone() -> None:
    """A seeded request draws the same noise alone, in any row of a batch, and after a preemption, when its outputs
    have become part of what is prefilled."""
    params = SamplingParams(seed=9)
    alone = pack_sampling([sampled_sequence(params, seed=9, num_output=4)]).keys[0]
    others = [sampled_sequence(SamplingParams(), seed=seed) for seed in range(5)]
    again = sampled_sequence(params, seed=9, num_output=4)
    again.num_computed_tokens = 0
    assert pack_sampling([*others, again]).keys[5].tolist() == alone.tolist()
    assert pack_sampling([sampled_sequence(params, seed=9, num_output=5)]).keys[0].tolist() != alone.tolist()
