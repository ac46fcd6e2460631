"""Fills a model's parameters, from a checkpoint or at random."""

import re

import torch
from torch import nn

from nanovllm.layers.linear import MergedLinear
from nanovllm.models import DecoderForCausalLM
from nanovllm.utils.checkpoint import Checkpoint

# Tables that older checkpoints saved although they follow from the config.
_ROTARY_BUFFER = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_DUMMY_STD = 0.02


def load_weights(model: DecoderForCausalLM, checkpoint: Checkpoint) -> None:
    """Copies every tensor of the checkpoint to its place.

    Raises:
        ValueError: a parameter without a tensor, a tensor without a place, or a shape that doesn't fit.
    """
    targets = checkpoint_targets(model)
    unknown = []
    for name, source in checkpoint.tensors():
        target = targets.pop(name, None)
        if target is not None:
            if source.shape != tuple(target.shape):
                wanted = list(target.shape)
                raise ValueError(f"{checkpoint.name}: {name} has shape {list(source.shape)}, not {wanted}")
            source.copy_to(target)
        elif not _is_redundant(name, model):
            unknown.append(name)
    if targets:
        raise ValueError(f"{checkpoint.name}: {_listing(list(targets))} missing from the checkpoint")
    if unknown:
        raise ValueError(f"{checkpoint.name}: {_listing(unknown)} unknown to {type(model).__name__}")


def load_dummy_weights(model: DecoderForCausalLM) -> None:
    """Random weights, the same each time: normal with a standard deviation of 0.02, norms 1, biases 0."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)


def checkpoint_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the (part of a) parameter that it fills. A tied parameter has one name, its first."""
    targets: dict[str, torch.Tensor] = {}
    merged = {name: module for name, module in model.named_modules() if isinstance(module, MergedLinear)}
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        if module_name not in merged:
            targets[name] = parameter.data
            continue
        parent = module_name.rpartition(".")[0]
        for part, rows in merged[module_name].parts.items():
            targets[f"{parent}.{part}.{kind}"] = parameter.data[rows]
    return targets


def _is_redundant(name: str, model: DecoderForCausalLM) -> bool:
    return bool(_ROTARY_BUFFER.search(name)) or (name == "lm_head.weight" and model.spec.tie_word_embeddings)


def _listing(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return (
        f"{shown} and {len(names) - 5} more are" if len(names) > 5 else f"{shown} {'is' if len(names) == 1 else 'are'}"
    )
