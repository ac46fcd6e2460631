"""The processes of data parallelism as their parent sees them: one queue, from which each replica gets what it needs.

Nobody knows how long an output will be, so requests are not shared out beforehand. A replica has room as long as all it
holds is sure to run at the same time (tokens of prompts and longest outputs fit the KV cache, sequences its
`max_num_seqs`), or what it holds and has not begun is less than a small look-ahead. The next request goes to the one
with room that holds the fewest tokens. So when the queue is empty, what waits behind others in a slow replica is at
most that look-ahead (and one request), and there is no need to steal anything back: what has begun has its KV there.

A replica that has work says so four times a second, between two steps, and on a CPU in the middle of them: it is the
thread that computes which speaks. One that is silent for minutes is as good as dead.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.child_process import (
    ChildProcess,
    Failure,
    WorkerError,
    end_children,
    interrupts_put_off,
    wait_for,
)
from nanovllm.engine.replica import Abort, Ready, Report, Request
from nanovllm.engine.stats import EngineStats, RequestCounts

logger = logging.getLogger(__name__)

# Requests that wait in the parent: what replicas take between two looks of the parent, and more.
_QUEUE_LENGTH = 1024

# A replica that has work and says nothing for so long is given up, like one that has died. A step on a GPU takes much
# less, the first ones included, which compile kernels.
SILENCE_LIMIT_SECONDS = 600.0
# So often it is looked at who is silent.
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Task:
    """A request, and the most that it can take: tokens of KV and sequences, of all its samples."""

    request: Request
    num_tokens: int
    num_seqs: int


@dataclass
class _Replica:
    """What the parent knows of one replica."""

    number: int
    config: Config
    child: ChildProcess
    num_kv_tokens: int | None = None  # None until it is loaded
    tasks: dict[int, Task] = field(default_factory=dict)  # unfinished ones by request_id
    waiting: dict[int, int] = field(default_factory=dict)  # request_id -> tokens of those that have not begun
    num_waiting_tokens: int = 0  # the sum of those
    num_tokens: int = 0  # of all tasks
    num_seqs: int = 0
    stats: EngineStats = field(default_factory=EngineStats)  # as last reported
    start_time: float = field(default_factory=time.monotonic)
    load_seconds: float = 0.0
    silent_seconds: float = 0.0  # for which it has owed a word, and this process has listened
    silence_limit: float | None = None  # seconds; None while it loads for the first time, however long that takes
    first_death: str | None = None

    @classmethod
    def start(cls, number: int, config: Config) -> "_Replica":
        child = ChildProcess.start(number, "nanovllm.engine.replica", has_outbox=True)
        child.send(config)
        return cls(number, config, child)

    def restart(self, cause: str) -> "_Replica":
        """Another in its place, which may take longer to load than this one did, but not for ever."""
        restarted = _Replica.start(self.number, self.config)
        restarted.first_death = cause
        restarted.silence_limit = SILENCE_LIMIT_SECONDS + 2 * self.load_seconds
        return restarted

    def begin(self, ready: Ready) -> None:
        """It is loaded."""
        self.num_kv_tokens, self.stats = ready.num_kv_tokens, ready.stats
        self.load_seconds = time.monotonic() - self.start_time
        self.silence_limit = SILENCE_LIMIT_SECONDS

    @property
    def has_room(self) -> bool:
        if self.num_kv_tokens is None:
            return False
        is_sure_to_run = self.num_seqs < self.config.max_num_seqs and self.num_tokens < self.num_kv_tokens
        return is_sure_to_run or self.num_waiting_tokens < self.config.max_num_batched_tokens

    @property
    def current_stats(self) -> EngineStats:
        """As last reported; but with nothing to do it holds nothing, even if it has not said so yet."""
        return self.stats if self.tasks else replace(self.stats, num_running=0, num_waiting=0, num_used_blocks=0)

    @property
    def owes_a_word(self) -> bool:
        return self.silence_limit is not None and (self.num_kv_tokens is None or bool(self.tasks))

    @property
    def is_given_up(self) -> bool:
        return self.silence_limit is not None and self.silent_seconds > self.silence_limit

    def take(self, task: Task) -> None:
        self.tasks[task.request.request_id] = task
        self.waiting[task.request.request_id] = task.num_tokens
        self.num_waiting_tokens += task.num_tokens
        self.num_tokens += task.num_tokens
        self.num_seqs += task.num_seqs

    def note_begun(self, request_id: int) -> None:
        self.num_waiting_tokens -= self.waiting.pop(request_id, 0)

    def drop(self, request_id: int) -> None:
        task = self.tasks.pop(request_id)
        self.note_begun(request_id)
        self.num_tokens -= task.num_tokens
        self.num_seqs -= task.num_seqs


class Replicas:
    """Owns the processes. They end when this is closed, garbage-collected, or the interpreter exits, and by themselves
    within seconds when this process dies. One that dies, or stops answering, is started again, once, and its requests
    are done again.

    Attributes:
        finished: request_id -> result, as in `Report`, of what nobody has taken from here yet.
        num_prefill_tokens, num_decode_tokens: computed by all replicas so far.
        counts: of requests. Replicas don't know those that are queued, and may get one that another has lost.
    """

    def __init__(self, configs: list[Config]) -> None:
        """Starts one replica for each config, and waits until all have loaded the model.

        Raises:
            WorkerError: one of them failed.
        """
        self.finished: dict[int, Any] = {}
        self.num_prefill_tokens = self.num_decode_tokens = 0
        self.counts = RequestCounts()
        self._lost_stats = EngineStats()  # of replicas that have died
        self._queue: deque[Task] = deque()
        self._replicas: list[_Replica] = []
        self._children: list[ChildProcess] = []
        self._end = weakref.finalize(self, end_children, self._children, os.getpid())
        self._is_starting = True
        self._last_look = time.monotonic()
        try:
            for number, config in enumerate(configs):
                self._replicas.append(_Replica.start(number, config))
                self._children.append(self._replicas[-1].child)
            while any(replica.num_kv_tokens is None for replica in self._replicas):
                self.poll()
        except BaseException:
            self.kill()
            raise
        self._is_starting = False

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    @property
    def num_kv_tokens(self) -> int:
        """Of the smallest KV cache of those that are loaded."""
        return min(replica.num_kv_tokens for replica in self._replicas if replica.num_kv_tokens is not None)

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + sum(len(replica.tasks) for replica in self._replicas)

    def stats(self) -> EngineStats:
        """Of all replicas, as they have last reported; requests as this process knows them."""
        total = sum((replica.current_stats for replica in self._replicas), self._lost_stats)
        return replace(total, **vars(self.counts), num_waiting=total.num_waiting + len(self._queue))

    @property
    def wants_more(self) -> bool:
        """Whether so little is queued that replicas may soon have nothing to take."""
        return len(self._queue) < _QUEUE_LENGTH

    def add(self, task: Task) -> None:
        """Queues a request; `hand_out` and `poll` send it on."""
        self._queue.append(task)

    def hand_out(self) -> None:
        """Sends queued requests to the replicas that have room, the one with the fewest tokens first."""
        with interrupts_put_off():
            given: dict[int, list[Request]] = {}
            while self._queue and (free := [replica for replica in self._replicas if replica.has_room]):
                replica = min(free, key=lambda replica: replica.num_tokens)
                task = self._queue.popleft()
                replica.take(task)
                given.setdefault(replica.number, []).append(task.request)
            for number, requests in given.items():
                self._replicas[number].child.send(requests)

    def poll(self, timeout: float | None = None) -> None:
        """Waits until a replica says something, or is given up, or for `timeout` seconds; hands out requests before and
        after.

        Raises:
            WorkerError: a replica has died, or stopped answering, that had been restarted; all have ended then.
        """
        self.hand_out()
        speakers = {replica.child.connection: replica for replica in self._replicas}
        deadline = None if timeout is None else time.monotonic() + timeout
        is_over = False
        while not is_over:
            remaining = _SECONDS_BETWEEN_LOOKS if deadline is None else deadline - time.monotonic()
            ready = wait_for(speakers, min(remaining, _SECONDS_BETWEEN_LOOKS))
            with interrupts_put_off():  # cut off halfway, a message would be lost
                for connection in ready:
                    self._hear(speakers[connection])
                has_lost = self._lose_silent({speakers[connection].number for connection in ready})
            is_over = bool(ready) or has_lost or (deadline is not None and time.monotonic() >= deadline)
        self.hand_out()

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drops requests, finished or not."""
        with interrupts_put_off():
            forgotten, num_before = set(request_ids), self.num_unfinished
            self._queue = deque(task for task in self._queue if task.request.request_id not in forgotten)
            self.finished = {key: output for key, output in self.finished.items() if key not in forgotten}
            for replica in self._replicas:
                if mine := replica.tasks.keys() & forgotten:
                    for request_id in mine:
                        replica.drop(request_id)
                    replica.child.send(Abort(list(mine)))
            self.counts.finish("abort", num_before - self.num_unfinished)

    def kill(self) -> None:
        """Ends the processes, whatever they are at."""
        if self._end.alive:
            for child in self._children:
                child.process.kill()
        self.close()

    def close(self) -> None:
        """Ends the processes after their step, and waits for that. Calling it again does nothing."""
        for replica in self._replicas:
            if self._end.alive and replica.num_kv_tokens is None:
                replica.child.process.kill()  # it does not listen before the model is loaded
        self._end()

    def _hear(self, replica: _Replica) -> None:
        message = replica.child.receive()
        if isinstance(message, Ready):
            replica.begin(message)
        elif isinstance(message, Report):
            self._record(replica, message)
        elif message is None:
            self._lose(replica, replica.child.describe_end())
        else:
            self._lose(replica, f"failed:\n{message.traceback}")

    def _lose_silent(self, heard: set[int]) -> bool:
        """Gives up who has been silent for too long; whether there is one.

        Between two looks little time counts, however much has passed: what has stopped this process for longer, such as
        a machine that was suspended, may have stopped the replicas, too.

        Args:
            heard: numbers of the replicas that have just said something.
        """
        now = time.monotonic()
        seconds = min(now - self._last_look, 2 * _SECONDS_BETWEEN_LOOKS)
        self._last_look = now
        for replica in self._replicas:
            is_silent = replica.owes_a_word and replica.number not in heard
            replica.silent_seconds = replica.silent_seconds + seconds if is_silent else 0.0
        given_up = [replica for replica in self._replicas if replica.is_given_up]
        for replica in given_up:
            stack = replica.child.describe_stack()
            self._lose(replica, f"did not answer for {replica.silent_seconds:.0f} seconds: {stack.rstrip()}")
        return bool(given_up)

    def _record(self, replica: _Replica, report: Report) -> None:
        self.num_prefill_tokens += report.stats.num_prefill_tokens - replica.stats.num_prefill_tokens
        self.num_decode_tokens += report.stats.num_output_tokens - replica.stats.num_output_tokens
        replica.stats = report.stats
        for request_id in report.begun:
            replica.note_begun(request_id)
        for request_id, output in report.finished.items():
            if request_id in replica.tasks:  # else it was forgotten
                replica.drop(request_id)
                self.counts.finish(_finish_reason(output))
                self.finished[request_id] = output

    def _lose(self, replica: _Replica, cause: str) -> None:
        """Starts a replica again that has died or is given up, or gives up itself."""
        name = f"replica {replica.number} of {len(self._replicas)}"
        if replica.first_death is not None or self._is_starting:
            self.kill()
            before = f"\nIt had been restarted, since it {replica.first_death}" if replica.first_death else ""
            raise WorkerError(f"data parallelism: {name} {cause}{before}")
        again = f", and does {len(replica.tasks)} requests again" if replica.tasks else ""
        logger.warning("%s is restarted%s: it %s", name, again, cause)
        self._lost_stats += replica.stats.counters()
        replica.child.process.kill()
        replica.child.end(0.0)
        self._queue.extendleft(task for _, task in sorted(replica.tasks.items(), reverse=True))
        restarted = replica.restart(cause)
        self._replicas[replica.number] = restarted
        self._children[replica.number] = restarted.child


def _finish_reason(output: Any) -> str:
    """Of a `RequestOutput`, a `ScoreOutput`, or a `Failure` to make one."""
    return "abort" if isinstance(output, Failure) else output.get("finish_reason", "scored")
