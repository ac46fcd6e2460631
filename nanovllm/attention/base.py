"""The contract of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.utils.context import ForwardContext


@dataclass(frozen=True)
class AttentionSpec:
    """What a model asks of its attention.

    Attributes:
        num_heads, num_kv_heads: query and key/value heads on this device; the first is a multiple of the second.
        head_dim: size of a head.
        scale: factor of the scores before the softmax.
        dtype: of queries, keys, values and cache.
        device: where they are.
        block_size: tokens in a KV block, or None while the backend may still choose it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None


class AttentionBackend(ABC):
    """Attention over the paged KV cache. One object serves all layers of a model.

    A layer's cache is a pair `k_cache`, `v_cache`, each [num_blocks, block_size, num_kv_heads, head_dim]. In each
    layer the KV of all tokens of the batch is stored before `decode` or `prefill` is called, so a token may attend to
    KV that another sequence of the same batch has just stored in a shared block.

    Attributes:
        name: what a user calls it.
        preferred_block_size: block size if the user leaves the choice.
        captures_in_graphs: whether `prepare_decode` and `decode` can be captured in a CUDA graph.
    """

    name: str
    preferred_block_size: int
    captures_in_graphs = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @property
    def group_capacity(self) -> int:
        """Most sequences of a group of which `decode` reads a shared prefix once; 0 if it reads whole contexts."""
        return 0

    def shared_bytes(self, num_groups: int) -> int:
        """Memory that decoding with so many groups takes at most, beside what it takes without any."""
        return 0

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why the backend can't serve the spec, a missing package being one; empty if it can."""

    def prepare_decode(self, context: ForwardContext) -> Any:
        """What `decode` needs of a batch in every layer; kept as `context.decode_plan`."""

    def prepare_prefill(self, context: ForwardContext) -> Any:
        """What `prefill` needs of a batch in every layer; kept as `context.prefill_plan`."""

    @abstractmethod
    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attention of one query token a sequence.

        Args:
            query: [num_decode_seqs, num_heads, head_dim], of the first sequences of the context. A sequence with a
                context length of 0 is padding: its output may be anything but must not disturb the others'.

        Returns:
            The same shape.
        """

    @abstractmethod
    def prefill(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Causal attention of the last query_len tokens of each sequence.

        Args:
            query: [T - num_decode_seqs, num_heads, head_dim], of the sequences after the decode ones, packed
                by `context.query_starts[num_decode_seqs:]`. Query i of a sequence with query length L and
                context length C has position C - L + i and sees the keys up to that position.

        Returns:
            The same shape.
        """
