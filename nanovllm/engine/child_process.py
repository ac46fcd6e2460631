"""A process of an engine's own: started by `ChildProcess.start`, and in it `run_child`.

It is started as `python -c`, not by multiprocessing, which would import the caller's script once more in each: a script
needs no main guard, and may as well come from stdin. What the two processes have between them, connections and memory,
has no name anywhere: when they end, however that happens, nothing is left to clean up. A connection that ends tells at
once that a process is dead.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any

from nanovllm.engine.step_memory import nameless_file

# First of all it ignores Ctrl-C, which is for the caller; and it finds modules where the caller does.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    r"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); "
    "from importlib import import_module; main = import_module(sys.argv.pop(1)).main; main()"
)
_SECONDS_TO_END = 5.0
SECONDS_TO_REPORT = 1.0
_SECONDS_BETWEEN_LOOKS = 1.0


class WorkerError(RuntimeError):
    """A process of an engine died, failed, or stopped answering; the engine is closed then."""


@dataclass(frozen=True)
class Failure:
    """The last message of a process that has raised: when (`time.monotonic`, which processes share), and the traceback.
    Others fail in consequence, so the first is the cause. An answer is anything else but None."""

    seconds: float
    traceback: str


@dataclass(frozen=True)
class ChildProcess:
    """A child as its parent sees it; `rank` is its number among its siblings."""

    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stacks: IO[bytes]  # where it writes, on SIGUSR1, what its threads are at
    outbox: "Outbox | None" = None

    @classmethod
    def start(
        cls, rank: int, module: str, inherited: tuple[int, ...] = (), *, has_outbox: bool = False
    ) -> "ChildProcess":
        """Starts the `main` of a module.

        Args:
            inherited: file descriptors that it gets.
            has_outbox: a thread sends, so that `send` never waits for a process that does not read.
        """
        ours, theirs = Pipe()
        stacks = os.fdopen(nameless_file(), "w+b")
        given = (theirs.fileno(), stacks.fileno(), *inherited)
        numbers = map(str, (rank, os.getpid(), *given))
        arguments = [sys.executable, "-c", _BOOT, "\n".join(map(str, sys.path)), module, *numbers]
        # A session of its own: neither Ctrl-C nor what else a terminal sends to its foreground concerns it. No stdin: a
        # script may be coming from there.
        process = subprocess.Popen(arguments, pass_fds=given, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        return cls(rank, process, ours, stacks, Outbox(ours) if has_outbox else None)

    def send(self, message: Any) -> None:
        """Raises OSError if the process has ended; with an outbox that shows only when it is listened to."""
        (self.outbox or self.connection).send(message)

    def receive(self) -> Any | None:
        """Its next message; None if the process has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def end(self, deadline: float) -> None:
        """Waits for the process until then, before it kills it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a device that is stuck may hold even a dead process
                self.process.wait(_SECONDS_TO_END)
        if self.outbox is not None:
            self.outbox.close()
        self.connection.close()
        self.stacks.close()

    def describe_end(self) -> str:
        """How the process ended, whose connection has."""
        try:
            code = self.process.wait(SECONDS_TO_REPORT)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def describe_stack(self) -> str:
        """What a process that does not answer is at."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(SECONDS_TO_REPORT / 4)
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace") or "it does not react to a signal either: is it stopped?"


class Outbox:
    """Sends messages through a connection, in their order, from a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=_send_all, args=(connection, self._messages), daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Does not wait."""
        self._messages.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Ends the thread; the process that it sends to has ended."""
        self._messages.put(None)
        if threading.current_thread() is not self._thread:  # as it is if the garbage collector runs there
            self._thread.join(_SECONDS_TO_END)


def _send_all(connection: Connection, messages: "SimpleQueue[bytes | None]") -> None:
    with contextlib.suppress(OSError):  # the process has ended, which shows when it is listened to
        while (message := messages.get()) is not None:
            connection.send_bytes(message)


def wait_for(connections: Iterable[Connection], timeout: float | None) -> list[Connection]:
    """Those that have something to say, or have ended."""
    return wait(list(connections), None if timeout is None else max(0.0, timeout))  # type: ignore[return-value]


def end_children(children: list[ChildProcess], owner: int) -> None:
    """Ends processes when they have done what they were told, and waits for that.

    Args:
        owner: id of the process whose children they are; a fork of it has no say.
    """
    if os.getpid() != owner:
        return
    for child in children:
        with contextlib.suppress(OSError):
            child.send(None)
    deadline = time.monotonic() + _SECONDS_TO_END
    try:
        for child in children:
            child.end(deadline)
    except BaseException:  # Ctrl-C: nobody comes back here, and one that hangs would outlive this process
        for child in children:
            child.process.kill()
        for child in children:
            child.end(0.0)
        raise


def run_child(serve: Callable[..., None]) -> None:
    """The whole life of a child: `serve(rank, connection, *inherited)`, until it returns, raises, which is reported, or
    the parent is gone. Does not return."""
    rank, parent, connection_fd, stacks_fd, *inherited = map(int, sys.argv[1:])
    faulthandler.register(signal.SIGUSR1, file=stacks_fd)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(connection_fd)
    code = 0
    try:
        serve(rank, connection, *inherited)
    except (EOFError, SystemExit):
        pass
    except BaseException:
        code = 1
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send(Failure(time.monotonic(), traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads and connections that torch has made need no farewell


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has: the main thread may be waiting for that, somewhere in torch."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Ctrl-C inside has its effect afterwards. It always concerns the main thread; others are not disturbed."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if received:
            previous(*received[0])
