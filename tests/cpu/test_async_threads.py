"""The asyncio engine's thread: several event loops, failures, and the end."""

import asyncio
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.engine.step_handle import StepHandle
from tests.asynchronous import collect, is_idle, parts, run, wait_until

PARAMS = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=400)
PROMPTS = [f"prompt {index}" for index in range(20)]


class Failure(Exception):
    """What the tests below make a step raise."""


@pytest.fixture(scope="module")
def expected(byte_llama: Path, make_shared_llm: Any) -> list[Any]:
    outputs: list[Any] = make_shared_llm(byte_llama).generate(PROMPTS, PARAMS, use_tqdm=False)
    return outputs


# Event loops and threads


def test_event_loop_that_ends(make_async_llm: Any, expected: list[Any]) -> None:
    """A loop that is closed under its tasks ends their requests; others go on."""
    engine = make_async_llm()
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


def test_several_event_loops(make_async_llm: Any, expected: list[Any]) -> None:
    engine = make_async_llm()

    async def main(index: int) -> Any:
        return await asyncio.gather(collect(engine.stream(PROMPTS[index], PARAMS)), engine.generate("x", PARAMS))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda index: run(main(index)), range(8)))
    assert [result[0] for result in results] == [parts(output) for output in expected[:8]]


def test_two_engines(make_async_llm: Any, expected: list[Any]) -> None:
    """Guards against forwards of two threads that meet in one place."""
    engines = [make_async_llm(), make_async_llm()]

    async def main() -> list[Any]:
        return await asyncio.gather(*(engines[index % 2].generate(PROMPTS[index], PARAMS) for index in range(20)))

    assert [parts(output) for output in run(main())] == [parts(output) for output in expected]


# Failures and ends


def test_failed_step(make_async_llm: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task that waits gets the error, and the engine goes on."""
    engine = make_async_llm()

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


def test_close(make_async_llm: Any) -> None:
    """Tasks that wait are told, as are later ones; closing twice is closing once."""
    engine = make_async_llm()

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


def test_idle_engine_does_not_spin(make_async_llm: Any) -> None:
    engine = make_async_llm()
    run(engine.generate("a", PARAMS))
    wait_until(lambda: is_idle(engine))
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
