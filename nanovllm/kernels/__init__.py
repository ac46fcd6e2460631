"""Triton kernels: each module is one fused step of a layer or of sampling, with a plain Python launcher.

Nothing is imported here, so that `import nanovllm.kernels` needs neither triton nor a GPU; import the module you
use. Every launcher takes torch tensors, picks its grid from *shapes* only (never from values on the device, so all
of them can be captured in a CUDA graph), and allocates its result with `torch.empty` unless given `out`. Under
`TRITON_INTERPRET=1` the same code runs on CPU tensors, slowly; that is how the tests check it without a GPU.
"""

from functools import cache

import torch


@cache
def are_installed() -> bool:
    """Whether triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def serve(x: torch.Tensor) -> bool:
    """Whether these kernels, not plain torch, work on a tensor: where it is on a CUDA device with triton at hand."""
    return x.is_cuda and are_installed()
