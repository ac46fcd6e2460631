"""RMSNorm, alone and fused with the residual addition before it, and with the sum over ranks before that."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import launch_options, scale_by_weight, wait_for_previous_kernel, warps_of_row
from nanovllm.kernels.peer_exchange import Exchange, check_parts, leave, load_sum, meet


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    parts,  # of each rank, or None: then x is there
    flags,
    counter_ptr,
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
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    wait_for_previous_kernel(PDL)
    if ADD:  # loaded first: while this rank waits for the others, if there are any
        residual_ptr += row * residual_row
        residual = tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if RANKS == 1:
        x = tl.load(x_ptr + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
        for piece in tl.static_range(1, PIECES):
            x += tl.load(x_ptr + piece * piece_stride + row * x_row + column, mask=mask, other=0.0)
    else:
        number = meet(flags, counter_ptr, RANK, RANKS)
        x = load_sum(parts, row * HIDDEN + column, mask, RANKS)
        leave(counter_ptr, number)
    if ADD:
        x += residual
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + column, stored, mask=mask)
        x = stored.to(tl.float32)  # the norm sees the sum as the next layer will: rounded to the model's dtype
    variance = tl.sum(x * x, axis=0) / HIDDEN
    normed = scale_by_weight(x * tl.rsqrt(variance + eps), weight, dtype)
    tl.store(out_ptr + row * out_row + column, normed.to(dtype), mask=mask)


def _launch(
    x: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    parts: tuple[torch.Tensor, ...] | None = None,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    hidden = weight.shape[0]
    out_rows = out.view(-1, hidden)  # [num_rows, hidden]
    rows = out_rows if x is None else x.reshape(-1, hidden)  # with all pieces
    residual_rows = rows if residual is None else residual.view(-1, hidden)
    num_rows = len(out_rows)
    block = triton.next_power_of_2(hidden)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            rows,
            parts,
            None if exchange is None else exchange.flags,
            None if exchange is None else exchange.counter,
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
            **({"RANK": 0, "RANKS": 1} if exchange is None else exchange.constants()),
            num_warps=warps_of_row(block),
            **launch_options(out.device),
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    x: [..., hidden], any hidden size, last dimension contiguous; weight: [hidden]; returns [..., hidden].
    Normalises in fp32, rounds to x's dtype, then multiplies by weight: the order of Hugging Face's modules.
    Raises ValueError when the shapes disagree.
    """
    _check(x, weight)
    return _launch(x, None, weight, eps, torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place (fp32 sum, rounded to the residual's dtype), then the RMSNorm of that sum.

    x, residual: [..., hidden], residual contiguous; weight: [hidden]; returns a new tensor of the residual's shape and
    dtype. x may also be the partial sums of one, [num_pieces, ..., hidden] contiguous fp32: they are added up first.
    Raises ValueError when the shapes disagree.
    """
    _check(x, weight)
    is_in_pieces = x.shape[1:] == residual.shape and x.is_contiguous()
    if not (residual.shape == x.shape or is_in_pieces) or not residual.is_contiguous():
        raise ValueError(f"residual {tuple(residual.shape)} must be contiguous and have x's shape {tuple(x.shape)}")
    return _launch(x, residual, weight, eps, torch.empty_like(residual))


def sum_add_rms_norm(
    parts: tuple[torch.Tensor, ...], residual: torch.Tensor, weight: torch.Tensor, eps: float, exchange: Exchange
) -> torch.Tensor:
    """`add_rms_norm` of the sum of the ranks' parts, each in its rank's memory: like the residual, or with more rows.
    They are added up in fp32 in the order of the ranks, so that all ranks get the same bits.
    """
    _check(residual, weight)
    check_parts(parts, residual, exchange)
    if not residual.is_contiguous():
        raise ValueError(f"residual {tuple(residual.shape)} must be contiguous")
    return _launch(None, residual, weight, eps, torch.empty_like(residual), parts, exchange)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must end in a contiguous dimension of weight's {tuple(weight.shape)}")
