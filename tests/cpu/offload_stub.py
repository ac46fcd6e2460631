"""An engine without a model whose KV cache has a second level, copied to and from at any moment that the rules allow.

Beside the token ids, the stub devices keep for each token the checksum of all tokens up to it, as real KV depends on
all of them: a block that holds the right tokens behind the wrong prefix is found out.
"""

import random
import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

from nanovllm.engine.batch import PackedBatch, pack
from nanovllm.engine.host_cache import BlockCopies, HostCache
from nanovllm.engine.scheduler import ScheduledBatch
from tests.cpu.policies import StubDevice, StubEngine


def checksums(tokens: Iterable[int], salt: int) -> list[int]:
    sums, last = [], salt
    for token_id in tokens:
        last = zlib.crc32(array("i", [token_id]).tobytes(), last)
        sums.append(last)
    return sums


class OffloadRank:
    """A device with its host memory. Copies of one direction are done in their order, each at some moment: `progress`
    does a few, and those that are declared finished are done at the latest."""

    def __init__(self, device: StubDevice, num_slots: int) -> None:
        self.device = device
        self.sums = [-1] * len(device.kv_rows)
        size = device.block_size
        self.host = [([-1] * size, [-1] * size) for _ in range(num_slots)]
        self.loads: deque[tuple[int, int, int]] = deque()  # ticket, slot, block
        self.saves: deque[tuple[int, int, int]] = deque()  # ticket, block, slot
        self.ticket = 0

    def begin(self, copies: BlockCopies) -> None:
        assert copies.ticket > self.ticket >= max(copies.loads_done, copies.saves_done)
        self.ticket = copies.ticket
        while self.loads and self.loads[0][0] <= copies.loads_done:
            self._load()
        while self.saves and self.saves[0][0] <= copies.saves_done:
            self._save()
        self.loads += [(copies.ticket, *pair) for pair in copies.loads]
        self.saves += [(copies.ticket, *pair) for pair in copies.saves]

    def progress(self, num_loads: int, num_saves: int) -> None:
        for _ in range(min(num_loads, len(self.loads))):
            self._load()
        for _ in range(min(num_saves, len(self.saves))):
            self._save()

    def finished(self) -> tuple[int, int]:
        first = [queue[0][0] if queue else self.ticket + 1 for queue in (self.loads, self.saves)]
        return first[0] - 1, first[1] - 1

    def run(self, packed: PackedBatch, salts: list[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Tokens and checksums that each row attends to, and the sampled tokens."""
        histories, sampled = self.device.run(packed)
        size = self.device.block_size
        slots = packed.kv_slots.tolist()
        pending, unwritten = list(range(len(salts))), set(slots)
        while pending:
            for row in pending:
                start, stop = packed.query_starts[row : row + 2].tolist()
                position, table = int(packed.positions[start]), packed.block_tables[row].tolist()
                before = table[(position - 1) // size] * size + (position - 1) % size
                if position and before in unwritten:
                    continue  # a row of this very step writes it
                last = self.sums[before] if position else salts[row]
                token_ids = histories[row][position : position + stop - start]
                for slot, value in zip(slots[start:stop], checksums(token_ids, last), strict=True):
                    self.sums[slot] = value
                    unwritten.discard(slot)
                pending.remove(row)
                break
            else:
                raise AssertionError("rows wait for one another")
        sums = [
            [self.sums[table[position // size] * size + position % size] for position in range(length)]
            for table, length in zip(packed.block_tables.tolist(), packed.context_lens.tolist(), strict=True)
        ]
        return histories, sums, sampled

    def _load(self) -> None:
        _, slot, block = self.loads.popleft()
        rows = self._rows(block)
        self.device.kv_rows[rows], self.sums[rows] = self.host[slot]

    def _save(self) -> None:
        _, block, slot = self.saves.popleft()
        rows = self._rows(block)
        self.host[slot] = self.device.kv_rows[rows], self.sums[rows]

    def _rows(self, block: int) -> slice:
        return slice(block * self.device.block_size, (block + 1) * self.device.block_size)


class OffloadEngine(StubEngine):
    """Two ranks: the first one's copies take a random time, the second one's as long as the first lets them."""

    patience = 60

    def __init__(
        self,
        *,
        num_slots: int,
        max_copies: int = 64,
        min_load_blocks: int = 1,
        speed: float = 1.0,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """`speed`: mean number of blocks that are copied a step, in each direction; None are if it is 0."""
        self.host_cache = HostCache(num_slots, max_copies=max_copies, min_load_blocks=min_load_blocks)
        super().__init__(host_cache=self.host_cache, **kwargs)
        self.speed, self._random = speed, random.Random(seed)
        block_size, slots = self.manager.block_size, self.scheduler.max_num_seqs
        devices = [self.device, StubDevice(self.manager.num_blocks, block_size, slots)]
        self.ranks = [OffloadRank(device, num_slots) for device in devices]
        self.copies: list[BlockCopies] = []
        self._has_failed = False

    def fail(self) -> None:
        super().fail()
        self._has_failed = True
        for rank in self.ranks:
            rank.sums = [-1] * len(rank.sums)
            rank.device.kv_rows[:] = rank.sums

    def _finish_copies(self) -> None:
        self._progress()
        self.host_cache.finish(*self.ranks[0].finished())

    def _progress(self) -> None:
        self.ranks[0].progress(*(int(self._random.expovariate(1) * self.speed + 0.5) for _ in range(2)))
        self.ranks[1].progress(self._random.random() < 0.2, self._random.random() < 0.2)

    def _begin_copies(self) -> None:
        copies = self.manager.begin_copies()
        if copies is not None:
            self.copies.append(copies)
            assert max(len(copies.loads), len(copies.saves)) <= self.host_cache.max_copies
            loads_finished, saves_finished = self.ranks[0].finished()
            is_late = copies.loads_done > loads_finished or copies.saves_done > saves_finished
            assert self._has_failed or not is_late, "the first rank has to wait for a copy"
            self._has_failed = False
            for rank in self.ranks:
                rank.begin(copies)
            if self._random.random() < 0.5:
                self._progress()  # before the step is launched

    def _run(self, batch: ScheduledBatch) -> list[int]:
        salts = [seq.cache_salt for seq in batch.sequences]
        packed = pack(batch, self.manager.block_size)
        for rank in self.ranks:
            histories, sums, sampled = rank.run(packed, salts)
            for seq, history, history_sums in zip(batch.sequences, histories, sums, strict=True):
                expected = self._expected_tokens[seq.seq_id][: seq.num_computed_tokens]
                assert history == expected, f"sequence {seq.seq_id} attends to {history}, but consists of {expected}"
                assert history_sums == checksums(expected, seq.cache_salt), f"sequence {seq.seq_id} has a stale prefix"
        return sampled
