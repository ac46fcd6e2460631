"""The processes of ranks 1 and up, as rank 0 sees them: started, told what to do, watched, ended.

They are started as `python -c`, not by multiprocessing, which would import the caller's script once more in each: a
script needs no main guard, and may as well come from stdin. What the processes have between them, connections and
memory, has no name anywhere: when they end, however that happens, nothing is left to clean up. A connection that ends
tells at once that a process is dead.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from nanovllm.engine.step_memory import nameless_file

# A rank that lets the others wait for so long in a step is given up: one that hangs looks the same as a slow one.
STEP_TIMEOUT_SECONDS = 10.0
# First of all it ignores Ctrl-C, which is for the caller; and it finds modules where the caller does.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    r"import sys; sys.path[:] = sys.argv.pop(1).split('\n'); "
    "from nanovllm.engine.worker import main; main()"
)
_SECONDS_TO_END = 5.0
_SECONDS_TO_REPORT = 1.0


class WorkerError(RuntimeError):
    """A process of a tensor-parallel engine died, failed, or stopped answering; the engine is closed then."""


@dataclass(frozen=True)
class Failure:
    """The last message of a worker that has raised: when (`time.monotonic`, which processes share), and the traceback.
    Other ranks fail in consequence, so the first is the cause. An answer is anything else but None."""

    seconds: float
    traceback: str


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection
    stacks: IO[bytes]  # where it writes, on SIGUSR1, what its threads are at

    @classmethod
    def start(cls, rank: int, inherited: int) -> "_Worker":
        ours, theirs = Pipe()
        stacks = os.fdopen(nameless_file(), "w+b")
        given = (theirs.fileno(), inherited, stacks.fileno())
        arguments = [sys.executable, "-c", _BOOT, "\n".join(map(str, sys.path)), *map(str, (rank, os.getpid(), *given))]
        # A session of its own: neither Ctrl-C nor what else a terminal sends to its foreground concerns it. No stdin: a
        # script may be coming from there.
        process = subprocess.Popen(arguments, pass_fds=given, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        return cls(rank, process, ours, stacks)

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
            self.process.wait()
        self.connection.close()
        self.stacks.close()

    def describe_end(self) -> str:
        """How the process ended, whose connection has."""
        try:
            code = self.process.wait(_SECONDS_TO_REPORT)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def describe_stack(self) -> str:
        """What a process that does not answer is at."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_SECONDS_TO_REPORT / 4)
        self.stacks.seek(0)
        return self.stacks.read().decode(errors="replace") or "it does not react to a signal either: is it stopped?"


class Workers:
    """Owns the processes. They end when this is closed, garbage-collected, or the interpreter exits, and by themselves
    within seconds when this process dies."""

    def __init__(self, num_ranks: int, inherited: int) -> None:
        """Starts ranks 1 to num_ranks - 1. `inherited` is a file descriptor that they get."""
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        self._num_owed = 1  # answers of each worker: it says when it is there
        try:
            for rank in range(1, num_ranks):
                self._workers.append(_Worker.start(rank, inherited))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def is_closed(self) -> bool:
        return not self._end.alive

    def tell(self, message: Any) -> None:
        """Sends something to each worker, which owes an answer for it."""
        for worker in self._workers:
            try:
                worker.connection.send(message)
            except OSError:
                raise self.fail() from None
        self._num_owed += 1

    def hear(self, timeout: float | None = None) -> list[Any]:
        """The next answer of each worker.

        Raises:
            WorkerError: one has failed, or lets us wait for longer than `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        answers: dict[int, Any] = {}
        pending = {worker.connection: worker for worker in self._workers}
        while pending:
            ready = _wait(pending, None if deadline is None else deadline - time.monotonic())
            if not ready:
                raise self.fail()
            for connection in ready:
                worker = pending.pop(connection)
                answers[worker.rank] = answer = worker.receive()
                if answer is None or isinstance(answer, Failure):
                    raise self.fail({worker.rank: answer})
        self._num_owed -= 1
        return [answers[worker.rank] for worker in self._workers]

    def settle(self) -> None:
        """Waits, for as long as a step may take, until nobody owes an answer. Raises like `hear`."""
        while self._num_owed:
            self.hear(STEP_TIMEOUT_SECONDS)

    def has_dead(self) -> bool:
        return any(worker.process.poll() is not None for worker in self._workers)

    def fail(self, known: dict[int, Failure | None] | None = None) -> WorkerError:
        """Ends all workers at once; returns what happened to them, as far as it shows, for the caller to raise.

        Args:
            known: the last messages that have been received already, by rank; None of those who died without one.
        """
        if self.is_closed:
            return WorkerError("this engine is closed")
        messages = self._last_messages(known or {})
        dead = [worker for worker in self._workers if messages.get(worker.rank, ...) is None]
        failures = {rank: message for rank, message in messages.items() if isinstance(message, Failure)}
        # A rank that has died without a word is no consequence of another's failure.
        if dead:
            text = "; ".join(f"rank {worker.rank} {worker.describe_end()}" for worker in dead)
        elif failures:
            rank = min(failures, key=lambda rank: failures[rank].seconds)
            text = f"rank {rank} failed:\n{failures[rank].traceback}"
        else:
            text = "\n".join(
                f"rank {worker.rank} does not answer: {worker.describe_stack()}" for worker in self._workers
            )
        self.kill()
        return WorkerError(f"tensor parallelism over {len(self._workers) + 1} ranks: {text}")

    def _last_messages(self, known: dict[int, Failure | None]) -> dict[int, Failure | None]:
        """What the workers said before they ended. Those that go on are left out."""
        messages = dict(known)
        pending = {worker.connection: worker for worker in self._workers if worker.rank not in known}
        deadline = time.monotonic() + _SECONDS_TO_REPORT
        while pending and (ready := _wait(pending, deadline - time.monotonic())):
            for connection in ready:
                worker = pending[connection]
                message = worker.receive()
                if message is None or isinstance(message, Failure):
                    messages[worker.rank] = message
                    del pending[connection]
        return messages

    def kill(self) -> None:
        """Ends the processes, whatever they are at."""
        if not self.is_closed:
            for worker in self._workers:
                worker.process.kill()
        self.close()

    def close(self) -> None:
        """Ends the processes when they have done what they were told, and waits for that. Calling it again does
        nothing."""
        self._end()


def _wait(connections: Iterable[Connection], timeout: float | None) -> list[Connection]:
    """Those that have something to say, or have ended."""
    return wait(list(connections), None if timeout is None else max(0.0, timeout))  # type: ignore[return-value]


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process has no say
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + _SECONDS_TO_END
    for worker in workers:
        worker.end(deadline)
