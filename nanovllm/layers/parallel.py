"""Tensor parallelism: which part of each weight a rank holds, and the exchanges that make the parts one model.

Megatron's scheme (Shoeybi et al., 2019): queries, keys, values, gate and up are cut by output features, so that each
rank computes some heads and some features; output and down projections by input features, and the ranks add up their
products. Embedding and head are cut by tokens of the vocabulary.
"""

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from nanovllm.layers.peers import Peers


class ExchangeError(RuntimeError):
    """An exchange has failed: another rank is lost, or does not take part in it."""


@dataclass(frozen=True)
class Shard:
    """One dimension of a checkpoint's tensor.

    Attributes:
        size: its length in the checkpoint.
        pieces: what this rank holds of it, one piece after the other.
    """

    size: int
    pieces: tuple[slice, ...]

    def __len__(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank: `num_heads` query heads, the KV heads `kv_heads` of the model, and their head size.

    Each of the KV heads serves equally many of the query heads, in order. A KV head may be on several ranks, or even
    twice on one, where the ranks cut the query heads otherwise than the KV heads do.
    """

    num_heads: int
    kv_heads: tuple[int, ...]
    query_rows: Shard
    kv_rows: Shard


@dataclass(frozen=True)
class Parallel:
    """One rank's place among those that share a model. Layers get it when they are built; nothing of it is global.

    The exchanges are of all ranks: each has to make the same ones in the same order. On a GPU they are only enqueued,
    and can be captured in a CUDA graph.

    Attributes:
        rank: 0 to size - 1; rank 0 samples.
        size: number of ranks.
        group: a process group of torch, of its own; None if there is one rank.
        store: where the ranks leave word for one another while they connect.
        peers: for exchanges of little between GPUs that reach each other's memory; None if they don't.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    store: Any = None
    peers: "Peers | None" = None

    def shard(self, size: int) -> Shard:
        """This rank's part of `size` features."""
        unit = 1 if size % self.size == 0 else math.gcd(size, 8)  # rows begin at multiples of 16 bytes
        first, end = (size // unit * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return Shard(size, (slice(first, end),))

    def shard_vocab(self, vocab_size: int) -> Shard:
        """This rank's tokens; the last ranks have fewer than the others, or none."""
        first, end = (min(rank * self.padded_vocab(vocab_size), vocab_size) for rank in (self.rank, self.rank + 1))
        return Shard(vocab_size, (slice(first, end),))

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of each rank's embedding and head, those of no token included."""
        return vocab_size if self.size == 1 else -(-vocab_size // (8 * self.size)) * 8

    def shard_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> HeadShare:
        """This rank's heads.

        Raises:
            ValueError: the query heads can't be shared out evenly.
        """
        if num_heads % self.size:
            divisors = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
            raise ValueError(
                f"tensor_parallel_size={self.size} does not divide the model's {num_heads} query heads; "
                f"these do: {divisors}"
            )
        own, group = num_heads // self.size, num_heads // num_kv_heads
        served = math.gcd(own, group)  # query heads for each KV head here
        first = self.rank * own
        kv_heads = tuple((first + offset) // group for offset in range(0, own, served))
        if kv_heads == tuple(range(kv_heads[0], kv_heads[-1] + 1)):
            kv_pieces: tuple[slice, ...] = (slice(kv_heads[0] * head_dim, (kv_heads[-1] + 1) * head_dim),)
        else:
            kv_pieces = tuple(slice(head * head_dim, (head + 1) * head_dim) for head in kv_heads)
        query_rows = Shard(num_heads * head_dim, (slice(first * head_dim, (first + own) * head_dim),))
        return HeadShare(own, kv_heads, query_rows, Shard(num_kv_heads * head_dim, kv_pieces))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, on each of them. Overwrites x."""
        if self.size > 1:
            self.begin_all_reduce(x)()
        return x

    def begin_all_reduce(self, x: torch.Tensor) -> Callable[[], None]:
        """The same, beside what the device is given next to do, until what is returned is called."""
        works: list[Any] = []
        _complete(lambda: works.append(self.group.allreduce([x])))
        return lambda: _complete(works[0].wait)

    def abort(self) -> None:
        """Ends exchanges on a GPU, and all later ones, whatever they do: some rank is lost."""
        try:
            if self.peers is not None:
                self.peers.release()
        finally:
            self.group.abort()

    def gather_vocab(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[N, padded_vocab] of each rank -> on rank 0, [N, vocab_size]; the others get back their own."""
        if self.size == 1:
            return logits
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(logits) for _ in range(self.size)] if self.rank == 0 else []
        _complete(lambda: self.group.gather([parts] if parts else [], [logits.contiguous()], options).wait())
        return torch.cat(parts, dim=1)[:, :vocab_size] if parts else logits

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x [N], on each rank. Overwrites the others' x."""
        if self.peers is not None and self.peers.serves(len(x)):
            self.peers.broadcast(x)
        elif self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            _complete(lambda: self.group.broadcast([x], options).wait())
        return x


SINGLE = Parallel()


def _complete(exchange: Callable[[], object]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        raise ExchangeError(str(error)) from error


def make_store() -> TCPStore:
    """Where the ranks of an engine on this machine find one another. Its port is whichever the system gives it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    return _open_store(port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _open_store(port: int, *, is_master: bool = False, **options: Any) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, is_master, use_libuv=False, **options)  # not every torch has libuv


def connect(device: torch.device, port: int, rank: int, size: int, timeout: float) -> Parallel:
    """A rank's place, with a process group: NCCL for a CUDA device, gloo for the CPU. Returns when all are connected.

    The group is none of those that torch knows by name, so a process may have several; the caller's are left alone.

    Args:
        port: of the store that rank 0 has made.
        timeout: seconds that an exchange may take on a CPU before it raises.

    Raises:
        ExchangeError: the others could not be reached.
    """
    store = _open_store(port)
    group_store = PrefixStore("group", store)
    if device.type == "cuda":
        group: Any = dist.ProcessGroupNCCL(group_store, rank, size, dist.ProcessGroupNCCL.Options())
        with torch.cuda.device(device):  # NCCL connects with the first exchange, and could not be stopped while it does
            _complete(lambda: group.allreduce([torch.zeros(1, device=device)]).wait())
            torch.cuda.synchronize(device)
        return Parallel(rank, size, group, store)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout)
    groups: list[Any] = []
    _complete(lambda: groups.append(dist.ProcessGroupGloo(group_store, rank, size, options)))
    return Parallel(rank, size, groups[0], store)
