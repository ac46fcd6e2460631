import pytest
import torch

from nanovllm.kernels import paged_prefill
from nanovllm.kernels.paged_prefill import paged_prefill_attention
from tests.kernels.reference import assert_as_exact_as_torch, attention, make_paged_cache

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL_TILES = (16, 16, 4, 1)  # rows, tokens, warps, stages
# (query length, context), around multiples of the tile: whole prompts, none, then chunks and prefix hits
SEQUENCES = [(1, 1), (15, 15), (16, 16), (17, 17), (0, 0), (0, 20)]
SEQUENCES += [(1, 40), (2, 17), (5, 37), (16, 33), (20, 34), (33, 48), (48, 65)]


def check(sequences, num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator):
    cache = make_paged_cache([c for _, c in sequences], num_kv_heads, head_dim, block_size, dtype, device, generator)
    lengths = [length for length, _ in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    num_tokens = sum(lengths)
    # q: a slice of packed qkv rows, and three padding rows that belong to no sequence
    q = torch.randn(num_tokens + 3, 2 * num_heads, head_dim, generator=generator).to(device, dtype)[:, num_heads:]
    out = torch.full_like(q, float("nan")).contiguous()
    scale = head_dim**-0.5
    result = paged_prefill_attention(
        q, cache.k_cache, cache.v_cache, cache.block_tables, starts, cache.context_lens, max(lengths), scale, out
    )
    assert result is out
    assert out[num_tokens:].isnan().all(), "rows of no sequence are not written"
    for seq, length in enumerate(lengths):
        if length:
            rows = slice(starts[seq], starts[seq] + length)
            inputs = (q[rows], cache.keys[seq], cache.values[seq])
            assert_as_exact_as_torch(out[rows], lambda q, k, v: attention(q, k, v, scale), *inputs)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (2, 2, 64, 16, torch.float32),
        (6, 2, 80, 48, torch.float16),
        (7, 1, 96, 32, torch.bfloat16),
        (8, 1, 128, 16, torch.float32),
        (2, 1, 256, 16, torch.bfloat16),
    ],
)
def test_edges_of_tiles_and_pages(num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator, monkeypatch):
    monkeypatch.setattr(paged_prefill, "_tiles", lambda *args: SMALL_TILES)
    sequences = SEQUENCES if num_heads < 7 or device.type == "cuda" else SEQUENCES[3::3]
    check(sequences, num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (128, torch.float32)])
@pytest.mark.parametrize("block_size", [16, 256])
def test_tiles_as_shipped(head_dim, dtype, block_size, device, generator):
    check([(130, 130), (3, 259), (129, 200)], 2, 1, head_dim, block_size, dtype, device, generator)


def test_chunks_equal_the_whole_prompt(device, generator):
    """Bitwise, when chunks start at multiples of both tiles: each row goes through the same key tiles."""
    cache = make_paged_cache([70], 2, 64, 16, torch.float32, device, generator)
    q = torch.randn(70, 4, 64, generator=generator).to(device)

    def run(first: int, last: int) -> torch.Tensor:
        starts, context = torch.tensor([0, last - first]), torch.tensor([last])
        return paged_prefill_attention(
            q[first:last], cache.k_cache, cache.v_cache, cache.block_tables,
            starts.int().to(device), context.int().to(device), last - first, 0.125,
        )  # fmt: skip

    assert torch.equal(torch.cat((run(0, 32), run(32, 70))), run(0, 70))


def test_the_shared_memory_of_every_gpu_is_respected():
    for limit in (64, 99, 163, 227):
        for dims in (16, 64, 128, 256):
            for element_size in (2, 4):
                rows, tokens, _, stages = paged_prefill._tiles(dims, element_size, limit * 1024)
                assert (rows + 2 * tokens * (stages if element_size == 2 else 0)) * dims * element_size < limit * 1024


def test_wrong_arguments_are_refused(device, generator):
    cache = make_paged_cache([20, 20], 2, 64, 16, torch.float32, device, generator)
    q = torch.zeros(40, 4, 64, device=device)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    caches = (cache.k_cache, cache.v_cache, cache.block_tables)
    with pytest.raises(ValueError, match="same sequences"):
        paged_prefill_attention(q, *caches, starts[:2], cache.context_lens, 20, 1.0)
    with pytest.raises(ValueError, match="3 query heads"):
        paged_prefill_attention(q[:, :3], *caches, starts, cache.context_lens, 20, 1.0)


@needs_cuda
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 8, 256)]
)
def test_large_batches(num_heads, num_kv_heads, head_dim, block_size, device, generator):
    sequences = [(1000, 1000), (1, 700), (100, 2148), (513, 1025), (0, 0), (64, 64)]
    check(sequences, num_heads, num_kv_heads, head_dim, block_size, torch.bfloat16, device, generator)
