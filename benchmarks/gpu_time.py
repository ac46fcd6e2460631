"""What a GPU does while something runs: its kernels and copies, and how much of the time there is none."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float, str]  # start and end in us, and name


def profile_device(run: Callable[[], object]) -> list[Span]:
    """Kernels and copies of a run, by their start."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def idle_share(spans: list[Span]) -> float:
    """Share of the time from the first start to the last end in which nothing runs."""
    first = busy_until = spans[0][0]
    busy = 0.0
    for start, end, _ in spans:
        busy += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return 1 - busy / (busy_until - first)
