import pytest
import torch

from nanovllm.kernels.norm import add_rms_norm, rms_norm
from tests.kernels.reference import assert_as_exact_as_torch
from tests.kernels.reference import rms_norm as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(5, 64), (3, 80), (1, 1), (2, 3, 1000), (2, 4097), (7,)]


def make(shape, dtype, device, generator):
    x = (torch.randn(shape, generator=generator) * 3).to(device, dtype)
    return x, torch.randn(shape[-1], generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, device, generator):
    x, weight = make(shape, dtype, device, generator)
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, 1e-6, out) is out
    assert_as_exact_as_torch(out, reference, x, weight, floor=1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-6), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape, dtype, device, generator):
    x, weight = make(shape, dtype, device, generator)
    residual, _ = make(shape, dtype, device, generator)
    total = x + residual
    x_before = x.clone()
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total), "the residual is the sum, rounded once to the model's dtype"
    assert torch.equal(x, x_before)
    assert_as_exact_as_torch(out, reference, total, weight, floor=1e-5)


def test_rows_with_a_stride(device, generator):
    wide, weight = make((6, 3 * 64), torch.float32, device, generator)
    x = wide[:, 64:128]
    assert torch.equal(rms_norm(x, weight[:64], 1e-6), rms_norm(x.contiguous(), weight[:64], 1e-6))


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
def test_eps_counts(eps, device):
    x = torch.full((1, 64), 1e-3, device=device)
    expected = 1e-3 / (1e-6 + eps) ** 0.5
    assert rms_norm(x, torch.ones(64, device=device), eps).allclose(torch.tensor(expected, device=device))


def test_wrong_shapes_are_refused(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, x[0, :4], 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(x.t(), x[:, 0], 1e-6)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.zeros(1, 8, device=device), x[0], 1e-6)


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
def test_partial_sums_are_added_up(num_pieces, device, generator):
    """As a split matrix product leaves them: fp32, one [rows, hidden] after the other."""
    residual, weight = make((5, 80), torch.bfloat16, device, generator)
    pieces = torch.randn(num_pieces, 5, 80, generator=generator).to(device)
    total = (residual.float() + pieces.sum(0)).bfloat16()
    out = add_rms_norm(pieces, residual, weight, 1e-6)
    assert out.shape == residual.shape and out.dtype == torch.bfloat16
    assert (residual.float() - total.float()).abs().max() <= 2**-7 * total.abs().max(), "one rounding, in any order"
    assert_as_exact_as_torch(out, reference, residual, weight, floor=1e-5)
