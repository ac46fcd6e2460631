"""Supported architectures, imported when a checkpoint asks for one."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.layers.parallel import SINGLE, Parallel
from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec

# Name in the config -> module of this package. The module holds a class of that name.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

__all__ = ["ARCHITECTURES", "DecoderForCausalLM", "DecoderSpec", "build_model", "resolve_architecture"]


def resolve_architecture(config: Any) -> tuple[type[DecoderForCausalLM], DecoderSpec]:
    """Class and spec of a config's model.

    Raises:
        ValueError: the architecture, or something that the config asks of it, is not supported.
    """
    names = list(getattr(config, "architectures", None) or [])
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise ValueError(
            f"architecture {', '.join(map(str, names)) or getattr(config, 'model_type', None)!r} is not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError("quantized checkpoints are not supported: quantization_config is set")
    cls = getattr(import_module(f"nanovllm.models.{ARCHITECTURES[name]}"), name)
    return cls, cls.make_spec(SimpleNamespace(**{**cls.config_defaults, **vars(config)}))


def build_model(
    model_class: type[DecoderForCausalLM],
    spec: DecoderSpec,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = SINGLE,
) -> DecoderForCausalLM:
    """A model for sequences of up to `max_len` tokens, or a rank's part of it, its parameters of a dtype, on a device,
    and uninitialised."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(spec, max_len, parallel)
    finally:
        torch.set_default_dtype(previous)
    return model.to(device).eval()
