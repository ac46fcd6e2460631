"""Several engines behind one queue give what one engine gives, and survive what happens to processes."""

import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import child_process
from nanovllm.engine import replicas as replicas_module
from nanovllm.engine.child_process import WorkerError
from nanovllm.engine.outputs import ResultError
from nanovllm.engine.replica import Ready, Report, Request
from nanovllm.engine.replicas import Replicas, Task, _Replica
from nanovllm.engine.stats import EngineStats
from tests.checkpoints import random_prompts, save_random_model
from tests.processes import is_alive

SETTINGS = {"device": "cpu", "num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_seqs": 8, "seed": 7}
SETTINGS["max_num_batched_tokens"] = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MEDIUM = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = random_prompts(range(3, 33))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _make(folder: Path, **kwargs: Any) -> LLM:
    return LLM(str(folder), **{"data_parallel_size": 2, **SETTINGS, **kwargs})


def _tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _await_end(pids: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def loops_for_ever(logits: torch.Tensor, rows: Any) -> None:
    while True:
        pass


def largest_is_banned(logits: torch.Tensor, rows: Any) -> None:
    logits.scatter_(1, logits.argmax(1, keepdim=True), -100.0)


@pytest.fixture(scope="module")
def one(byte_llama: Path) -> Iterator[LLM]:
    with _make(byte_llama, data_parallel_size=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(byte_llama: Path) -> Iterator[LLM]:
    with _make(byte_llama) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(byte_llama: Path) -> list[list[int]]:
    with _make(byte_llama, data_parallel_size=1) as llm:
        return _tokens(llm)


def _generate(llm: LLM) -> list[Any]:
    """All kinds of params; some of the requests have no seed of their own."""
    kinds = [
        GREEDY,
        RANDOM,
        SamplingParams(seed=5, max_tokens=9),
        SamplingParams(n=3, max_tokens=5),
        SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, logits_processor=largest_is_banned),
        SamplingParams(max_tokens=30, stop="a"),
    ]
    return llm.generate(PROMPTS, [kinds[index % len(kinds)] for index in range(len(PROMPTS))], use_tqdm=False)


def _chat(llm: LLM) -> list[Any]:
    conversations = [[{"role": "user", "content": "x" * length}] for length in range(1, 20)]
    return llm.chat(conversations, RANDOM, chat_template=TEMPLATE, use_tqdm=False)


def _without_chance(outputs: list[Any]) -> list[Any]:
    """Less what depends on batches: the prefix cache, and the last digits of log-probabilities."""
    left_out = {"num_cached_tokens", "logprobs", "prompt_logprobs"}
    return [{key: value for key, value in output.items() if key not in left_out} for output in outputs]


def test_results_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    """In the prompts' order, to the last token, whatever replica computed them: twice, as the seeds go on."""
    for call in (_generate, _generate, _chat):
        alone, together = call(one), call(two)
        assert _without_chance(together) == _without_chance(alone)
        for output, other in zip(alone, together, strict=True):
            for key in {"logprobs", "prompt_logprobs"} & output.keys():
                assert (output[key].token_ids == other[key].token_ids).all()
                assert abs(output[key].logprobs[1:] - other[key].logprobs[1:]).max() < 1e-4
    assert len({tuple(output["token_ids"]) for output in together}) > 10


def test_scores(one: LLM, two: LLM) -> None:
    prompts, continuations = ["the", "a", "one more"] * 4, [" cat", "n apple", "!"] * 4
    alone, together = (llm.score(prompts, continuations, use_tqdm=False) for llm in (one, two))
    assert [output["token_ids"] for output in together] == [output["token_ids"] for output in alone]
    assert [output["logprob"] for output in together] == pytest.approx([output["logprob"] for output in alone])


def test_submit_and_collect(two: LLM, expected: list[list[int]]) -> None:
    """A call of `generate` in between neither takes nor loses what was submitted."""
    assert two.is_finished() and two.collect() == {}
    ids = [two.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert two.abort(two.submit(PROMPTS[0], LONG)) and not two.abort(ids[-1] + 100)
    assert _tokens(two) == expected
    results: dict[int, Any] = {}
    while not two.is_finished():
        results |= two.collect(timeout=10)
    assert [results[request_id]["token_ids"] for request_id in ids] == expected
    two.submit(PROMPTS[0], LONG)
    assert two.collect(timeout=0) == {}
    (output,) = two.collect().values()
    assert len(output["token_ids"]) == 400
    assert two.wants_more


def test_abort_of_what_has_finished(two: LLM, expected: list[list[int]]) -> None:
    """Another call has seen it finish: it can't be aborted any more, and is still reported."""
    request_id = two.submit(PROMPTS[0], GREEDY)
    while two._replicas.num_unfinished:
        two._poll(None)
    assert not two.abort(request_id)
    assert two.collect()[request_id]["token_ids"] == expected[0]
    assert not two.abort(request_id) and two.is_finished()


def test_gauges_after_an_abort(two: LLM) -> None:
    """Nobody listens to a replica when nothing is left, but it is known to hold nothing."""
    ids = [two.submit(prompt, LONG) for prompt in PROMPTS]
    while two.stats().num_used_blocks == 0 or two.stats().num_running < 2:
        two._poll(None)
    for request_id in ids:
        two.abort(request_id)
    stats = two.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_unfinished) == (0, 0, 0, 0)
    assert (stats.num_blocks, stats.max_num_seqs) == (128, 16)


def test_steps(two: LLM, expected: list[list[int]]) -> None:
    ids = [two.add_request(prompt, GREEDY) for prompt in PROMPTS]
    steps = []
    while not two.is_finished():
        steps.append(two.step())
    results = {request_id: output for step in steps for request_id, output in step.finished.items()}
    assert [results[request_id]["token_ids"] for request_id in ids] == expected
    assert two.step().finished == {}
    num_tokens = sum(map(len, PROMPTS)) + sum(map(len, expected))
    assert 0 < sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps) <= num_tokens
    request_id = two.add_request(PROMPTS[0], SamplingParams(n=3, max_tokens=4, ignore_eos=True))
    assert two.add_request(PROMPTS[0], GREEDY) == request_id + 3
    tokens: dict[int, list[int]] = {}
    while not two.is_finished():
        tokens |= two.step().new_token_ids
    assert [len(tokens[request_id + index]) for index in range(4)] == [4, 4, 4, 8]


def test_a_jobs_requests_are_sent_together(
    two: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message for each would interrupt the thread that computes as often. And a replica prepares params once for all
    that are equal: with its seed, which each row of a job has, each would be different."""
    sent: list[Any] = []
    send = child_process.ChildProcess.send
    monkeypatch.setattr(
        child_process.ChildProcess, "send", lambda child, message: (sent.append(message), send(child, message))
    )
    ids = []
    for index, prompt in enumerate(PROMPTS):
        (prepared,) = two.inputs.process_params(replace(GREEDY, seed=index), 1)
        ids.append(two.add_checked(two.inputs.process_prompts([prompt])[0], prepared))
    assert not sent
    finished: dict[int, Any] = {}
    while not two.is_finished():
        finished.update(two.step().finished)
    assert [finished[request_id]["token_ids"] for request_id in ids] == expected
    requests = [request for message in sent for request in message]
    assert sorted(request.seed for request in requests) == list(range(len(PROMPTS)))
    assert len({request.params for request in requests}) == 1
    assert len(sent[0]) > 1


def test_slow_replica(two: LLM, expected: list[list[int]]) -> None:
    """The other one does what a replica that doesn't move has no room for."""
    slow, fast = two._replicas._replicas
    prompts = PROMPTS * 3
    os.kill(slow.child.process.pid, signal.SIGSTOP)
    try:
        ids = [two.submit(prompt, GREEDY) for prompt in prompts]
        results: dict[int, Any] = {}
        deadline = time.monotonic() + 20
        while fast.tasks or two._replicas._queue:
            assert time.monotonic() < deadline
            results |= two.collect(timeout=1)
        look_ahead = SETTINGS["max_num_batched_tokens"]
        assert 0 < slow.num_seqs == len(prompts) - len(results) <= SETTINGS["max_num_seqs"] + look_ahead / 11
    finally:
        os.kill(slow.child.process.pid, signal.SIGCONT)
    while not two.is_finished():
        results |= two.collect(timeout=10)
    assert [results[request_id]["token_ids"] for request_id in ids] == expected * 3


def test_interrupt(two: LLM, expected: list[list[int]]) -> None:
    """Ctrl-C ends the call, neither the replicas nor what others have submitted."""
    pids = two._replicas.pids
    for delay in (0.02, 0.1, 0.17):
        kept = two.submit(PROMPTS[0], LONG)
        timer = threading.Timer(delay, lambda: [os.kill(pid, signal.SIGINT) for pid in (*pids, os.getpid())])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            two.generate(PROMPTS * 20, LONG, use_tqdm=False)
        assert two._replicas.num_unfinished <= 1
        assert len(two.collect()[kept]["token_ids"]) == 400
        assert two.is_finished()
        assert _tokens(two) == expected
    assert two._replicas.pids == pids


def test_what_one_engine_alone_can_do(two: LLM) -> None:
    for call in (two.stream, two.open_stream):
        with pytest.raises(NotImplementedError, match="streams need data_parallel_size=1, and it is 2"):
            call(PROMPTS)
    with pytest.raises(ValueError, match="not data_parallel_size=2"):
        AsyncLLM(two)
    assert two.default_sampling_params() == SamplingParams()


def _from_script(logits: torch.Tensor, rows: Any) -> None: ...


_from_script.__module__ = "__main__"


@pytest.mark.parametrize("processor, reason", [(lambda logits, rows: None, "lambda"), (_from_script, "__main__")])
def test_processor_that_cannot_be_sent(two: LLM, processor: Callable[..., Any], reason: str) -> None:
    params = [GREEDY, SamplingParams(logits_processor=processor)]
    with pytest.raises(ValueError, match=rf"sampling params 1: logits_processor must be .*{reason}"):
        two.generate(PROMPTS[:2], params)
    assert two.is_finished()


def test_bad_input(two: LLM, expected: list[list[int]]) -> None:
    """Found by the parent, before or after work has begun, and nothing of the call is left."""
    with pytest.raises(ValueError, match="prompt 1: is empty"):
        two.generate([[1], []])
    with pytest.raises(ValueError, match="prompt 1500: has 600 tokens"):
        two.generate(["x" * 100] * 1500 + ["x" * 600], GREEDY, use_tqdm=False)
    assert two.is_finished()
    assert _tokens(two) == expected


def test_death(one: LLM, byte_llama: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """The first is made good; the second ends everything, and says what happened."""
    llm = _make(byte_llama)
    survivor, victim = llm._replicas.pids
    threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
    outputs = llm.generate(PROMPTS * 2, MEDIUM, use_tqdm=False)
    assert "replica 1 of 2 is restarted, and does" in caplog.text and "killed by SIGKILL" in caplog.text
    assert [output["token_ids"] for output in outputs] == _tokens(one, MEDIUM) * 2
    assert _tokens(llm) == expected
    pids = llm._replicas.pids
    assert pids[0] == survivor and pids[1] != victim
    threading.Timer(0.05, os.kill, (pids[1], signal.SIGKILL)).start()
    reason = r"replica 1 of 2 was killed by SIGKILL\nIt had been restarted, since it was killed by SIGKILL"
    with pytest.raises(WorkerError, match=reason):
        llm.generate(PROMPTS * 8, MEDIUM, use_tqdm=False)
    assert not any(map(is_alive, pids))
    with pytest.raises(RuntimeError, match="this engine is closed"):
        _tokens(llm)
    llm.close()


def test_replicas_of_two_ranks(byte_llama: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """A lost rank is an exception of its replica, which is restarted; forgotten, the engine leaves no process."""
    llm = _make(byte_llama, tensor_parallel_size=2)
    assert _tokens(llm) == expected
    ranks = [_children(pid) for pid in llm._replicas.pids]
    os.kill(ranks[0][0], signal.SIGKILL)
    assert _tokens(llm) == expected
    assert "replica 0 of 2 is restarted" in caplog.text and "rank 1 was killed by SIGKILL" in caplog.text
    pids = [*llm._replicas.pids, *(child for pid in llm._replicas.pids for child in _children(pid))]
    assert len(pids) >= 3
    del llm
    gc.collect()
    _await_end(pids + ranks[0] + ranks[1])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """The silence, in seconds, for which a replica is given up."""
    monkeypatch.setattr(replicas_module, "_SECONDS_BETWEEN_LOOKS", 0.1)
    monkeypatch.setattr(replicas_module, "SILENCE_LIMIT_SECONDS", 2.0)
    return 2.0


@pytest.mark.usefixtures("impatient")
def test_stopped_process(byte_llama: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """As one that dies. It doesn't read either, and what it is sent is more than the system holds for it."""
    large = replace(GREEDY, stop="x" * 500_000)
    llm = _make(byte_llama)
    for pid in llm._replicas.pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert _tokens(llm, large) == expected
    assert "replica 1 of 2 is restarted" in caplog.text and "did not answer for 2 seconds" in caplog.text
    assert "is it stopped?" in caplog.text and time.monotonic() - started < 20
    pids = llm._replicas.pids
    assert _tokens(llm) == expected and llm._replicas.pids == pids
    while any(replica.num_kv_tokens is None for replica in llm._replicas._replicas):
        llm._replicas.poll()
    os.kill(pids[1], signal.SIGSTOP)
    reason = (
        r"replica 1 of 2 did not answer for 2 seconds: (?s:.*)\nIt had been restarted, since it did not answer for 2"
    )
    with pytest.raises(WorkerError, match=reason):
        _tokens(llm, LONG)
    assert not any(map(is_alive, pids))


@pytest.mark.usefixtures("impatient")
def test_step_that_never_ends(byte_llama: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """The request goes from one replica to the next until one is lost for the second time; the error tells at what."""
    with _make(byte_llama) as llm:
        pids = llm._replicas.pids
        llm.submit(PROMPTS[0], replace(GREEDY, logits_processor=loops_for_ever))
        with pytest.raises(WorkerError, match=r"did not answer for 2 seconds: (?s:.*) in loops_for_ever") as info:
            while not llm.is_finished():
                llm.collect()
        assert len(re.findall("in loops_for_ever", str(info.value))) == 2
        assert len(re.findall(r"replica [01] of 2 is restarted, and does 1 requests again", caplog.text)) == 2
        _await_end(pids)


SLOW = """import time
from nanovllm.models.decoder import DecoderMLP
def forward(self, *args, original=DecoderMLP.forward):
    time.sleep(1.2)
    return original(self, *args)
DecoderMLP.forward = forward
main()"""


def test_slow_steps(
    byte_llama: Path, impatient: float, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a replica shows in the middle of a step that it goes on."""
    monkeypatch.setattr(child_process, "_BOOT", child_process._BOOT.replace("main()", f"exec({SLOW!r})"))
    with _make(byte_llama, max_num_batched_tokens=1024) as llm:
        pids = llm._replicas.pids
        params = replace(GREEDY, max_tokens=1)
        started = time.monotonic()
        outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
        assert time.monotonic() - started > impatient
        assert [output["token_ids"] for output in outputs] == [tokens[:1] for tokens in expected[:2]]
        assert llm._replicas.pids == pids


UNDECODABLE = """from nanovllm.engine.output_text import OutputTexts
def output_of(self, seq, original=OutputTexts.output_of):
    if seq.num_prompt_tokens == 5:
        raise LookupError("this one")
    return original(self, seq)
OutputTexts.output_of = output_of
main()"""


def test_result_that_cannot_be_decoded(byte_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs this result, and no replica."""
    monkeypatch.setattr(child_process, "_BOOT", child_process._BOOT.replace("main()", f"exec({UNDECODABLE!r})"))
    with _make(byte_llama) as llm:
        pids = llm._replicas.pids
        with pytest.raises(ResultError) as info:
            _tokens(llm)
        assert "LookupError: this one" in str(info.value.__cause__)
        assert llm.is_finished()
        bad, good = llm.submit(PROMPTS[2], GREEDY), llm.submit(PROMPTS[0], GREEDY)
        results: dict[int, Any] = {}
        errors = []
        while not llm.is_finished():
            try:
                results |= llm.collect()
            except ResultError as error:
                errors.append(error.seq_id)
        assert (errors, list(results)) == ([bad], [good])
        assert llm._replicas.pids == pids


def test_constructor_failures(tmp_path: Path, byte_llama: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the model's 4 query heads"):
        _make(byte_llama, tensor_parallel_size=3)
    save_random_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkerError, match=r"replica [01] of 2 failed:\n(?s:.*)model\.norm\.weight is missing"):
        _make(tmp_path)


def test_too_few_devices(byte_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    message = "data_parallel_size=2 with tensor_parallel_size=2 needs the CUDA devices 1 to 4, and this machine has 4"
    with pytest.raises(ValueError, match=message):
        _make(byte_llama, tensor_parallel_size=2, device="cuda:1")


SCRIPT = """
from nanovllm import LLM, SamplingParams
llm = LLM({folder!r}, data_parallel_size=2, **{settings})
print(*llm._replicas.pids, flush=True)
{before}
params = SamplingParams(temperature=0, max_tokens={max_tokens}, ignore_eos=True)
for output in llm.generate({prompts}, params, use_tqdm=False):
    print(*output["token_ids"])
"""
KILL = "import os, threading; threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()"


@pytest.mark.parametrize("is_killed", [False, True])
def test_script_from_stdin(byte_llama: Path, expected: list[list[int]], is_killed: bool) -> None:
    """No main guard is needed; replicas end with a script that closes nothing, and with one that is killed."""
    script = SCRIPT.format(
        folder=str(byte_llama),
        settings=SETTINGS,
        prompts=PROMPTS,
        before=KILL if is_killed else "",
        max_tokens=400 if is_killed else 8,
    )
    result = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60)
    pids, *tokens = [[int(word) for word in line.split()] for line in result.stdout.splitlines()]
    assert (result.returncode, result.stderr) == (-signal.SIGKILL if is_killed else 0, "")
    assert tokens == ([] if is_killed else expected)
    _await_end(pids)


def test_process_that_outlives_sigkill() -> None:
    """As one that waits for a device which is stuck. It is not waited for."""

    def wait(timeout: float | None = None) -> None:
        assert timeout is not None
        raise subprocess.TimeoutExpired("", timeout)

    ours, theirs = Pipe()
    process = SimpleNamespace(wait=wait, kill=lambda: None)
    child = child_process.ChildProcess(0, process, ours, io.BytesIO())  # type: ignore[arg-type]
    child.end(0.0)
    assert ours.closed
    theirs.close()


class _Child:
    """What a replica's process would be sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def describe_stack(self) -> str:
        return "its stack\n"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    """Replicas without processes: 4 sequences, 100 tokens of KV and a look-ahead of 30 tokens each."""

    def start(number: int, config: Config) -> _Replica:
        return _Replica(number, config, _Child())  # type: ignore[arg-type]

    monkeypatch.setattr(replicas_module._Replica, "start", start)
    monkeypatch.setattr(replicas_module, "end_children", lambda *args: None)
    monkeypatch.setattr(Replicas, "poll", lambda self: [setattr(one, "num_kv_tokens", 100) for one in self._replicas])
    return Replicas([Config("m", max_num_seqs=4, max_num_batched_tokens=30)] * 2)


def _add(policy: Replicas, *num_tokens: int) -> None:
    for size in num_tokens:
        number = policy.num_unfinished
        policy.add(Task(Request(number, None, b"", 0), size, 1))  # type: ignore[arg-type]
    policy.hand_out()


def _held(policy: Replicas) -> list[list[int]]:
    return [[task.num_tokens for task in replica.tasks.values()] for replica in policy._replicas]


def test_tokens_are_shared_out_evenly(policy: Replicas) -> None:
    _add(policy, 50, 10, 10, 10, 10)
    assert _held(policy) == [[50], [10, 10, 10, 10]]
    assert [len(replica.child.sent) for replica in policy._replicas] == [1, 1]


def test_backlog_is_small(policy: Replicas) -> None:
    """Beyond what is sure to run a replica gets a look-ahead, and more when what it has begins, not when it ends."""
    first, second = policy._replicas
    _add(policy, *[20] * 20)
    assert _held(policy) == [[20] * 4] * 2  # four sequences, and what waits is more than 30 tokens
    policy._record(first, Report(begun=list(first.tasks)))
    policy.hand_out()
    assert _held(policy) == [[20] * 6, [20] * 4]
    policy._record(second, Report(list(second.tasks), {key: {"finish_reason": "stop"} for key in second.tasks}))
    policy.hand_out()
    assert _held(policy) == [[20] * 6, [20] * 4]
    assert policy.num_unfinished == 16 and len(policy.finished) == 4
    # What ends without having begun doesn't wait any more, either.
    policy.forget(list(first.tasks)[-2:])
    policy.hand_out()
    assert _held(policy) == [[20] * 6, [20] * 4] and len(policy._queue) == 4
    assert policy.stats().num_finished_stop == 4


def test_a_request_larger_than_the_window(policy: Replicas) -> None:
    _add(policy, 1000, 1000, 1000)
    assert _held(policy) == [[1000], [1000]]


def test_a_replica_that_loads_gets_nothing(policy: Replicas) -> None:
    policy._replicas[0].num_kv_tokens = None
    _add(policy, 10, 10)
    assert _held(policy) == [[], [10, 10]]


class _Clock:
    """The time in the parent; each look of it comes so many seconds after the one before. They are whole seconds, whose
    sums are exact."""

    def __init__(self, policy: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = policy._last_look = float(int(time.monotonic()))
        for replica in policy._replicas:
            replica.start_time = self.now
        self.lost: list[tuple[int, str]] = []
        self._policy = policy
        monkeypatch.setattr(replicas_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(policy, "_lose", lambda replica, cause: self.lost.append((replica.number, cause)))

    def look(self, seconds: float, number: int, heard: tuple[int, ...] = ()) -> None:
        for _ in range(number):
            self.now += seconds
            self._policy._lose_silent(set(heard))


def test_who_is_given_up(policy: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has work and was silent for ten minutes in which the parent listened, and nobody else."""
    clock = _Clock(policy, monkeypatch)
    for replica in policy._replicas:
        replica.begin(Ready(100, EngineStats()))
    clock.look(1.0, 2000)  # nobody has anything to do
    _add(policy, 50)
    clock.look(1.0, 599)
    clock.look(1.0, 1, heard=(0,))
    clock.look(1.0, 598)
    clock.look(86400.0, 1)  # the machine was suspended
    assert clock.lost == []
    clock.look(1.0, 1)
    assert clock.lost == [(0, "did not answer for 601 seconds: its stack")]


def test_who_is_given_up_while_it_loads(policy: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start may take as long as it likes; the second has that as its measure."""
    clock = _Clock(policy, monkeypatch)
    first = policy._replicas[0]
    first.num_kv_tokens = None
    clock.look(1.0, 5000)
    first.begin(Ready(100, EngineStats()))
    policy._replicas[0] = first.restart("died")
    clock.look(1.0, 10_600)
    assert clock.lost == []
    clock.look(1.0, 1)
    assert [number for number, _ in clock.lost] == [0]


def test_gauges_of_who_has_nothing_to_do(policy: Replicas) -> None:
    """A report from before the abort is the last one that was read: nobody listens when nothing is left."""
    first, second = policy._replicas
    _add(policy, 10, 10)
    busy = EngineStats(num_running=1, num_waiting=1, num_used_blocks=3, num_blocks=8, num_output_tokens=5)
    for replica in (first, second):
        policy._record(replica, Report(stats=busy))
    policy.forget(list(first.tasks))
    stats = policy.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (1, 1, 3)
    policy.forget(list(second.tasks))
    assert policy.stats() == EngineStats(num_blocks=16, num_output_tokens=10, num_finished_abort=2)
