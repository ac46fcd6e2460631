"""Exchanges of ranks that are, here, so many sets of memory on one device.

One rank's kernels run at a time, so the flags that it would wait for are set beforehand, as the others would have set
them. That ranks do wait for one another is tested on several GPUs, by the engine's tests.
"""

import time

import pytest
import torch

from nanovllm.kernels.norm import sum_add_rms_norm
from nanovllm.kernels.peer_exchange import (
    FLAG_STRIDE,
    RELEASED,
    Exchange,
    broadcast_first,
    meet_others,
    sum_parts,
)
from tests.kernels.reference import assert_as_exact_as_torch
from tests.kernels.reference import rms_norm as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [2, 3, 4]


class Ranks:
    """All ranks' state."""

    def __init__(self, size: int, device: torch.device) -> None:
        numbers = {"dtype": torch.int64, "device": device}
        self.flags = tuple(torch.zeros(size * FLAG_STRIDE.value, **numbers) for _ in range(size))
        self.exchanges = [Exchange(rank, self.flags, torch.zeros(2, **numbers)) for rank in range(size)]

    def arrive(self, rank: int, number: int) -> None:
        """Sets the flags that the others have with a rank."""
        for other, flags in enumerate(self.flags):
            if other != rank:
                flags[rank * FLAG_STRIDE.value] = number

    def seen(self, rank: int) -> list[int]:
        """A rank's flags."""
        return self.flags[rank][:: FLAG_STRIDE.value].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_meetings_are_counted(size: int, device: torch.device) -> None:
    ranks = Ranks(size, device)
    for number in (1, 2, 3):
        for rank in range(1, size):
            ranks.arrive(rank, number)
        meet_others(ranks.exchanges[0])
        assert ranks.exchanges[0].counter.tolist() == [number, 0]
        assert ranks.seen(0) == [0] + [number] * (size - 1)
        assert ranks.seen(1) == [number if rank != 1 else 0 for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 1000)])
def test_sums(size: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, generator) -> None:
    """Every rank gets the same bits, those of a sum in float32 in the order of the ranks."""
    ranks = Ranks(size, device)
    parts = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(size)]
    for rank in range(size):
        ranks.arrive(rank, RELEASED)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for exchange in ranks.exchanges:
        out = torch.full(shape, float("nan"), dtype=dtype, device=device)
        assert sum_parts(tuple(parts), out, exchange) is out
        assert torch.equal(out, expected.to(dtype))
        assert exchange.counter.tolist() == [1, 0]  # however many programs it took


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (2, 4096)])
def test_sum_and_norm(size: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, generator) -> None:
    ranks = Ranks(size, device)
    parts = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(size)]
    residual = torch.randn(shape, generator=generator).to(device, dtype)
    weight = torch.randn(shape[-1], generator=generator).to(device, dtype)
    for rank in range(size):
        ranks.arrive(rank, RELEASED)
    total = (torch.stack(parts).float().sum(0) + residual.float()).to(dtype)
    results = []
    for exchange in ranks.exchanges:
        stream = residual.clone()
        out = sum_add_rms_norm(tuple(parts), stream, weight, 1e-6, exchange)
        assert torch.allclose(stream, total, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert_as_exact_as_torch(out, reference, stream, weight, floor=1e-5)
        results.append((stream, out))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_values", [1, 7, 512, 1300])
def test_broadcasts(size: int, num_values: int, device: torch.device) -> None:
    """By turns into either half of an inbox, so that one is not overwritten while it is read."""
    capacity = 1400
    ranks = Ranks(size, device)
    boxes = tuple(torch.full((2, capacity), -1, dtype=torch.int64, device=device) for _ in range(size))
    previous = torch.full((num_values,), -1, device=device)
    for number in (1, 2, 3):
        sent = torch.arange(num_values, device=device) * number + (number << 40)
        for rank in range(1, size):
            ranks.arrive(rank, number)
        broadcast_first(sent.clone(), boxes, ranks.exchanges[0])
        for rank in range(1, size):
            got = torch.zeros_like(sent)
            for other in range(size):
                ranks.arrive(other, number)
            broadcast_first(got, boxes, ranks.exchanges[rank])
            assert torch.equal(got, sent)
            assert torch.equal(boxes[rank][(number + 1) % 2, :num_values], previous)
            assert (boxes[rank][:, num_values:] == -1).all()
        previous = sent
        assert (boxes[0] == -1).all()


def test_bad_shapes(device: torch.device) -> None:
    exchange = Ranks(2, device).exchanges[0]
    boxes = (torch.zeros(2, 8, dtype=torch.int64, device=device),) * 2
    with pytest.raises(ValueError, match="9 values for inboxes of 8"):
        broadcast_first(torch.zeros(9, dtype=torch.int64, device=device), boxes, exchange)
    x = torch.zeros(2, 64, device=device)
    for wrong in ((x,), (x[:1], x), (x, x.half()), (x, x[:, :32]), (x, x.t().contiguous().t())):
        with pytest.raises(ValueError, match="parts"):
            sum_add_rms_norm(wrong, x, x[0], 1e-6, exchange)
        with pytest.raises(ValueError, match="parts"):
            sum_parts(wrong, x, exchange)
    with pytest.raises(ValueError, match="must end in"):
        sum_add_rms_norm((x, x), x, x[0, :8], 1e-6, exchange)
    with pytest.raises(ValueError, match="must be contiguous"):
        sum_add_rms_norm((x, x), torch.zeros(2, 128, device=device)[:, :64], x[0], 1e-6, exchange)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="two ranks run at the same time on a GPU alone")


@needs_gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_ranks_wait_for_one_another(is_captured: bool, device: torch.device, generator) -> None:
    """Each rank is a stream here. They do as layers do: write a part where the other reads it, add the parts up, go on
    with the sum. A rank that went ahead would read, or overwrite, what is not of this round."""
    rounds, shape = 60, (40, 512)
    ranks = Ranks(2, device)
    parts = [[torch.zeros(shape, device=device) for _ in range(2)] for _ in range(2)]  # by turn, then by rank
    boxes = tuple(torch.zeros(2, 64, dtype=torch.int64, device=device) for _ in range(2))
    starts = torch.randn(2, *shape, generator=generator).to(device)
    outs = torch.zeros(2, rounds, *shape, device=device)
    tokens = torch.zeros(2, rounds, 64, dtype=torch.int64, device=device)
    busy = torch.randn(2, 1024, 1024, device=device)

    def run(rank: int) -> None:
        x = starts[rank]
        for number in range(rounds):
            if (number * 7 + rank * 3) % 5 == 0:  # now one rank is late, now the other
                torch.mm(busy[rank], busy[rank])
            turn = number % 2
            torch.mul(x, 0.5 + rank / 8, out=parts[turn][rank])
            x = sum_parts(tuple(parts[turn]), outs[rank, number], ranks.exchanges[rank])
            tokens[rank, number].fill_(number if rank == 0 else -1)
            broadcast_first(tokens[rank, number], boxes, ranks.exchanges[rank])

    for rank in range(2):  # compiles, with nobody to wait for
        ranks.arrive(1 - rank, RELEASED)
        run(rank)
    torch.cuda.synchronize()
    for flags, exchange in zip(ranks.flags, ranks.exchanges, strict=True):
        flags.zero_()
        exchange.counter.zero_()
    outs.zero_()
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs: list[torch.cuda.CUDAGraph] = []
    if is_captured:
        for rank in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[rank]):
                run(rank)
    torch.cuda.synchronize()
    for _ in range(3):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[rank].replay() if is_captured else run(rank)
    torch.cuda.synchronize()
    assert [exchange.counter.tolist() for exchange in ranks.exchanges] == [[6 * rounds, 0]] * 2
    x = list(starts)
    for number in range(rounds):
        total = x[0] * 0.5 + x[1] * 0.625
        assert torch.equal(outs[0, number], outs[1, number])
        torch.testing.assert_close(outs[0, number], total)
        x = [outs[0, number], outs[0, number]]
    assert torch.equal(tokens, torch.arange(rounds, device=device)[None, :, None].expand_as(tokens))


@needs_gpu
def test_released(device: torch.device) -> None:
    """A rank that waits for a lost one goes on, and never waits again."""
    ranks = Ranks(2, device)
    exchange = ranks.exchanges[0]
    ranks.arrive(1, 1)
    meet_others(exchange)
    torch.cuda.synchronize()
    released = torch.full_like(ranks.flags[0], RELEASED, device="cpu").pin_memory()
    done = torch.cuda.Event()
    for _ in range(3):
        meet_others(exchange)
    done.record()
    time.sleep(0.1)
    assert not done.query()
    with torch.cuda.stream(torch.cuda.Stream()):
        ranks.flags[0].copy_(released, non_blocking=True)
    torch.cuda.synchronize()
    assert exchange.counter.tolist() == [4, 0]
