"""An engine for asyncio: one thread drives it, tasks of any event loop wait for what it computes.

The engine is not thread-safe, so that every call of it happens in that thread (`_Driver`). Tasks send it commands
through a queue, and get results by `call_soon_threadsafe` on their own loop, one call a step and loop.
"""

import asyncio
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nanovllm.engine.inputs import Prompt
from nanovllm.engine.outputs import OutputDelta, RequestOutput, ResultError
from nanovllm.engine.stats import EngineStats
from nanovllm.engine.streaming import RequestStream
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


class AsyncLLM:
    """Completes prompts for any number of asyncio tasks at once, batched together: `AsyncLLM(LLM(model))`.

    The methods are those of `LLM`, for one prompt each: concurrency comes from the tasks. It owns the engine, which
    must not be used otherwise from then on. An async context manager.
    """

    def __init__(self, llm: LLM) -> None:
        """
        Raises:
            TypeError: it is given something else than an `LLM`.
            ValueError: that is data-parallel.
            RuntimeError: that is closed.
        """
        if not isinstance(llm, LLM):
            raise TypeError(f"AsyncLLM takes an LLM, as in AsyncLLM(LLM(model)), got {llm!r:.80}")
        if llm.config.data_parallel_size > 1:
            raise ValueError(f"AsyncLLM takes one engine, not data_parallel_size={llm.config.data_parallel_size}")
        llm.check_open()
        self._driver = _Driver(llm)
        # The thread refers to the driver only: dropped without `close`, this object ends it all the same.
        self._stop = weakref.finalize(self, self._driver.stop)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Completes a prompt. A task that is cancelled aborts its request.

        Raises:
            TypeError, ValueError: something about the prompt or its params is wrong.
            RuntimeError: the engine is closed.
            Exception: what made the step fail that the request was part of.
        """
        await self._driver.prepare(sampling_params)
        request = _Request(asyncio.get_running_loop(), prompt, sampling_params, is_streamed=False)
        try:
            self._driver.submit(request)
            output: RequestOutput = await request.get()
            return output
        finally:
            self._driver.cancel(request)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Completes a prompt and yields what is new of it. Raises like `generate`, with the first delta.

        The request begins with the first `anext`. Closing or dropping the generator, or cancelling the task that waits
        for it, aborts the request. Whoever takes deltas more slowly than they come gets larger ones.
        """
        await self._driver.prepare(sampling_params)
        request = _Request(asyncio.get_running_loop(), prompt, sampling_params, is_streamed=True)
        try:
            self._driver.submit(request)
            while True:
                delta: OutputDelta = await request.get()
                yield delta
                if delta["finish_reason"] is not None:
                    return
        finally:
            self._driver.cancel(request)

    def stats(self) -> EngineStats:
        """The engine's counters and gauges (see `LLM.stats`), from any thread, without waiting: a step may be running,
        and have changed some of the numbers already and others not yet."""
        return self._driver.stats()

    def close(self) -> None:
        """Ends the thread after its current step, and closes the engine. Tasks that wait get a RuntimeError, as do
        later calls. Closing again does nothing."""
        self._stop()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class _Request:
    """Where the engine's thread leaves something for a task.

    `is_empty` is cleared by the thread, which then sends no second delta until the task's loop has set it again, save
    the last: so that there are at most two, which become one. All other state belongs to the loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, prompt: Prompt, params: SamplingParams | None, *, is_streamed: bool
    ) -> None:
        self.loop, self.prompt, self.params, self.is_streamed = loop, prompt, params, is_streamed
        self.is_empty = True
        self._item: Any = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        """Leaves a RequestOutput, a delta or an error. Called in the loop."""
        self._item = item if self._item is None or isinstance(item, BaseException) else _joined(self._item, item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Waits for an item. Raises it if it is an error."""
        while self._item is None:
            self._waiter = self.loop.create_future()
            await self._waiter
        item, self._item = self._item, None
        self.is_empty = True
        if isinstance(item, BaseException):
            raise item
        return item


@dataclass(frozen=True)
class _Command:
    """What the driver is to do: "submit" or "cancel" the request, or "stop"."""

    kind: str
    request: _Request | None = None


class _Driver:
    """Owns the engine. `submit`, `cancel`, `stats` and `stop` may be called in any thread, all else runs in its own."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._is_stopped = False
        # Unfinished requests: what the engine knows them by.
        self._streams: dict[_Request, RequestStream] = {}
        self._seq_ids: dict[_Request, int] = {}
        self._by_seq_id: dict[int, _Request] = {}
        # What this step has for the tasks of each loop.
        self._mail: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Request, Any]]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="nanovllm", daemon=True)
        self._thread.start()

    async def prepare(self, params: Any) -> None:
        """Has a request's constraint compiled, for which the engine's thread, and with it everybody else, would have to
        wait else. What is wrong with it is found again, and said, when the request is made."""
        constraint = params.constraint if isinstance(params, SamplingParams) else None
        if constraint is not None:
            with suppress(Exception):
                await asyncio.to_thread(self._llm.inputs.grammars.compile, constraint)

    def submit(self, request: _Request) -> None:
        self._commands.put(_Command("submit", request))
        if self._is_stopped:
            self._refuse_commands()

    def cancel(self, request: _Request) -> None:
        """Aborts the request, if it is unfinished. The garbage collector may call this."""
        self._commands.put(_Command("cancel", request))

    def stats(self) -> EngineStats:
        return self._llm.stats()

    def stop(self) -> None:
        """Ends the thread and waits for that."""
        self._commands.put(_Command("stop"))
        if threading.current_thread() is not self._thread:  # as it is if the garbage collector runs there
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._step()
        finally:
            self._is_stopped = True
            self._fail_all(_closed())
            self._refuse_commands()
            self._llm.close()

    def _obey_commands(self) -> bool:
        """Carries out what has been asked for; waits for something while there is nothing to compute. False: stop."""
        while self._llm.is_finished() or not self._commands.empty():
            command = self._commands.get()
            if command.request is None:
                return False
            if command.kind == "submit":
                self._begin(command.request)
            else:
                self._abort(command.request)
        return True

    def _begin(self, request: _Request) -> None:
        try:
            if request.is_streamed:
                self._streams[request] = self._llm.open_stream(request.prompt, request.params)
            else:
                seq_id = self._llm.add_request(request.prompt, request.params)
                self._seq_ids[request], self._by_seq_id[seq_id] = seq_id, request
        except BaseException as error:
            self._mail[request.loop].append((request, error))
            self._send_mail()

    def _abort(self, request: _Request) -> None:
        if (stream := self._streams.pop(request, None)) is not None:
            self._llm.close_stream(stream)
        if (seq_id := self._seq_ids.pop(request, None)) is not None:
            del self._by_seq_id[seq_id]
            if not self._llm.is_closed:  # as it is when a process of it was lost
                self._llm.abort(seq_id)

    def _step(self) -> None:
        for request in [*self._streams, *self._seq_ids]:
            if request.loop.is_closed():  # and nobody is left to cancel it
                self._abort(request)
        try:
            try:
                results: dict[int, Any] = {**self._llm.step().finished}
            except ResultError as error:
                results = {error.seq_id: error}
            for seq_id, result in results.items():
                if seq_id in self._by_seq_id:  # else it was aborted
                    request = self._by_seq_id.pop(seq_id)
                    del self._seq_ids[request]
                    self._mail[request.loop].append((request, result))
            for request, stream in list(self._streams.items()):
                try:
                    self._take(request, stream)
                except Exception as error:  # its text can't be decoded
                    self._mail[request.loop].append((request, error))
                    self._abort(request)
        except BaseException as error:
            self._fail_all(error)
        self._send_mail()

    def _take(self, request: _Request, stream: RequestStream) -> None:
        if not (request.is_empty or stream.seq.is_finished):
            return  # what comes until the task is ready stays in the stream
        if (delta := stream.take()) is not None:
            request.is_empty = False
            self._mail[request.loop].append((request, delta))
        if stream.is_over:
            del self._streams[request]

    def _fail_all(self, error: BaseException) -> None:
        """Every request ends with this error: after a failed step the engine has nothing left of them."""
        requests = [*self._streams, *self._seq_ids]
        for request in requests:
            self._mail[request.loop].append((request, error))
        self._send_mail()
        for request in requests:
            self._abort(request)

    def _send_mail(self) -> None:
        for loop, items in self._mail.items():
            _call_in(loop, _put_all, items)
        self._mail.clear()

    def _refuse_commands(self) -> None:
        """Answers what came too late. May run in several threads: each command is taken once."""
        while True:
            try:
                request = self._commands.get_nowait().request
            except queue.Empty:
                return
            if request is not None:
                _call_in(request.loop, request.put, _closed())


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    """Calls a function in a loop, from any thread, unless the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)


def _put_all(items: list[tuple[_Request, Any]]) -> None:
    for request, item in items:
        request.put(item)


def _joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Two deltas of a request as one."""
    joined = OutputDelta({**first, **second})
    joined["text"] = first["text"] + second["text"]
    joined["token_ids"] = first["token_ids"] + second["token_ids"]
    if "logprobs" in first:
        joined["logprobs"] = first["logprobs"] + second["logprobs"]
    return joined


def _closed() -> RuntimeError:
    return RuntimeError("this engine is closed")
