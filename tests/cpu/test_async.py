"""The asyncio engine: tasks share one batch, come and go as they like, and get what `generate` returns."""

import asyncio
import gc
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.async_llm import _Request
from nanovllm.engine import grammar_compiler
from nanovllm.engine.output_text import OutputTexts
from nanovllm.engine.outputs import ResultError
from tests.asynchronous import collect, is_idle, parts, run, wait_until

PARAMS = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=400)
PROMPTS = [f"prompt {index}" for index in range(20)]


@pytest.fixture(scope="module")
def expected(byte_llama: Path, make_shared_llm: Any) -> list[Any]:
    outputs: list[Any] = make_shared_llm(byte_llama).generate(PROMPTS, PARAMS, use_tqdm=False)
    return outputs


def test_equals_generate(make_async_llm: Any, expected: list[Any]) -> None:
    """Guards against outputs that reach another task, and against tasks that wait for each other: all of them run in
    one batch."""

    async def main() -> None:
        async with make_async_llm() as engine:
            whole = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            streamed = [collect(engine.stream(prompt, PARAMS)) for prompt in PROMPTS]
            results = await asyncio.gather(*whole, *streamed)
            for one, two, wanted in zip(results, results[20:], expected, strict=False):
                assert parts(one) == two == parts(wanted)
                assert one["prompt_token_ids"] == wanted["prompt_token_ids"]

    run(main())


def test_one_batch(make_async_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = make_async_llm(), list[Any]()
    step = engine._driver._llm.step
    monkeypatch.setattr(engine._driver._llm, "step", lambda: (steps.append(step()), steps[-1])[1])

    async def main() -> None:
        await asyncio.gather(*(engine.generate(prompt, replace(LONG, max_tokens=48)) for prompt in PROMPTS))

    run(main())
    assert max(step.num_decode_tokens for step in steps) == len(PROMPTS)


def test_errors_reach_their_task_only(make_async_llm: Any, expected: list[Any]) -> None:
    async def main() -> None:
        async with make_async_llm() as engine:
            bad = [engine.generate("", PARAMS), collect(engine.stream([-1], PARAMS)), engine.generate("a", "params")]
            results = await asyncio.gather(*bad, engine.generate(PROMPTS[0], PARAMS), return_exceptions=True)
            assert [type(result) for result in results[:3]] == [ValueError, ValueError, TypeError]
            assert parts(results[3]) == parts(expected[0])

    run(main())


# Tasks that go away


def test_random_cancels(make_async_llm: Any, expected: list[Any]) -> None:
    """Guards against cancelled requests that go on, are lost half-way, or end others: 20 tasks, some of which are
    cancelled at any moment, or stop listening."""
    rng = random.Random(0)

    async def listen(engine: AsyncLLM, index: int) -> Any:
        if index % 2:
            return parts(await engine.generate(PROMPTS[index], PARAMS))
        if index % 4:
            return await collect(engine.stream(PROMPTS[index], PARAMS))
        async for delta in engine.stream(PROMPTS[index], PARAMS):
            if rng.random() < 0.2:
                return delta["finish_reason"]
        return None

    async def main() -> None:
        engine, num_cancelled, num_whole = make_async_llm(), 0, 0
        for _ in range(4):
            tasks = [asyncio.create_task(listen(engine, index)) for index in range(20)]
            for task in rng.sample(tasks, 7):
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for index, result in enumerate(results):
                if isinstance(result, asyncio.CancelledError):
                    num_cancelled += 1
                elif index % 4:
                    assert result == parts(expected[index])
                    num_whole += 1
            del tasks
            await asyncio.get_running_loop().shutdown_asyncgens()
            await asyncio.to_thread(wait_until, lambda: is_idle(engine))
            assert engine._driver._llm.block_manager.num_used_blocks == 0
        assert num_cancelled > 5 and num_whole > 20

    run(main())


@pytest.mark.parametrize("how", ["aclose", "break", "collect", "cancel"])
def test_consumer_goes_away(make_async_llm: Any, how: str) -> None:
    """Guards against requests that run to their end for nobody."""

    async def main() -> None:
        engine = make_async_llm()
        stream = engine.stream(PROMPTS[0], LONG)
        await anext(stream)
        (held,) = engine._driver._streams.values()
        if how == "aclose":
            await stream.aclose()
        elif how == "break":
            async for _ in stream:
                break
        elif how == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            del task
        del stream
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: is_idle(engine))
        assert held.seq.finish_reason == "abort"

    run(main())


@pytest.mark.parametrize("num_others", [0, 2])
def test_cancelled_generate(make_async_llm: Any, num_others: int) -> None:
    """Guards against a whole request that goes on after its task was cancelled."""

    async def main() -> None:
        engine = make_async_llm()
        llm = engine._driver._llm
        others = [asyncio.create_task(engine.generate("other", LONG)) for _ in range(num_others)]
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: len(llm.scheduler.running) == num_others + 1)
        seq = max(llm.scheduler.running.values(), key=lambda seq: seq.seq_id)
        task.cancel()
        assert {len(output["token_ids"]) for output in await asyncio.gather(*others)} <= {LONG.max_tokens}
        await asyncio.to_thread(wait_until, lambda: is_idle(engine))
        assert seq.finish_reason == "abort"

    run(main())


# Slow tasks


def test_slow_consumer(make_async_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against deltas piling up: what comes meanwhile is one delta, and others are not held up."""
    num_puts = 0
    put = _Request.put

    def counting_put(request: _Request, item: Any) -> None:
        nonlocal num_puts
        num_puts += request.is_streamed
        put(request, item)

    monkeypatch.setattr(_Request, "put", counting_put)

    async def main() -> None:
        async with make_async_llm() as engine:
            slow = engine.stream(PROMPTS[0], LONG)
            first = await anext(slow)
            whole = await engine.generate(PROMPTS[0], LONG)  # as long as the other
            await asyncio.to_thread(wait_until, lambda: is_idle(engine))
            rest = [delta async for delta in slow]
            assert len(rest) <= 2
            assert num_puts <= 3
            assert "".join(delta["text"] for delta in [first, *rest]) == whole["text"]
            assert [token for delta in [first, *rest] for token in delta["token_ids"]] == whole["token_ids"]
            assert rest[-1]["finish_reason"] == "length"

    run(main())


def test_joined_deltas_keep_logprobs(make_async_llm: Any) -> None:
    """Guards against deltas that become one for a slow reader, with the log-probabilities of the last one alone."""

    async def main() -> None:
        async with make_async_llm() as engine:
            token_ids, logprobs, prompts = [], [], []
            async for delta in engine.stream(PROMPTS[0], replace(LONG, max_tokens=60, logprobs=1, prompt_logprobs=1)):
                token_ids += delta["token_ids"]
                logprobs += delta["logprobs"]
                prompts.append(delta.get("prompt_logprobs"))
                await asyncio.sleep(0.005)
            assert len(token_ids) == 60 and len(prompts) < 60, "no deltas were joined"
            assert [next(iter(entry)) for entry in logprobs] == token_ids
            assert prompts[0] is not None and not any(prompts[1:])

    run(main())


def test_takes_an_open_llm_only(byte_llama: Path, make_llm: Any) -> None:
    with pytest.raises(TypeError, match="AsyncLLM takes an LLM"):
        AsyncLLM(str(byte_llama))  # type: ignore[arg-type]
    llm = make_llm(byte_llama)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        AsyncLLM(llm)


def test_text_that_cannot_be_decoded(make_async_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concerns the task whose result it is, and no other."""
    output_of = OutputTexts.output_of

    def refuse(self: OutputTexts, request: Any) -> Any:
        if request.num_prompt_tokens == 1:
            raise LookupError("refused")
        return output_of(self, request)

    monkeypatch.setattr(OutputTexts, "output_of", refuse)

    async def main() -> list[Any]:
        async with make_async_llm() as engine:
            calls = [engine.generate("x" * (1 + index % 2), LONG) for index in range(6)]
            return await asyncio.gather(*calls, return_exceptions=True)

    results = run(main())
    assert [type(result) for result in results] == [ResultError, dict] * 3
    assert isinstance(results[0].__cause__, LookupError)


def test_slow_constraint_stalls_nobody(make_async_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one task's constraint is compiled, another task's deltas come as ever."""
    pytest.importorskip("llguidance")
    compile_now = grammar_compiler._compile
    begun, ended = [], []

    def compile_slowly(*args: Any) -> Any:
        begun.append(time.monotonic())
        time.sleep(0.7)
        ended.append(time.monotonic())
        return compile_now(*args)

    monkeypatch.setattr(grammar_compiler, "_compile", compile_slowly)
    arrivals: list[float] = []

    async def main() -> tuple[Any, Any]:
        async with make_async_llm() as engine:

            async def watch() -> None:
                while not ended:
                    async for _ in engine.stream("x", LONG):
                        arrivals.append(time.monotonic())

            constrained = engine.generate("y", replace(PARAMS, regex="[ab]{3}"))
            return (await asyncio.gather(watch(), constrained))[1], await asyncio.gather(
                engine.generate("y", replace(PARAMS, regex="a{2")), return_exceptions=True
            )

    output, (error,) = run(main())
    assert output["finish_reason"] == "stop" and len(output["text"]) == 3
    assert isinstance(error, ValueError) and "sampling params 0: regex" in str(error)
    meanwhile = [moment for moment in arrivals if begun[0] < moment < ended[0]]
    gaps = [after - before for before, after in pairwise(meanwhile)]
    assert len(meanwhile) > 10 and max(gaps) < 0.35
