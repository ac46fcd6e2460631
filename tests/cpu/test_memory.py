"""Sizing of the KV cache, fed with numbers."""

import os
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine import memory
from nanovllm.engine.memory import GIB, cpu_kv_cache_bytes, kv_cache_bytes, physical_memory

CARD = {"total": 80 * GIB, "free": 70 * GIB, "utilization": 0.5, "own": 10 * GIB, "reserve": 5 * GIB}


def size(**changes: Any) -> float:
    """GiB for the KV cache on an 80 GiB card where this engine may take half of it."""
    return kv_cache_bytes(**{**CARD, **changes}) / GIB


def test_share_of_an_empty_card() -> None:
    """What the share leaves after weights and activations."""
    assert size() == 40 - 10 - 5
    assert size(utilization=1.0, free=70 * GIB) == 70 - 5
    assert size(utilization=1) == 65


def test_neighbour_is_not_charged_to_the_share() -> None:
    """Another process takes half of the card: this engine's half is whole. Taking everything in use for its own
    would leave nothing."""
    assert size(free=30 * GIB) == 25


def test_neighbour_takes_what_the_share_counts_on() -> None:
    """Half of the card is somebody else's, and 90 % was asked for: only what is free can be had."""
    assert size(free=30 * GIB, utilization=0.9) == 30 - 5


def test_what_is_held_already_counts_once() -> None:
    """Weights lower the share, but they are not taken from what is free any more."""
    assert size(own=30 * GIB, free=50 * GIB) == 5
    assert size(own=0, free=80 * GIB) == 35


def test_cap() -> None:
    """No more than is of any use, and the cap never adds anything."""
    assert size(max_useful=3 * GIB) == 3
    assert size(max_useful=300 * GIB) == 25


def test_result_is_whole_bytes() -> None:
    num_bytes = kv_cache_bytes(total=1001, free=1001, utilization=0.333, own=0, reserve=0)
    assert num_bytes == 333 and isinstance(num_bytes, int)


@pytest.mark.parametrize("utilization", [0, 0.0, -0.1, 1.0001, 1.5, 90, float("nan"), float("inf")])
def test_impossible_share(utilization: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be in \(0, 1\], got"):
        size(utilization=utilization)


def test_weights_larger_than_the_share() -> None:
    """The share is what was short: its size, the weights' and the way out are named."""
    with pytest.raises(ValueError) as error:
        size(own=45 * GIB, free=35 * GIB)
    message = str(error.value)
    for part in ("share is 40.00 GiB", "0.5 of 80.00 GiB", "weights take 45.00 GiB", "activations 5.00 GiB"):
        assert part in message
    assert "raise gpu_memory_utilization" in message


def test_activations_larger_than_the_share() -> None:
    with pytest.raises(ValueError, match=r"share is 40\.00 GiB.*activations 31\.00 GiB"):
        size(reserve=31 * GIB)


def test_too_little_free() -> None:
    """A neighbour was what was short: a larger share would not help, so it is not what the message offers."""
    with pytest.raises(ValueError) as error:
        size(free=4 * GIB)
    message = str(error.value)
    for part in ("only 4.00 GiB of 80.00 GiB are free", "other processes", "activations need 5.00 GiB"):
        assert part in message
    assert "gpu_memory_utilization" not in message


def test_last_byte() -> None:
    """One byte is something, none is an error; in both ways to run short."""
    exact: dict[str, Any] = {"total": 1000, "free": 500, "utilization": 0.5, "reserve": 100}
    assert kv_cache_bytes(own=399, **exact) == 1
    assert kv_cache_bytes(own=0, **{**exact, "free": 101}) == 1
    with pytest.raises(ValueError, match="share"):
        kv_cache_bytes(own=400, **exact)
    with pytest.raises(ValueError, match="free"):
        kv_cache_bytes(own=0, **{**exact, "free": 100})


@pytest.mark.parametrize("memory_gib, useful_gib, expected_gib", [(8, 100, 2), (64, 100, 4), (64, 1, 1), (8, 3, 2)])
def test_cpu_cache(monkeypatch: pytest.MonkeyPatch, memory_gib: int, useful_gib: int, expected_gib: int) -> None:
    """A quarter of the machine, at most 4 GiB, and no more than is of use."""
    monkeypatch.setattr(memory, "physical_memory", lambda: memory_gib * GIB)
    assert cpu_kv_cache_bytes(useful_gib * GIB) == expected_gib * GIB


@pytest.mark.parametrize(
    "files, limit",
    [
        ({}, None),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/sys/fs/cgroup/memory.max": "123456789\n"}, 123456789),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "987654321\n"}, 987654321),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),  # version 1's "no limit"
    ],
)
def test_container_limit(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None) -> None:
    """In a container the machine's memory is not all there for the taking."""

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}.__getitem__)
    assert physical_memory() == (16 * GIB if limit is None else limit)


def test_memory_of_this_machine() -> None:
    assert GIB // 8 < physical_memory() < 2**50
