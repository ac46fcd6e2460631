"""Copies KV blocks between a device's cache and host memory, as a `HostCache` has decided."""

import logging
import time
import weakref
from collections import deque
from contextlib import suppress

import torch

from nanovllm.engine.child_process import interrupts_put_off
from nanovllm.engine.host_cache import BlockCopies, min_blocks_worth_copying

logger = logging.getLogger(__name__)

_BLOCKS_TIMED = 8  # for their rate


def make_copier(kv_cache: torch.Tensor, num_bytes: int) -> "BlockCopier":
    """A copier whose host memory is new and takes up to `num_bytes`.

    Args:
        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].

    Raises:
        ValueError: not one block has room, or the memory can't be had or pinned.
    """
    blocks = kv_cache.movedim(2, 0)
    block_bytes = blocks[0].numel() * kv_cache.element_size()
    num_slots = num_bytes // block_bytes
    if not num_slots:
        raise ValueError(f"kv_offload_gb gives a rank {num_bytes} bytes, but one block takes {block_bytes}")
    shape = (num_slots, *blocks.shape[1:])
    try:
        host = torch.empty(shape, dtype=kv_cache.dtype)
    except RuntimeError as error:
        raise ValueError(f"kv_offload_gb: no {num_slots * block_bytes} bytes of host memory: {error}") from error
    return StreamCopier(blocks, host) if kv_cache.is_cuda else BlockCopier(blocks, host)


class BlockCopier:
    """Copies at once, as a CPU does."""

    def __init__(self, blocks: torch.Tensor, host: torch.Tensor) -> None:
        """`blocks` [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] is a view of the KV cache, `host`
        [num_slots, ...] has the same dtype."""
        self._blocks, self._host = blocks, host
        self.num_slots = len(host)
        self.block_bytes = host[0].numel() * host.element_size()
        self.block_size = host.shape[3]  # tokens
        self._ticket = 0

    @torch.inference_mode()
    def begin(self, copies: BlockCopies) -> None:
        """Takes copies over, before the step is launched that they were decided on with. They come after all that has
        been launched so far; what is launched from now on comes after those that they say are done."""
        for slot, block_id in copies.loads:
            self._blocks[block_id].copy_(self._host[slot])
        for block_id, slot in copies.saves:
            self._host[slot].copy_(self._blocks[block_id])
        self._ticket = copies.ticket

    def flush(self) -> None:
        """Starts what `begin` has taken over, when the step is launched or there is none."""

    def finished(self) -> tuple[int, int]:
        """The tickets up to which loads, and saves, are finished."""
        return self._ticket, self._ticket

    def wait(self) -> None:
        """Waits for all loads."""

    def close(self) -> None:
        """Gives the memory back, when no copy uses it any more."""
        del self._blocks, self._host


class _Lane:
    """One direction: copies are done one after the other."""

    def __init__(self, example: torch.Tensor) -> None:
        self.stream = torch.cuda.Stream(example.device)
        self.events: deque[tuple[int, torch.cuda.Event]] = deque()
        # A block is contiguous here and on the host, but in the cache it is in one piece a layer.
        self.staging = torch.empty_like(example, memory_format=torch.contiguous_format)
        self.finished = 0

    def look(self) -> None:
        for ticket, event in self.events:
            if ticket > self.finished:
                if not event.query():
                    return
                self.finished = ticket

    def hold_back(self, stream: torch.cuda.Stream, ticket: int) -> None:
        """Makes a stream wait for the copies up to a ticket."""
        last = None
        while self.events and self.events[0][0] <= ticket:
            _, last = self.events.popleft()
        if last is not None:
            stream.wait_event(last)
        self.finished = max(self.finished, ticket)


class StreamCopier(BlockCopier):
    """Copies in the background: each direction has a stream of its own, and the host memory is pinned.

    The stream that computes waits for a copy only when it is known to be finished on rank 0: there that costs nothing,
    and on the other ranks it keeps what rank 0 takes for granted true. The copies wait for what was launched before the
    step that they were begun with. Launching them takes the host some 10 us a block, so it is done behind the step.
    """

    def __init__(self, blocks: torch.Tensor, host: torch.Tensor) -> None:
        """Raises ValueError if the memory can't be pinned."""
        super().__init__(blocks, host)
        self._device = blocks.device
        self._loads, self._saves = _Lane(blocks[0]), _Lane(blocks[0])
        self._launched = torch.cuda.Event()
        self._stashed: BlockCopies | None = None
        _pin(host, self._device)
        self._unpin = weakref.finalize(self, _unpin, host)

    def begin(self, copies: BlockCopies) -> None:
        with interrupts_put_off():
            self.flush()
            compute = torch.cuda.current_stream(self._device)
            self._loads.hold_back(compute, copies.loads_done)
            self._saves.hold_back(compute, copies.saves_done)
            self._launched.record(compute)
            self._stashed = copies

    @torch.inference_mode()
    def flush(self) -> None:
        copies, self._stashed = self._stashed, None
        if copies is None:
            return
        with interrupts_put_off():
            for lane, pairs in ((self._loads, copies.loads), (self._saves, copies.saves)):
                with torch.cuda.stream(lane.stream):
                    lane.stream.wait_event(self._launched)
                    for source, target in pairs:
                        if lane is self._loads:
                            lane.staging.copy_(self._host[source], non_blocking=True)
                            self._blocks[target].copy_(lane.staging)
                        else:
                            lane.staging.copy_(self._blocks[source])
                            self._host[target].copy_(lane.staging, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                lane.events.append((copies.ticket, event))

    def finished(self) -> tuple[int, int]:
        self._loads.look()
        self._saves.look()
        return self._loads.finished, self._saves.finished

    def wait(self) -> None:
        self.flush()
        self._loads.stream.synchronize()

    def close(self) -> None:
        self._stashed = None
        self._loads.stream.synchronize()
        self._saves.stream.synchronize()
        self._unpin()
        del self._loads, self._saves
        super().close()


def find_crossover(copier: BlockCopier, seconds_a_token: float) -> int | None:
    """Times loads, before the first copies, and logs how they compare with computing; see `min_blocks_worth_copying`.

    Args:
        seconds_a_token: what computing takes.
    """

    def seconds(num_blocks: int) -> float:
        started = time.perf_counter()
        copier.begin(BlockCopies(0, 0, 0, [(0, 0)] * num_blocks, []))
        copier.wait()
        return time.perf_counter() - started

    seconds(1)
    one, several = (min(seconds(count) for _ in range(3)) for count in (1, 1 + _BLOCKS_TIMED))
    copy_seconds = max(1e-9, (several - one) / _BLOCKS_TIMED)
    latency = max(0.0, one - copy_seconds)
    compute_seconds = seconds_a_token * copier.block_size
    logger.info(
        "KV offload: %.1f GB/s to the device, %.0f tokens/s and %.0f us a copy; computing makes %.0f tokens/s",
        copier.block_bytes / 1e9 / copy_seconds,
        copier.block_size / copy_seconds,
        1e6 * latency,
        1 / seconds_a_token,
    )
    return min_blocks_worth_copying(latency, copy_seconds, compute_seconds)


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    """Registers memory with the driver as it is: torch's own pinned memory comes in powers of two, up to twice as much.

    Raises:
        ValueError: the driver refuses.
    """
    num_bytes = memory.numel() * memory.element_size()
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if error:
        with suppress(RuntimeError):  # the runtime keeps the error for the next launch to raise
            torch.zeros(1, device=device)
        raise ValueError(
            f"kv_offload_gb: {num_bytes} bytes of host memory can't be pinned (CUDA error {error}); lower it, or raise "
            "the limit of locked memory (ulimit -l)"
        )


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
