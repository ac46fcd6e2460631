import pytest
import torch

from nanovllm.kernels.kv_store import store_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (5, 96), (70, 64)])
def test_rows_land_in_their_slots_and_nowhere_else(num_heads, head_dim, dtype, device, generator):
    num_blocks, block_size, num_tokens = 4, 48, 9
    # key: a slice of packed qkv rows; value: heads before tokens in memory
    key = torch.randn(num_tokens, 3, num_heads, head_dim, generator=generator).to(device, dtype)[:, 1]
    value = torch.randn(num_heads, num_tokens, head_dim, generator=generator).to(device, dtype).transpose(0, 1)
    k_cache = torch.full((num_blocks, block_size, num_heads, head_dim), float("nan"), dtype=dtype, device=device)
    v_cache = torch.full_like(k_cache, float("nan")).view(num_blocks, num_heads, block_size, head_dim).transpose(1, 2)
    last = num_blocks * block_size - 1
    inner = torch.randperm(last - 1, generator=generator)[: num_tokens - 2] + 1
    slots = torch.cat((torch.tensor([last, 0]), inner)).int()
    slots[[3, 7]] = -1
    store_kv(key, value, k_cache, v_cache, slots.to(device))

    live = slots >= 0
    for cache, rows in ((k_cache, key), (v_cache, value)):
        flat = cache.reshape(num_blocks * block_size, num_heads, head_dim).cpu()
        assert torch.equal(flat[slots[live].long()], rows.cpu()[live])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots[live].long()] = False
        assert flat[untouched].isnan().all()
        assert untouched.sum() == len(flat) - 7


def test_offsets_past_the_range_of_int32(device):
    """Block 3 starts at element 3 * 2**30: a 32-bit product would wrap."""
    storage = torch.empty(3 * 2**30 + 4096, dtype=torch.float16, device=device)  # the CPU commits only touched pages
    k_cache = storage.as_strided((4, 16, 1, 64), (2**30, 64, 64, 1))
    v_cache = storage.as_strided((4, 16, 1, 64), (2**30, 64, 64, 1), storage_offset=2048)
    key, value = torch.randn(2, 1, 1, 64, device=device).half()
    k_cache[3, 5] = v_cache[3, 5] = 0
    store_kv(key, value, k_cache, v_cache, torch.tensor([3 * 16 + 5], dtype=torch.int32, device=device))
    assert torch.equal(k_cache[3, 5], key[0])
    assert torch.equal(v_cache[3, 5], value[0])


def test_no_tokens_is_no_work(device):
    cache = torch.zeros(1, 16, 2, 64, device=device)
    empty = torch.zeros(0, 2, 64, device=device)
    store_kv(empty, empty, cache, cache.clone(), torch.zeros(0, dtype=torch.int32, device=device))
    assert (cache == 0).all()


def test_wrong_shapes_are_refused(device):
    rows, slots = torch.zeros(3, 2, 64, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    cache = torch.zeros(2, 16, 2, 64, device=device)
    with pytest.raises(ValueError, match="multiple of 16"):
        store_kv(rows, rows, cache[:, :15], cache[:, :15], slots)
    with pytest.raises(ValueError, match="2 heads of 64, the call has 1"):
        store_kv(rows[:, :1], rows[:, :1], cache, cache, slots)
    with pytest.raises(ValueError, match="disagree"):
        store_kv(rows, rows, cache, cache, slots[:2])
