"""The engine driven by hand, interrupted, and closed: nothing is lost, nothing is left, and it stays right."""

import gc
import io
import itertools
import os
import random
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import llm_engine, output_text, step_runner
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.outputs import ResultError
from nanovllm.engine.progress import ProgressBar
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_handle import StepHandle
from nanovllm.layers.attention import Attention
from tests.checkpoints import VOCAB_SIZE, save_random_model

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT_LENGTHS = (2 * BLOCK_SIZE + 1, 3, BLOCK_SIZE, 20, 2 * BLOCK_SIZE + 5)


class Failure(Exception):
    """What the tests below make the engine's parts raise."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The first and the last share two blocks."""
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    prompts[-1][: 2 * BLOCK_SIZE] = prompts[0][: 2 * BLOCK_SIZE]
    return prompts


@pytest.fixture(scope="module")
def expected(random_llama: Any, make_shared_llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of the prompts on an engine that nothing has happened to."""
    return tokens_of(make_shared_llm(random_llama[0]).generate(prompts, GREEDY, use_tqdm=False))


@pytest.fixture(scope="module")
def shared_llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    llm: LLM = make_shared_llm(random_llama[0])
    return llm


@pytest.fixture
def llm(shared_llm: LLM, assert_idle: Any) -> Any:
    """An engine that other tests have used, idle before and after."""
    yield shared_llm
    try:
        assert_idle(shared_llm)
    finally:
        while not shared_llm.is_finished():  # so that the next test begins clean
            shared_llm.step()


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


def finish(llm: LLM) -> dict[int, Any]:
    """Steps until there is nothing left; what finished on the way."""
    finished: dict[int, Any] = {}
    for _ in range(10_000):
        if llm.is_finished():
            return finished
        finished.update(llm.step().finished)
    raise AssertionError("the engine makes no progress")


# By hand


def test_idle_engine(llm: LLM) -> None:
    """A step of an idle engine does nothing, and says so."""
    assert llm.is_finished()
    step = llm.step()
    assert (step.finished, step.new_token_ids) == ({}, {})
    assert (step.num_prefill_tokens, step.num_decode_tokens, step.num_cached_tokens) == (0, 0, 0)
    assert (step.num_used_blocks, step.num_free_blocks) == (0, llm.block_manager.num_blocks)


def test_requests_by_hand(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Guards against a request that comes while others run being lost or changing them."""
    seq_ids, tokens, finished = [], {}, {}
    for index in itertools.count():
        if index < 2 * len(prompts) and not index % 2:
            seq_ids.append(llm.add_request(prompts[index // 2], GREEDY))
            assert not llm.is_finished()
            tokens[seq_ids[-1]] = list[int]()
        elif llm.is_finished():
            break
        step = llm.step()
        for seq_id, ids in step.new_token_ids.items():
            assert seq_id not in finished
            tokens[seq_id] += ids
        for seq_id, output in step.finished.items():
            assert seq_id not in finished
            finished[seq_id] = output
            assert tokens[seq_id] == output["token_ids"]  # every token was reported, the last one with the end
    assert len(set(seq_ids)) == len(prompts)
    assert [finished[seq_id]["token_ids"] for seq_id in seq_ids] == expected


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"num_kvcache_blocks": 6}], ids=str
)
def test_counts_add_up(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, int],
) -> None:
    """Guards against tokens counted twice or not at all: without preemptions, prefill and cached tokens are the
    prompts', and decoding computes one token less than comes out."""
    llm = make_llm(random_llama[0], **settings)
    for _ in range(2):
        outputs, steps = drive(llm, prompts, GREEDY)
        assert tokens_of(outputs) == expected
        assert sum(step.num_preemptions for step in steps) == 0
        num_cached = sum(step.num_cached_tokens for step in steps)
        assert num_cached == sum(output["num_cached_tokens"] for output in outputs)
        assert sum(step.num_prefill_tokens for step in steps) == sum(map(len, prompts)) - num_cached
        num_new = sum(len(ids) for step in steps for ids in step.new_token_ids.values())
        assert num_new == sum(map(len, expected))
        assert sum(step.num_decode_tokens for step in steps) == num_new - len(prompts)
        for step in steps:
            assert step.num_used_blocks + step.num_free_blocks == llm.block_manager.num_blocks
            assert step.num_used_blocks >= 0 and step.num_free_blocks >= 0
        assert steps[0].num_used_blocks > 0
        assert steps[-1].num_used_blocks == 0


def test_generate_is_over_when_it_returns(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], expected: Any
) -> None:
    """Guards against a step left in flight that concerns nobody: after sequences that stopped, whose extra token is
    dropped, the engine has nothing left to compute, to read or to report."""
    llm = make_llm(random_llama[0])
    params = [replace(GREEDY, stop_token_ids=(tokens[3],)) for tokens in expected]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output["finish_reason"] for output in outputs] == ["stop"] * len(prompts)
    assert llm.block_manager.num_used_blocks == 0
    assert llm.is_finished()


# Abort


@pytest.mark.parametrize("num_steps", range(12))
def test_abort(llm: LLM, prompts: list[list[int]], expected: list[list[int]], num_steps: int) -> None:
    """Guards against an abort at any moment (waiting, in flight, running, ended) that leaks blocks, loses the tokens so
    far, reports twice, or reaches the others."""
    seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    finished: dict[int, Any] = {}
    num_known = 0
    for _ in range(num_steps):
        step = llm.step()
        finished.update(step.finished)
        num_known += len(step.new_token_ids.get(seq_ids[0], []))
    has_ended = seq_ids[0] in finished
    assert has_ended == (num_steps > GREEDY.max_tokens)
    assert llm.abort(seq_ids[0]) != has_ended
    assert not llm.abort(seq_ids[0])  # once is enough
    llm.block_manager.check_integrity(llm.scheduler.unfinished())
    if not has_ended:
        assert not llm.is_finished()
        step = llm.step()
        assert seq_ids[0] not in step.new_token_ids
        assert seq_ids[0] in step.finished
        finished.update(step.finished)
    finished.update(finish(llm))
    assert set(finished) == set(seq_ids)
    assert finished[seq_ids[0]]["finish_reason"] == ("length" if has_ended else "abort")
    assert finished[seq_ids[0]]["token_ids"] == expected[0][:num_known]
    assert [finished[seq_id]["token_ids"] for seq_id in seq_ids[1:]] == expected[1:]


def test_abort_of_unknown_requests(llm: LLM) -> None:
    seq_id = llm.add_request([1], GREEDY)
    assert not llm.abort(seq_id + 1)
    assert not llm.abort(-1)
    assert set(finish(llm)) == {seq_id}
    assert not llm.abort(seq_id)


def test_abort_of_all(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Each of them is reported, by the next step."""
    for num_steps in (0, 1, 3):
        seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(num_steps):
            llm.step()
        assert all(llm.abort(seq_id) for seq_id in seq_ids)
        assert llm.block_manager.num_used_blocks == 0
        step = llm.step()
        assert set(step.finished) == set(seq_ids)
        assert {output["finish_reason"] for output in step.finished.values()} == {"abort"}
        assert llm.is_finished()
    assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_blocks_of_an_aborted_request_are_reused_at_once(
    random_llama: Any, make_llm: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Guards against a step in flight writing into blocks that were given away, or its token reaching the sequence
    that took the slot."""
    llm = make_llm(random_llama[0], num_kvcache_blocks=3, max_num_seqs=1)
    for num_steps in range(1, 7):
        aborted = llm.add_request([9] * 40, GREEDY)
        for _ in range(num_steps):
            llm.step()
        assert llm.abort(aborted)
        seq_ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        finished = finish(llm)
        assert [finished[seq_id]["token_ids"] for seq_id in seq_ids] == expected
        assert len(finished[aborted]["token_ids"]) == num_steps - 1


# Others' requests beside generate


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_generate_beside_other_requests(
    random_llama: Any,
    make_llm: Any,
    assert_idle: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    max_num_seqs: int,
    num_steps: int,
) -> None:
    """Guards against generate returning other people's results, or swallowing them: later steps report them, once."""
    llm = make_llm(random_llama[0], max_num_seqs=max_num_seqs)
    early = llm.add_request(prompts[1], replace(GREEDY, max_tokens=2))
    long = llm.add_request(prompts[2], replace(GREEDY, max_tokens=40))
    finished: dict[int, Any] = {}
    for _ in range(num_steps):
        finished.update(llm.step().finished)
    aborted = llm.add_request(prompts[3], GREEDY)
    assert llm.abort(aborted)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert not llm.is_finished()
    finished.update(llm.step().finished)
    assert {early, aborted} <= set(finished)
    last = llm.add_request(prompts[4], GREEDY)
    finished.update(finish(llm))
    assert set(finished) == {early, long, aborted, last}
    assert finished[early]["token_ids"] == expected[1][:2]
    assert finished[aborted]["finish_reason"] == "abort"
    assert finished[long]["token_ids"][:8] == expected[2]
    assert len(finished[long]["token_ids"]) == 40
    assert finished[last]["token_ids"] == expected[4]
    assert_idle(llm)


def test_refused_call_leaves_others_alone(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    seq_id = llm.add_request(prompts[0], GREEDY)
    llm.step()
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate([[1], []], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 0"):
        llm.add_request([-1], GREEDY)
    finished = finish(llm)
    assert set(finished) == {seq_id}
    assert finished[seq_id]["token_ids"] == expected[0]


# Failures


# Where the engine can fail: name -> what to patch.
POINTS: dict[str, tuple[Any, str]] = {
    "schedule": (Scheduler, "schedule"),
    "chunk": (Scheduler, "_schedule_chunk"),
    "publish": (BlockManager, "publish"),
    "pack": (llm_engine, "pack"),
    "run": (ModelRunner, "run"),
    "store_kv": (Attention, "_rotate_and_store"),  # once a layer: the first may have its KV and the second not
    "sample": (step_runner, "sample"),
    "read": (StepHandle, "read"),
    "postprocess": (Scheduler, "postprocess"),
    "progress": (ProgressBar, "update"),
}
FAILURES = [(point, moment) for point in POINTS for moment in ("before", "after")]
STEP_FAILURES = [failure for failure in FAILURES if failure[0] != "progress"]
# These leave KV blocks that were published and not computed.
LAUNCH_FAILURES = [("schedule", "after"), ("pack", "before"), ("run", "before"), ("store_kv", "before")]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[None]]:
    """`with fail(("run", "before"), 2, error):` raises before the third call of that point, and at no other."""

    @contextmanager
    def failing(failure: tuple[str, str], call: int, error: BaseException) -> Iterator[None]:
        (owner, name), moment = POINTS[failure[0]], failure[1]
        original, calls = getattr(owner, name), itertools.count()

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            is_hit = next(calls) == call
            if is_hit and moment == "before":
                raise error
            result = original(*args, **kwargs)
            if is_hit:
                raise error
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrapper)
            with pytest.raises(type(error)):
                yield

    return failing


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("failure", FAILURES, ids="-".join)
def test_failed_generate(
    llm: LLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    fail: Any,
    failure: tuple[str, str],
    error: type[BaseException],
) -> None:
    """Guards against an engine that an exception leaves unusable: blocks held, requests queued, a forward context that
    stays set, or tokens that changed."""
    for call in (0, 1, 4):
        with fail(failure, call, error()):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.block_manager.check_integrity(llm.scheduler.unfinished())
        assert llm.block_manager.num_used_blocks == 0
        assert not list(llm.scheduler.unfinished())
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    finish(llm)


@pytest.mark.parametrize(
    "failure", [("schedule", "after"), ("run", "before"), ("read", "before"), ("progress", "before")], ids="-".join
)
def test_failed_generate_leaves_nothing(
    random_llama: Any,
    make_llm: Any,
    assert_idle: Any,
    prompts: list[list[int]],
    fail: Any,
    failure: tuple[str, str],
) -> None:
    """Guards against results of a failed call that nobody asks for any more: the engine is idle at once, and later
    steps report other people's requests only."""
    llm = make_llm(random_llama[0])
    with fail(failure, 1, Failure()):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert_idle(llm)
    other = llm.add_request(prompts[0], replace(GREEDY, max_tokens=40))
    llm.step()
    with fail(failure, 1, Failure()):
        llm.generate(prompts[1:], GREEDY, use_tqdm=False)
    assert set(finish(llm)) == {other}


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("failure", LAUNCH_FAILURES, ids="-".join)
def test_blocks_of_a_failed_launch_are_not_reused(
    random_llama: Any,
    make_llm: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    fail: Any,
    failure: tuple[str, str],
    call: int,
) -> None:
    """Guards against blocks that were published when they were scheduled, and never computed: here they hold NaN."""
    llm = make_llm(random_llama[0], max_num_batched_tokens=40)
    llm.runner.kv_cache.fill_(torch.nan)
    with fail(failure, call, Failure()):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    longer = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    fresh = make_llm(random_llama[0], enable_prefix_caching=False)
    assert tokens_of(llm.generate(longer, GREEDY, use_tqdm=False)) == tokens_of(
        fresh.generate(longer, GREEDY, use_tqdm=False)
    )


@pytest.mark.parametrize("failure", STEP_FAILURES, ids="-".join)
def test_failed_step_reports_aborted_requests(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]], fail: Any, failure: tuple[str, str]
) -> None:
    """Guards against requests that vanish in a failed step: a later one reports each, as finished or as aborted, with
    the tokens that were known."""
    params = [replace(GREEDY, max_tokens=max_tokens) for max_tokens in (2, 8, 3, 8, 8)]
    for call in (0, 2, 4):
        seq_ids = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        finished: dict[int, Any] = {}
        with fail(failure, call, Failure()):
            while not llm.is_finished():
                finished.update(llm.step().finished)
        assert llm.block_manager.num_used_blocks == 0
        finished.update(finish(llm))
        assert set(finished) == set(seq_ids)
        for seq_id, tokens, one in zip(seq_ids, expected, params, strict=True):
            output = finished[seq_id]
            assert output["token_ids"] == tokens[: len(output["token_ids"])]
            is_whole = len(output["token_ids"]) == one.max_tokens
            assert output["finish_reason"] == ("length" if is_whole else "abort")
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_failing_detokenizer(
    byte_llama: Path, make_llm: Any, assert_idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against sequences that ended in the very step that fails: their blocks are back, and nothing is left."""
    llm = make_llm(byte_llama)
    expected = llm.generate(["abc", "d"], GREEDY, use_tqdm=False)

    def decode(*args: Any) -> str:
        raise Failure

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(Failure):
            patch.setattr(output_text, "decode_output", decode)
            llm.generate(["abc", "d"], GREEDY, use_tqdm=False)
        assert tokens_of(llm.generate(["abc", "d"], GREEDY, use_tqdm=False)) == tokens_of(expected)
    assert_idle(llm)


def test_detokenizer_that_fails_once(byte_llama: Path, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against results that are lost when a Ctrl-C comes while a step turns them into text: a later step has
    them all."""
    llm = make_llm(byte_llama)
    original = output_text.decode_output
    expected = tokens_of(llm.generate(["abc", "d", "ef"], GREEDY, use_tqdm=False))
    for call in range(3):
        seq_ids = [llm.add_request(prompt, GREEDY) for prompt in ("abc", "d", "ef")]
        calls = itertools.count()

        def decode(*args: Any, call: int = call, calls: Iterator[int] = calls) -> str:
            if next(calls) == call:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(output_text, "decode_output", decode)
            finish(llm)
        finished = finish(llm)
        assert set(finished) == set(seq_ids)
        assert tokens_of([finished[seq_id] for seq_id in seq_ids]) == expected


def test_text_that_cannot_be_decoded(byte_llama: Path, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a result that fails every later step, and so keeps everybody's: it is lost alone."""
    llm = make_llm(byte_llama)
    original = output_text.decode_output

    def decode(tokenizer: Any, prompt_ids: Any, *args: Any) -> str:
        if 7 in prompt_ids:
            raise Failure
        return original(tokenizer, prompt_ids, *args)

    monkeypatch.setattr(output_text, "decode_output", decode)
    lost, other = llm.add_request([7], GREEDY), llm.add_request([8], GREEDY)
    with pytest.raises(ResultError, match=f"request {lost} ") as error:
        finish(llm)
    assert error.value.seq_id == lost and isinstance(error.value.__cause__, Failure)
    assert set(finish(llm)) == {other}


@pytest.mark.parametrize("name", ["add", "finish"])
def test_interrupted_add_and_abort(byte_llama: Path, make_llm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards against requests that are half in the engine after a Ctrl-C: nothing would ever end them."""
    llm = make_llm(byte_llama)
    seq_id = llm.add_request([5], GREEDY)
    llm.step()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.scheduler, name, interrupt)
        llm.add_request([1, 2], GREEDY) if name == "add" else llm.abort(seq_id)
    other = llm.add_request([3, 4], GREEDY)
    finished = finish(llm)
    assert len(finished[other]["token_ids"]) == GREEDY.max_tokens
    assert llm.is_finished() and llm.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_failed_generate_spares_other_requests(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]], fail: Any, error: type[BaseException]
) -> None:
    """An error outside a step, such as a Ctrl-C while the bar is drawn, ends only the call that it hits."""
    for call in range(4):
        other = llm.add_request(prompts[0], GREEDY)
        short = llm.add_request(prompts[1], replace(GREEDY, max_tokens=2))
        with fail(("progress", "before"), call, error()):
            llm.generate(prompts[2:], GREEDY, use_tqdm=False)
        finished = finish(llm)
        assert set(finished) == {other, short}
        assert finished[other]["token_ids"] == expected[0]
        assert finished[short]["token_ids"] == expected[1][:2]


class Interrupter:
    """Raises KeyboardInterrupt at a line of the code that changes the engine's state, as Ctrl-C may at any."""

    FILES = (
        "/nanovllm/engine/llm_engine.py",
        "/nanovllm/engine/feed.py",
        "/nanovllm/engine/requests.py",
        "/nanovllm/engine/scheduler.py",
        "/nanovllm/engine/block_manager.py",
        "/nanovllm/engine/ledger.py",
        "/nanovllm/engine/model_runner.py",
        "/nanovllm/engine/step_runner.py",
        "/nanovllm/utils/context.py",
    )

    def __init__(self) -> None:
        self.num_runs: dict[tuple[str, int], int] = {}  # of each (file, line) in the last call
        self.target: tuple[str, int] | None = None
        self.num_passes = 0  # runs of the target line that go well first

    def call(self, function: Callable[[], Any]) -> Any:
        self.num_runs.clear()
        previous = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(previous)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.endswith(self.FILES):
            return None
        if event == "line":
            line = (file.rpartition("/")[2], frame.f_lineno)
            self.num_runs[line] = self.num_runs.get(line, 0) + 1
            if line == self.target and self.num_runs[line] > self.num_passes:
                self.target = None
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool traces already")
@pytest.mark.parametrize("when", ["first", "last"])
def test_interrupt_at_any_line(
    tmp_path: Path, drive: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Guards against moments in which a Ctrl-C leaves the engine unusable, in whatever line it lands: blocks that
    belong to nobody, sequences in no queue, slots that are lost, a forward that never ends, or tokens that changed."""
    save_random_model(tmp_path, num_hidden_layers=1)
    chosen = [prompts[0], prompts[4]]
    params = [replace(GREEDY, max_tokens=3), replace(GREEDY, max_tokens=2)]

    def make() -> LLM:
        # Not by `make_llm`: what is broken is looked at here.
        return LLM(str(tmp_path), num_kvcache_blocks=8, kvcache_block_size=BLOCK_SIZE, max_num_seqs=2, device="cpu")

    llm = make()
    wanted = tokens_of(llm.generate(chosen, params, use_tqdm=False))

    def generate() -> None:
        llm.generate(chosen, params, use_tqdm=False)

    interrupter = Interrupter()
    interrupter.call(generate)
    lines = dict(interrupter.num_runs)
    assert len(lines) > 150  # else the trace misses the engine
    broken = []
    num_interrupted = 0
    for line, num_runs in sorted(lines.items()):
        interrupter.target = line
        interrupter.num_passes = 0 if when == "first" else num_runs - 1
        try:
            interrupter.call(generate)
            continue  # on an engine that other lines interrupted it runs less often
        except KeyboardInterrupt:
            num_interrupted += 1
        try:
            llm.block_manager.check_integrity(llm.scheduler.unfinished())
            assert llm.block_manager.num_used_blocks == 0, "blocks are lost"
            assert not list(llm.scheduler.unfinished()), "requests are left"
            outputs, steps = drive(llm, chosen, params)
            assert tokens_of(outputs) == wanted, "other tokens"
            assert max(len(step.new_token_ids) for step in steps) == 2, "a slot is lost"
        except Exception as error:
            broken.append(f"{line[0]}:{line[1]}: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
            monkeypatch.setattr("nanovllm.utils.context._state.current", None)  # so that one fault is not seen twice
            llm = make()
    assert num_interrupted > len(lines) / 2
    assert not broken, "\n".join(broken)


# Closing


USES: list[Callable[[LLM], Any]] = [
    lambda llm: llm.generate([[1]], GREEDY, use_tqdm=False),
    lambda llm: llm.generate([]),
    lambda llm: llm.add_request([1], GREEDY),
    lambda llm: llm.abort(0),
    lambda llm: llm.step(),
]


@pytest.mark.parametrize("name", ["close", "exit"])
def test_close(random_llama: Any, make_llm: Any, prompts: list[list[int]], name: str) -> None:
    """Closing twice is closing once; everything else says that the engine is closed."""
    llm = make_llm(random_llama[0])
    llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    for _ in range(3):
        getattr(llm, name)()
        for use in USES:
            with pytest.raises(RuntimeError, match="closed"):
                use(llm)
    assert llm.block_manager.num_used_blocks == 0


def test_close_with_work_left(random_llama: Any, make_llm: Any, prompts: list[list[int]]) -> None:
    """Guards against closing that fails, or keeps blocks, while requests wait, run and are in flight."""
    for num_steps in range(4):
        llm = make_llm(random_llama[0], max_num_seqs=2)
        for prompt in prompts:
            llm.add_request(prompt, GREEDY)
        for _ in range(num_steps):
            llm.step()
        llm.close()
        assert llm.block_manager.num_used_blocks == 0
        assert not list(llm.scheduler.unfinished())


def test_close_gives_memory_back(random_llama: Any, make_llm: Any) -> None:
    """Guards against weights and KV cache outliving the engine that is closed, or one that is forgotten."""
    llm = make_llm(random_llama[0])
    llm.generate([[1]], GREEDY, use_tqdm=False)
    held = [weakref.ref(llm.runner.kv_cache), weakref.ref(llm.runner.model)]
    llm.close()
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    forgotten = LLM(str(random_llama[0]), device="cpu", num_kvcache_blocks=4)
    held = [weakref.ref(forgotten.runner.kv_cache), weakref.ref(forgotten)]
    del forgotten
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_context_manager(random_llama: Any, make_llm: Any, expected: Any, prompts: list[list[int]]) -> None:
    with make_llm(random_llama[0]) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], GREEDY)
    # An error inside passes through, and a close inside is fine.
    with pytest.raises(Failure), make_llm(random_llama[0]) as llm:
        llm.add_request([1], GREEDY)
        raise Failure
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()
    with make_llm(random_llama[0]) as llm:
        llm.close()


def test_script_that_fails_with_an_engine_open(random_llama: Any, tmp_path: Path) -> None:
    """Guards against a process that hangs at its end, or hides the script's own error, while requests wait: a plain
    script without a main guard."""
    script = tmp_path / "script.py"
    script.write_text(
        "from nanovllm import LLM, SamplingParams\n"
        f"llm = LLM({str(random_llama[0])!r}, device='cpu', num_kvcache_blocks=8)\n"
        "params = SamplingParams(max_tokens=3, ignore_eos=True)\n"
        "print(len(llm.generate([[1]], params, use_tqdm=False)[0]['token_ids']))\n"
        "llm.add_request([1, 2])\n"
        "llm.step()\n"
        "raise KeyError('on purpose')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "3\n"
    assert done.stderr.rstrip().endswith("KeyError: 'on purpose'")


# Several engines


def test_engines_one_after_another(random_llama: Any, make_llm: Any, prompts: list[list[int]], expected: Any) -> None:
    for _ in range(3):
        llm = make_llm(random_llama[0])
        assert tokens_of(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        llm.close()


def test_engines_at_the_same_time(
    random_llama: Any, tmp_path: Path, make_llm: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Guards against state that engines share: another model, block size and pool, steps in turn."""
    save_random_model(tmp_path, "qwen3", seed=5, num_hidden_layers=1)
    alone = tokens_of(make_llm(tmp_path).generate(prompts, GREEDY, use_tqdm=False))
    assert alone != expected
    engines = [make_llm(random_llama[0]), make_llm(tmp_path, kvcache_block_size=3, num_kvcache_blocks=99)]
    seq_ids = [[llm.add_request(prompt, GREEDY) for prompt in prompts] for llm in engines]
    finished: list[dict[int, Any]] = [{}, {}]
    while not all(llm.is_finished() for llm in engines):
        for llm, results in zip(engines, finished, strict=True):
            results.update(llm.step().finished)
    for ids, results, tokens in zip(seq_ids, finished, (expected, alone), strict=True):
        assert [results[seq_id]["token_ids"] for seq_id in ids] == tokens
    engines[0].close()
    assert tokens_of(engines[1].generate(prompts, GREEDY, use_tqdm=False)) == alone


def test_constructor_failure_then_retry(
    random_llama: Any,
    tmp_path: Path,
    make_llm: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against state that a failed start leaves behind."""
    damaged = tmp_path / "damaged"
    save_random_model(damaged)
    (damaged / "model.safetensors").write_bytes(b"\x08" + bytes(40))
    for error, model, settings in (
        (FileNotFoundError, tmp_path / "nothing", {}),
        (ValueError, tmp_path, {}),
        (ValueError, damaged, {}),
        (TypeError, random_llama[0], {"nonsense": 1}),
        (ValueError, random_llama[0], {"dtype": "float8"}),
        (ValueError, random_llama[0], {"num_kvcache_blocks": 2**50}),
    ):
        with pytest.raises(error):
            make_llm(model, **settings)
        assert torch.get_default_dtype() == torch.float32
    with monkeypatch.context() as patch:  # the memory is there by arithmetic, and is not to be had
        patch.setattr(ModelRunner, "_bind_kv_cache", lambda runner, num_blocks: torch.empty(1 << 60))
        with pytest.raises((RuntimeError, MemoryError)):
            make_llm(random_llama[0])
    assert tokens_of(make_llm(random_llama[0]).generate(prompts, GREEDY, use_tqdm=False)) == expected


# The progress bar


def captured_generate(llm: LLM, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """What generate writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        llm.generate(*args, **kwargs)
    return out.getvalue(), err.getvalue()


def test_no_progress_bar(llm: LLM, prompts: list[list[int]]) -> None:
    assert captured_generate(llm, prompts, GREEDY, use_tqdm=False) == ("", "")
    assert captured_generate(llm, [], GREEDY, use_tqdm=False) == ("", "")


@pytest.mark.parametrize("how", [{}, {"use_tqdm": True}], ids=str)
def test_progress_bar(llm: LLM, prompts: list[list[int]], how: dict[str, bool]) -> None:
    """The bar ends full, on stderr, and shows how fast prompts were read and outputs written."""
    out, err = captured_generate(llm, prompts, GREEDY, **how)
    assert out == ""
    last = err.strip().split("\r")[-1]
    assert f"{len(prompts)}/{len(prompts)}" in last and "100%" in last
    rates = re.search(r"prefill ([\d,.]+) ?tok/s, decode ([\d,.]+) ?tok/s", last)
    assert rates
    assert all(float(rate.replace(",", "")) > 0 for rate in rates.groups())


def test_progress_bar_counts_its_own_requests(llm: LLM, prompts: list[list[int]]) -> None:
    """Guards against a bar that runs past its end on other people's requests."""
    others = {llm.add_request([index + 1], replace(GREEDY, max_tokens=2)) for index in range(4)}
    _, err = captured_generate(llm, prompts[:3], GREEDY)
    assert set(finish(llm)) == others
    assert "3/3" in err.strip().split("\r")[-1]


def test_progress_bar_is_closed_by_an_error(llm: LLM, prompts: list[list[int]], fail: Any) -> None:
    """Guards against a bar that an interrupted call leaves open, under which the next one is drawn."""
    from tqdm.auto import tqdm

    with fail(("run", "after"), 2, KeyboardInterrupt()):
        captured_generate(llm, prompts, GREEDY)
    assert not getattr(tqdm, "_instances", None)
    finish(llm)


def test_llm_is_the_engine() -> None:
    assert issubclass(LLM, LLMEngine)
