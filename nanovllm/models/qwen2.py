"""Qwen2 and Qwen2.5 (dense)."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on query, key and value, always; none on the output projection."""

    config_defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 32, "use_sliding_window": False}

    @classmethod
    def make_spec(cls, config: Any) -> DecoderSpec:
        return DecoderSpec.from_config(config, qkv_bias=True)
