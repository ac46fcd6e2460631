"""Qwen3 (dense)."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Each head's query and key are normalised; `attention_bias` means all four attention projections."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
    }

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderSpec.from_config(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
