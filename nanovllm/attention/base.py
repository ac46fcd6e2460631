"""The contract of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

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

    A layer's cache is a pair `k_cache`, `v_cache`, each [num_blocks, block_size, num_kv_heads, head_dim].
    Each forward calls `prepare` once, then in each layer `store_kv` for all tokens and, after it, `decode` for the
    sequences with one query token and `prefill` for the others (either is skipped if there are none). Thus a
    token may attend to KV that another sequence of the same batch has just stored in a shared block.
    """

    name: str
    preferred_block_size: int

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why the backend can't serve the spec; empty if it can."""

    def prepare(self, context: ForwardContext) -> None:
        """Computes what all layers need of a batch, into `context.attention_plan`. May do nothing."""

    @abstractmethod
    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: ForwardContext,
    ) -> None:
        """Writes the KV of all T tokens, each [T, num_kv_heads, head_dim], to `context.kv_slots`."""

    @abstractmethod
    def decode(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attention of one query token a sequence.

        Args:
            query: [num_decode_seqs, num_heads, head_dim], of the first sequences of the context.

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
