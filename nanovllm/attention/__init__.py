"""Attention backends, and the choice among them."""

import logging
from dataclasses import dataclass, replace

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.attention.flash import FlashAttention2Backend, FlashAttention3Backend, FlashAttention4Backend
from nanovllm.attention.sdpa import SDPABackend
from nanovllm.attention.triton import TritonBackend

logger = logging.getLogger(__name__)

_FLASH = (FlashAttention3Backend, FlashAttention4Backend, FlashAttention2Backend)
# In order of preference. Decode reads the cache once and nothing else matters: this project's kernel does it fastest.
PREFILL_BACKENDS: tuple[type[AttentionBackend], ...] = (*_FLASH, TritonBackend, SDPABackend)
DECODE_BACKENDS: tuple[type[AttentionBackend], ...] = (TritonBackend, *_FLASH, SDPABackend)
# What a user may ask for -> the backends that will do.
CHOICES: dict[str, tuple[type[AttentionBackend], ...]] = {
    "flash": _FLASH,
    **{backend.name: (backend,) for backend in PREFILL_BACKENDS},
}


@dataclass(frozen=True)
class SelectedBackends:
    """Backends of the two kinds of work, and the block size that suits both."""

    prefill: type[AttentionBackend]
    decode: type[AttentionBackend]
    block_size: int

    @property
    def name(self) -> str:
        names = dict.fromkeys((self.prefill.name, self.decode.name))
        return " + ".join(names) if len(names) == 1 else f"{self.prefill.name} prefill + {self.decode.name} decode"


def select_backends(spec: AttentionSpec, choice: str = "auto") -> SelectedBackends:
    """The chosen backend for everything, or with "auto" the best for prefill and for decode. Logs choice and reasons.

    Raises:
        ValueError: the choice is unknown, or nothing that it allows can serve the spec; all reasons are given.
    """
    if choice != "auto" and choice not in CHOICES:
        raise ValueError(f"attention_backend must be one of {', '.join(map(repr, ('auto', *CHOICES)))}, got {choice!r}")
    prefill = _first_supported(spec, CHOICES.get(choice, PREFILL_BACKENDS))
    block_size = spec.block_size or prefill.preferred_block_size
    decode_candidates = DECODE_BACKENDS if choice == "auto" else (prefill,)
    selected = SelectedBackends(
        prefill, _first_supported(replace(spec, block_size=block_size), decode_candidates), block_size
    )
    logger.info("attention: %s, blocks of %d tokens", selected.name, block_size)
    return selected


def _first_supported(spec: AttentionSpec, candidates: tuple[type[AttentionBackend], ...]) -> type[AttentionBackend]:
    refusals: list[str] = []
    for backend in candidates:
        reasons = backend.unsupported(spec)
        if not reasons:
            if refusals:
                logger.info("attention: not %s", "; not ".join(refusals))
            return backend
        refusals.append(f"{backend.name}: {', '.join(reasons)}")
    raise ValueError(f"no attention backend can serve this model: {'; '.join(refusals)}")
