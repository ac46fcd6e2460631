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
    """Captured decode steps, by batch size. A step's whole input is one copy into a fixed buffer.

    Each step is two graphs, so that a batch which asks for more than plain sampling still replays the first.
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], torch.Tensor],
        sample: Callable[[torch.Tensor, StepTensors], torch.Tensor],
        batch_sizes: list[int],
        *,
        table_width: int,
        max_context_len: int,
        dummy_slot: int,
        group_capacity: int,
        device: torch.device,
    ) -> None:
        """Captures every size, the largest first, so that the others share its memory.

        Args:
            forward: a step's model; returns the hidden states [N, hidden_size].
            sample: what makes tokens [N] of them.
            table_width: blocks of the longest sequence.
            max_context_len: tokens of the longest sequence.
            dummy_slot: where padding rows leave their token.
            group_capacity: most sequences of a group that shares a prefix.
        """
        self.batch_sizes = sorted(batch_sizes)
        self._table_width, self._dummy_slot = table_width, dummy_slot
        self._group_capacity = group_capacity
        self._pool = torch.cuda.graph_pool_handle()
        self._forward: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sampling: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        largest = len(flatten(self._padded_dummy(self.batch_sizes[-1])))
        self._buffer = torch.zeros(largest, dtype=torch.int32, device=device)
        for size in reversed(self.batch_sizes):
            batch = self._padded_dummy(size)
            flat = torch.from_numpy(flatten(batch))
            self._buffer[: len(flat)].copy_(flat)
            inputs = view_flat(self._buffer, batch, max_context_len=max_context_len)
            sample(forward(inputs), inputs)  # compiles what capturing must not
            self._forward[size] = _, hidden = self._capture(forward, inputs)
            self._sampling[size] = self._capture(sample, hidden, inputs)

    @torch.inference_mode()
    def replay_forward(self, batch: PackedBatch) -> torch.Tensor:
        """Launches a pure-decode batch; returns its N sequences' hidden states, valid until the next replay."""
        size = self._size(batch)
        flat = torch.from_numpy(flatten(pad_decode(batch, size, self._table_width, self._dummy_slot)))
        self._buffer[: len(flat)].copy_(flat.pin_memory(), non_blocking=True)
        graph, hidden = self._forward[size]
        graph.replay()
        return hidden[: len(batch.context_lens)]

    @torch.inference_mode()
    def replay_sampling(self, batch: PackedBatch) -> torch.Tensor:
        """Launches the sampling of the batch just replayed; returns its N tokens, valid until the next replay."""
        graph, tokens = self._sampling[self._size(batch)]
        graph.replay()
        return tokens[: len(batch.context_lens)]

    def _size(self, batch: PackedBatch) -> int:
        return self.batch_sizes[bisect.bisect_left(self.batch_sizes, len(batch.context_lens))]

    def _capture(
        self, run: Callable[..., torch.Tensor], *args: StepTensors | torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other engines, in other threads, may launch and allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run(*args)
        return graph, output

    def _padded_dummy(self, size: int) -> PackedBatch:
        batch = dummy_batch(size, 1, dummy_slot=self._dummy_slot, num_filters=size, group_capacity=self._group_capacity)
        return pad_decode(batch, size, self._table_width, self._dummy_slot)
