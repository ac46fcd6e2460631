import pytest
import torch

from nanovllm.kernels import paged_decode
from nanovllm.kernels.paged_decode import decode_workspace_size, paged_decode_attention, split_length
from tests.kernels.reference import PagedCache, assert_as_exact_as_torch, attention, attention_scores, make_paged_cache

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


def edge_contexts(block_size: int) -> list[int]:
    """Around the ends of pages and of the 128-token splits that a batch this small gets; 0 is graph padding."""
    split = paged_decode.SHORTEST_SPLIT
    return [0, 1, block_size - 1, block_size, block_size + 1, split - 1, split, split + 1, 2 * split, 2 * split + 3]


def check(out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, cache: PagedCache, scale: float) -> None:
    for seq, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        if len(k) == 0:
            assert (out[seq] == 0).all()
            assert lse is None or (lse[seq] == float("-inf")).all()
            continue
        query = q[seq : seq + 1]
        assert_as_exact_as_torch(out[seq : seq + 1], lambda q, k, v: attention(q, k, v, scale), query, k, v)
        if lse is not None:
            wide = attention_scores(query.double(), k.double(), scale).logsumexp(-1)[:, 0]
            assert (lse[seq] - wide).abs().max() < 1e-4 * max(1, wide.abs().max().item())  # fp32 accumulation


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"), CASES)
def test_edges(num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator):
    contexts = edge_contexts(block_size)
    cache = make_paged_cache(contexts, num_kv_heads, head_dim, block_size, dtype, device, generator)
    # q: a slice of packed qkv rows
    q = torch.randn(len(contexts), 2 * num_heads, head_dim, generator=generator).to(device, dtype)[:, num_heads:]
    out = torch.full_like(q, float("nan")).contiguous()
    lse = torch.full((len(contexts), num_heads), float("nan"), device=device)
    max_context = max(contexts)
    size = decode_workspace_size(len(contexts), num_heads, num_kv_heads, head_dim, max_context)
    assert size > 0, "the longest context is to be split"
    workspace = torch.full((size,), float("nan"), device=device)
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    result = paged_decode_attention(q, *tables, head_dim**-0.5, out, workspace, max_context=max_context, lse=lse)
    assert result is out
    check(out, lse, q, cache, head_dim**-0.5)


def test_long_tables_and_own_buffers(device, generator):
    """Defaults: everything allocated, and a bound on the context that is the table's capacity, far above the truth."""
    contexts = [3, 0, 131]
    cache = make_paged_cache(contexts, 2, 64, 16, torch.float32, device, generator, spare_table_entries=200)
    q = torch.randn(3, 4, 64, generator=generator).to(device)
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    check(paged_decode_attention(q, *tables, 0.3), None, q, cache, 0.3)


def test_a_batch_that_fills_the_gpu(device, generator, monkeypatch):
    """Many rows, most of them of one split: the combine kernel takes four heads and four splits at a time."""
    monkeypatch.setattr(paged_decode, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(paged_decode, "LONGEST_SPLIT", 128)
    contexts = [1100, 5, 0, 129, 1000]
    cache = make_paged_cache(contexts, 2, 64, 16, torch.float32, device, generator)
    q = torch.randn(5, 6, 64, generator=generator).to(device)
    lse = torch.full((5, 6), float("nan"), device=device)
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    check(paged_decode_attention(q, *tables, 0.125, lse=lse), lse, q, cache, 0.125)


def test_large_scores_do_not_overflow(device, generator):
    cache = make_paged_cache([150], 1, 64, 16, torch.float32, device, generator)
    q = torch.randn(1, 1, 64, generator=generator).to(device) * 100
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    check(paged_decode_attention(q, *tables, 1.0), None, q, cache, 1.0)


@pytest.mark.parametrize("block_size", [16, 256])  # a gather of pages, and one page a tile
def test_offsets_past_the_range_of_int32(block_size, device):
    """Block 3 starts at element 3 * 2**30: a 32-bit product would wrap."""
    storage = torch.empty(3 * 2**30 + 40000, dtype=torch.float16, device=device)  # the CPU commits only touched pages
    k_cache = storage.as_strided((4, block_size, 1, 64), (2**30, 64, 64, 1))
    v_cache = storage.as_strided((4, block_size, 1, 64), (2**30, 64, 64, 1), storage_offset=20000)
    k_cache[3], v_cache[3] = 0, 7
    index = torch.tensor([[3]], dtype=torch.int32, device=device)
    q = torch.ones(1, 1, 64, dtype=torch.float16, device=device)
    assert (paged_decode_attention(q, k_cache, v_cache, index, index[0], 1.0) == 7).all()


def test_split_policy():
    for num_seqs in (1, 3, 16, 64, 132, 133, 256, 1024):
        for num_kv_heads in (1, 2, 8, 32):
            for max_context in (1, 100, 4096, 40960, 131072):
                length = split_length(num_seqs, num_kv_heads, max_context)
                num_splits = -(-max_context // length)
                assert length % 128 == 0
                assert num_seqs * num_kv_heads * num_splits <= max(16384, num_seqs * num_kv_heads)
    assert split_length(1, 8, 4096) == 256  # 128 programs: one a multiprocessor
    assert split_length(1, 1, 4096) == 128
    assert split_length(256, 8, 4096) == 1024
    assert split_length(512, 8, 1024) == 1024  # one split: no combine kernel at all


def test_workspace_serves_every_smaller_batch():
    size = decode_workspace_size(300, 16, 8, 128, 4096)
    for num_seqs in range(1, 301):
        num_splits = -(-4096 // split_length(num_seqs, 8, 4096))
        assert num_seqs * 16 * num_splits * 129 <= size
    assert decode_workspace_size(300, 16, 8, 128, 128) == 0


def test_wrong_arguments_are_refused(device, generator):
    cache = make_paged_cache([300], 2, 64, 16, torch.float32, device, generator)
    q = torch.zeros(1, 4, 64, device=device)
    tables = (cache.block_tables, cache.context_lens)
    with pytest.raises(ValueError, match="3 query heads"):
        paged_decode_attention(q[:, :3], cache.k_cache, cache.v_cache, *tables, 1.0)
    with pytest.raises(ValueError, match=r"float16, the caches are torch\.float32"):
        paged_decode_attention(q.half(), cache.k_cache, cache.v_cache, *tables, 1.0)
    with pytest.raises(ValueError, match="2 queries"):
        paged_decode_attention(q.expand(2, -1, -1), cache.k_cache, cache.v_cache, *tables, 1.0)
    with pytest.raises(ValueError, match="workspace holds 10"):
        paged_decode_attention(q, cache.k_cache, cache.v_cache, *tables, 1.0, workspace=q.flatten()[:10])


@needs_cuda
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64)])
def test_large_batches(num_heads, num_kv_heads, head_dim, block_size, device, generator):
    for num_seqs in (1, 16, 256):
        contexts = torch.randint(1, 2600, (num_seqs,), generator=generator).tolist()
        cache = make_paged_cache(contexts, num_kv_heads, head_dim, block_size, torch.bfloat16, device, generator)
        q = torch.randn(num_seqs, num_heads, head_dim, generator=generator).to(device, torch.bfloat16)
        tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
        check(paged_decode_attention(q, *tables, head_dim**-0.5), None, q, cache, head_dim**-0.5)


@needs_cuda
def test_one_captured_graph_serves_all_context_lengths(device, generator):
    cache = make_paged_cache([2000] * 8, 8, 128, 256, torch.bfloat16, device, generator)
    q = torch.randn(8, 16, 128, generator=generator).to(device, torch.bfloat16)
    tables = (cache.k_cache, cache.v_cache, cache.block_tables, cache.context_lens)
    paged_decode_attention(q, *tables, 0.1)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode_attention(q, *tables, 0.1)
    keys, values = cache.keys, cache.values
    for contexts in ([2000] * 8, [0, 1, 255, 256, 257, 1024, 1025, 1999], [0] * 8):
        cache.context_lens.copy_(torch.tensor(contexts))
        cache.keys = [k[:n] for k, n in zip(keys, contexts, strict=True)]
        cache.values = [v[:n] for v, n in zip(values, contexts, strict=True)]
        out.fill_(float("nan"))
        graph.replay()
        check(out, None, q, cache, 0.1)
