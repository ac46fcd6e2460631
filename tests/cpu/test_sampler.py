"""Sampling: the noise, the filters, and the frequencies that come out."""

import itertools
import math
import struct
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import noise_keys
from nanovllm.layers.sampler import filter_mask, gumbel_noise, sample
from tests.checkpoints import save_markov_model

CPU = torch.device("cpu")
ROW = [0.1, 0.2, 0.3, 0.4]
NUM_DRAWS = 5000
# Below this a test calls the frequencies wrong. All draws have fixed keys, so a test that passes goes on passing.
SMALLEST_P_VALUE = 1e-3


def changes(params: Any) -> str:
    """What differs from the defaults, to name a test."""
    default = SamplingParams()
    if not isinstance(params, SamplingParams):
        return str(params)
    return ",".join(f"{name}={value}" for name, value in vars(params).items() if value != getattr(default, name))


def make_sampling(params: list[SamplingParams], keys: Any = None, banned: list[tuple[int, int]] | None = None) -> Any:
    """Settings of rows as the sampler reads them; noise keys of seed 0 and the row's number unless given."""
    filtered = [row for row, one in enumerate(params) if one.has_filter]
    if keys is None:
        keys = noise_keys(np.zeros(len(params), dtype=np.uint64), np.arange(len(params), dtype=np.uint64))
    rows, ids = np.array(banned or [], dtype=np.int32).reshape(-1, 2).T
    arrays = {
        "temperature": np.array([0.0 if one.is_greedy else one.temperature for one in params], dtype=np.float32),
        "keys": np.array(keys, dtype=np.int32),
        "filter_rows": np.array(filtered, dtype=np.int32),
        "top_k": np.array([max(one.top_k, 0) for one in params], dtype=np.int32),
        "top_p": np.array([one.top_p for one in params], dtype=np.float32),
        "min_p": np.array([one.min_p for one in params], dtype=np.float32),
        "banned_rows": rows,
        "banned_ids": ids,
    }
    return SimpleNamespace(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def draw(probabilities: list[float], params: SamplingParams, num_draws: int = NUM_DRAWS, **kwargs: Any) -> Counter[int]:
    """Counts of the tokens that rows of the same logits draw."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float().repeat(num_draws, 1)
    return Counter(sample(logits, make_sampling([params] * num_draws, **kwargs)).tolist())


def p_value(counts: Counter[int], expected: dict[int, float]) -> float:
    """Chance of frequencies at least this far (chi-square) from probabilities that sum to 1."""
    assert not set(counts) - {token for token, probability in expected.items() if probability > 0}
    total = sum(counts.values())
    classes = [(counts[token], probability * total) for token, probability in expected.items() if probability > 0]
    assert all(wanted >= 5 for _, wanted in classes), "too few draws for a chi-square test"
    if len(classes) == 1:
        return 1.0
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in classes)
    freedom = torch.tensor((len(classes) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def expected_probabilities(probabilities: list[float], params: SamplingParams) -> dict[int, float]:
    """The distribution that the params make of probabilities, in plain Python."""
    scaled = [math.log(p) / params.temperature if p > 0 else -math.inf for p in probabilities]
    weights = [math.exp(value - max(scaled)) for value in scaled]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass = sum(weights[token] for token in kept)
    if params.top_p < 1:
        before = 0.0
        nucleus: list[int] = []
        for token in kept:
            if before < params.top_p * mass or not nucleus:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    mass = sum(weights[token] for token in kept)
    return {token: weights[token] / mass for token in kept}


# Noise


def to_signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def mix(x: int) -> int:
    """The 32-bit integer hash that the sampler's noise is made of."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def to_float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def noise_twin(key_0: int, key_1: int, token: int) -> float:
    """Gumbel noise by Python's integers and float64 logarithms; the largest float32 below 1 stands for 1."""
    h = mix(token * 0x9E3779B9 + key_0) ^ key_1
    uniform = min(to_float32((h >> 8) + 0.5) * 2.0**-24, 1 - 2.0**-24)
    return -math.log(-math.log(uniform))


@pytest.mark.parametrize("seed", range(4))
def test_noise_equals_twin(seed: int) -> None:
    """Guards against sign errors of 32-bit arithmetic: another shift, a wrap, a signed comparison."""
    keys = noise_keys(np.full(8, seed * 2**62 + seed, dtype=np.uint64), np.arange(8, dtype=np.uint64))
    for key_0, key_1 in keys.tolist():
        noise = gumbel_noise(torch.tensor([key_0, key_1], dtype=torch.int32), 500)
        assert noise.dtype == torch.float32
        twin = [noise_twin(key_0 % 2**32, key_1 % 2**32, token) for token in range(500)]
        torch.testing.assert_close(noise.double(), torch.tensor(twin, dtype=torch.float64), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "hashed", [0, 0xFF, 0x100, 0x7FFFFFFF, 0x80000000, 0xFFFFFDFF, 0xFFFFFEFF, 0xFFFFFF00, 2**32 - 1]
)
def test_noise_is_finite(hashed: int) -> None:
    """Guards against a uniform number that rounds to 0 or 1: its noise is infinite, and its token drawn whatever its
    logit is, once in 2^24 tokens."""
    token, key_0 = 3, 12345
    key_1 = mix(token * 0x9E3779B9 + key_0) ^ hashed
    noise = gumbel_noise(torch.tensor([key_0, to_signed(key_1)], dtype=torch.int32), 5)
    assert noise.isfinite().all()
    assert noise[token].item() == pytest.approx(noise_twin(key_0, key_1, token), rel=1e-5)


def test_impossible_token_is_never_drawn() -> None:
    """Guards against -inf + inf: the luckiest noise of all must not lift a token of probability 0."""
    token, key_0 = 3, 12345
    key_1 = to_signed(mix(token * 0x9E3779B9 + key_0) ^ 0xFFFFFFFF)
    logits = torch.tensor([[0.0, 1.0, 0.0, -torch.inf, 0.0]])
    assert sample(logits.clone(), make_sampling([SamplingParams()], keys=[[key_0, key_1]])).item() != token
    logits[0, token] = -60.0
    assert sample(logits, make_sampling([SamplingParams()], keys=[[key_0, key_1]])).item() != token


def test_noise_keys_equal_twin() -> None:
    """Guards against seeds or positions being cut to 32 bits."""

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    positions = [0, 1, 4095, 2**20, 7, 2**31 - 1]
    keys = noise_keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    for (key_0, key_1), seed, position in zip(keys.tolist(), seeds, positions, strict=True):
        wanted = mix64((mix64(seed) + position) % 2**64)
        assert (key_0 % 2**32, key_1 % 2**32) == (wanted % 2**32, wanted >> 32)
    many = noise_keys(np.repeat(np.arange(64, dtype=np.uint64), 64), np.tile(np.arange(64, dtype=np.uint64), 64))
    assert len({tuple(pair) for pair in many.tolist()}) == 64 * 64


# Frequencies


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1e30),
        SamplingParams(top_k=3),
        SamplingParams(top_k=-1, top_p=0.999999),
        SamplingParams(temperature=2.0, top_p=0.85),  # temperature first: else one token fewer is kept
        SamplingParams(temperature=0.5, min_p=0.45),  # and here one more
        SamplingParams(top_k=3, top_p=0.7, min_p=0.1),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.95, min_p=0.3),
    ],
    ids=changes,
)
def test_frequencies(params: SamplingParams) -> None:
    """Guards against noise of another distribution, and against filters applied in another order."""
    assert p_value(draw(ROW, params), expected_probabilities(ROW, params)) > SMALLEST_P_VALUE


def test_test_sees_wrong_frequencies() -> None:
    """Frequencies that pass under their own temperature must fail under another one."""
    counts = draw(ROW, SamplingParams())
    for temperature in (0.7, 1.5):
        assert p_value(counts, expected_probabilities(ROW, SamplingParams(temperature=temperature))) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frequencies_of_half_precision(dtype: torch.dtype) -> None:
    """Guards against noise being added in the logits' own precision."""
    logits = torch.tensor([ROW]).log().to(dtype)
    probabilities = logits.double().softmax(-1)[0].tolist()
    tokens = sample(logits.repeat(NUM_DRAWS, 1), make_sampling([SamplingParams()] * NUM_DRAWS))
    assert p_value(Counter(tokens.tolist()), dict(enumerate(probabilities))) > SMALLEST_P_VALUE


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_are_independent(by: str) -> None:
    """Guards against keys whose noise goes together: pairs of draws under neighbouring seeds or positions."""
    numbers, zeros = np.arange(8000, dtype=np.uint64), np.zeros(8000, dtype=np.uint64)
    keys = noise_keys(numbers, zeros) if by == "seed" else noise_keys(zeros, numbers)
    logits = torch.tensor([ROW]).log().repeat(len(keys), 1)
    tokens = sample(logits, make_sampling([SamplingParams()] * len(keys), keys=keys)).tolist()
    pairs = Counter(4 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True))
    joint = {4 * first + second: ROW[first] * ROW[second] for first in range(4) for second in range(4)}
    assert p_value(pairs, joint) > SMALLEST_P_VALUE


def test_frequencies_of_a_large_vocabulary() -> None:
    """Guards against noise that favours some token ids: equal logits over thousands of tokens, counted in 64 classes
    of neighbours and 64 of every 64th, and a likely token against the mass of all unlikely ones."""
    vocab_size, num_rows = 8192, 3000
    params = [SamplingParams()] * num_rows
    tokens = sample(torch.zeros(num_rows, vocab_size), make_sampling(params)).tolist()
    for classes in (Counter(token // 128 for token in tokens), Counter(token % 64 for token in tokens)):
        assert p_value(classes, dict.fromkeys(range(64), 1 / 64)) > SMALLEST_P_VALUE
    logits = torch.zeros(num_rows, vocab_size)
    logits[:, 4321] = math.log(vocab_size - 1)
    is_likely = Counter(int(token == 4321) for token in sample(logits, make_sampling(params)).tolist())
    assert p_value(is_likely, {0: 0.5, 1: 0.5}) > SMALLEST_P_VALUE


# Greedy


def test_ties_go_to_the_lowest_token() -> None:
    """Guards against an argmax that takes any of several maxima, at sizes where it is vectorised."""
    for vocab_size in (2, 17, 320, 5000):
        for first, second in ((0, vocab_size - 1), (vocab_size // 2, vocab_size - 1), (0, 1)):
            logits = torch.full((1, vocab_size), -1.0)
            logits[0, [first, second]] = 7.0
            assert sample(logits, make_sampling([SamplingParams(temperature=0)])).item() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9.9e-7, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_beside_others(temperature: float, dtype: torch.dtype) -> None:
    """Guards against overflow and NaN of logits up to 60 over a tiny temperature, and against one row's temperature
    reaching another."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.rand(60, 320, generator=generator) * 120 - 60).to(dtype)
    logits[:, 17] = 59.0  # a clear winner
    logits[::2, 17] = 60.0
    logits[:, [5, 300]] = -torch.inf
    kinds = [
        SamplingParams(temperature=temperature),
        SamplingParams(),
        SamplingParams(temperature=temperature, top_p=0.5, top_k=7, min_p=0.2),
        SamplingParams(temperature=5.0, top_k=100),
    ]
    params = [kinds[row % 4] for row in range(60)]
    others = [row for row in range(60) if row % 2]
    logits[others] = logits[others] / 60  # flat enough for the noise to decide
    best = logits.float().argmax(-1)
    tokens = sample(logits.clone(), make_sampling(params))
    assert tokens[::2].tolist() == best[::2].tolist() == [17] * 30
    assert (tokens[others] != best[others]).sum() > 15
    # The others draw what they draw without such neighbours.
    alone = make_sampling([params[row] for row in others], keys=make_sampling(params).keys[others])
    assert tokens[others].tolist() == sample(logits[others], alone).tolist()


@pytest.mark.parametrize("temperature", [-1e-9, -1.0, math.nan, math.inf, -math.inf])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=temperature)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_huge_temperatures(random_llama: Any, make_llm: Any, temperature: float) -> None:
    """Guards against -inf / inf: a temperature beyond float32 must not turn banned tokens into NaN, which wins."""
    banned = tuple(range(0, 320, 2))
    params = SamplingParams(
        temperature=temperature, max_tokens=30, min_tokens=30, stop_token_ids=banned, seed=1, ignore_eos=True
    )
    tokens = make_llm(random_llama[0]).generate([[1]], params, use_tqdm=False)[0]["token_ids"]
    assert not set(tokens) & set(banned)
    assert len(set(tokens)) > 15  # and it stays random


# Banned tokens and filters


def test_banned_tokens() -> None:
    """Guards against a ban that reaches another row, misses a greedy row, or is undone by a filter."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
    ] * 500
    banned = [(row, token) for row in range(0, 2000, 2) for token in (3, 2)]
    banned += [(row, 3) for row in range(1, 2000, 8)]
    logits = torch.tensor([ROW]).log().repeat(2000, 1)
    tokens = sample(logits, make_sampling(params, banned=banned)).tolist()
    assert set(tokens[0::4]) == {1}
    assert set(tokens[2::4]) == {1}
    assert set(tokens[1::8]) == {0, 1, 2}
    assert set(tokens[5::8]) == {0, 1, 2, 3}
    assert set(tokens[3::4]) == {3}


def test_only_one_token_allowed() -> None:
    """Guards against noise that lifts a banned token."""
    banned = [(row, token) for row in range(500) for token in range(4) if token != row % 4]
    params = [SamplingParams(temperature=100.0), SamplingParams(temperature=100.0, top_p=0.9)] * 250
    tokens = sample(torch.zeros(500, 4), make_sampling(params, banned=banned)).tolist()
    assert tokens == [row % 4 for row in range(500)]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2, top_p=0.5), {3}),
        (SamplingParams(top_k=2, top_p=0.6), {2, 3}),
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=1, temperature=1e6), {3}),
        (SamplingParams(top_k=5), {0, 1, 2, 3}),
        (SamplingParams(top_k=2**40), {0, 1, 2, 3}),
        (SamplingParams(top_k=0), {0, 1, 2, 3}),
        (SamplingParams(top_k=-1, min_p=1e-9), {0, 1, 2, 3}),
        (SamplingParams(top_p=1e-12), {3}),
        (SamplingParams(top_p=1e-300), {3}),
        (SamplingParams(top_p=0.39), {3}),
        (SamplingParams(top_p=0.41), {2, 3}),
        (SamplingParams(top_p=0.89), {1, 2, 3}),
        (SamplingParams(top_p=0.91), {0, 1, 2, 3}),
        (SamplingParams(min_p=1.0), {3}),
        (SamplingParams(min_p=0.76), {3}),
        (SamplingParams(min_p=0.74), {2, 3}),
        (SamplingParams(min_p=0.26), {1, 2, 3}),
        (SamplingParams(top_p=0.8, min_p=0.74), {2, 3}),
    ],
    ids=changes,
)
def test_filters_through_the_engine(markov: LLM, params: SamplingParams, kept: set[int]) -> None:
    """Guards against a filter set of another request's, a limit rounded away, and settings that are never handed on."""
    params = replace(params, max_tokens=1, ignore_eos=True)
    neighbour = replace(params, temperature=0.3, top_k=3, top_p=1.0, min_p=0.0)
    outputs = markov.generate([[0]] * 300, [params, params, neighbour] * 100, use_tqdm=False)
    tokens = [output["token_ids"][0] for output in outputs]
    assert {token for row, token in enumerate(tokens) if row % 3 < 2} == kept
    assert set(tokens[2::3]) == {1, 2, 3}


def naive_mask(scaled: list[float], top_k: int, top_p: float, min_p: float) -> list[bool | None]:
    """Which tokens survive; None where rounding may decide."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    survivors = order[:top_k] if top_k else order
    best = scaled[order[0]]
    weights = {token: math.exp(scaled[token] - best) for token in survivors}
    total = math.fsum(weights.values())
    mask: list[bool | None] = [False] * len(scaled)
    before = 0.0
    for place, token in enumerate(survivors):
        distance_p = top_p - before / total
        distance_m = weights[token] - min_p
        in_nucleus = True if top_p == 1 or place == 0 else None if abs(distance_p) < 1e-9 else distance_p > 0
        is_likely = True if scaled[token] == best else None if abs(distance_m) < 1e-6 * min_p else distance_m >= 0
        mask[token] = False if False in (in_nucleus, is_likely) else None if None in (in_nucleus, is_likely) else True
        before += weights[token]
    return mask


LOGIT = st.one_of(
    st.floats(-60, 60, width=32),
    st.integers(-3, 3).map(float),  # many ties
    st.just(-math.inf),
)
ROWS = st.integers(1, 40).flatmap(
    lambda vocab_size: st.lists(
        st.tuples(
            st.lists(LOGIT, min_size=vocab_size, max_size=vocab_size).filter(lambda row: max(row) > -math.inf),
            st.integers(0, vocab_size + 2),
            st.one_of(st.just(1.0), st.floats(2**-20, 1, width=32), st.sampled_from([0.25, 0.5])),
            st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1, width=32)),
        ),
        min_size=1,
        max_size=5,
    )
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ROWS)
def test_filter_mask_equals_naive(rows: list[tuple[list[float], int, float, float]]) -> None:
    """Guards against ties, -inf, and settings of one row reaching another."""
    logits, top_k, top_p, min_p = zip(*rows, strict=True)
    mask = filter_mask(
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
    )
    assert mask.dtype == torch.bool
    for got, row in zip(mask.tolist(), rows, strict=True):
        for token, (is_kept, wanted) in enumerate(zip(got, naive_mask(*row), strict=True)):
            # A token of probability 0 can't be drawn: whether it is kept makes no difference.
            assert wanted is None or is_kept == wanted or row[0][token] == -math.inf
        assert any(kept and logit > -math.inf for kept, logit in zip(got, row[0], strict=True))


# The whole engine


# Row t: chances of the token after t.
CHANCES = [
    [0.1, 0.2, 0.3, 0.4, 0.0, 0.0],
    [0.25, 0.25, 0.1, 0.1, 0.2, 0.1],
    [0.05, 0.05, 0.1, 0.1, 0.3, 0.4],
    [0.3, 0.15, 0.15, 0.1, 0.1, 0.2],
    [0.4, 0.1, 0.1, 0.1, 0.1, 0.2],
    [0.2, 0.2, 0.2, 0.2, 0.1, 0.1],
]


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """An engine whose model draws from row t of CHANCES after token t."""
    folder = tmp_path_factory.mktemp("markov")
    save_markov_model(folder, torch.tensor(CHANCES).clamp_min(1e-30).log())
    llm: LLM = make_shared_llm(folder, seed=11, num_kvcache_blocks=2048)
    return llm


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.4, top_p=0.88),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.2),
    ],
    ids=changes,
)
def test_first_tokens_of_the_engine(markov: LLM, params: SamplingParams) -> None:
    """One prompt many times: unseeded requests of a call are independent draws."""
    params = replace(params, max_tokens=1, ignore_eos=True)
    outputs = markov.generate([[5, 0]] * 1500, params, use_tqdm=False)
    counts = Counter(output["token_ids"][0] for output in outputs)
    assert p_value(counts, expected_probabilities(CHANCES[0], params)) > SMALLEST_P_VALUE


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)], ids=changes)
def test_transitions_of_the_engine(markov: LLM, params: SamplingParams) -> None:
    """Guards against noise that repeats along a sequence, and against tokens that see another token's logits."""
    params = replace(params, max_tokens=80, ignore_eos=True)
    outputs = markov.generate([[0]] * 48, params, use_tqdm=False)
    transitions: dict[int, Counter[int]] = {token: Counter() for token in range(6)}
    for output in outputs:
        tokens = [0, *output["token_ids"]]
        for before, after in itertools.pairwise(tokens):
            transitions[before][after] += 1
    for token, counts in transitions.items():
        assert p_value(counts, expected_probabilities(CHANCES[token], params)) > SMALLEST_P_VALUE / 6
