"""The processes of ranks 1 and up, as rank 0 sees them: started, told what to do, watched, ended."""

import os
import time
import weakref
from typing import Any

from nanovllm.engine.child_process import (
    SECONDS_TO_REPORT,
    ChildProcess,
    Failure,
    WorkerError,
    end_children,
    wait_for,
)

# A rank that lets the others wait for so long in a step is given up: one that hangs looks the same as a slow one.
STEP_TIMEOUT_SECONDS = 10.0


class Workers:
    """Owns the processes. They end when this is closed, garbage-collected, or the interpreter exits, and by themselves
    within seconds when this process dies."""

    def __init__(self, num_ranks: int, inherited: int) -> None:
        """Starts ranks 1 to num_ranks - 1. `inherited` is a file descriptor that they get."""
        self._workers: list[ChildProcess] = []
        self._end = weakref.finalize(self, end_children, self._workers, os.getpid())
        self._num_owed = 1  # answers of each worker: it says when it is there
        try:
            for rank in range(1, num_ranks):
                self._workers.append(ChildProcess.start(rank, "nanovllm.engine.worker", (inherited,)))
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
            ready = wait_for(pending, None if deadline is None else deadline - time.monotonic())
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
        deadline = time.monotonic() + SECONDS_TO_REPORT
        while pending and (ready := wait_for(pending, deadline - time.monotonic())):
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
