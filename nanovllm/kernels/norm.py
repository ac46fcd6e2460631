"""RMSNorm, alone and fused with the residual addition before it."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import launch_options, scale_by_weight, wait_for_previous_kernel


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_row,
    residual_row,
    out_row,
    eps,
    piece_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    wait_for_previous_kernel(PDL)
    x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    for piece in tl.static_range(1, PIECES):
        x += tl.load(x_ptr + piece * piece_stride + row * x_row + column, mask=mask, other=0.0)
    if ADD:
        residual_ptr += row * residual_row
        x += tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + column, stored, mask=mask)
        x = stored.to(tl.float32)  # the norm sees the sum as the next layer will: rounded to the model's dtype
    variance = tl.sum(x * x, axis=0) / HIDDEN
    normed = scale_by_weight(x * tl.rsqrt(variance + eps), weight, dtype)
    tl.store(out_ptr + row * out_row + column, normed.to(dtype), mask=mask)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    hidden = x.shape[-1]
    if weight.shape != (hidden,) or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must end in a contiguous dimension of weight's {tuple(weight.shape)}")
    if out is None:
        out = torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)
    rows, out_rows = x.reshape(-1, hidden), out.view(-1, hidden)  # [num_rows, hidden], x's with all pieces
    residual_rows = rows if residual is None else residual.view(-1, hidden)
    num_rows = len(out_rows)
    block = triton.next_power_of_2(hidden)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            rows,
            residual_rows,
            weight,
            out_rows,
            rows.stride(0),
            residual_rows.stride(0),
            out_rows.stride(0),
            eps,
            num_rows * rows.stride(0),
            HIDDEN=hidden,
            BLOCK=block,
            ADD=residual is not None,
            PIECES=len(rows) // num_rows,
            num_warps=min(max(block // 512, 1), 16),  # 16 elements a thread, so that loads are 16 bytes wide
            **launch_options(x.device),
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    x: [..., hidden], any hidden size, last dimension contiguous; weight: [hidden]; returns [..., hidden].
    Normalises in fp32, rounds to x's dtype, then multiplies by weight: the order of Hugging Face's modules.
    Raises ValueError when the shapes disagree.
    """
    return _launch(x, None, weight, eps, out)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place (fp32 sum, rounded to the residual's dtype), then the RMSNorm of that sum.

    x, residual: [..., hidden], residual contiguous; weight: [hidden]; returns a new tensor of the residual's shape and
    dtype. x may also be the partial sums of one, [num_pieces, ..., hidden] contiguous fp32: they are added up first.
    Raises ValueError when the shapes disagree.
    """
    is_in_pieces = x.shape[1:] == residual.shape and x.is_contiguous()
    if not (residual.shape == x.shape or is_in_pieces) or not residual.is_contiguous():
        raise ValueError(f"residual {tuple(residual.shape)} must be contiguous and have x's shape {tuple(x.shape)}")
    return _launch(x, residual, weight, eps, None)
