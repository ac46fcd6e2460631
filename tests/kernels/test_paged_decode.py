import pytest
import torch

from nanovllm.kernels import decode_plan
from nanovllm.kernels.decode_plan import plan_decode
from nanovllm.kernels.paged_decode import paged_decode_attention
from tests.kernels.reference import PagedCache, assert_as_exact_as_torch, attention, make_paged_cache

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [  # (query heads, KV heads, head_dim, block size, dtype)
    (4, 4, 64, 16, torch.float32),
    (6, 2, 80, 48, torch.float16),
    (7, 1, 96, 32, torch.bfloat16),
    (8, 1, 128, 64, torch.bfloat16),
    (4, 2, 256, 16, torch.float16),
    (40, 2, 64, 16, torch.bfloat16),
    (4, 2, 128, 256, torch.float32),
]


def attend(q: torch.Tensor, cache: PagedCache, scale: float) -> torch.Tensor:
    """Plan and attention, with buffers full of NaN: what is read before it is written shows."""
    plan = plan_decode(cache.context_lens, *q.shape[1:2], cache.k_cache.shape[2], q.shape[2], q.dtype)
    plan.partial.fill_(float("nan"))
    plan.partial_lse.fill_(float("nan"))
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    out = paged_decode_attention(q, *tables, scale, plan)
    assert (plan.arrivals == 0).all(), "the next layer would count on from here"
    return out


def check(out: torch.Tensor, q: torch.Tensor, cache: PagedCache, scale: float) -> None:
    for seq, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if len(k):
            query = q[seq : seq + 1]
            assert_as_exact_as_torch(out[seq : seq + 1], lambda q, k, v: attention(q, k, v, scale), query, k, v)


def use_multiprocessors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Three times as many programs: with few of them, a share holds several sequences."""
    monkeypatch.setattr(decode_plan, "num_multiprocessors", lambda device: number)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"), CASES)
def test_edges(
    multiprocessors, num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator, monkeypatch
) -> None:
    """Lengths around the ends of pages and tiles, padding before, between and after them."""
    use_multiprocessors(monkeypatch, multiprocessors)
    contexts = [0, 1, block_size - 1, block_size, block_size + 1, 0, 127, 128, 129, 259, 0]
    cache = make_paged_cache(contexts, num_kv_heads, head_dim, block_size, dtype, device, generator)
    # q: a slice of packed qkv rows
    q = torch.randn(len(contexts), 2 * num_heads, head_dim, generator=generator).to(device, dtype)[:, num_heads:]
    check(attend(q, cache, head_dim**-0.5), q, cache, head_dim**-0.5)


@pytest.mark.parametrize("multiprocessors", [2, 5, 40])
def test_random_lengths(multiprocessors, device, generator, monkeypatch) -> None:
    """Shares of several sequences, sequences of several shares, and more partial results than are joined at once."""
    use_multiprocessors(monkeypatch, multiprocessors)
    contexts = [3000, *torch.randint(0, 700, (7,), generator=generator).tolist()]
    cache = make_paged_cache(contexts, 2, 64, 16, torch.float32, device, generator, spare_table_entries=50)
    q = torch.randn(len(contexts), 6, 64, generator=generator).to(device)
    check(attend(q, cache, 0.125), q, cache, 0.125)


def test_one_plan_serves_every_layer(device, generator, monkeypatch):
    use_multiprocessors(monkeypatch, 4)
    layers = [make_paged_cache([400, 30], 2, 64, 16, torch.float32, device, generator) for _ in range(2)]
    q = torch.randn(2, 4, 64, generator=generator).to(device)
    plan = plan_decode(layers[0].context_lens, 4, 2, 64, torch.float32)
    for cache in layers:
        tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
        check(paged_decode_attention(q, *tables, 0.3, plan), q, cache, 0.3)


@pytest.mark.parametrize("num_seqs", [1, 5, 1500])
def test_shares_cover_the_line_of_tiles(num_seqs, device, generator, monkeypatch):
    use_multiprocessors(monkeypatch, 16)
    contexts = torch.randint(0, 900, (num_seqs,), generator=generator).int()
    plan = plan_decode(contexts.to(device), 4, 2, 64, torch.float32)
    tiles = -(-contexts // plan.tile)
    ends = tiles.cumsum(0)
    assert plan.first_tiles.tolist() == [0, *ends.tolist()]
    assert len(plan.shares) == 32
    assert not plan.arrivals.any()
    position = 0
    for start, end, length, first_seq, first_tile, end_tile, context, _ in plan.shares.tolist():
        assert start == position
        assert length == max(-(-int(ends[-1]) // 32), 2)
        assert end - start in (0, length) or end == ends[-1]
        assert first_seq == (ends <= start).sum()
        if start < end:
            assert (first_tile, end_tile) == tuple(plan.first_tiles[first_seq : first_seq + 2].tolist())
            assert context == contexts[first_seq]
        position = end
    assert position == ends[-1]


def test_large_scores_do_not_overflow(device, generator):
    cache = make_paged_cache([150], 1, 64, 16, torch.float32, device, generator)
    q = torch.randn(1, 1, 64, generator=generator).to(device) * 100
    check(attend(q, cache, 1.0), q, cache, 1.0)


@pytest.mark.parametrize("block_size", [16, 256])  # a gather of pages, and one page a tile
def test_offsets_past_the_range_of_int32(block_size, device):
    """Block 3 starts at element 3 * 2**30: a 32-bit product would wrap."""
    storage = torch.empty(3 * 2**30 + 40000, dtype=torch.float16, device=device)  # the CPU commits only touched pages
    k_cache = storage.as_strided((4, block_size, 1, 64), (2**30, 64, 64, 1))
    v_cache = storage.as_strided((4, block_size, 1, 64), (2**30, 64, 64, 1), storage_offset=20000)
    k_cache[3], v_cache[3] = 0, 7
    index = torch.tensor([[3]], dtype=torch.int32, device=device)
    q = torch.ones(1, 1, 64, dtype=torch.float16, device=device)
    plan = plan_decode(index[0], 1, 1, 64, torch.float16)
    assert (paged_decode_attention(q, k_cache, v_cache, index, index[0], 1.0, plan) == 7).all()


def test_wrong_arguments_are_refused(device, generator):
    cache = make_paged_cache([300], 2, 64, 16, torch.float32, device, generator)
    q = torch.zeros(1, 4, 64, device=device)
    tables = (cache.block_tables, cache.context_lens)
    plan = plan_decode(cache.context_lens, 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="3 query heads"):
        paged_decode_attention(q[:, :3], cache.k_cache, cache.v_cache, *tables, 1.0, plan)
    with pytest.raises(ValueError, match=r"float16, the caches are torch\.float32"):
        paged_decode_attention(q.half(), cache.k_cache, cache.v_cache, *tables, 1.0, plan)
    with pytest.raises(ValueError, match="2 queries"):
        paged_decode_attention(q.expand(2, -1, -1), cache.k_cache, cache.v_cache, *tables, 1.0, plan)
    with pytest.raises(ValueError, match="another batch"):
        paged_decode_attention(q[:, :2], cache.k_cache, cache.v_cache, *tables, 1.0, plan)
    with pytest.raises(ValueError, match="int32"):
        plan_decode(cache.context_lens.long(), 4, 2, 64, torch.float32)


@needs_cuda
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64)])
def test_large_batches(num_heads, num_kv_heads, head_dim, block_size, device, generator):
    for num_seqs in (1, 16, 256):
        contexts = torch.randint(1, 2600, (num_seqs,), generator=generator).tolist()
        cache = make_paged_cache(contexts, num_kv_heads, head_dim, block_size, torch.bfloat16, device, generator)
        q = torch.randn(num_seqs, num_heads, head_dim, generator=generator).to(device, torch.bfloat16)
        for _ in range(20):  # a race between the programs that join their results would not show every time
            check(attend(q, cache, head_dim**-0.5), q, cache, head_dim**-0.5)


@needs_cuda
def test_one_captured_graph_serves_all_context_lengths(device, generator):
    cache = make_paged_cache([2000] * 8, 8, 128, 256, torch.bfloat16, device, generator)
    q = torch.randn(8, 16, 128, generator=generator).to(device, torch.bfloat16)
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)

    def run() -> torch.Tensor:
        return paged_decode_attention(q, *tables, 0.1, plan_decode(cache.context_lens, 16, 8, 128, q.dtype))

    run()  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    keys, values = cache.keys, cache.values
    for contexts in ([2000] * 8, [0, 1, 255, 256, 257, 1024, 1025, 1999], [0] * 8):
        cache.context_lens.copy_(torch.tensor(contexts))
        cache.keys = [k[:n] for k, n in zip(keys, contexts, strict=True)]
        cache.values = [v[:n] for v, n in zip(values, contexts, strict=True)]
        out.fill_(float("nan"))
        graph.replay()
        check(out, q, cache, 0.1)
