"""The one decoder-only transformer that all supported architectures are; a model file states what differs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.attention.base import AttentionSpec
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import LMHead, VocabEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GatedLinear, MergedLinear, RowLinear
from nanovllm.layers.parallel import SINGLE, HeadShare, Parallel
from nanovllm.layers.peers import ATTENTION, MLP, PartialSum
from nanovllm.layers.rotary_embedding import RopeSpec, RotaryEmbedding, Rotation

# Field of the spec -> key of a transformers config.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and options of a decoder. The `*_bias` flags say which projections have one; `qk_norm` whether each
    head's query and key are normalised before they are rotated; `sliding_window` how far back a token sees
    (None: to the beginning)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeSpec
    max_position_embeddings: int
    sliding_window: int | None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: Any, **differences: Any) -> "DecoderSpec":
        """Reads what the architectures share from a model's config.

        Raises:
            ValueError: the config lacks something, or asks for something that this decoder does not do.
        """
        sizes: dict[str, Any] = {field: _size(config, name) for field, name in _SIZES.items()}
        activation = getattr(config, "hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"activation {activation!r} is not supported (supported: 'silu')")
        num_heads = sizes["num_heads"]
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads can't share {num_kv_heads} KV heads")
        head_dim = getattr(config, "head_dim", None) or sizes["hidden_size"] // num_heads
        return cls(
            **sizes,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            rope=RopeSpec.from_config(config, head_dim),
            sliding_window=_sliding_window(config),
            **differences,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence that the model is meant for, and that this decoder computes exactly."""
        limit = max(self.max_position_embeddings, self.rope.max_len)
        # Up to its length, a window sees all there is: full attention is the same.
        return limit if self.sliding_window is None else min(limit, self.sliding_window)

    def head_share(self, parallel: Parallel) -> HeadShare:
        """The heads that a rank computes. Raises ValueError if they can't be shared out."""
        return parallel.shard_heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def attention_spec(
        self, dtype: torch.dtype, device: torch.device, block_size: int | None, parallel: Parallel = SINGLE
    ) -> AttentionSpec:
        """What a rank asks of its attention backend."""
        heads = self.head_share(parallel)
        scale = self.head_dim**-0.5
        return AttentionSpec(heads.num_heads, len(heads.kv_heads), self.head_dim, scale, dtype, device, block_size)


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"the model's config needs a positive integer as {name!r}, got {value!r}")
    return value


def _sliding_window(config: Any) -> int | None:
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


class DecoderAttention(nn.Module):
    def __init__(self, spec: DecoderSpec, parallel: Parallel) -> None:
        super().__init__()
        heads = spec.head_share(parallel)
        parts = {"q_proj": heads.query_rows, "k_proj": heads.kv_rows, "v_proj": heads.kv_rows}
        self.qkv_proj = MergedLinear(spec.hidden_size, parts, spec.qkv_bias)
        self.o_proj = RowLinear(heads.query_rows, spec.hidden_size, spec.output_bias, parallel, ATTENTION)
        self.norms = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
            self.norms = (self.q_norm, self.k_norm)
        self.attention = Attention(heads.num_heads, len(heads.kv_heads), spec.head_dim)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor | PartialSum:
        return self.o_proj.in_pieces(self.attention(self.qkv_proj(hidden), self.norms, rotation))


class DecoderMLP(nn.Module):
    def __init__(self, spec: DecoderSpec, parallel: Parallel) -> None:
        super().__init__()
        features = parallel.shard(spec.intermediate_size)
        self.gate_up_proj = GatedLinear(spec.hidden_size, features, spec.mlp_bias)
        self.down_proj = RowLinear(features, spec.hidden_size, spec.mlp_bias, parallel, MLP)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | PartialSum:
        return self.down_proj.in_pieces(self.gate_up_proj(hidden))


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, parallel: Parallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = DecoderAttention(spec, parallel)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = DecoderMLP(spec, parallel)


class Decoder(nn.Module):
    def __init__(self, spec: DecoderSpec, max_len: int, parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        layers = [DecoderLayer(spec, parallel) for _ in range(spec.num_layers)]
        self.layers: Iterable[DecoderLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary = RotaryEmbedding(spec.rope, max_len)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor | None) -> torch.Tensor:
        rotation = self.rotary(positions, rope_lens)
        residual = self.embed_tokens(token_ids)
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        hidden: torch.Tensor = norms[0](residual)
        # The residual stream takes each block's output together with the norm that comes next: one kernel on a GPU.
        for layer, next_norm in zip(self.layers, norms[1:], strict=True):
            output = layer.self_attn(hidden, rotation)
            output = layer.mlp(layer.post_attention_layernorm.add_and_normalize(output, residual))
            hidden = next_norm.add_and_normalize(output, residual)
        return hidden


class DecoderForCausalLM(nn.Module):
    """Base of the architectures. Module names are those of the checkpoints, so that tensors find their place.

    Attributes:
        config_defaults: what a key that the config leaves out means to transformers, where it matters.
    """

    config_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, spec: DecoderSpec, max_len: int, parallel: Parallel = SINGLE) -> None:
        """`max_len`: positions are below this. `parallel`: what part of the weights is here."""
        super().__init__()
        self.spec = spec
        self.model = Decoder(spec, max_len, parallel)
        self.lm_head = LMHead(spec.vocab_size, spec.hidden_size, parallel)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        """What the architecture makes of a model's config; subclasses state what differs.

        Raises:
            ValueError: the config asks for something unsupported.
        """
        return DecoderSpec.from_config(config)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rope_lens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final hidden states [T, hidden_size] of T tokens at their positions, inside a forward context.

        `rope_lens` [T] are the context lengths that a dynamic rotary embedding adapts to.
        """
        return self.model(token_ids, positions, rope_lens)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> [N, vocab_size], on rank 0; the others take part."""
        return self.lm_head(hidden)

    def attention_layers(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]
