"""Decode steps as CUDA graphs: one launch instead of hundreds."""

import bisect
from collections.abc import Callable

import torch

from nanovllm.engine.batch import PackedBatch, dummy_batch, pad_decode
from nanovllm.engine.step_tensors import StepTensors, flatten, view_flat


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: every batch up to `max_num_seqs` pads to one of them, none is above it."""
    sizes = [1, 2, 4, 8]
    step = 8
    while sizes[-1] < max_num_seqs:
        if sizes[-1] >= 16 * step:  # from 128 on, at most about one row in sixteen is padding
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Captured decode steps, by batch size. A step's whole input is one copy into a fixed buffer."""

    def __init__(
        self,
        execute: Callable[[StepTensors], torch.Tensor],
        batch_sizes: list[int],
        *,
        table_width: int,
        max_context_len: int,
        dummy_slot: int,
        device: torch.device,
    ) -> None:
        """Captures every size, the largest first, so that the others share its memory.

        Args:
            execute: what a step does on the device; returns the sampled tokens [N].
            table_width: blocks of the longest sequence.
            max_context_len: tokens of the longest sequence.
            dummy_slot: where padding rows leave their token.
        """
        self.batch_sizes = sorted(batch_sizes)
        self._table_width, self._dummy_slot = table_width, dummy_slot
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        largest = len(flatten(self._padded_dummy(self.batch_sizes[-1])))
        self._buffer = torch.zeros(largest, dtype=torch.int32, device=device)
        for size in reversed(self.batch_sizes):
            batch = self._padded_dummy(size)
            flat = torch.from_numpy(flatten(batch))
            self._buffer[: len(flat)].copy_(flat)
            inputs = view_flat(self._buffer, batch, max_context_len=max_context_len)
            execute(inputs)  # compiles what capturing must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                tokens = execute(inputs)
            self._graphs[size] = graph, tokens

    @torch.inference_mode()
    def replay(self, batch: PackedBatch) -> torch.Tensor:
        """Launches a pure-decode batch; returns the tokens of its N sequences, valid until the next replay."""
        num_seqs = len(batch.context_lens)
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, num_seqs)]
        flat = torch.from_numpy(flatten(pad_decode(batch, size, self._table_width, self._dummy_slot)))
        self._buffer[: len(flat)].copy_(flat.pin_memory(), non_blocking=True)
        graph, tokens = self._graphs[size]
        graph.replay()
        return tokens[:num_seqs]

    def _padded_dummy(self, size: int) -> PackedBatch:
        batch = dummy_batch(size, 1, dummy_slot=self._dummy_slot, num_filters=size)
        return pad_decode(batch, size, self._table_width, self._dummy_slot)
