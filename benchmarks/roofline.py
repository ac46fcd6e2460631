"""The least time that a job can take on a device, from bytes and operations counted and rates measured on the spot."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.workloads import Request
from nanovllm.models import DecoderSpec

_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second read from memory, and multiply-add operations (two each) a second."""

    bytes_per_second: float
    flops_per_second: float

    def of_devices(self, number: int) -> "DeviceRates":
        """Those of several that share the work without losing anything over it."""
        return DeviceRates(number * self.bytes_per_second, number * self.flops_per_second)


@dataclass(frozen=True)
class Bound:
    """What the seconds that a job takes at least are made of."""

    weight_seconds: float
    kv_seconds: float
    prefill_seconds: float

    @property
    def seconds(self) -> float:
        return self.weight_seconds + self.kv_seconds + self.prefill_seconds


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """A large copy (bytes read and written count), and a large matrix product of random numbers; the best of five."""
    num_bytes, size = _COPY_BYTES[device.type], _MATRIX_SIZE[device.type]
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy_seconds = min(_seconds(lambda: target.copy_(source), device) for _ in range(5))
    product_seconds = min(_seconds(lambda: left @ right, device) for _ in range(5))
    return DeviceRates(num_bytes / copy_seconds, 2 * size**3 / product_seconds)


def bound(
    requests: list[Request], spec: DecoderSpec, dtype: torch.dtype, rates: DeviceRates, max_num_seqs: int
) -> Bound:
    """Least time of a job: every step reads each weight once, or multiplies it with each sequence's token if that
    takes longer, and reads each live KV byte once (a shared prefix's once for all); the prompts' arithmetic comes on
    top. Sequences start as soon as one of `max_num_seqs` places is free."""
    read_seconds = num_parameters(spec) * dtype.itemsize / rates.bytes_per_second
    token_seconds = 2 * num_parameters(spec) / rates.flops_per_second
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    num_shared = max((request.num_shared for request in requests), default=0)
    waiting = [(len(r.prompt) - r.num_shared, r.max_tokens) for r in reversed(requests)]
    lengths = np.zeros(0, dtype=np.int64)
    left = np.zeros(0, dtype=np.int64)
    weight_seconds, num_kv_tokens = 0.0, 0
    while waiting or len(left):
        admitted = [waiting.pop() for _ in range(min(max_num_seqs - len(left), len(waiting)))]
        lengths = np.append(lengths, [own for own, _ in admitted]).astype(np.int64)
        left = np.append(left, [num_tokens for _, num_tokens in admitted]).astype(np.int64)
        jump = int(left.min())  # nobody ends and nobody starts in between
        weight_seconds += jump * max(read_seconds, len(left) * token_seconds)
        num_kv_tokens += jump * (int(lengths.sum()) + num_shared) + len(left) * jump * (jump - 1) // 2
        lengths, left = lengths + jump, left - jump
        lengths, left = lengths[left > 0], left[left > 0]
    prefill_flops = _prefill_flops(requests, spec, num_shared)
    kv_seconds = num_kv_tokens * kv_bytes / rates.bytes_per_second
    return Bound(weight_seconds, kv_seconds, prefill_flops / rates.flops_per_second)


def num_parameters(spec: DecoderSpec) -> int:
    """Weights that a decode step reads: all but an untied input embedding."""
    return _layer_parameters(spec) * spec.num_layers + spec.vocab_size * spec.hidden_size


def _layer_parameters(spec: DecoderSpec) -> int:
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def _prefill_flops(requests: list[Request], spec: DecoderSpec, num_shared: int) -> float:
    num_tokens = num_shared + sum(len(r.prompt) - r.num_shared for r in requests)
    # Token i attends to i + 1 keys: twice (scores and values) two operations a head dimension.
    pairs = num_shared**2 / 2 + sum((len(r.prompt) ** 2 - r.num_shared**2) / 2 for r in requests)
    attention = 4 * pairs * spec.num_layers * spec.num_heads * spec.head_dim
    return 2 * num_tokens * _layer_parameters(spec) * spec.num_layers + attention


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
