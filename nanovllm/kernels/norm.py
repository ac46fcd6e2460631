"""RMSNorm, alone and fused with the residual addition before it, and with the sum over ranks before that."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.common import launch_options, scale_by_weight, wait_for_previous_kernel
from nanovllm.kernels.peer_exchange import Exchange, leave, load_sum, meet


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
    flags_ptr,  # these two are None, and x_ptr is x, if there is one rank; else x_ptr is where the ranks' parts are
    counter_ptr,
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
        number = meet(flags_ptr, counter_ptr, RANK, RANKS)
        x = load_sum(x_ptr, row * HIDDEN + column, mask, dtype, RANKS)
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
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    hidden = weight.shape[0]
    if out is None:
        out = torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)
    out_rows = out.view(-1, hidden)
    rows = x.view(-1, 1) if exchange is not None else x.reshape(-1, hidden)  # [num_rows, hidden], with all pieces
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
            None if exchange is None else exchange.flags,
            None if exchange is None else exchange.counter,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=residual is not None,
            PIECES=len(rows) // num_rows if exchange is None else 1,
            **({"RANK": 0, "RANKS": 1} if exchange is None else exchange.constants()),
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
    _check(x, weight)
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    """residual += x in place (fp32 sum, rounded to the residual's dtype), then the RMSNorm of that sum.

    x, residual: [..., hidden], residual contiguous; weight: [hidden]; returns a new tensor of the residual's shape and
    dtype. x may also be the partial sums of one, [num_pieces, ..., hidden] contiguous fp32: they are added up first.
    With an exchange, x is int64 [num_ranks]: where each rank has its part of the sum, contiguous and like the residual,
    at a multiple of 16 bytes. All ranks get the same bits.
    Raises ValueError when the shapes disagree.
    """
    if exchange is not None:
        _check(residual, weight)
        is_like = x.shape == (exchange.num_ranks,) and x.dtype == torch.int64
    else:
        _check(x, weight)
        is_like = residual.shape == x.shape or (x.shape[1:] == residual.shape and x.is_contiguous())
    if not is_like or not residual.is_contiguous():
        raise ValueError(f"residual {tuple(residual.shape)} must be contiguous and have x's shape {tuple(x.shape)}")
    return _launch(x, residual, weight, eps, exchange=exchange)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or x.stride(-1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must end in a contiguous dimension of weight's {tuple(weight.shape)}")
