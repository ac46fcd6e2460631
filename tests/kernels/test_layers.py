"""Layers give the same by kernels as in plain torch: a decode step's products come fused and in pieces there."""

import pytest
import torch

from nanovllm import kernels
from nanovllm.kernels import skinny_linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GatedLinear, Linear, MergedLinear
from nanovllm.layers.parallel import SINGLE
from tests.kernels.reference import assert_as_exact_as_torch


@pytest.mark.parametrize("num_rows", [1, 20, 130, 260])
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_block(num_rows, bias, device, generator, monkeypatch):
    linear, gated, down = (
        MergedLinear(128, {"a": SINGLE.shard(128)}, bias),
        GatedLinear(128, SINGLE.shard(256), bias),
        Linear(256, 128, bias),
    )
    norm = RMSNorm(128, 1e-6)
    modules = torch.nn.ModuleList((linear, gated, down, norm))
    for parameter in modules.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    x, residual = (torch.randn(num_rows, 128, generator=generator).to(device, torch.bfloat16) for _ in range(2))

    def block(x, residual):
        modules.to(x.device, x.dtype)
        return norm.add_and_normalize(down.in_pieces(gated(linear(x))), residual.clone())

    served = []
    launch = skinny_linear.skinny_linear
    with monkeypatch.context() as patch:
        patch.setattr(skinny_linear, "skinny_linear", lambda *a, **k: served.append(launch(*a, **k)) or served[-1])
        patch.setattr(skinny_linear, "has_dependent_launch", lambda device: True)
        patch.setattr(skinny_linear, "shared_memory_per_block", lambda device: 227 << 10)
        patch.setattr(kernels, "serve", lambda x: True)
        actual = block(x, residual)
    if num_rows > 256:
        assert not served
    elif bias:
        assert len(served) == (2 if num_rows <= 128 else 0)
    else:
        assert len(served) == (3 if num_rows <= 128 else 1)
        assert served[-1].dim() == 3, "the last product is to come in pieces"
    monkeypatch.setattr(kernels, "serve", lambda x: False)
    assert_as_exact_as_torch(actual, block, x, residual, floor=1e-2)
