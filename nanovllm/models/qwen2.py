"""Qwen2 and Qwen2.5 (dense)."""

from typing import Any

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on query, key and value, always; none on the output projection."""

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        return DecoderSpec.from_config(config, qkv_bias=True)
