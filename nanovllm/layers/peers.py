"""Exchanges of a decode step between GPUs that reach each other's memory: sums, logits and tokens of some rows.

A library's collective copies its input and its output, and has a protocol to go through. Here a product writes its part
of a sum where the others read it, and the norm that comes next adds the parts up as it reads them; an LM head writes
its part of the logits straight to rank 0. The memory is torch's symmetric memory, without multicast. What is too large
for that is left to the library.
"""

import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from nanovllm.layers.parallel import Parallel

logger = logging.getLogger(__name__)

# A rank reads all others' parts of a sum. With more, a library's all-reduce, which reads each number twice at most, and
# not once a rank, is as fast.
_MAX_REMOTE_BYTES = 8 << 20
_MAX_ROWS = 1024  # the memory for their logits is the most of all
# Places of the sums, whose users take turns: a part is read while that of the next sum is written.
ATTENTION, MLP, EMBEDDING = range(3)
_ALIGNMENT = 256  # bytes
# Of the folder for temporary files, where torch's ranks meet in a socket. Its name may have 107 bytes, which torch does
# not check.
_MAX_FOLDER_BYTES = 80
_PATIENCE = timedelta(seconds=10)  # of ranks that have just met, and meet again
_rendezvous_lock = threading.Lock()  # torch has one socket for it in a process


@dataclass(frozen=True)
class PartialSum:
    """A sum [num_rows, hidden] that is still in parts, one in each rank's memory. It has to be added up before the next
    one of the same place is begun."""

    peers: "Peers"
    place: int
    part: torch.Tensor

    def total(self) -> torch.Tensor:
        from nanovllm.kernels.peer_exchange import sum_parts

        peers = self.peers
        return sum_parts(peers.parts[self.place], torch.empty_like(self.part), peers.exchange)

    def add_and_normalize(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As `RMSNorm.add_and_normalize`."""
        from nanovllm.kernels.norm import sum_add_rms_norm

        return sum_add_rms_norm(self.peers.parts[self.place], residual, weight, eps, self.peers.exchange)


class Peers:
    """One rank's view of the memory of all."""

    def __init__(
        self, parallel: Parallel, device: torch.device, dtype: torch.dtype, max_rows: int, hidden: int, vocab_size: int
    ) -> None:
        """See `connect_peers`; all ranks have to come here. Raises RuntimeError if the memory can't be shared."""
        from nanovllm.kernels.peer_exchange import FLAG_STRIDE, RELEASED, Exchange

        rank, size = parallel.rank, parallel.size
        self.rank, self.max_rows = rank, max_rows
        flags, inbox = _Array((size * FLAG_STRIDE.value,), torch.int64), _Array((2, max_rows), torch.int64)
        parts = [_Array((max_rows, hidden), dtype) for _ in (ATTENTION, MLP, EMBEDDING)]
        logits = _Array((max_rows, size * parallel.padded_vocab(vocab_size)), dtype)
        # Held here: the views of it don't hold it.
        self._memory = memory = _SharedMemory(parallel, device, [flags, inbox, *parts, logits])
        self._own_flags = memory.of(rank, flags)
        self._own_flags.zero_()
        self._released = torch.full(flags.shape, RELEASED, dtype=torch.int64, pin_memory=device.type == "cuda")
        counter = torch.zeros(2, dtype=torch.int64, device=device)
        self.exchange = Exchange(rank, memory.of_each(flags), counter)
        self._inboxes = memory.of_each(inbox)
        self.parts = [memory.of_each(part) for part in parts]
        self._logits = memory.of(0, logits)  # in rank 0's memory, where each rank has some of the columns

    def serves(self, num_rows: int) -> bool:
        """Whether exchanges of so many rows go this way."""
        return num_rows <= self.max_rows

    def begin_sum(self, place: int, num_rows: int) -> PartialSum:
        """A sum whose `part` is to be filled with this rank's."""
        return PartialSum(self, place, self.parts[place][self.rank][:num_rows])

    def multiply_on_first(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] and each rank's [padded_vocab, hidden_size] -> on rank 0, [N, size * padded_vocab], valid
        until the next call; on the others, some of it."""
        from nanovllm.kernels.peer_exchange import meet_others

        logits = self._logits[: len(hidden)]
        own = logits[:, self.rank * len(weight) : (self.rank + 1) * len(weight)]
        meet_others(self.exchange)  # rank 0 has done with the last ones
        torch.mm(hidden, weight.t(), out=own)
        meet_others(self.exchange)
        return logits if self.rank == 0 else own

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x int64 [N], on each rank. Overwrites the others' x."""
        from nanovllm.kernels.peer_exchange import broadcast_first

        broadcast_first(x, self._inboxes, self.exchange)

    def release(self) -> None:
        """Lets every exchange end, now and in future, whatever the other ranks do: some of them are lost."""
        stream = torch.cuda.Stream(self._own_flags.device)  # not behind what waits
        with torch.cuda.stream(stream):
            self._own_flags.copy_(self._released, non_blocking=True)


def connect_peers(
    parallel: Parallel, device: torch.device, dtype: torch.dtype, max_rows: int, hidden_size: int, vocab_size: int
) -> Parallel:
    """The same place with `peers`, if there are other ranks, on GPUs that reach each other's memory.

    Args:
        dtype: of the model.
        max_rows: of a decode step. Exchanges of more rows are the group's.

    Raises:
        ExchangeError: another rank is lost.
    """
    row_bytes = hidden_size * dtype.itemsize
    if parallel.size == 1 or device.type == "cpu" or row_bytes % 16:
        return parallel
    max_rows = min(max_rows, _MAX_ROWS, _MAX_REMOTE_BYTES // (row_bytes * (parallel.size - 1)))
    first = (device.index or 0) - parallel.rank
    pairs = itertools.permutations(range(first, first + parallel.size), 2)
    if not max_rows or not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        return parallel
    # Whoever comes first waits here for the others, where it can be stopped; then they are together.
    parallel.all_reduce(torch.zeros(1, device=device)).item()
    try:
        peers = Peers(parallel, device, dtype, max_rows, hidden_size, vocab_size)
    except (RuntimeError, AttributeError, ImportError, TypeError) as error:  # what torch offers for this is not final
        logger.warning("the ranks' exchanges are NCCL's alone: %s", error)
        peers = None
    # No rank goes on before the others' flags are zero, and none with peers if another has none.
    num_ready = torch.tensor([float(peers is not None)], device=device)
    is_complete = parallel.all_reduce(num_ready).item() == parallel.size
    return replace(parallel, peers=peers) if is_complete else parallel


@dataclass(frozen=True, eq=False)
class _Array:
    """One that each rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class _MeetingStore(Store):
    """Where ranks meet that have met others before, or have not.

    torch numbers its meetings for shared memory from the start of the process, and names what it stores by them, as in
    "CUDASymmetricMemory/5/0". So a process that has met others, as one that makes its second engine has, would never
    find a rank that is new. Here the numbers begin at 0 for each group.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._renumbered(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta = _PATIENCE) -> None:
        self._store.wait([self._renumbered(key) for key in keys], timeout)

    def _renumbered(self, key: str) -> str:
        name, number, rest = re.fullmatch(r"(.*?)(?<=/)(\d+)(/.*)", key).groups()  # type: ignore[union-attr]
        return f"{name}{self._numbers.setdefault(number, len(self._numbers))}{rest}"


class _SharedMemory:
    """Memory of each rank's GPU that all ranks have mapped."""

    def __init__(self, parallel: Parallel, device: torch.device, arrays: list[_Array]) -> None:
        from torch._C._distributed_c10d import (
            _register_process_group,
            _SymmetricMemory,
            _unregister_process_group,
        )

        folders = [os.environ.get(name, "") for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR")]
        if max(len(os.fsencode(folder)) for folder in folders) > _MAX_FOLDER_BYTES:
            raise RuntimeError(f"torch can't name a socket in one of {folders}: the name would be too long")
        ends = list(itertools.accumulate(array.num_bytes for array in arrays))
        self._offsets = dict(zip(arrays, [0, *ends], strict=False))
        name: Any = f"nanovllm-{parallel.store.port}"
        store = _MeetingStore(PrefixStore("peers", parallel.store))
        group: Any = dist.ProcessGroup(store, parallel.rank, parallel.size)
        group._set_group_name(name)
        with _rendezvous_lock, _without_multicast():
            _register_process_group(name, group)
            try:
                own = _SymmetricMemory.empty_strided_p2p((ends[-1],), (1,), torch.uint8, device, name)
                self._handle = _SymmetricMemory.rendezvous(own, name)
            finally:
                _unregister_process_group(name)
        self._own = own

    def of(self, rank: int, array: _Array) -> torch.Tensor:
        """A rank's array."""
        offset = self._offsets[array] // array.dtype.itemsize
        return self._handle.get_buffer(rank, array.shape, array.dtype, offset)

    def of_each(self, array: _Array) -> tuple[torch.Tensor, ...]:
        """The array of each rank."""
        return tuple(self.of(rank, array) for rank in range(self._handle.world_size))


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Nothing here uses it, and it needs a fabric manager in good order."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
