import pytest
import torch

from nanovllm.kernels.activation import silu_and_mul
from tests.kernels.reference import assert_as_exact_as_torch


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2), (4, 2 * 96), (2, 2 * 1500), (2, 3, 2 * 64), (1, 2 * 1024)])
def test_silu_and_mul(shape, dtype, device, generator):
    gate_up = (torch.randn(shape, generator=generator) * 3).to(device, dtype)
    out = torch.full((*shape[:-1], shape[-1] // 2), float("nan"), dtype=dtype, device=device)
    assert silu_and_mul(gate_up, out) is out
    assert_as_exact_as_torch(out, reference, gate_up)
    assert torch.equal(silu_and_mul(gate_up), out)


def test_rows_with_a_stride(device, generator):
    wide = torch.randn(5, 200, generator=generator).to(device)
    assert torch.equal(silu_and_mul(wide[:, 20:148]), silu_and_mul(wide[:, 20:148].contiguous()))


def test_extreme_gates_do_not_overflow(device):
    gate = torch.tensor([-3e38, -200.0, -88.0, 0.0, 200.0, 1e30], device=device)
    out = silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))
    assert out.allclose(torch.nn.functional.silu(gate).unsqueeze(0), atol=1e-30)


def test_odd_width_is_refused(device):
    with pytest.raises(ValueError, match="even"):
        silu_and_mul(torch.zeros(2, 7, device=device))
