"""Kernel tests run on the GPU when there is one, else on the CPU through Triton's interpreter.

The interpreter is chosen by an environment variable that Triton reads when it is imported, so this file sets it before
anything imports Triton. It also mends three faults of the interpreter (seen in 3.6 and 3.9) that would make bf16
results wrong: it multiplies bf16 matrices as if their bits were integers, truncates where hardware rounds, and loses
subnormals. (Triton 3.6's interpreter also needs numpy < 2.4.)
"""

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402


def _mend_interpreter() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def torch_cast(self, src, dst_type):
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    def float_dot(self, a, b, *rest):
        a, b = (torch_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = torch_cast, float_dot


if not HAS_CUDA:
    _mend_interpreter()


@pytest.fixture(autouse=True)
def _runs_somewhere() -> None:
    if not HAS_CUDA and isinstance(triton.language.zeros, triton.runtime.jit.JITFunction):
        pytest.fail("triton was imported before tests/kernels/conftest.py could set TRITON_INTERPRET=1")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh inputs in every run; the seed is printed when a test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"input seed: {seed}")
    return torch.Generator().manual_seed(seed)
