"""How many KV blocks fit. Pure arithmetic on numbers that the model runner measures."""

import os
from pathlib import Path

GIB = 1 << 30
# A CPU's KV cache takes at most this share of the machine's memory, and at most so many bytes.
_CPU_SHARE = 0.25
_CPU_MAX_BYTES = 4 * GIB
# What is left of the machine's memory beside KV blocks that are kept in it: at least this share.
_HOST_RESERVE = 0.1


def kv_cache_bytes(
    *, total: int, free: int, utilization: float, own: int, reserve: int, max_useful: int | None = None
) -> int:
    """Bytes of a device that the KV cache may take.

    Args:
        total: memory of the device.
        free: what is free on it now. Memory held by other processes lowers this number alone: it is not charged
            to this engine's share.
        utilization: share of the total that this engine may hold.
        own: what this engine holds already (weights).
        reserve: what it needs on top of that at its peak (activations, graphs).
        max_useful: the cache needs no more than this.

    Raises:
        ValueError: nothing is left; the message has the numbers.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization}")
    in_share = int(total * utilization) - own - reserve
    in_free = free - reserve
    available = min(in_share, in_free)
    if available <= 0:
        if in_share <= in_free:
            raise ValueError(
                f"no memory for the KV cache: this engine's share is {_gib(int(total * utilization))} "
                f"({utilization} of {_gib(total)}), but weights take {_gib(own)} and activations {_gib(reserve)}; "
                "raise gpu_memory_utilization or lower max_num_batched_tokens or max_num_seqs"
            )
        raise ValueError(
            f"no memory for the KV cache: only {_gib(free)} of {_gib(total)} are free beside weights and other "
            f"processes, and activations need {_gib(reserve)} of it"
        )
    return available if max_useful is None else min(available, max_useful)


def check_kv_blocks(num_blocks: int, block_bytes: int, total: int) -> None:
    """Raises ValueError if so many blocks as the user wants are more than the device's memory."""
    if num_blocks * block_bytes > total:
        raise ValueError(
            f"num_kvcache_blocks={num_blocks} of {block_bytes} bytes each take {_gib(num_blocks * block_bytes)}, but "
            f"the device has {_gib(total)}, at most {total // block_bytes} blocks"
        )


def cpu_kv_cache_bytes(max_useful: int, num_ranks: int = 1) -> int:
    """Bytes of main memory that the KV cache of each rank takes by default; see the constants above, which are about
    all ranks of all replicas together."""
    total = physical_memory()
    num_bytes = kv_cache_bytes(
        total=total,
        free=min(total, int(_CPU_MAX_BYTES)),
        utilization=_CPU_SHARE,
        own=0,
        reserve=0,
        max_useful=max_useful * num_ranks,
    )
    return num_bytes // num_ranks


def host_cache_bytes(gib: float, num_ranks: int, num_replicas: int) -> int:
    """Bytes of host memory for each rank's KV blocks.

    Args:
        gib: `kv_offload_gb`, of one replica.

    Raises:
        ValueError: the machine has too little memory for all replicas; the message has the numbers.
    """
    wanted, total = gib * num_replicas * GIB, physical_memory()
    if wanted > (1 - _HOST_RESERVE) * total:
        raise ValueError(
            f"kv_offload_gb={gib} with data_parallel_size={num_replicas} is {_gib(wanted)} of host memory, but of the "
            f"machine's {_gib(total)} at most {_gib((1 - _HOST_RESERVE) * total)} can be had"
        )
    return int(gib * GIB) // num_ranks


def physical_memory() -> int:
    """Bytes of main memory of this machine, or of this container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
