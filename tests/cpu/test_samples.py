"""Several samples of one prompt: they share its KV, differ, repeat under a seed, and are one request to the caller."""

import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.progress import ProgressBar
from nanovllm.engine.requests import sample_seed
from nanovllm.engine.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 8
N = 5
PARAMS = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=3, n=N)
PROMPT_LENGTHS = (1, BLOCK_SIZE, 3 * BLOCK_SIZE + 5, 2 * BLOCK_SIZE - 1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


@pytest.fixture(scope="module")
def expected(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Tokens of each prompt's samples, each sample alone in the engine as a request of its own."""
    alone = [replace(PARAMS, n=1, seed=sample_seed(3, index)) for index in range(N)]
    return [[llm.generate([prompt], one, use_tqdm=False)[0]["token_ids"] for one in alone] for prompt in prompts]


def samples_of(outputs: list[Any]) -> list[list[list[int]]]:
    return [[sample["token_ids"] for sample in output["samples"]] for output in outputs]


# Tokens


def test_fixture_sees_faults(expected: list[list[list[int]]]) -> None:
    """All samples differ, and early: else a swapped or repeated one would not show."""
    heads = [tuple(tokens[:3]) for samples in expected for tokens in samples]
    assert len(set(heads)) == len(heads)


def test_equals_single_requests(llm: LLM, prompts: list[list[int]], expected: Any) -> None:
    """Sample i is what the request would give alone under the i-th seed, in a call with others."""
    assert samples_of(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected


def test_first_sample_is_that_of_n_1(llm: LLM, prompts: list[list[int]], expected: Any) -> None:
    """Guards against n changing the first sample, or the number of samples changing those before."""
    for n in (1, 2, 4):
        outputs = llm.generate(prompts, replace(PARAMS, n=n), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == [samples[0] for samples in expected]
        if n > 1:
            assert samples_of(outputs) == [samples[:n] for samples in expected]


def test_seeds_of_samples() -> None:
    """Guards against derived seeds that meet those of neighbouring requests: users count seeds up."""
    seeds = {sample_seed(seed, index) for seed in range(200) for index in range(50)}
    assert len(seeds) == 200 * 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(2**64 - 1, 1) != sample_seed(2**64 - 1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 7},
        {"enable_prefix_caching": False},
        {"kvcache_block_size": 3},
        {"num_kvcache_blocks": 7},
    ],
    ids=str,
)
def test_other_engine_settings(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], expected: Any, settings: dict[str, Any]
) -> None:
    """More samples than may run at once, or than the pool holds, queue; the cuts of the work change no token."""
    llm = make_llm(random_llama[0], **{"kvcache_block_size": BLOCK_SIZE, **settings})
    assert samples_of(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected


@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_preempted(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: Any,
    enable_prefix_caching: bool,
) -> None:
    """Guards against samples that change places, or seeds, when they are recomputed. Every preemption is counted,
    also that of a step which launches nothing else."""
    preempted = []
    original = Scheduler._preempt

    def fits(self: Scheduler, seq: Any, cached_block_ids: list[int], forecast: Any) -> bool:
        return self.block_manager.num_new_blocks(seq, cached_block_ids) <= self.block_manager.num_free_blocks

    def preempt(self: Scheduler, seq: Any) -> None:
        preempted.append(seq.seq_id)
        original(self, seq)

    monkeypatch.setattr(Scheduler, "_fits", fits)
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    llm = make_llm(
        random_llama[0],
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=7,
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs, steps = drive(llm, prompts, PARAMS)
    assert samples_of(outputs) == expected
    assert sum(step.num_preemptions for step in steps) == len(preempted) > 0


def test_unseeded(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """The engine's seed makes a run repeatable, whatever the number of samples: a request draws one seed."""
    unseeded = replace(PARAMS, seed=None)
    runs = []
    for n in (1, N, N):
        llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, seed=9)
        runs.append(llm.generate(prompts + prompts[:1], replace(unseeded, n=n), use_tqdm=False))
    assert [output["token_ids"] for output in runs[0]] == [output["token_ids"] for output in runs[1]]
    assert samples_of(runs[1]) == samples_of(runs[2])
    tokens = [tuple(sample) for samples in samples_of(runs[1]) for sample in samples]
    assert len(set(tokens)) == len(tokens)


# Sharing


@pytest.mark.parametrize("budget", [16384, BLOCK_SIZE])
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 5])
def test_prompt_is_computed_once(random_llama: Any, make_llm: Any, drive: Any, length: int, budget: int) -> None:
    """Full blocks of the prompt are computed for the first sample only; the others compute what follows them, and at
    least one token. Prompts longer than a step's budget, too."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, max_num_batched_tokens=budget)
    num_shared = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    (output,), steps = drive(llm, [list(range(length))], PARAMS)
    assert sum(step.num_prefill_tokens for step in steps) == length + (N - 1) * (length - num_shared)
    assert sum(step.num_cached_tokens for step in steps) == (N - 1) * num_shared
    assert output["num_cached_tokens"] == 0  # the request found nothing that was there before


@pytest.mark.parametrize(("enable_prefix_caching", "num_used"), [(True, 3 + N), (False, 4 * N)])
def test_blocks_in_use(random_llama: Any, make_llm: Any, enable_prefix_caching: bool, num_used: int) -> None:
    """Three full blocks of the prompt are held once, the fourth by each sample; without the cache, all by each."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
    llm.add_request(list(range(3 * BLOCK_SIZE + 5)), replace(PARAMS, max_tokens=3))
    for _ in range(3):
        assert llm.step().num_used_blocks == num_used
    while not llm.is_finished():
        step = llm.step()
    assert step.num_used_blocks == 0


# One request


def test_results(byte_llama: Path, make_llm: Any) -> None:
    """The first sample is the request's own result; there are "samples" only if more than one was asked for."""
    llm = make_llm(byte_llama)
    params = replace(PARAMS, ignore_eos=False, stop_token_ids=tuple(range(100)), max_tokens=6, n=20)
    single, several = llm.generate(["ab", "cd"], [replace(params, n=1), params], use_tqdm=False)
    assert "samples" not in single
    assert set(several) - set(single) == {"samples"}
    assert len(several["samples"]) == 20
    for sample in several["samples"]:
        assert set(sample) == {"text", "token_ids", "finish_reason", "stop_reason"}
        last = sample["token_ids"][-1]
        is_stopped = last < 100 or last == 257
        assert (sample["finish_reason"], sample["stop_reason"]) == (("stop", last) if is_stopped else ("length", None))
        assert is_stopped or len(sample["token_ids"]) == 6
    assert {key: several[key] for key in several["samples"][0]} == several["samples"][0]
    assert {sample["finish_reason"] for sample in several["samples"]} == {"stop", "length"}
    assert len({sample["text"] for sample in several["samples"]}) > 10
    several["token_ids"].clear()
    assert several["samples"][0]["token_ids"]


def test_steps(llm: LLM, prompts: list[list[int]], expected: Any) -> None:
    """Sample i's tokens come under seq_id + i; the request is reported once, when its last sample has ended."""
    seq_id = llm.add_request(prompts[2], replace(PARAMS, stop_token_ids=(expected[2][0][4],)))
    other = llm.add_request(prompts[0], replace(PARAMS, n=1))
    assert other == seq_id + N
    tokens: dict[int, list[int]] = {}
    finished: dict[int, Any] = {}
    while not llm.is_finished():
        step = llm.step()
        for key, ids in step.new_token_ids.items():
            tokens.setdefault(key, []).extend(ids)
        assert not finished.keys() & step.finished.keys()
        assert seq_id not in step.finished or len(tokens[seq_id + 1]) == PARAMS.max_tokens
        finished.update(step.finished)
    assert set(finished) == {seq_id, other}
    assert tokens.pop(other) == expected[0][0]
    assert [tokens[seq_id + index] for index in range(N)] == samples_of([finished[seq_id]])[0]
    assert len(tokens[seq_id]) == 5


@pytest.mark.parametrize("num_steps", range(0, 14, 3))
@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_abort(
    random_llama: Any, make_llm: Any, assert_idle: Any, prompts: list[list[int]], max_num_seqs: int, num_steps: int
) -> None:
    """One id stands for all samples: those that wait, run, and have ended."""
    llm = make_llm(random_llama[0], max_num_seqs=max_num_seqs)
    seq_id = llm.add_request(prompts[1], replace(PARAMS, max_tokens=20))
    for _ in range(num_steps):
        assert not llm.step().finished
    assert not llm.abort(seq_id + 1)
    assert llm.abort(seq_id)
    assert not llm.abort(seq_id)
    output = llm.step().finished[seq_id]
    assert [sample["finish_reason"] for sample in output["samples"]] == ["abort"] * N
    assert [len(sample["token_ids"]) for sample in output["samples"]] == [
        max(num_steps - 1, 0) if index < max_num_seqs else 0 for index in range(N)
    ]
    assert_idle(llm)


def test_abort_keeps_what_has_ended(llm: LLM, prompts: list[list[int]], expected: Any) -> None:
    stop_id = expected[1][2][3]
    seq_id = llm.add_request(prompts[1], replace(PARAMS, stop_token_ids=(stop_id,)))
    for _ in range(8):
        llm.step()
    assert llm.abort(seq_id)
    reasons = [sample["finish_reason"] for sample in llm.step().finished[seq_id]["samples"]]
    assert reasons == ["stop" if stop_id in tokens[:7] else "abort" for tokens in expected[1]]
    assert set(reasons) == {"stop", "abort"}
    assert llm.is_finished()


def test_failed_call(
    llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], expected: Any
) -> None:
    """A Ctrl-C leaves no sample behind, and a failed step reports the request with all of them."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in ((ProgressBar, "update"), (Scheduler, "postprocess")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            llm.generate(prompts, PARAMS, use_tqdm=False)
        assert_idle(llm)
    seq_id = llm.add_request(prompts[0], PARAMS)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Scheduler, "postprocess", interrupt)
        while True:
            llm.step()
    output = llm.step().finished[seq_id]
    assert [sample["finish_reason"] for sample in output["samples"]] == ["abort"] * N
    assert samples_of(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected


def test_progress_bar_counts_requests(llm: LLM, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(prompts[:2], PARAMS)
    last = capsys.readouterr().err.strip().split("\r")[-1]
    assert "2/2" in last and "100%" in last


def test_streamed_samples(llm: LLM, prompts: list[list[int]], expected: list[list[list[int]]]) -> None:
    """Each sample has deltas of its own, which add up to what `generate` gives."""
    token_ids: dict[tuple[int, int], list[int]] = {}
    for delta in llm.stream(prompts, PARAMS):
        token_ids.setdefault((delta["index"], delta["sample"]), []).extend(delta["token_ids"])
    assert [[token_ids[index, sample] for sample in range(N)] for index in range(len(prompts))] == expected
    with pytest.raises(ValueError, match=f"n must be 1 .* got {N}"):
        llm.open_stream(prompts[0], PARAMS)


def test_logprobs_of_samples(llm: LLM, prompts: list[list[int]]) -> None:
    """Each sample has those of its own tokens, also in a stream; the prompt is scored once, for the first."""
    params = replace(PARAMS, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(prompts[2:3], params, use_tqdm=False)
    for sample in output["samples"]:
        assert [next(iter(entry)) for entry in sample["logprobs"]] == sample["token_ids"]
        assert "prompt_logprobs" not in sample
    assert [next(iter(entry)) for entry in output["prompt_logprobs"][1:]] == prompts[2][1:]
    assert output["logprobs"] == output["samples"][0]["logprobs"]
    streamed: dict[int, list[Any]] = {}
    for delta in llm.stream(prompts[2:3], params):
        streamed.setdefault(delta["sample"], []).extend(delta["logprobs"])
    assert [list(map(list, entries)) for entries in streamed.values()] == [
        list(map(list, sample["logprobs"])) for sample in output["samples"]
    ]


def test_ends_are_counted_once(llm: LLM, prompts: list[list[int]]) -> None:
    """Guards against looking at all samples whenever one of them ends: a thousand of them took seconds."""
    (prepared,) = llm.inputs.process_params(replace(PARAMS, n=4), 1)
    request = llm.requests.make(array("i", prompts[0]), prepared)
    seen = []
    for sample in (*request.other_samples[1:], request, request.other_samples[0]):
        assert not request.has_ended()
        sample.end("length")
        seen.append(request.num_ended_samples)
    assert request.has_ended()
    assert seen == [0, 0, 0, 0] and request.num_ended_samples == 3
