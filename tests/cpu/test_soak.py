"""Hundreds of calls on one engine, many of them disturbed: nothing is lost, and nothing grows."""

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import launched_step
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler

NUM_CALLS = int(os.environ.get("NANOVLLM_SOAK_CALLS", 300))
NUM_REQUESTS = 20
MEMORY_SLACK = 6 << 20  # bytes: two kilobytes for each of the requests that are made meanwhile
SETTINGS = {"num_kvcache_blocks": 24, "kvcache_block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class Injected(Exception):
    pass


def random_params(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"ignore_eos": True},
        {"stop": [chr(rng.randrange(97, 123)), "\n"]},
        {"stop_token_ids": [rng.randrange(256) for _ in range(20)], "seed": rng.randrange(99)},
        {"logprobs": rng.randrange(3), "prompt_logprobs": 1, "ignore_eos": True},
        {"presence_penalty": 0.3, "repetition_penalty": 1.2, "bad_words": ["a", "bc"]},
        {"n": 3, "top_p": 0.9},
        {"regex": "[a-z]{2,9}"},
    ]
    kind = rng.choice(kinds)
    temperature = rng.choice([0.0, 1.0]) if "n" not in kind else 1.0
    return SamplingParams(temperature=temperature, max_tokens=rng.randrange(1, 25), **kind)


def random_prompt(rng: random.Random) -> str | list[int]:
    """Some begin alike, some are longer than the token budget. Few different words: the tokenizer keeps 10,000."""
    text = rng.choice(["", "shared beginning " * 3]) + rng.choice("abcdef") * rng.randrange(1, 90)
    return rng.choice([text, [rng.randrange(256) for _ in range(rng.randrange(1, 140))]])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[random.Random], None]:
    """Makes one of the next calls of schedule, launch, read or postprocess raise, once."""
    left: dict[str, int] = {}

    def wrap(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def raise_sometimes(*args: Any, **kwargs: Any) -> Any:
            if left.get(name, 0):
                left[name] -= 1
                if not left[name]:
                    raise Injected(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, raise_sometimes)

    places = {
        "schedule": Scheduler,
        "_launch": ModelRunner,
        "read": launched_step.LaunchedStep,
        "accept_tokens": launched_step.LaunchedStep,
        "postprocess": Scheduler,
        "_read": LLMEngine,
    }
    for name, owner in places.items():
        wrap(owner, name)

    def fail_soon(rng: random.Random) -> None:
        left.clear()
        left[rng.choice(sorted(places))] = rng.randrange(1, 20)

    return fail_soon


def call(llm: LLM, rng: random.Random, fail_soon: Callable[[random.Random], None]) -> None:
    """One call: whole, streamed and left early, driven by hand with aborts, or failing somewhere."""
    prompts = [random_prompt(rng) for _ in range(NUM_REQUESTS)]
    params = [random_params(rng) for _ in prompts]
    kind = rng.randrange(4)
    if kind == 0:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output["finish_reason"] in ("stop", "length") for output in outputs)
    elif kind == 1:
        for number, _ in enumerate(llm.stream(prompts, params)):
            if number > rng.randrange(200):
                break
    elif kind == 2:
        ids = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        finished: set[int] = set()
        while not llm.is_finished():
            finished |= llm.step().finished.keys()
            if rng.random() < 0.2:
                llm.abort(rng.choice(ids))
        assert finished == set(ids)
    else:
        fail_soon(rng)
        with pytest.raises(Injected):
            while True:  # the failure may be further away than the end of one call
                llm.generate(prompts, params, use_tqdm=False)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the process's figures from /proc")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [1, 2])
def test_soak(
    byte_llama: Path, make_llm: Any, assert_idle: Any, failing: Any, eager_admission: None, size: int
) -> None:
    pytest.importorskip("llguidance")
    rng = random.Random(size)
    llm = make_llm(byte_llama, tensor_parallel_size=size, **SETTINGS)
    num_preemptions = 0
    preempt = Scheduler._preempt

    def counted(self: Scheduler, seq: Any) -> None:
        nonlocal num_preemptions
        num_preemptions += 1
        preempt(self, seq)

    Scheduler._preempt = counted  # type: ignore[method-assign]
    try:
        num_calls = NUM_CALLS // (1 if size == 1 else 6)
        for number in range(num_calls):
            if llm.is_closed:  # where a failure loses the other ranks
                llm = make_llm(byte_llama, tensor_parallel_size=size, **SETTINGS)
            call(llm, rng, failing)
            if not llm.is_closed:
                while not llm.is_finished():  # reports what a failure has aborted
                    llm.step()
                assert_idle(llm)
            if number == num_calls // 3:  # caches have their size by now
                gc.collect()
                before = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
        gc.collect()
        memory, files, threads = resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()
    finally:
        Scheduler._preempt = preempt  # type: ignore[method-assign]
    assert num_preemptions > num_calls / 4
    assert memory - before[0] < MEMORY_SLACK
    if size == 1:
        assert (files, threads) == before[1:]
