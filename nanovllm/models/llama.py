"""Llama (1 to 3.x, and what shares its architecture: SmolLM2, ...)."""

from typing import Any

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    """Optional biases: `attention_bias` means all four attention projections, `mlp_bias` all three others."""

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        mlp_bias = bool(getattr(config, "mlp_bias", False))
        return DecoderSpec.from_config(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
