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


@pytest.fixture(params=[132, 5, 1])
def num_programs(request, monkeypatch):
    """As many as run at once: the fewer, the wider are the tiles."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: request.param)


def make(num_rows, in_features, out_features, dtype, device, generator):
    # x: a slice of wider rows; neither dimension fills its tiles
    x = torch.randn(num_rows, 2 * in_features, generator=generator).to(device, dtype)[:, in_features:]
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(device, dtype)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_product(num_rows, in_features, out_features, num_programs, dtype, device, generator):
    x, weight = make(num_rows, in_features, out_features, dtype, device, generator)
    assert_as_exact_as_torch(skinny_linear(x, weight), F.linear, x, weight)
    bias = torch.randn(out_features, generator=generator).to(device, dtype)
    assert_as_exact_as_torch(skinny_linear(x, weight, bias), F.linear, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SIZES)
def test_gated_product(num_rows, in_features, out_features, num_programs, dtype, device, generator):
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
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)

    def suits(num_rows, out_features, in_features, dtype=torch.bfloat16, **way):
        one = torch.empty(1, dtype=dtype, device=device)
        return module.suits(one.expand(num_rows, in_features), one.expand(out_features, in_features), **way)

    assert suits(128, 64, 256) and not suits(128, 64, 256, torch.float32)
    assert not suits(0, 64, 256) and not suits(128, 64, 200)
    assert not suits(129, 64, 256) and suits(256, 64, 256, in_pieces=True) and not suits(257, 64, 256, in_pieces=True)
    # 132 programs run at once
    assert suits(16, 132 * 64, 4096) and not suits(16, 132 * 64 + 1, 4096)
    assert suits(16, 2 * 132 * 128, 4096, silu_and_mul=True)
    assert not suits(16, 2 * 132 * 128 + 2, 4096, silu_and_mul=True)
    assert suits(64, 132 * 64, 1024) and not suits(65, 132 * 64, 1024)
    # long sums
    assert suits(16, 1024, 65536)
    assert suits(64, 88 * 32, 8192) and not suits(64, 87 * 32, 8192) and suits(64, 87 * 32, 3072)
    assert suits(65, 1024, 1536) and not suits(65, 1024, 2048) and suits(65, 1024, 2048, in_pieces=True)
    x, weight = (torch.empty(n, 256, dtype=torch.bfloat16, device=device) for n in (128, 64))
    with monkeypatch.context() as patch:
        patch.setattr(module, "shared_memory_per_block", lambda device: 99 << 10)
        assert not module.suits(x, weight), "the tiles don't fit a consumer GPU"
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    assert not module.suits(x, weight), "without dependent launches, a library's product is as good"


@pytest.mark.parametrize("gated", [False, True])
def test_the_tile_of_most_programs(gated):
    """Of those that run at once; the widest of equals."""

    def columns(num_rows, out_features):
        plan = module._plan(num_rows, 1024, out_features, 132, gated=gated, in_pieces=False)
        return plan.tile.columns, plan.num_programs

    assert columns(17, 132 * 32) == (32, 132)
    assert columns(65, 66 * 32) == (32, 132)
    assert columns(17, 133 * 32) == (64, 67)
    assert columns(17, 20) == (64 if not gated else 128, 1)
    assert columns(16, 133 * 64) == ((128, 67) if gated else (64, 133))
    assert columns(17, 133 * 128) == ((128, 133) if gated else (64, 266)), "none fits: the widest"


def test_tiles_fit_shared_memory():
    for (_, gated), tiles in module._TILES.items():
        for tile in tiles:
            num_columns = (1 + gated) * tile.columns
            assert 2 * (tile.rows + num_columns) * tile.inner * tile.num_stages <= module.SHARED_MEMORY
            assert module.INNER % tile.inner == 0


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
