"""Decode steps as CUDA graphs: one launch instead of hundreds."""

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanovllm.engine.batch import PackedBatch, dummy_batch, pad_decode
from nanovllm.engine.prefix_groups import PrefixGroups, max_num_groups
from nanovllm.engine.step_tensors import StepTensors, flatten, upload, view_flat

logger = logging.getLogger(__name__)


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: every batch up to `max_num_seqs` pads to one of them, none is above it."""
    sizes = [1, 2, 4, 8]
    step = 8
    while sizes[-1] < max_num_seqs:
        if sizes[-1] >= 16 * step:  # from 128 on, at most about one row in sixteen is padding
            step *= 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class _Step:
    """A captured step: what makes hidden states, and what makes tokens of them."""

    forward: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    sampling: torch.cuda.CUDAGraph
    tokens: torch.Tensor


class DecodeGraphs:
    """Captured decode steps, by batch size. A step's input is copied into fixed buffers.

    Each step is two graphs, so that a batch which asks for more than plain sampling still replays the first. Batches
    with groups, which share prefixes, have steps of their own: others do without the kernel for them. These are
    captured when a batch first needs them; where there is no memory for that, each sequence reads its whole context.
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
        is_alone: bool,
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
            is_alone: whether no other rank captures the same at the same time.
        """
        self.batch_sizes = sorted(batch_sizes)
        self._forward, self._sample = forward, sample
        self._max_context_len, self._dummy_slot = max_context_len, dummy_slot
        self._group_capacity, self._device = group_capacity, device
        self._is_alone = is_alone
        self._without_groups: set[int] = set()  # sizes
        self._pool = torch.cuda.graph_pool_handle()
        largest = self._dummy(self.batch_sizes[-1], has_groups=True)
        self._buffer = torch.zeros(len(flatten(largest)), dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(self.batch_sizes[-1], table_width, dtype=torch.int32, device=device)
        self._steps = {(size, False): self._capture_step(size, False) for size in reversed(self.batch_sizes)}

    @torch.inference_mode()
    def replay_forward(self, batch: PackedBatch) -> torch.Tensor:
        """Launches a pure-decode batch; returns its N sequences' hidden states, valid until the next replay."""
        size, has_groups = self._key(batch)
        if has_groups and (size, True) not in self._steps:
            has_groups = self._can_capture_groups(size)
        if batch.has_groups and not has_groups:
            batch = replace(batch, groups=PrefixGroups.none(batch.context_lens, self._group_capacity))
        self._fill(pad_decode(batch, size, self._dummy_slot))
        step = self._steps[size, has_groups]
        step.forward.replay()
        return step.hidden[: len(batch.context_lens)]

    @torch.inference_mode()
    def replay_sampling(self, batch: PackedBatch) -> torch.Tensor:
        """Launches the sampling of the batch just replayed; returns its N tokens, valid until the next replay."""
        step = self._steps[self._key(batch)]
        step.sampling.replay()
        return step.tokens[: len(batch.context_lens)]

    def _key(self, batch: PackedBatch) -> tuple[int, bool]:
        """Batch size, and whether groups are attended to as such."""
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, len(batch.context_lens))]
        return size, batch.has_groups and size not in self._without_groups

    def _fill(self, batch: PackedBatch) -> None:
        """Copies a padded batch to where the graphs read it. Of the block tables, that is as much as the longest
        context has; nothing reads what earlier batches have left after it."""
        flat = upload(batch, self._device)
        tables = view_flat(flat, batch).block_tables
        self._buffer[: tables.storage_offset()].copy_(flat[: tables.storage_offset()])
        self._block_tables[: len(tables), : tables.shape[1]].copy_(tables)

    def _can_capture_groups(self, size: int) -> bool:
        """Captures a size's step with groups, if there is memory for it."""
        try:
            self._steps[size, True] = self._capture_step(size, True)
        except torch.OutOfMemoryError:
            if not self._is_alone:  # the other ranks are in the midst of it
                raise
            logger.warning("batches of %d do without shared prefixes: there is no memory for their CUDA graph", size)
            self._without_groups.add(size)
        return size not in self._without_groups

    def _capture_step(self, size: int, has_groups: bool) -> _Step:
        batch = self._dummy(size, has_groups)
        self._fill(batch)
        inputs = view_flat(
            self._buffer, batch, block_tables=self._block_tables[:size], max_context_len=self._max_context_len
        )
        self._sample(self._forward(inputs), inputs)  # compiles what capturing must not
        forward, hidden = self._capture(self._forward, inputs)
        return _Step(forward, hidden, *self._capture(self._sample, hidden, inputs))

    def _capture(
        self, run: Callable[..., torch.Tensor], *args: StepTensors | torch.Tensor
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other engines, in other threads, may launch and allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run(*args)
        return graph, output

    def _dummy(self, size: int, has_groups: bool) -> PackedBatch:
        batch = dummy_batch(
            size,
            1,
            dummy_slot=self._dummy_slot,
            num_filters=size,
            group_capacity=self._group_capacity,
            num_groups=min(int(has_groups), max_num_groups(size)),
        )
        return pad_decode(batch, size, self._dummy_slot)
