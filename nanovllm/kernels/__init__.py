"""Triton kernels: each module is one fused step of a layer or of sampling, with a plain Python launcher.

Nothing is imported here, so that `import nanovllm.kernels` needs neither triton nor a GPU; import the module you
use. Every launcher takes torch tensors, picks its grid from what the host knows (never from values on the device, so
that all of them can be captured in a CUDA graph), and allocates its result with `torch.empty` unless given `out`. Under
`TRITON_INTERPRET=1` the same code runs on CPU tensors, slowly; that is how the tests check it without a GPU.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

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


_compiling = threading.Lock()


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, kernels are compiled instead of launched, several at a time; leaving waits for them.

    Whatever a kernel would have written is left as it was, so the results of what runs inside mean nothing. Other
    threads launch their kernels meanwhile as ever.
    """
    import triton
    from triton.runtime.jit import JITFunction

    owner = threading.get_ident()

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == owner:
            options["warmup"] = True
        return launch(kernel, *args, **options)

    device = torch.cuda.current_device()  # of this thread; others begin with number 0
    with _compiling, ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as executor:
        launch = JITFunction.run
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(executor) as mode:
                yield
                futures = list(mode.future_kernels.values())
        finally:
            JITFunction.run = launch
        compiled = [future.result() for future in futures]
        list(executor.map(lambda kernel: kernel.run, compiled))  # builds and loads what launches it
