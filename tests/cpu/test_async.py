"""The asyncio engine: tasks share one batch, come and go as they like, and never wait for nothing."""

import asyncio
import gc
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.model_runner import StepHandle

PARAMS = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=400)
PROMPTS = [f"prompt {index}" for index in range(20)]


class Failure(Exception):
    """What the tests below make a step raise."""


@pytest.fixture
def make(byte_llama: Path) -> Iterator[Callable[[], AsyncLLM]]:
    """Makes engines; each must end idle, with all blocks back and without its thread."""
    made: list[tuple[AsyncLLM, LLM]] = []

    def make() -> AsyncLLM:
        llm = LLM(str(byte_llama), device="cpu", num_kvcache_blocks=512, kvcache_block_size=16)
        made.append((AsyncLLM(llm), llm))
        return made[-1][0]

    yield make
    for engine, llm in made:
        engine.close()
        llm.block_manager.check_integrity([])
        assert llm.block_manager.num_used_blocks == 0
        assert not engine._driver._thread.is_alive()


@pytest.fixture(scope="module")
def expected(byte_llama: Path, make_shared_llm: Any) -> list[Any]:
    outputs: list[Any] = make_shared_llm(byte_llama).generate(PROMPTS, PARAMS, use_tqdm=False)
    return outputs


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.002)


def is_idle(engine: AsyncLLM) -> bool:
    """Whether all that was asked for is done or aborted."""
    driver = engine._driver
    return driver._commands.empty() and driver._llm.is_finished() and not driver._streams and not driver._seq_ids


async def collect(deltas: AsyncIterator[Any]) -> tuple[str, list[int], str | None]:
    text, token_ids, reason = "", list[int](), None
    async for delta in deltas:
        assert reason is None
        text, token_ids, reason = text + delta["text"], token_ids + delta["token_ids"], delta["finish_reason"]
    return text, token_ids, reason


def parts(output: Any) -> tuple[str, list[int], str]:
    return output["text"], output["token_ids"], output["finish_reason"]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


def test_equals_generate(make: Any, expected: list[Any]) -> None:
    """Guards against outputs that reach another task, and against tasks that wait for each other: all of them run in
    one batch."""

    async def main() -> None:
        async with make() as engine:
            whole = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            streamed = [collect(engine.stream(prompt, PARAMS)) for prompt in PROMPTS]
            results = await asyncio.gather(*whole, *streamed)
            for one, two, wanted in zip(results, results[20:], expected, strict=False):
                assert parts(one) == two == parts(wanted)
                assert one["prompt_token_ids"] == wanted["prompt_token_ids"]

    run(main())


def test_one_batch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = make(), list[Any]()
    step = engine._driver._llm.step
    monkeypatch.setattr(engine._driver._llm, "step", lambda: (steps.append(step()), steps[-1])[1])

    async def main() -> None:
        await asyncio.gather(*(engine.generate(prompt, replace(LONG, max_tokens=48)) for prompt in PROMPTS))

    run(main())
    assert max(step.num_decode_tokens for step in steps) == len(PROMPTS)


def test_errors_reach_their_task_only(make: Any, expected: list[Any]) -> None:
    async def main() -> None:
        async with make() as engine:
            bad = [engine.generate("", PARAMS), collect(engine.stream([-1], PARAMS)), engine.generate("a", "params")]
            results = await asyncio.gather(*bad, engine.generate(PROMPTS[0], PARAMS), return_exceptions=True)
            assert [type(result) for result in results[:3]] == [ValueError, ValueError, TypeError]
            assert parts(results[3]) == parts(expected[0])

    run(main())


# Tasks that go away


def test_random_cancels(make: Any, expected: list[Any]) -> None:
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
        engine, num_cancelled, num_whole = make(), 0, 0
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
def test_consumer_goes_away(make: Any, how: str) -> None:
    """Guards against requests that run to their end for nobody."""

    async def main() -> None:
        engine = make()
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


def test_event_loop_that_ends(make: Any, expected: list[Any]) -> None:
    """A loop that is closed under its tasks ends their requests; others go on."""
    engine = make()
    loop = asyncio.new_event_loop()
    streams = [engine.stream(PROMPTS[0], LONG) for _ in range(2)]
    for stream in streams:
        loop.run_until_complete(anext(stream))
    whole = loop.create_task(engine.generate(PROMPTS[0], LONG))
    loop.run_until_complete(asyncio.sleep(0))
    wait_until(lambda: len(engine._driver._seq_ids) == 1)
    held = list(engine._driver._streams.values())
    assert len(held) == 2
    loop.close()
    wait_until(lambda: is_idle(engine))
    assert [one.seq.finish_reason for one in held] == ["abort"] * 2
    assert parts(run(engine.generate(PROMPTS[1], PARAMS))) == parts(expected[1])
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    del streams, stream, whole
    gc.collect()
    sys.unraisablehook = hook


# Slow tasks


def test_slow_consumer(make: Any) -> None:
    """Guards against deltas piling up: what comes meanwhile is one delta, and others are not held up."""

    async def main() -> None:
        async with make() as engine:
            slow = engine.stream(PROMPTS[0], LONG)
            first = await anext(slow)
            whole = await engine.generate(PROMPTS[0], LONG)  # as long as the other
            await asyncio.to_thread(wait_until, lambda: is_idle(engine))
            rest = [delta async for delta in slow]
            assert len(rest) <= 2
            assert "".join(delta["text"] for delta in [first, *rest]) == whole["text"]
            assert [token for delta in [first, *rest] for token in delta["token_ids"]] == whole["token_ids"]
            assert rest[-1]["finish_reason"] == "length"

    run(main())


def test_several_event_loops(make: Any, expected: list[Any]) -> None:
    engine = make()

    async def main(index: int) -> Any:
        return await asyncio.gather(collect(engine.stream(PROMPTS[index], PARAMS)), engine.generate("x", PARAMS))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda index: run(main(index)), range(8)))
    assert [result[0] for result in results] == [parts(output) for output in expected[:8]]


def test_two_engines(make: Any, expected: list[Any]) -> None:
    """Guards against forwards of two threads that meet in one place."""
    engines = [make(), make()]

    async def main() -> list[Any]:
        return await asyncio.gather(*(engines[index % 2].generate(PROMPTS[index], PARAMS) for index in range(20)))

    assert [parts(output) for output in run(main())] == [parts(output) for output in expected]


# Failures and ends


def test_failed_step(make: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task that waits gets the error, and the engine goes on."""
    engine = make()

    def read(handle: Any) -> Any:
        raise Failure

    async def main() -> None:
        for _ in range(2):
            waiting: list[Any] = [collect(engine.stream(prompt, LONG)) for prompt in PROMPTS[:5]]
            waiting += [engine.generate(prompt, LONG) for prompt in PROMPTS[:5]]
            tasks = [asyncio.create_task(one) for one in waiting]
            await asyncio.sleep(0.02)
            with monkeypatch.context() as patch:
                patch.setattr(StepHandle, "read", read)
                results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [Failure] * 10
            assert parts(await engine.generate(PROMPTS[1], PARAMS)) == parts(expected[1])

    run(main())


def test_close(make: Any) -> None:
    """Tasks that wait are told, as are later ones; closing twice is closing once."""
    engine = make()

    async def main() -> None:
        waiting: list[Any] = [collect(engine.stream("a", LONG)), engine.generate("a", LONG)]
        tasks = [asyncio.create_task(one) for one in waiting]
        await asyncio.sleep(0.02)
        engine.close()
        engine.close()
        tasks.append(asyncio.create_task(engine.generate("a", LONG)))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RuntimeError) and "closed" in str(result)

    run(main())
    with pytest.raises(RuntimeError, match="closed"):
        engine._driver._llm.generate(["a"])


def test_dropped_engine(byte_llama: Path) -> None:
    """Guards against a thread that keeps an engine for ever which nobody has any more."""
    engine = AsyncLLM(LLM(str(byte_llama), device="cpu", num_kvcache_blocks=8))
    thread = engine._driver._thread
    run(engine.generate("a", PARAMS))
    assert thread.is_alive()
    del engine
    gc.collect()
    assert not thread.is_alive()


def test_idle_engine_does_not_spin(make: Any) -> None:
    engine = make()
    run(engine.generate("a", PARAMS))
    wait_until(lambda: is_idle(engine))
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
