"""Mistral (dense)."""

from nanovllm.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """No biases. A sliding window limits the context length instead of being computed."""
