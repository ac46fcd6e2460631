import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import skinny_linear as module
from nanovllm.kernels.skinny_linear import skinny_linear
from tests.kernels.reference import assert_as_exact_as_torch

SIZES = [
    (1, 128, 64),
    (3, 256, 80),
    (16, 1024, 96),
    (17, 384, 32),
    (64, 256, 200),
    (65, 512, 64),
    (128, 256, 72),
    (200, 128, 64),
]
DTYPES = [torch.bfloat16, torch.float16]


def make(num_rows, in_features, out_features, dtype, device, generator):
    # x: a slice of wider rows; neither dimension fills its tiles
    x = torch.randn(num_rows, 2 * in_features, generator=generator).to(device, dtype)[:, in_features:]
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(device, dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_product(num_rows, in_features, out_features, dtype, device, generator):
    x, weight = make(num_rows, in_features, out_features, dtype, device, generator)
    assert_as_exact_as_torch(skinny_linear(x, weight), F.linear, x, weight)
    bias = torch.randn(out_features, generator=generator).to(device, dtype)
    assert_as_exact_as_torch(skinny_linear(x, weight, bias), F.linear, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_gated_product(num_rows, in_features, out_features, dtype, device, generator):
    x, weight = make(num_rows, in_features, 2 * out_features, dtype, device, generator)

    def formula(x, weight):
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    assert_as_exact_as_torch(skinny_linear(x, weight, silu_and_mul=True), formula, x, weight)


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "num_pieces"),
    [
        (16, 1024, 96, 4),
        (5, 768, 64, 2),
        (3, 384, 64, 1),
        (128, 1024, 128, 4),
        (16, 512, 64 * 40, 2),
        (200, 1024, 64, 4),
    ],
)
def test_pieces_add_up(num_rows, in_features, out_features, num_pieces, device, generator, monkeypatch):
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    x, weight = make(num_rows, in_features, out_features, torch.bfloat16, device, generator)
    pieces = skinny_linear(x, weight, in_pieces=True)
    assert pieces.shape == ((num_pieces, num_rows, out_features) if num_pieces > 1 else (num_rows, out_features))
    total = pieces.sum(0).to(x.dtype) if num_pieces > 1 else pieces
    assert_as_exact_as_torch(total, F.linear, x, weight)


def test_given_output(device, generator):
    x, weight = make(20, 256, 96, torch.bfloat16, device, generator)
    out = torch.full((22, 96), float("nan"), dtype=x.dtype, device=device)
    assert skinny_linear(x, weight, out=out[1:21]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1:21], skinny_linear(x, weight))
    assert out[0].isnan().all() and out[21].isnan().all()


def test_no_rows(device):
    weight = torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    assert skinny_linear(weight[:0], weight).shape == (0, 64)


def test_what_suits(device, monkeypatch):
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(module, "shared_memory_per_block", lambda device: 227 << 10)
    weight = torch.empty(64, 256, dtype=torch.bfloat16, device=device)
    x = torch.empty(128, 256, dtype=torch.bfloat16, device=device)
    assert module.suits(x, weight)
    assert not module.suits(x.float(), weight.float())
    more = torch.empty(129, 256, dtype=torch.bfloat16, device=device)
    assert not module.suits(more, weight)
    assert module.suits(more, weight, in_pieces=True)
    assert not module.suits(x, torch.empty(64, 200, dtype=torch.bfloat16, device=device))
    assert not module.suits(x, torch.empty(1, dtype=torch.bfloat16, device=device).expand(64 << 10, 256))
    with monkeypatch.context() as patch:
        patch.setattr(module, "shared_memory_per_block", lambda device: 99 << 10)
        assert not module.suits(x, weight), "the tiles don't fit a consumer GPU"
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    assert not module.suits(x, weight), "without dependent launches, a library's product is as good"


def test_wrong_arguments_are_refused(device):
    x, weight = (torch.zeros(4, 256, dtype=torch.bfloat16, device=device) for _ in range(2))
    with pytest.raises(ValueError, match="must agree"):
        skinny_linear(x, weight[:, :128])
    with pytest.raises(ValueError, match="multiples of 128"):
        skinny_linear(x[:, :100], weight[:, :100])
    with pytest.raises(ValueError, match="bias"):
        skinny_linear(x, weight, x[0, :4], in_pieces=True)
    with pytest.raises(ValueError, match="pieces"):
        skinny_linear(x, weight, in_pieces=True, out=x[:, :4])
    with pytest.raises(ValueError, match="must be contiguous"):
        skinny_linear(x, weight, out=x[:, :4])
