"""What the tests of the asyncio engine share."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from nanovllm import AsyncLLM


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
