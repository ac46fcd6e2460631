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

FLAG_STRIDE = tl.constexpr(16)  # int64 numbers from one rank's flag to the next: 128 bytes, a line of the cache
RELEASED = 2**62  # no exchange has this number


@triton.jit
def meet(flags_ptr, counter_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits for the other ranks, and returns the exchange's number. What they have written before is visible then, and
    what this rank has written in earlier kernels is visible to them. All programs may call it; the first one signals.
    """
    number = tl.load(counter_ptr, volatile=True) + 1
    if tl.program_id(0) == 0:
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                flag_ptr = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int64)) + RANK * FLAG_STRIDE
                tl.atomic_xchg(flag_ptr, number, sem="release", scope="sys")
    own_flags_ptr = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(own_flags_ptr + rank * FLAG_STRIDE, 0, sem="acquire", scope="sys") < number:
                pass
    return number


@triton.jit
def leave(counter_ptr, number):
    """Ends an exchange. Every program calls it; the last one counts."""
    if tl.atomic_add(counter_ptr + 1, 1) == tl.num_programs(0) - 1:
        tl.store(counter_ptr + 1, 0)
        tl.store(counter_ptr, number)


@triton.jit
def load_sum(parts_ptr, offsets, mask, DTYPE: tl.constexpr, RANKS: tl.constexpr):
    """The sum over ranks, in their order, of what each has at `offsets` of its part: fp32, the same bits on all."""
    total = tl.zeros(offsets.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        part_ptr = tl.multiple_of(tl.load(parts_ptr + rank).to(tl.pointer_type(DTYPE)), 16)
        total += tl.load(part_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _meet_kernel(flags_ptr, counter_ptr, RANK: tl.constexpr, RANKS: tl.constexpr):
    leave(counter_ptr, meet(flags_ptr, counter_ptr, RANK, RANKS))


@triton.jit
def _sum_kernel(
    parts_ptr,
    out_ptr,
    flags_ptr,
    counter_ptr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    number = meet(flags_ptr, counter_ptr, RANK, RANKS)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + column
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, load_sum(parts_ptr, offsets, mask, dtype, RANKS).to(dtype), mask=mask)
    leave(counter_ptr, number)


@triton.jit(do_not_specialize=["num_values"])
def _broadcast_kernel(
    x_ptr,
    inboxes_ptr,  # of each rank the address of an inbox [2, capacity]
    capacity,
    num_values,
    flags_ptr,
    counter_ptr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    turn = (tl.load(counter_ptr, volatile=True) + 1) % 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if RANK == 0:
        for first in range(0, num_values, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(x_ptr + column, mask=column < num_values)
            for rank in tl.static_range(1, RANKS):
                inbox_ptr = tl.load(inboxes_ptr + rank).to(tl.pointer_type(dtype)) + turn * capacity
                tl.store(inbox_ptr + column, values, mask=column < num_values)
        tl.debug_barrier()  # one thread signals for all
    number = meet(flags_ptr, counter_ptr, RANK, RANKS)
    if RANK != 0:
        inbox_ptr = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(dtype)) + turn * capacity
        for first in range(0, num_values, BLOCK):
            column = first + tl.arange(0, BLOCK)
            values = tl.load(inbox_ptr + column, mask=column < num_values, cache_modifier=".cg")
            tl.store(x_ptr + column, values, mask=column < num_values)
    leave(counter_ptr, number)


@dataclass(frozen=True)
class Exchange:
    """What the exchanges of one rank need, all on its device.

    Attributes:
        flags: int64 [num_ranks], where each rank's flags are: int64 [num_ranks * FLAG_STRIDE], zero at first.
        counter: int64 [2], zero at first: the number of the last exchange; programs that have left the present one.
    """

    rank: int
    num_ranks: int
    flags: torch.Tensor
    counter: torch.Tensor

    def constants(self) -> dict[str, int]:
        """Keyword arguments of the kernels."""
        return {"RANK": self.rank, "RANKS": self.num_ranks}


def meet_others(exchange: Exchange) -> None:
    """Waits on the device until all ranks have come here."""
    _meet_kernel[(1,)](exchange.flags, exchange.counter, **exchange.constants(), num_warps=1)


def sum_parts(parts: torch.Tensor, out: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The sum of the ranks' parts.

    parts:   int64 [num_ranks], where each rank has a part of out's shape and dtype, at a multiple of 16 bytes
    out:     [num_rows, hidden], contiguous
    returns: out, filled: added up in fp32 in the order of the ranks, and rounded once
    """
    num_rows, hidden = out.shape
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
            num_warps=min(max(block // 512, 1), 16),
        )
    return out


def broadcast_first(x: torch.Tensor, inboxes: torch.Tensor, capacity: int, exchange: Exchange) -> torch.Tensor:
    """Rank 0's x, on each rank.

    x:        [num_values], num_values <= capacity; overwritten where the rank is not 0
    inboxes:  int64 [num_ranks], where each rank has an inbox [2, capacity] of x's dtype
    returns:  x
    Raises ValueError when x is too long.
    """
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
