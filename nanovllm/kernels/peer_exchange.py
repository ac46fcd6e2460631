"""Exchanges among the GPUs of a machine, each of which reads and writes the others' memory.

Every kernel here, and the norm that adds up the ranks' parts, is one *exchange*. The ranks count their exchanges, each
on its own device, and all of them make the same ones in the same order. In exchange number n a rank first writes n into
a flag of its own at each of the others: "all I was asked for before n is done". Then it waits until the flags that the
others have with it say so, too. Numbers only grow, so nothing has to be reset, and graphs can be replayed.

A rank that waits in exchange n knows that the others have finished what they did in n - 1. Two buffers that exchanges
use by turns are therefore enough: nobody writes into one that another rank still reads.

To end a rank that waits for one which is lost, its flags are set to RELEASED.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import warps_of_row

FLAG_STRIDE = tl.constexpr(16)  # int64 numbers from one rank's flag to the next: 128 bytes, a line of the cache
RELEASED = 2**62  # no exchange has this number


@triton.jit
def meet(flags, counter_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits for the other ranks, and returns the exchange's number. What they have written before is visible then, and
    what this rank has written in earlier kernels is visible to them. All programs may call it; the first one signals.
    """
    number = tl.load(counter_ptr, volatile=True) + 1
    if tl.program_id(0) == 0:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                tl.atomic_xchg(flags[rank] + RANK * FLAG_STRIDE, number, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(flags[RANK] + rank * FLAG_STRIDE, 0, sem="acquire", scope="sys") < number:
                pass
    return number


@triton.jit
def leave(counter_ptr, number):
    """Ends an exchange. Every program calls it; the last one counts."""
    if tl.atomic_add(counter_ptr + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(counter_ptr + 1, 0)
        tl.store(counter_ptr, number)


@triton.jit
def load_sum(parts, offsets, mask, RANKS: tl.constexpr):
    """The sum over ranks, in their order, of what each has at `offsets` of its part: fp32, the same bits on all."""
    total = tl.zeros(offsets.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        total += tl.load(parts[rank] + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _meet_kernel(flags, counter_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):
    leave(counter_ptr, meet(flags, counter_ptr, RANK, RANKS))


@triton.jit
def _sum_kernel(
    parts,
    out_ptr,
    flags,
    counter_ptr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    number = meet(flags, counter_ptr, RANK, RANKS)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + column
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, load_sum(parts, offsets, mask, RANKS).to(dtype), mask=mask)
    leave(counter_ptr, number)


@triton.jit(do_not_specialize=["num_values"])
def _broadcast_kernel(
    x_ptr,
    inboxes,  # of each rank [2, capacity]
    capacity,
    num_values,
    flags,
    counter_ptr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    turn = (tl.load(counter_ptr, volatile=True) + 1) % 2
    if RANK == 0:
        for first in range(0, num_values, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + column, mask=column < num_values)
            for rank in tl.static_range(1, RANKS):
                tl.store(inboxes[rank] + turn * capacity + column, values, mask=column < num_values)
        tl.debug_barrier()  # one thread signals for all
    number = meet(flags, counter_ptr, RANK, RANKS)
    if RANK != 0:
        inbox_ptr = inboxes[RANK] + turn * capacity
        for first in range(0, num_values, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(inbox_ptr + column, mask=column < num_values, cache_modifier=".cg")
            tl.store(x_ptr + column, values, mask=column < num_values)
    leave(counter_ptr, number)


@dataclass(frozen=True)
class Exchange:
    """What the exchanges of one rank need.

    Attributes:
        flags: each rank's int64 [num_ranks * FLAG_STRIDE], in its memory, zero at first.
        counter: int64 [2], this rank's, zero at first: the number of the last exchange; programs that have left the
            present one.
    """

    rank: int
    flags: tuple[torch.Tensor, ...]
    counter: torch.Tensor

    def constants(self) -> dict[str, int]:
        """Keyword arguments of the kernels."""
        return {"RANK": self.rank, "RANKS": len(self.flags)}


def meet_others(exchange: Exchange) -> None:
    """Waits on the device until all ranks have come here."""
    _meet_kernel[(1,)](exchange.flags, exchange.counter, **exchange.constants(), num_warps=1)


def check_parts(parts: tuple[torch.Tensor, ...], x: torch.Tensor, exchange: Exchange) -> None:
    """Raises ValueError unless there is one part a rank, each like x [num_rows, hidden], or with more rows."""
    rows = x.view(-1, x.shape[-1])
    for part in parts:
        is_like = part.shape[1:] == rows.shape[1:] and len(part) >= len(rows) and part.dtype == x.dtype
        if len(parts) != len(exchange.flags) or not is_like or not part.is_contiguous():
            raise ValueError(f"{len(parts)} parts {tuple(part.shape)} of {part.dtype} for a sum {tuple(x.shape)}")


def sum_parts(parts: tuple[torch.Tensor, ...], out: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The sum of the ranks' parts.

    parts:   each rank's part in its memory, like out, or with more rows
    out:     [num_rows, hidden], contiguous
    returns: out, filled: added up in fp32 in the order of the ranks, and rounded once
    Raises ValueError when the shapes disagree.
    """
    num_rows, hidden = out.shape
    check_parts(parts, out, exchange)
    if num_rows:
        block = triton.next_power_of_2(hidden)
        _sum_kernel[(num_rows,)](
            parts,
            out,
            exchange.flags,
            exchange.counter,
            HIDDEN=hidden,
            BLOCK=block,
            **exchange.constants(),
            num_warps=warps_of_row(block),
        )
    return out


def broadcast_first(x: torch.Tensor, inboxes: tuple[torch.Tensor, ...], exchange: Exchange) -> torch.Tensor:
    """Rank 0's x, on each rank.

    x:        [num_values], num_values <= capacity; overwritten where the rank is not 0
    inboxes:  each rank's [2, capacity] of x's dtype, in its memory
    returns:  x
    Raises ValueError when x is too long.
    """
    capacity = inboxes[0].shape[1]
    if len(x) > capacity or not x.is_contiguous():
        raise ValueError(f"{len(x)} values for inboxes of {capacity}")
    if len(x):
        _broadcast_kernel[(1,)](
            x,
            inboxes,
            capacity,
            len(x),
            exchange.flags,
            exchange.counter,
            BLOCK=512,
            **exchange.constants(),
            num_warps=4,
        )
    return x
