"""SiLU(gate) * up in one pass."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import launch_options, wait_for_previous_kernel

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr, out_ptr, in_row, out_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    wait_for_previous_kernel(PDL)
    gate = tl.load(gate_up_ptr + row * in_row + column, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + row * in_row + SIZE + column, mask=mask).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate))  # exp overflows for a very negative gate, and x / inf is 0 as it should
    tl.store(out_ptr + row * out_row + column, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up with silu(x) = x * sigmoid(x), in fp32, rounded once to the input's dtype.

    gate_up: [..., 2 * size], gate first, last dimension contiguous
    returns: [..., size], contiguous unless `out` says otherwise
    Raises ValueError for an odd last dimension or one that is not contiguous.
    """
    if gate_up.shape[-1] % 2 or gate_up.stride(-1) != 1:
        raise ValueError(f"gate_up must end in a contiguous dimension of even size, not {tuple(gate_up.shape)}")
    size = gate_up.shape[-1] // 2
    if out is None:
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows, out_rows = gate_up.reshape(-1, 2 * size), out.view(-1, size)  # [num_rows, 2 * size], [num_rows, size]
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(size, BLOCK))
        _silu_and_mul_kernel[grid](
            rows, out_rows, rows.stride(0), out_rows.stride(0), SIZE=size, BLOCK=BLOCK, **launch_options(rows.device)
        )
    return out
