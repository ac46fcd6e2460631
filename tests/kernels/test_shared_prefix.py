import random
from dataclasses import replace

import pytest
import torch

from nanovllm.engine import prefix_groups
from nanovllm.engine.prefix_groups import PrefixGrouper, max_num_groups
from nanovllm.kernels import decode_plan, shared_prefix
from nanovllm.kernels.decode_plan import plan_decode
from nanovllm.kernels.paged_decode import paged_decode_attention
from nanovllm.kernels.shared_prefix import group_capacity, plan_shared, shared_prefix_attention
from nanovllm.utils.context import SharedPrefixes
from tests.kernels.reference import PagedCache, assert_as_exact_as_torch, attention, make_paged_cache

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [  # (query heads, KV heads, head_dim, block size, dtype)
    (4, 4, 64, 16, torch.float32),
    (6, 2, 80, 48, torch.float16),
    (7, 1, 96, 32, torch.bfloat16),
    (4, 2, 128, 64, torch.bfloat16),
    (4, 2, 256, 16, torch.float16),
    (9, 3, 64, 256, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _every_group_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "_GROUP_COST", 0)
    monkeypatch.setattr(prefix_groups, "_MEMBER_COST", 0)


def random_tree(rng: random.Random, num_seqs: int, max_blocks: int, max_branches: int = 3) -> list[list[int]]:
    """Block tables that share random beginnings: each sequence takes some of an earlier one's, then new blocks."""
    tables: list[list[int]] = []
    next_block = 0
    for _ in range(num_seqs):
        table = []
        if tables and rng.random() < 0.8:
            parent = rng.choice(tables[-max_branches:])
            table = parent[: rng.randint(0, len(parent))]
        num_new = rng.randint(1, max_blocks)
        table = table + list(range(next_block, next_block + num_new))
        next_block += num_new
        tables.append(table)
    return tables


def make_shared_cache(tables: list[list[int]], rng: random.Random, *sizes, dtype, device, generator) -> PagedCache:
    """A cache whose sequences end anywhere in their tables' last blocks. `sizes`: KV heads, their size, a block's."""
    block_size = sizes[2]
    num_blocks = 1 + max(max(table) for table in tables)
    whole = make_paged_cache([num_blocks * block_size], *sizes, dtype, device, generator)
    order = whole.block_tables[0].tolist()
    contexts = [(len(table) - 1) * block_size + rng.randint(1, block_size) for table in tables]
    block_tables = torch.full((len(tables), max(map(len, tables)) + 2), 2**30, dtype=torch.int32)
    keys, values = [], []
    for row, (table, context) in enumerate(zip(tables, contexts, strict=True)):
        block_tables[row, : len(table)] = torch.tensor([order[block] for block in table])
        for parts, tokens in ((keys, whole.keys[0]), (values, whole.values[0])):
            blocks = tokens.unflatten(0, (num_blocks, block_size))
            parts.append(blocks[table].flatten(0, 1)[:context])
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    return PagedCache(whole.k_cache, whole.v_cache, block_tables.to(device), lens, keys, values)


def find_prefixes(cache: PagedCache, capacity: int, num_seqs: int | None = None) -> SharedPrefixes:
    """The groups of a cache's sequences; padded as for a graph of `num_seqs`, if given."""
    grouper = PrefixGrouper(cache.k_cache.shape[1], capacity)
    groups = grouper.find(
        list(range(len(cache.keys))), cache.block_tables.cpu().numpy(), cache.context_lens.cpu().numpy()
    )
    if num_seqs is not None:
        groups = groups.padded(num_seqs, max_num_groups(num_seqs))
    return SharedPrefixes(**{k: torch.from_numpy(v).to(cache.k_cache.device) for k, v in vars(groups).items()})


def attend(q: torch.Tensor, cache: PagedCache, prefixes: SharedPrefixes, scale: float) -> torch.Tensor:
    """Plans and attention, with buffers full of NaN: what is read before it is written shows."""
    sizes = (q.shape[1], cache.k_cache.shape[2], q.shape[2], q.dtype)
    shared_plan, plan = plan_shared(prefixes, *sizes), plan_decode(prefixes.own_lens, *sizes)
    for buffer in (shared_plan.partial, shared_plan.partial_lse, plan.partial, plan.partial_lse):
        buffer.fill_(float("nan"))
    caches = (cache.k_cache, cache.v_cache, cache.block_tables)
    shared_prefix_attention(q, *caches, prefixes, scale, shared_plan)
    return paged_decode_attention(q, *caches, prefixes.own_lens, scale, plan, prefixes.shared_lens, shared_plan)


def check(out: torch.Tensor, q: torch.Tensor, cache: PagedCache, scale: float) -> None:
    for seq, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        query = q[seq : seq + 1]
        k, v = k.to(q.device), v.to(q.device)
        assert_as_exact_as_torch(out[seq : seq + 1], lambda q, k, v: attention(q, k, v, scale), query, k, v)


def use_multiprocessors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (decode_plan, shared_prefix):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: number)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"), CASES)
def test_random_trees(
    multiprocessors, num_heads, num_kv_heads, head_dim, block_size, dtype, device, generator, monkeypatch
) -> None:
    """Groups larger than a tile, nested ones, sequences without company; few programs and many."""
    use_multiprocessors(monkeypatch, multiprocessors)
    rng = random.Random(int(torch.randint(2**30, (), generator=generator)))
    num_seqs = 12
    tables = random_tree(rng, num_seqs, max(1, 64 // block_size))
    sizes = (num_kv_heads, head_dim, block_size)
    cache = make_shared_cache(tables, rng, *sizes, dtype=dtype, device=device, generator=generator)
    q = torch.randn(num_seqs, 2 * num_heads, head_dim, generator=generator).to(device, dtype)[:, num_heads:]
    prefixes = find_prefixes(cache, min(group_capacity(num_heads, num_kv_heads, dtype), rng.choice([2, 3, 5, 64])))
    if len(prefixes.lens):
        check(attend(q, cache, prefixes, head_dim**-0.5), q, cache, head_dim**-0.5)


@pytest.mark.parametrize("multiprocessors", [3, 40])
def test_a_full_group_over_several_shares(multiprocessors, device, generator, monkeypatch):
    """Forty sequences, 32 to a tile, of a prefix that several programs cut into pieces; and one with a prefix of its
    own."""
    use_multiprocessors(monkeypatch, multiprocessors)
    rng = random.Random(0)
    tables = [[*range(20), 100 + i] for i in range(40)]
    tables[7] = [90, 91]
    cache = make_shared_cache(tables, rng, 2, 64, 16, dtype=torch.float16, device=device, generator=generator)
    q = torch.randn(40, 4, 64, generator=generator).to(device, torch.float16)
    prefixes = find_prefixes(cache, group_capacity(4, 2, torch.float16))
    assert prefixes.members.shape == (2, 32) and prefixes.lens.tolist() == [320, 320]
    assert prefixes.shared_lens[7] == 0
    check(attend(q, cache, prefixes, 0.125), q, cache, 0.125)


def test_padding_of_a_graph(device, generator):
    """Rows of empty contexts, and groups of no tokens, change nothing."""
    rng = random.Random(1)
    cache = make_shared_cache(
        [[0, 1, 2], [0, 1, 3], [4]], rng, 2, 64, 16, dtype=torch.float32, device=device, generator=generator
    )
    q = torch.randn(9, 4, 64, generator=generator).to(device)
    prefixes = find_prefixes(cache, 3, num_seqs=9)
    assert prefixes.lens.tolist() == [32, 0, 0, 0] and len(prefixes.own_lens) == 9
    cache.block_tables = torch.cat((cache.block_tables, torch.zeros_like(cache.block_tables[:1]).expand(6, -1)))
    check(attend(q, cache, prefixes, 0.125)[:3], q, cache, 0.125)


def test_nothing_shared_in_a_graph(device, generator):
    rng = random.Random(2)
    cache = make_shared_cache(
        [[0], [1], [2, 3]], rng, 2, 64, 16, dtype=torch.float32, device=device, generator=generator
    )
    q = torch.randn(3, 4, 64, generator=generator).to(device)
    prefixes = find_prefixes(cache, 3, num_seqs=3)
    check(attend(q, cache, prefixes, 0.125), q, cache, 0.125)


def test_wrong_arguments_are_refused(device, generator):
    rng = random.Random(3)
    cache = make_shared_cache([[0, 1], [0, 2]], rng, 2, 64, 16, dtype=torch.float32, device=device, generator=generator)
    caches = (cache.k_cache, cache.v_cache, cache.block_tables)
    q = torch.zeros(2, 4, 64, device=device)
    prefixes = find_prefixes(cache, 16)
    plan = plan_shared(prefixes, 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="3 queries"):
        shared_prefix_attention(torch.zeros(3, 4, 64, device=device), *caches, prefixes, 1.0, plan)
    with pytest.raises(ValueError, match="16 sequences, 4 heads each, don't fit 32 rows"):
        shared_prefix_attention(torch.zeros(2, 8, 64, device=device), *caches, prefixes, 1.0, plan)
    with pytest.raises(ValueError, match="another batch"):
        more = replace(prefixes, members=prefixes.members.repeat(2, 1))
        shared_prefix_attention(q, *caches, more, 1.0, plan)


@needs_cuda
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_large_batches(num_heads, num_kv_heads, head_dim, block_size, device, generator):
    rng = random.Random(4)
    dtype = torch.bfloat16
    for num_seqs in (2, 16, 200):
        tables = random_tree(rng, num_seqs, 1024 // block_size, max_branches=30)
        sizes = (num_kv_heads, head_dim, block_size)
        cache = make_shared_cache(tables, rng, *sizes, dtype=dtype, device=device, generator=generator)
        q = torch.randn(num_seqs, num_heads, head_dim, generator=generator).to(device, dtype)
        prefixes = find_prefixes(cache, group_capacity(num_heads, num_kv_heads, dtype), num_seqs)
        for _ in range(5):
            check(attend(q, cache, prefixes, head_dim**-0.5), q, cache, head_dim**-0.5)
