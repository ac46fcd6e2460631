"""The requests of an engine, from their arrival until they are reported."""

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import RequestCounts


class Ledger:
    """Each request is in it once, as its first sample.

    Attributes:
        unfinished: by seq_id, those that are waiting or running.
        ended: by seq_id, those that are to be reported.
        counts: of all that there were.
    """

    def __init__(self) -> None:
        self.unfinished: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}
        self.counts = RequestCounts()

    @property
    def is_empty(self) -> bool:
        return not (self.unfinished or self.ended)

    def receive(self, request: Sequence) -> None:
        """Enters a request that has arrived."""
        self.unfinished[request.seq_id] = request
        self.counts.receive(request.num_prompt_tokens)

    def retire(self, sequences: list[Sequence]) -> None:
        """Keeps the requests of finished sequences to be reported, if all their samples have finished; those that are
        streamed are watched by who streams them."""
        for seq in sequences:
            request = self.unfinished.get(seq.request_id)
            if request is not None and request.has_ended():
                if not request.is_streamed:
                    self.ended[request.seq_id] = request
                del self.unfinished[request.seq_id]
                self._count_end(request)

    def forget(self, request: Sequence) -> None:
        """Strikes out a request, which will not be reported, if it is still there."""
        if self.unfinished.pop(request.seq_id, None) is not None:
            self._count_end(request)
        self.ended.pop(request.seq_id, None)

    def _count_end(self, request: Sequence) -> None:
        reason = request.finish_reason or "abort"
        self.counts.finish("scored" if request.is_only_scored and reason == "length" else reason)
