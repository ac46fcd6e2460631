"""What one forward pass knows beside its tokens and positions: the batch's layout in the KV cache."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of decoding sequences that share a prefix, as tensors; see `engine.prefix_groups.PrefixGroups` for shapes
    and meaning. There may be none: G is 0 then."""

    own_lens: torch.Tensor
    shared_lens: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    members: torch.Tensor

    @classmethod
    def none(cls, context_lens: torch.Tensor) -> "SharedPrefixes":
        """Of sequences that share nothing."""
        empty = context_lens[:0]
        return cls(
            own_lens=context_lens,
            shared_lens=torch.zeros_like(context_lens),
            places=context_lens.new_full((len(context_lens), 1), -1),
            starts=empty,
            lens=empty,
            members=empty[:, None],
        )


@dataclass
class ForwardContext:
    """Metadata of a forward over T tokens of S sequences. Read by `Attention` and its backends only.

    The first `num_decode_seqs` sequences have one query token each, so their tokens are the first of the batch.

    Attributes:
        kv_slots: [T] int32, where each token's KV is stored: block * block_size + offset; -1 is not stored.
        query_starts: [S + 1] int32, prefix sums of the query lengths.
        context_lens: [S] int32, KV tokens of each sequence, this step's included.
        block_tables: [S, W] int32.
        num_decode_seqs: number of sequences with one query token.
        max_query_len: longest query of the others, 0 if there are none.
        max_context_len: at least the longest context.
        prefixes: what the decoding sequences share. A backend that makes no use of it attends to each whole context.
        decode_plan, prefill_plan: what the attention backends prepared for this batch, once for all layers.
    """

    kv_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    num_decode_seqs: int
    max_query_len: int
    max_context_len: int
    prefixes: SharedPrefixes
    decode_plan: Any = None
    prefill_plan: Any = None


class _State(threading.local):
    """One forward a thread: engines may run side by side."""

    current: ForwardContext | None = None


_state = _State()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Sets the context of the forward that runs inside. Nesting is an error."""
    if _state.current is not None:
        raise RuntimeError("a forward is running already: forward contexts don't nest")
    try:
        _state.current = context
        yield
    finally:
        _state.current = None


def clear_forward_context() -> None:
    """Ends whatever forward an interrupt has cut off, even within the lines above."""
    _state.current = None


def get_forward_context() -> ForwardContext:
    if _state.current is None:
        raise RuntimeError("no forward is running: call the model inside forward_context()")
    return _state.current
