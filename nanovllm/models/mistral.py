"""Mistral (dense)."""

from typing import Any, ClassVar

from nanovllm.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """No biases. A sliding window limits the context length instead of being computed."""

    config_defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
