"""Who is admitted next: first come first served, or those together that begin alike."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_index import PrefixIndex
from nanovllm.engine.sequence import Sequence

# So many requests may be admitted before the oldest one, then it is its turn: of what the order saves, at most one part
# in so many is lost, and a request with p others before it is overtaken by at most (p + 1) times as many.
MAX_OVERTAKINGS = 64


class WaitingQueue(Mapping[int, Sequence]):
    """The waiting sequences by seq_id: the preempted ones first, then the others in order of arrival.

    By the policy "fcfs" that is the order of admission, too. By "prefix" the preempted ones still come first, then the
    other samples of the request admitted last, and then the oldest sequence below the longest prefix that is cached
    and that somebody waits for (`PrefixIndex`): as in a walk through the tree of all prefixes, which leaves a branch
    when nobody is left there. Where no waiting request begins like another or like something cached, that is the order
    of arrival.

    Overtaking is bounded: after `MAX_OVERTAKINGS` requests that were not the oldest, the oldest is next. So nobody
    starves.

    Every operation is O(1), or O(blocks that the sequence shares).
    """

    def __init__(self, block_manager: BlockManager, policy: str) -> None:
        self._block_manager = block_manager
        self._is_by_prefix = policy == "prefix" and block_manager.enable_prefix_caching
        self.clear()

    def clear(self) -> None:
        self._preempted: OrderedDict[int, Sequence] = OrderedDict()
        self._arrived: OrderedDict[int, Sequence] = OrderedDict()
        self._prefixes = PrefixIndex(self._block_manager)
        self._num_overtakings = 0
        self._last_request_id = self._next_sample_id = -1  # of the request admitted last

    def __getitem__(self, seq_id: int) -> Sequence:
        return self._arrived[seq_id] if seq_id in self._arrived else self._preempted[seq_id]

    def __iter__(self) -> Iterator[int]:
        yield from self._preempted
        yield from self._arrived

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    @property
    def is_sharing(self) -> bool:
        """Whether the order makes use of seeing more requests: some begin alike, or like something cached."""
        return self._prefixes.is_sharing

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence; the samples of a request in a row."""
        self._arrived[seq.seq_id] = seq
        if self._is_by_prefix and seq.seq_id == seq.request_id:  # the other samples follow the first
            self._prefixes.add(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queues a preempted sequence before all others."""
        self._preempted[seq.seq_id] = seq
        self._preempted.move_to_end(seq.seq_id, last=False)

    def choose(self) -> Sequence:
        """The sequence that is to be admitted next; the queue isn't empty."""
        if self._preempted:
            return next(iter(self._preempted.values()))
        sample = self._arrived.get(self._next_sample_id)
        if sample is not None and sample.request_id == self._last_request_id:
            return sample
        if self._num_overtakings < MAX_OVERTAKINGS:
            preferred = self._prefixes.choose()
            if preferred is not None:
                return preferred
        return next(iter(self._arrived.values()))

    def take(self, seq: Sequence) -> None:
        """Removes a sequence that is admitted: whoever begins like it is preferred from now on."""
        if seq.seq_id not in self._preempted:
            if seq is next(iter(self._arrived.values())):
                self._num_overtakings = 0
            elif seq.request_id != self._last_request_id:
                self._num_overtakings += 1
            self._last_request_id, self._next_sample_id = seq.request_id, seq.seq_id + 1
        self.remove(seq)
        self._prefixes.prefer(seq)

    def remove(self, seq: Sequence) -> None:
        if self._arrived.pop(seq.seq_id, None) is None:
            del self._preempted[seq.seq_id]
        self._prefixes.remove(seq)
