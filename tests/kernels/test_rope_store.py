import pytest
import torch

from nanovllm.kernels.rope_store import qk_norm_rope_store
from tests.kernels.reference import assert_as_exact_as_torch, rms_norm, rotate

CASES = [  # (query heads, KV heads, head_dim, dtype)
    (4, 4, 64, torch.float32),
    (6, 2, 80, torch.float16),
    (7, 1, 96, torch.bfloat16),
    (16, 2, 128, torch.bfloat16),
    (28, 4, 128, torch.float16),
]


@pytest.mark.parametrize(("norm_q", "norm_k"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "dtype"), CASES)
def test_against_separate_steps(num_heads, num_kv_heads, head_dim, dtype, norm_q, norm_k, device, generator):
    # enough tokens that plain torch's largest error is no matter of luck
    num_tokens, block_size, max_positions = 33, 16, 50
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 32, generator=generator).to(device, dtype)[:, :width]
    weights = [torch.randn(head_dim, generator=generator).to(device, dtype) for _ in range(2)]
    angles = torch.rand(max_positions, head_dim // 2, generator=generator, dtype=torch.float64) * 50
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)
    positions = torch.randint(max_positions, (num_tokens,), generator=generator).to(device)
    positions[0] = max_positions - 1
    slots = torch.tensor([37, -1, *range(31)], dtype=torch.int32, device=device)
    k_cache = torch.full((3, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    v_cache = torch.full((3, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device)
    v_cache = v_cache.transpose(1, 2)

    q = qk_norm_rope_store(
        qkv, weights[0] if norm_q else None, weights[1] if norm_k else None, 1e-6, cos_sin, positions,
        k_cache, v_cache, slots, num_heads, num_kv_heads,
    )  # fmt: skip

    assert q.shape == (num_tokens, num_heads, head_dim)
    assert q.is_contiguous()
    heads = qkv.unflatten(1, (-1, head_dim))
    raw_q, raw_k, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    live = slots >= 0
    key = k_cache.reshape(-1, num_kv_heads, head_dim)[slots[live].long()]
    turn = cos_sin[positions]
    for actual, raw, weight, normed, rows in (
        (q, raw_q, weights[0], norm_q, slice(None)),
        (key, raw_k, weights[1], norm_k, live),
    ):

        def formula(x, w, normed=normed, rows=rows):
            return rotate(rms_norm(x, w) if normed else x, turn[rows])

        assert_as_exact_as_torch(actual, formula, raw[rows], weight)
    assert torch.equal(v_cache.reshape(-1, num_kv_heads, head_dim)[slots[live].long()], value[live])
    for cache in (k_cache, v_cache):  # the -1 row and all other slots stay as they were
        assert cache.isnan().all(dim=-1).all(dim=-1).sum() == 3 * block_size - 32


def test_position_zero_changes_nothing_without_norm(device, generator):
    qkv = torch.randn(1, 3 * 64, generator=generator).to(device)
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=-1).to(device)
    caches = [torch.zeros(1, 16, 1, 64, device=device) for _ in range(2)]
    index = torch.zeros(1, dtype=torch.int32, device=device)  # int32 positions work as well as int64
    q = qk_norm_rope_store(qkv, None, None, 1e-6, cos_sin, index, *caches, index, 1, 1)
    packed = torch.cat((q.flatten(), caches[0][0, 0].flatten(), caches[1][0, 0].flatten()))
    assert torch.equal(packed, qkv[0])


def test_wrong_shapes_are_refused(device):
    cache, index = torch.zeros(1, 16, 1, 64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    angles = torch.zeros(4, 64, device=device)
    with pytest.raises(ValueError, match="heads of 64"):
        qk_norm_rope_store(angles[:2], None, None, 1e-6, angles, index, cache, cache, index, 2, 1)
    qkv = torch.zeros(2, 4 * 64, device=device)
    with pytest.raises(ValueError, match="fp32"):
        qk_norm_rope_store(qkv, None, None, 1e-6, angles.half(), index, cache, cache, index, 2, 1)
    with pytest.raises(ValueError, match="slot_mapping"):
        qk_norm_rope_store(qkv, None, None, 1e-6, angles, index, cache, cache, index[:1], 2, 1)
