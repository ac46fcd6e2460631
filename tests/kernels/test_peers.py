"""Layers of several ranks that exchange through one another's memory, which here is all on one device: their parts add
up to what the whole layer gives."""

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import HashStore, PrefixStore

from nanovllm.kernels.peer_exchange import RELEASED
from nanovllm.layers import peers as module
from nanovllm.layers.embed_head import LMHead, VocabEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import RowLinear
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.peers import ATTENTION, MLP, PartialSum, Peers, _MeetingStore, connect_peers

HIDDEN, VOCAB, MAX_ROWS = 64, 50, 9


class LocalMemory:
    """What `_SharedMemory` offers, of ranks that are all in this process."""

    contents: ClassVar[dict] = {}
    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, parallel, device, arrays):
        self.parallel, self.device = parallel, device
        self.alive.add(self)
        self.numbers = {array: number for number, array in enumerate(arrays)}

    def of(self, rank, array):
        key = (self.numbers[array], rank)
        if key not in self.contents:
            self.contents[key] = torch.full(array.shape, 77, dtype=array.dtype, device=self.device)
        return self.contents[key]

    def of_each(self, array):
        return tuple(self.of(rank, array) for rank in range(self.parallel.size))


@pytest.fixture(params=[2, 3])
def places(request, device, monkeypatch):
    """A `Parallel` of each rank."""
    monkeypatch.setattr(LocalMemory, "contents", {})
    LocalMemory.alive.clear()
    monkeypatch.setattr(module, "_SharedMemory", LocalMemory)
    alone = [Parallel(rank, request.param) for rank in range(request.param)]
    peers = [Peers(place, device, torch.float32, MAX_ROWS, HIDDEN, VOCAB) for place in alone]
    return [Parallel(place.rank, place.size, peers=own) for place, own in zip(alone, peers, strict=True)]


def each(run, places):
    """What `run` gives for each rank, the last one first. None waits for another."""
    results = []
    for place in reversed(places):
        place.peers._own_flags.fill_(RELEASED)
        results.insert(0, run(place))
    return results


def randn(generator, device, *shape):
    return torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear(places, num_rows, bias, device, generator):
    """Twice, by turns in both places; a bias counts once, not once a rank."""
    weight, row_bias = randn(generator, device, HIDDEN, 40), randn(generator, device, HIDDEN) if bias else None
    norm = RMSNorm(HIDDEN, 1e-6).to(device)
    norm.weight.data = randn(generator, device, HIDDEN)
    for turn in (ATTENTION, MLP):
        x, residual = randn(generator, device, num_rows, 40), randn(generator, device, num_rows, HIDDEN)
        expected_stream = residual + F.linear(x, weight, row_bias)
        expected = norm(expected_stream)

        def multiply(place, x=x, turn=turn):
            columns = place.shard(40)
            layer = RowLinear(columns, HIDDEN, bias, place, turn).to(device)
            layer.weight.data = weight[:, columns.pieces[0]].contiguous()
            if bias:
                layer.bias.data = row_bias.clone()
            return layer.in_pieces(x[:, columns.pieces[0]].contiguous())

        sums = [multiply(place) for place in places]  # all parts are there before one is read
        assert all(isinstance(result, PartialSum) for result in sums)

        def normalize(place, sums=sums, residual=residual):
            stream = residual.clone()
            return norm.add_and_normalize(sums[place.rank], stream), stream

        for normed, stream in each(normalize, places):
            torch.testing.assert_close(stream, expected_stream)
            torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-4)


def test_embedding(places, device, generator, monkeypatch):
    """Also of a token whose row another rank's layer must not see: numbers that are none, times zero."""
    weight = randn(generator, device, VOCAB, HIDDEN)
    weight[0] = float("inf")
    token_ids = torch.tensor([1, VOCAB - 1, 17, 25, 26, 0, 33], device=device)
    totals = {}
    monkeypatch.setattr(PartialSum, "total", lambda self: totals.setdefault(self.peers.rank, self).part)
    for place in places:
        layer = VocabEmbedding(VOCAB, HIDDEN, place).to(device)
        (rows,) = layer.rows.pieces
        layer.weight.data[: len(layer.rows)] = weight[rows]
        layer(token_ids)
    monkeypatch.undo()
    for total in each(lambda place: totals[place.rank].total(), places):
        assert torch.equal(total, weight[token_ids])


def test_head(places, device, generator):
    """Rank 0 gets all logits, without those of no token; what it had before is overwritten."""
    weight = randn(generator, device, VOCAB, HIDDEN)
    for num_rows in (MAX_ROWS, 2):
        hidden = randn(generator, device, num_rows, HIDDEN)

        def logits(place, hidden=hidden):
            layer = LMHead(VOCAB, HIDDEN, place).to(device)
            (rows,) = layer.rows.pieces
            layer.weight.data[: len(layer.rows)] = weight[rows]
            return layer(hidden)

        torch.testing.assert_close(each(logits, places)[0], F.linear(hidden, weight))


def test_tokens(places, device):
    sent = torch.arange(MAX_ROWS, device=device) + (5 << 40)
    values = [sent.clone() if place.rank == 0 else torch.zeros_like(sent) for place in places]
    for place in places:  # rank 0 writes first, as the others wait for it
        place.peers._own_flags.fill_(RELEASED)
        place.from_first(values[place.rank])
    assert all(torch.equal(value, sent) for value in values)


def test_memory_is_held(places):
    """The views that torch gives don't keep it from being freed."""
    gc.collect()
    assert len(LocalMemory.alive) == len(places)


def test_more_rows_than_there_is_memory_for(places):
    peers = places[0].peers
    assert peers.serves(MAX_ROWS) and not peers.serves(MAX_ROWS + 1)


def test_ranks_meet_whatever_they_have_met_before():
    """torch puts a number into its keys that counts the meetings of a process."""
    shared = HashStore()
    stores = [_MeetingStore(shared) for _ in range(2)]
    old, new = (PrefixStore("x", store) for store in stores)  # which calls them as torch does, from C++
    for number in range(3):
        old.set(f"Name/{number + 7}/0", f"old {number}")
        new.set(f"Name/{number}/1", f"new {number}")
        old.wait([f"Name/{number + 7}/1"])
        new.wait([f"Name/{number}/0"])
        assert old.get(f"Name/{number + 7}/1") == f"new {number}".encode()
        assert new.get(f"Name/{number}/0") == f"old {number}".encode()


class FakeGroup:
    """Of two ranks. `others` is what the other one adds to a sum."""

    def __init__(self, others=0.0):
        self.others, self.is_aborted = others, False

    def allreduce(self, tensors):
        tensors[0] += self.others
        return SimpleNamespace(wait=lambda: None)

    def abort(self):
        self.is_aborted = True


@pytest.fixture
def reachable(monkeypatch):
    """Two GPUs that reach one another's memory, as far as `connect_peers` can see."""
    cuda = SimpleNamespace(can_device_access_peer=lambda one, other: True)
    zeros, tensor = (lambda value, device: torch.zeros(value)), (lambda value, device: torch.tensor(value))
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, tensor=tensor))
    return torch.device("cuda", 0), torch.float16, 8, 64, 100


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, ImportError, TypeError])
def test_without_what_torch_offers(reachable, monkeypatch, error, caplog):
    """Other versions of torch may not have it, or call it otherwise."""

    def fail(*args):
        raise error("no such thing")

    monkeypatch.setattr(module, "Peers", fail)
    assert connect_peers(Parallel(0, 2, FakeGroup()), *reachable).peers is None
    assert "NCCL's alone: no such thing" in caplog.text


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_all_ranks_or_none(reachable, monkeypatch, others):
    monkeypatch.setattr(module, "Peers", lambda *args: "peers")
    assert connect_peers(Parallel(0, 2, FakeGroup(others)), *reachable).peers == ("peers" if others else None)


def test_the_group_is_aborted_whatever_the_device_says():
    def release():
        raise RuntimeError("the device is broken")

    group = FakeGroup()
    with pytest.raises(RuntimeError, match="is broken"):
        Parallel(0, 2, group, peers=SimpleNamespace(release=release)).abort()
    assert group.is_aborted


def test_folder_with_a_long_name(monkeypatch):
    """torch would write its socket's name over whatever comes behind it."""
    monkeypatch.setenv("TMPDIR", "/tmp/" + 90 * "x")
    with pytest.raises(RuntimeError, match="too long"):
        module._SharedMemory(Parallel(0, 2), torch.device("cpu"), [])
