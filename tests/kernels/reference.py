"""Plain torch references, and the one comparison that every kernel test uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FLOOR = 2e-6  # absolute, for values of about 1: where plain torch happens to be exact, a few fp32 roundings are not


def assert_as_exact_as_torch(
    actual: torch.Tensor, formula: Callable[..., torch.Tensor], *inputs: torch.Tensor, floor: float = FLOOR
) -> None:
    """`actual` must be within twice the error of `formula` run in the inputs' own dtype, both against float64.

    Rounding the exact result to that dtype counts as an error of plain torch too: nobody can do better.
    """
    exact = formula(*(x.double() for x in inputs))
    plain = formula(*inputs)
    actual = actual.to(exact.device).double()
    assert actual.shape == exact.shape
    assert not actual.isnan().any(), "NaN in the result: something unwritten or poisoned was read"
    error = (actual - exact).abs().max().item()
    least = (exact.to(plain.dtype).double() - exact).abs().max().item()
    allowed = 2 * max((plain.double() - exact).abs().max().item(), least) + floor
    assert error <= allowed, f"error {error:.3e}, twice that of plain torch is {allowed:.3e}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Hugging Face's order: normalise in at least fp32, round to x's dtype, multiply in it."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of x [num_tokens, heads, dim] by cos_sin [num_tokens, dim], in x's dtype."""
    cos, sin = (half.unsqueeze(1) for half in cos_sin.to(x.dtype).chunk(2, dim=-1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last len(q) positions of k attend causally: q [queries, H, D], k and v [keys, KVH, D] -> [queries, H, D]."""
    scores, values = attention_scores(q, k, scale), v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def attention_scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled and causally masked scores [H, queries, keys]."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return scores.masked_fill(~visible, float("-inf"))


@dataclass
class PagedCache:
    """Random keys and values of several sequences in randomly permuted blocks; every unused slot holds NaN."""

    k_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; entries past a context are a huge number
    context_lens: torch.Tensor  # [num_seqs] int32
    keys: list[torch.Tensor]  # [context_len, num_kv_heads, head_dim] of each sequence
    values: list[torch.Tensor]


def make_paged_cache(
    contexts: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    spare_table_entries: int = 2,
) -> PagedCache:
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    # heads before slots in memory, so that the strides differ from those of a contiguous cache
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=dtype).transpose(1, 2)
    v_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(contexts), max(counts) + spare_table_entries), 2**30, dtype=torch.int32)
    keys, values = [], []
    for seq, context in enumerate(contexts):
        keys.append(torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype))
        values.append(torch.randn(context, num_kv_heads, head_dim, generator=generator).to(dtype))
        for index in range(counts[seq]):
            block = tables[seq, index] = next(order)
            part = slice(index * block_size, min((index + 1) * block_size, context))
            k_cache[block, : part.stop - part.start] = keys[-1][part]
            v_cache[block, : part.stop - part.start] = values[-1][part]
    return PagedCache(
        k_cache.to(device),
        v_cache.to(device),
        tables.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        [k.to(device) for k in keys],
        [v.to(device) for v in values],
    )
