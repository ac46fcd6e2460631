"""Fills a model's parameters, from a checkpoint or at random."""

import re
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.layers.embed_head import VocabEmbedding
from nanovllm.layers.linear import MergedLinear, RowLinear
from nanovllm.layers.parallel import Shard
from nanovllm.models import DecoderForCausalLM
from nanovllm.utils.checkpoint import Checkpoint, TensorSource

# Tables that older checkpoints saved although they follow from the config.
_ROTARY_BUFFER = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_DUMMY_STD = 0.02


@dataclass(frozen=True)
class Target:
    """The (part of a) parameter that a checkpoint's tensor fills, with all of it or with a shard of dimension `dim`."""

    tensor: torch.Tensor
    dim: int = 0
    shard: Shard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor in the checkpoint."""
        shape = list(self.tensor.shape)
        if self.shard is not None:
            shape[self.dim] = self.shard.size
        return tuple(shape)

    def fill(self, source: TensorSource) -> None:
        """Copies what is wanted of a tensor of that shape, and reads no more."""
        if self.shard is None or self.shard.pieces == (slice(0, self.shard.size),):
            source.copy_to(self.tensor)
            return
        first = 0
        for piece in self.shard.pieces:
            length = piece.stop - piece.start
            if length:
                part = (*[slice(None)] * self.dim, piece)
                source.copy_to(self.tensor.narrow(self.dim, first, length), part)
            first += length


def load_weights(model: DecoderForCausalLM, checkpoint: Checkpoint) -> None:
    """Copies every tensor of the checkpoint, or a rank's part of each, to its place.

    Raises:
        ValueError: a parameter without a tensor, a tensor without a place, or a shape that doesn't fit.
    """
    targets = checkpoint_targets(model)
    unknown = []
    for name, source in checkpoint.tensors():
        target = targets.pop(name, None)
        if target is not None:
            if source.shape != target.shape:
                raise ValueError(f"{checkpoint.name}: {name} has shape {list(source.shape)}, not {list(target.shape)}")
            target.fill(source)
        elif not _is_redundant(name, model):
            unknown.append(name)
    if targets:
        raise ValueError(f"{checkpoint.name}: {_listing(list(targets))} missing from the checkpoint")
    if unknown:
        raise ValueError(f"{checkpoint.name}: {_listing(unknown)} unknown to {type(model).__name__}")


def load_dummy_weights(model: DecoderForCausalLM, rank: int = 0) -> None:
    """Random weights, the same each time: normal with a standard deviation of 0.02, norms 1, biases 0."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(rank)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)


def checkpoint_targets(model: nn.Module) -> dict[str, Target]:
    """Checkpoint name -> what it fills. A tied parameter has one name, its first."""
    targets: dict[str, Target] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        module_name, _, kind = name.rpartition(".")
        module = modules[module_name]
        if isinstance(module, MergedLinear):
            parent = module_name.rpartition(".")[0]
            for part, (rows, shard) in module.parts.items():
                targets[f"{parent}.{part}.{kind}"] = Target(parameter.data[rows], 0, shard)
        elif isinstance(module, RowLinear) and kind == "weight":
            targets[name] = Target(parameter.data, 1, module.columns)
        elif isinstance(module, VocabEmbedding):
            targets[name] = Target(parameter.data[: len(module.rows)], 0, module.rows)
        else:
            targets[name] = Target(parameter.data)
    return targets


def _is_redundant(name: str, model: DecoderForCausalLM) -> bool:
    return bool(_ROTARY_BUFFER.search(name)) or (name == "lm_head.weight" and model.spec.tie_word_embeddings)


def _listing(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return (
        f"{shown} and {len(names) - 5} more are" if len(names) > 5 else f"{shown} {'is' if len(names) == 1 else 'are'}"
    )
