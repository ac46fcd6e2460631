"""Where requests enter the scheduler's queue: at once, or when their constraint is compiled."""

import logging
from concurrent.futures import FIRST_COMPLETED, wait

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

logger = logging.getLogger(__name__)

# Longest time that a step waits when all requests are held: commands of an `AsyncLLM` come through between steps.
_SECONDS_OF_WAITING = 0.01


class Entrance:
    """Holds the requests whose constraint is still being compiled, so that they delay nobody else.

    A request is known by its first sample. Which requests are held is known here alone.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: dict[int, Sequence] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, request: Sequence) -> None:
        """Lets a request in, ends it because its constraint can't be compiled, or holds it until that is known."""
        if not request.is_ready:
            self._held[request.seq_id] = request
            return
        error = request.grammar.exception() if request.grammar is not None else None
        if error is not None:
            logger.error("request %d ends: %s", request.seq_id, error)
        for sample in request.samples:
            if error is None:
                self._scheduler.add(sample)
            else:
                sample.end("abort")

    def open(self) -> list[Sequence]:
        """Adds the held requests that have become ready, in their order; returns those that this ended."""
        ready = [request for request in self._held.values() if request.is_ready]
        for request in ready:
            del self._held[request.seq_id]
            self.add(request)
        return [request for request in ready if request.is_finished]

    def wait(self) -> None:
        """Waits a moment for some held request to become ready."""
        futures = {request.grammar for request in self._held.values() if request.grammar is not None}
        wait(futures, _SECONDS_OF_WAITING, FIRST_COMPLETED)

    def abort(self, request: Sequence) -> None:
        """Ends a request's unfinished samples, held, waiting or running."""
        is_held = self._held.pop(request.seq_id, None) is not None
        for sample in request.samples:
            if is_held:
                sample.end("abort")
            elif self._scheduler.find(sample.seq_id):
                self._scheduler.finish(sample, "abort")

    def reset(self) -> None:
        """Forgets all requests, the scheduler's too."""
        self._held.clear()
        self._scheduler.reset()
