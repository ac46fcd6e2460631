"""An engine of several processes starts, dies and closes cleanly."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine import child_process, tensor_parallel, workers
from nanovllm.engine.child_process import ChildProcess, WorkerError
from nanovllm.engine.model_runner import ModelRunner
from tests.checkpoints import random_prompts, save_random_model
from tests.processes import is_alive

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = random_prompts((5, 20))
SECONDS_TO_FAIL = 15


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    if os.path.isdir("/dev/shm"):
        assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of all workers that the test starts."""
    pids: list[int] = []
    start = ChildProcess.start

    def recorded(*args: Any) -> Any:
        worker = start(*args)
        pids.append(worker.process.pid)
        return worker

    monkeypatch.setattr(ChildProcess, "start", recorded)
    return pids


@pytest.fixture(scope="module")
def expected(random_llama: Any) -> list[list[int]]:
    with LLM(str(random_llama[0]), device="cpu", num_kvcache_blocks=64, kvcache_block_size=16) as llm:
        return _tokens(llm)


def _make(folder: Path, **kwargs: Any) -> LLM:
    settings = {"device": "cpu", "num_kvcache_blocks": 64, "kvcache_block_size": 16, "tensor_parallel_size": 2}
    return LLM(str(folder), **settings | kwargs)


def _tokens(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def _inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    boot = child_process._BOOT.replace("main()", f"from tests.faults import install; install({fault!r}); main()")
    monkeypatch.setattr(child_process, "_BOOT", boot)


def test_several_engines(random_llama: Any, expected: Any, started: list[int]) -> None:
    """At once and one after another; closed, closed twice, and forgotten."""
    first, second = _make(random_llama[0]), _make(random_llama[0])
    assert _tokens(first) == _tokens(second) == _tokens(first) == expected
    first.add_request(PROMPTS[0], GREEDY)
    first.step()
    first.close()
    first.close()
    assert [is_alive(pid) for pid in started] == [False, True]
    assert _tokens(second) == expected
    del second
    gc.collect()
    assert not any(map(is_alive, started))
    with pytest.raises(RuntimeError, match="closed"):
        _tokens(first)


def test_constructor_failures(
    random_llama: Any, expected: Any, started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of rank 0 are what they are with one rank; those of others come with their traceback; a retry works."""
    save_random_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        _make(tmp_path)
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=1099511627776 of .* GiB, but the device has "):
        _make(random_llama[0], num_kvcache_blocks=1 << 40)
    with monkeypatch.context() as patch:
        # What arithmetic does not foresee: rank 1 has its cache then, and waits.
        patch.setattr(ModelRunner, "_bind_kv_cache", lambda runner, num_blocks: torch.empty(1 << 60))
        with pytest.raises(RuntimeError, match="alloc"):
            _make(random_llama[0])
    with monkeypatch.context() as patch:
        _inject(patch, "load")
        with pytest.raises(WorkerError, match=r"rank 1 failed:\n(?s:.*)fail\n(?s:.*)LookupError: a fault of rank 1"):
            _make(random_llama[0])
    assert len(started) == 4
    assert not any(map(is_alive, started))
    with _make(random_llama[0]) as llm:
        assert _tokens(llm) == expected


def test_ctrl_c_while_it_closes(random_llama: Any, started: list[int]) -> None:
    """A process that is stopped doesn't see that its parent is gone. So it is not left behind."""
    llm = _make(random_llama[0])
    os.kill(started[0], signal.SIGSTOP)
    timer = threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.close()
        assert not is_alive(started[0])
    finally:
        timer.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[0], signal.SIGKILL)


@pytest.mark.parametrize("cause", ["killed", "raise", "hang"])
def test_lost_worker(random_llama: Any, started: list[int], monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    if cause != "killed":
        _inject(monkeypatch, cause)
    reason = {
        "killed": "rank 1 was killed by SIGKILL",
        "raise": "rank 1 failed:\n(?s:.*)in follow_for_a_while\n(?s:.*)LookupError: a fault of rank 1",
        "hang": 'rank 1 does not answer: (?s:.*)faults.py", line [0-9]+ in fail',
    }
    assert workers.STEP_TIMEOUT_SECONDS + 2 * child_process.SECONDS_TO_REPORT < SECONDS_TO_FAIL - 2
    for module in (workers, tensor_parallel):
        monkeypatch.setattr(module, "STEP_TIMEOUT_SECONDS", 3.0)  # less to wait for
    llm = _make(random_llama[0])
    if cause == "killed":
        threading.Timer(0.3, os.kill, (started[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=reason[cause]):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert time.monotonic() - start < SECONDS_TO_FAIL
    assert not is_alive(started[0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this engine is closed"):
            _tokens(llm)
    llm.close()


def test_lost_worker_of_an_async_engine(random_llama: Any, started: list[int]) -> None:
    """Guards against tasks that wait for ever, because the engine's thread has stumbled over the first failure."""

    async def generate() -> list[Any]:
        async with AsyncLLM(_make(random_llama[0])) as llm:
            tasks = [asyncio.create_task(llm.generate(prompt, LONG)) for prompt in PROMPTS]
            await asyncio.sleep(0.2)
            os.kill(started[0], signal.SIGKILL)
            return [*await asyncio.gather(*tasks, return_exceptions=True), llm]

    *errors, llm = asyncio.run(asyncio.wait_for(generate(), 30))
    assert [type(error) for error in errors] == [WorkerError, WorkerError]
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(llm.generate(PROMPTS[0], GREEDY))


@pytest.mark.parametrize("size", [1, 2])
def test_interrupt(random_llama: Any, expected: Any, started: list[int], assert_idle: Any, size: int) -> None:
    """Ctrl-C ends the call, wherever in a step it comes, and neither the engine nor its workers."""
    with _make(random_llama[0], tensor_parallel_size=size) as llm:
        for delay in (0.05, 0.111, 0.207):
            pids = [*started, os.getpid()]
            timer = threading.Timer(delay, lambda pids=pids: [os.kill(pid, signal.SIGINT) for pid in pids])
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                llm.generate(PROMPTS * 4, LONG, use_tqdm=False)
            assert_idle(llm)
            assert _tokens(llm) == expected


SCRIPT = """
from nanovllm import LLM, SamplingParams
{first}
llm = LLM({folder!r}, device="cpu", num_kvcache_blocks=64, kvcache_block_size=16, tensor_parallel_size=2)
print(*llm.runner._workers.pids, flush=True)
params = SamplingParams(temperature=0, max_tokens={max_tokens}, ignore_eos=True)
{before}
for output in llm.generate({prompts}, params, use_tqdm=False):
    print(*output["token_ids"])
{after}
"""


def _run(folder: Path, is_stdin: bool = False, **parts: Any) -> tuple[int, list[list[int]], str, list[int]]:
    """Runs the script without a main guard. Gives exit code, tokens, what went to stderr, process ids of workers."""
    script = SCRIPT.format(
        folder=str(folder), prompts=PROMPTS, **{"max_tokens": 8, "first": "", "before": "", "after": ""} | parts
    )
    arguments = [sys.executable, "-X", "dev", "-"] if is_stdin else [sys.executable, "-c", script]
    result = subprocess.run(arguments, input=script if is_stdin else None, capture_output=True, text=True, timeout=60)
    lines = [[int(word) for word in line.split()] for line in result.stdout.splitlines()]
    noise = "\n".join(line for line in result.stderr.splitlines() if "no tokenizer" not in line)
    return result.returncode, lines[1:], noise, lines[0]


def test_script_from_stdin(random_llama: Any, expected: Any) -> None:
    """Guards against scripts that need a main guard, and against warnings at the end of one that closes nothing."""
    code, tokens, noise, pids = _run(random_llama[0], is_stdin=True)
    assert (code, tokens, noise) == (0, expected, "")
    assert not any(map(is_alive, pids))


def test_script_that_fails(random_llama: Any, expected: Any) -> None:
    code, tokens, noise, pids = _run(random_llama[0], after="raise SystemExit('no luck')")
    assert (code, tokens, noise) == (1, expected, "no luck")
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("worker", ["working", "hanging"])
def test_killed_driver(random_llama: Any, worker: str) -> None:
    """Workers end by themselves when rank 0 is killed in the middle of a step, even one that hangs."""
    hang = (
        "from nanovllm.engine import child_process; "
        "boot = 'from tests.faults import install; install(\"hang\"); main()'; "
        "child_process._BOOT = child_process._BOOT.replace('main()', boot)"
    )
    kill = "import os, threading; threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()"
    code, tokens, noise, pids = _run(
        random_llama[0], first=hang if worker == "hanging" else "", before=kill, max_tokens=400
    )
    assert (code, tokens, noise) == (-signal.SIGKILL, [], "")
    deadline = time.monotonic() + SECONDS_TO_FAIL
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a worker outlives rank 0"
        time.sleep(0.1)
