"""Requests whose constraint takes long to compile: they wait, and nobody waits for them."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import grammar_compiler
from nanovllm.engine.batch import pack_sampling
from nanovllm.engine.sequence import Sequence
from tests.asynchronous import collect, is_idle, run, wait_until

SLOW = SamplingParams(regex="slow[0-9]", max_tokens=20)
SLOW_AND_WRONG = SamplingParams(regex="slow[", max_tokens=20)
FAST = SamplingParams(regex="fast[0-9]", max_tokens=20)
PLAIN = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Constraints with "slow" in them are compiled once this is set."""
    event = threading.Event()
    compile_ = grammar_compiler._compile

    def compile_slowly(constraint: Any, vocabulary: Any) -> Any:
        if "slow" in constraint.text:
            assert event.wait(60)
        return compile_(constraint, vocabulary)

    monkeypatch.setattr(grammar_compiler, "_compile", compile_slowly)
    yield event
    event.set()


@pytest.fixture
def llm(byte_llama: Any, make_llm: Any, go_on: threading.Event) -> LLM:
    engine: LLM = make_llm(byte_llama)
    engine.inputs.grammars._patience = 0.5
    engine.inputs.grammars.compile(FAST.constraint)  # type: ignore[arg-type]
    engine.inputs.grammars._patience = 0.01
    return engine


def drain(llm: LLM) -> dict[int, Any]:
    finished = {}
    while not llm.is_finished():
        finished.update(llm.step().finished)
    return finished


def test_others_go_on(llm: LLM, go_on: threading.Event) -> None:
    """All others finish, whenever they came; then the held one gets its turn, with all its samples."""
    slow = llm.add_request("a", replace(SLOW, n=3))
    others = [llm.add_request("b", PLAIN), llm.add_request("c", FAST)]
    finished: dict[int, Any] = {}
    for _ in range(20):
        finished.update(llm.step().finished)
    assert set(finished) == set(others) and not llm.is_finished() and llm.entrance.num_held == 1
    assert finished[others[1]]["text"].startswith("fast")
    go_on.set()
    output = drain(llm)[slow]
    assert llm.entrance.num_held == 0
    assert all(len(sample["text"]) == 5 and sample["text"].startswith("slow") for sample in output["samples"])


def test_generate_waits(llm: LLM, go_on: threading.Event) -> None:
    """Only held requests are left, so that there is nothing to launch: that is no scheduler that is stuck, and the
    wait burns no steps."""
    num_steps = [0]
    step = llm._step

    def count() -> Any:
        num_steps[0] += 1
        return step()

    llm._step = count  # type: ignore[method-assign]
    threading.Timer(0.3, go_on.set).start()
    outputs = llm.generate(["a", "b", "c"], [SLOW, PLAIN, SLOW], use_tqdm=False)
    assert [output["text"][:4] for output in outputs[::2]] == ["slow"] * 2
    assert len(outputs[1]["token_ids"]) == 5
    assert num_steps[0] < 60


def test_late_failure_ends_one_request(llm: LLM, go_on: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    """As when it is refused at once, but the others' work is not thrown away."""
    threading.Timer(0.1, go_on.set).start()
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate(["a", "b", "c"], [replace(SLOW_AND_WRONG, n=2), PLAIN, FAST], use_tqdm=False)
    assert [output["finish_reason"] for output in outputs] == ["abort", "length", "stop"]
    assert [sample["finish_reason"] for sample in outputs[0]["samples"]] == ["abort"] * 2
    assert outputs[0]["token_ids"] == [] and outputs[0]["text"] == ""
    assert "unclosed character class" in caplog.text
    with pytest.raises(ValueError, match="sampling params 0: regex"):  # by now it is known
        llm.add_request("a", SLOW_AND_WRONG)


def test_failure_before_the_request_is_queued(llm: LLM, go_on: threading.Event) -> None:
    """A large job's sequences are made long after its params were checked."""
    params = llm.inputs.process_params(SLOW_AND_WRONG, 1)
    go_on.set()
    grammar = params[0].grammar
    assert grammar is not None and grammar.exception(60)
    seq = llm.requests.make(llm.inputs.process_prompts(["a"])[0], params[0])
    llm._enqueue(seq)
    assert drain(llm)[seq.seq_id]["finish_reason"] == "abort"


def test_abort(llm: LLM, go_on: threading.Event, assert_idle: Any) -> None:
    seq_id = llm.add_request("a", replace(SLOW, n=2))
    llm.step()
    assert llm.abort(seq_id) and not llm.abort(seq_id)
    assert [sample["finish_reason"] for sample in drain(llm)[seq_id]["samples"]] == ["abort"] * 2
    go_on.set()
    assert_idle(llm)
    assert llm.generate(["a"], SLOW, use_tqdm=False)[0]["text"].startswith("slow")


def test_stream_that_is_closed(llm: LLM, assert_idle: Any) -> None:
    stream = llm.stream(["a", "b"], [SLOW, PLAIN])
    assert next(stream)["index"] == 1
    assert llm.entrance.num_held == 1
    stream.close()
    assert_idle(llm)
    assert llm.entrance.num_held == 0


def test_failed_step(llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seq_id = llm.add_request("a", SLOW)
    monkeypatch.setattr(llm.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.step()
    monkeypatch.undo()
    assert drain(llm)[seq_id]["finish_reason"] == "abort"
    assert_idle(llm)


def test_close(llm: LLM, go_on: threading.Event) -> None:
    llm.add_request("a", SLOW)
    llm.close()
    with pytest.raises(RuntimeError):
        llm.inputs.grammars._pool.submit(print)


def test_asyncio(make_async_llm: Any, go_on: threading.Event) -> None:
    """Tasks come, are served, and leave while another one's constraint is compiled."""
    engine = make_async_llm()
    grammars = engine._driver._llm.inputs.grammars
    grammars.compile(FAST.constraint)  # the others may take all the threads there are
    grammars._patience = 0.01

    async def main() -> None:
        slow = [asyncio.create_task(engine.generate("a", SLOW)) for _ in range(2)]
        failing = asyncio.create_task(engine.generate("a", replace(SLOW_AND_WRONG, seed=1)))
        gone = asyncio.create_task(collect(engine.stream("a", SLOW)))
        while engine._driver._llm.entrance.num_held < 4:
            await asyncio.sleep(0.01)
        text, token_ids, reason = await collect(engine.stream("b", replace(FAST, seed=2)))
        assert text.startswith("fast") and len(token_ids) == 5 and reason == "stop"
        gone.cancel()
        slow[1].cancel()
        await asyncio.gather(gone, slow[1], return_exceptions=True)
        assert not slow[0].done()
        go_on.set()
        assert (await slow[0])["text"].startswith("slow")
        assert (await failing)["finish_reason"] == "abort"

    run(main())
    wait_until(lambda: is_idle(engine))


def test_masks_see_to_min_tokens() -> None:
    """No pairs of banned tokens for a sequence under a constraint: where its grammar allows nothing but a stop token,
    that must be sampled."""
    params = SamplingParams(regex="a", min_tokens=3)
    future: Future[Any] = Future()
    sequences = [
        Sequence(index, [1], params, max_total_tokens=9, stop_ids=frozenset({5}), grammar=grammar)  # type: ignore
        for index, grammar in enumerate([future, None])
    ]
    packed = pack_sampling(sequences)
    assert packed["banned_rows"].tolist() == [1] and packed["banned_ids"].tolist() == [5]
