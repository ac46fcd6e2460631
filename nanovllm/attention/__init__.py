"""Attention backends, and the choice among them."""

import logging

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.attention.sdpa import SDPABackend

logger = logging.getLogger(__name__)

# In order of preference.
BACKENDS: tuple[type[AttentionBackend], ...] = (SDPABackend,)


def select_backend(spec: AttentionSpec, name: str = "auto") -> type[AttentionBackend]:
    """The named backend, or with "auto" the first that serves the spec. The choice is logged.

    Raises:
        ValueError: the name is unknown, or no backend allowed serves the spec; all reasons are given.
    """
    known = {backend.name: backend for backend in BACKENDS}
    if name != "auto" and name not in known:
        raise ValueError(f"attention_backend must be 'auto' or one of {sorted(known)}, got {name!r}")
    refusals: list[str] = []
    for backend in BACKENDS if name == "auto" else (known[name],):
        reasons = backend.unsupported(spec)
        if not reasons:
            logger.info("attention backend: %s%s", backend.name, f" (not {'; '.join(refusals)})" * bool(refusals))
            return backend
        refusals.append(f"{backend.name}: {', '.join(reasons)}")
    raise ValueError(f"no attention backend can serve this model: {'; '.join(refusals)}")
