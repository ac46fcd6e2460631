"""Supported architectures, imported when a checkpoint asks for one."""

from importlib import import_module
from typing import Any

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec

# Name in the config -> module of this package. The module holds a class of that name.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

__all__ = ["ARCHITECTURES", "DecoderForCausalLM", "DecoderSpec", "resolve_architecture"]


def resolve_architecture(config: Any) -> tuple[type[DecoderForCausalLM], DecoderSpec]:
    """Class and spec of a transformers config's model.

    Raises:
        ValueError: the architecture, or something that the config asks of it, is not supported.
    """
    names = list(getattr(config, "architectures", None) or [])
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise ValueError(
            f"architecture {', '.join(names) or config.model_type!r} is not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError("quantized checkpoints are not supported: quantization_config is set")
    cls = getattr(import_module(f"nanovllm.models.{ARCHITECTURES[name]}"), name)
    return cls, cls.make_spec(config)
