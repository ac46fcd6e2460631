"""Rotary position embedding (Su et al., 2021) and the ways it is stretched to longer contexts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Type -> what it can't do without beside theta: positive numbers.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of a model.

    Attributes:
        head_dim: rotated dimensions of a head, all of them.
        theta: base of the frequencies theta^(-2i / head_dim).
        rope_type: one of ROPE_TYPES.
        original_max_len: context length that the model was trained on before it was stretched.
        parameters: the rest of the checkpoint's rope settings, e.g. "factor".
    """

    head_dim: int
    theta: float
    rope_type: str
    original_max_len: int
    parameters: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any, head_dim: int) -> "RopeSpec":
        """Reads a model's config, with `rope_parameters` or the older `rope_theta` and `rope_scaling`.

        Raises:
            ValueError: the rope type is not supported, or only part of a head is rotated.
        """
        parameters = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError("rotary embeddings that differ from layer to layer are not supported")
        partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        if partial != 1.0:
            raise ValueError(f"partial rotary embedding (partial_rotary_factor={partial}) is not supported")
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
        for key in ROPE_TYPES[rope_type]:
            value = parameters.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"rope type {rope_type!r} needs a positive number as {key!r}, got {value!r}")
        theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
        # Dynamic scaling starts where the configured length ends; the other types may name their origin.
        original = None if rope_type == "dynamic" else parameters.get("original_max_position_embeddings")
        return cls(head_dim, float(theta), rope_type, original or config.max_position_embeddings, parameters)

    @property
    def max_len(self) -> int:
        """Longest context that the embedding is meant for."""
        is_stretched = self.rope_type in ("linear", "dynamic", "yarn")
        factor = self.parameters.get("factor") or 1.0
        return int(self.original_max_len * factor) if is_stretched else self.original_max_len

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on the length of its prompt, not on its position alone."""
        return self.rope_type == "dynamic"


@dataclass(frozen=True)
class Rotation:
    """The rotations of a batch: token i is rotated by row `rows[i]` of the table.

    Attributes:
        table: [num_rows, head_dim] float32, cosines in the first half of a row, sines in the second.
        rows: [T] int32.
    """

    table: torch.Tensor
    rows: torch.Tensor


class RotaryEmbedding(nn.Module):
    """The rotation of each position, made once a forward for all layers."""

    inverse_frequencies: torch.Tensor
    table: torch.Tensor

    def __init__(self, spec: RopeSpec, max_len: int) -> None:
        """`max_len`: positions are below this."""
        super().__init__()
        self.spec = spec
        inverse_frequencies, self.amplitude = _frequencies(spec)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)
        num_rows = 0 if spec.depends_on_length else max_len
        table = self._rows(torch.arange(num_rows, device="cpu"), inverse_frequencies)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> Rotation:
        """The rotation of a batch.

        Args:
            positions: [T] int32.
            lengths: [T], the context length that a dynamic embedding adapts to; unused by the others.
        """
        if not self.spec.depends_on_length:
            return Rotation(self.table, positions)
        assert lengths is not None
        table = self._rows(positions, self._dynamic_frequencies(lengths))
        return Rotation(table, torch.arange(len(positions), dtype=torch.int32, device=positions.device))

    def _rows(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """[T] positions, [head_dim / 2] or [T, head_dim / 2] frequencies -> [T, head_dim] cosines and sines."""
        angles = positions[:, None].float() * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.amplitude

    def _dynamic_frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """[T] lengths -> [T, head_dim / 2]. The base grows with the length ("NTK-aware" scaling)."""
        spec, factor = self.spec, self.spec.parameters["factor"]
        stretch = lengths.clamp(min=spec.original_max_len).double() / spec.original_max_len
        growth = (factor * stretch - (factor - 1)) ** (spec.head_dim / (spec.head_dim - 2))
        theta = (spec.theta * growth)[:, None]
        return (1.0 / theta ** (_exponents(spec).to(lengths.device).double())).float()


def apply_rotary(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates x [T, num_heads, head_dim] in float32: dimension i pairs with i + head_dim / 2."""
    cos, sin = rotation.table[rotation.rows][:, None].chunk(2, dim=-1)  # [T, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _exponents(spec: RopeSpec) -> torch.Tensor:
    return torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu") / spec.head_dim


def _frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2], and the factor of cosines and sines (1 but for yarn)."""
    frequencies = 1.0 / spec.theta ** _exponents(spec)
    if spec.rope_type == "linear":
        return frequencies / spec.parameters["factor"], 1.0
    if spec.rope_type == "llama3":
        return _llama3(frequencies, spec), 1.0
    if spec.rope_type == "yarn":
        return _yarn(frequencies, spec)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by the factor, short ones not, with a ramp between."""
    factor = spec.parameters["factor"]
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    turns = spec.original_max_len * frequencies / (2 * math.pi)  # rotations within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept)


def _yarn(frequencies: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): dimensions that turn often keep their frequency, slow ones are stretched."""
    parameters = spec.parameters
    factor = parameters["factor"]

    def dimension_of(num_turns: float) -> float:
        span = math.log(spec.original_max_len / (num_turns * 2 * math.pi))
        return spec.head_dim * span / (2 * math.log(spec.theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = torch.arange(len(frequencies), dtype=torch.float32, device="cpu")
    stretched = ((ramp - low) / max(high - low, 0.001)).clamp(0, 1)
    amplitude = parameters.get("attention_factor")
    if amplitude is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        amplitude = _yarn_mscale(factor, 1.0)
        if mscale and mscale_all:
            amplitude = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return frequencies / factor * stretched + frequencies * (1 - stretched), float(amplitude)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
