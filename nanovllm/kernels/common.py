"""What several kernels share: the paged layout, the order of RMSNorm's roundings, argument checks.

Paged layout: a layer's `k_cache` and `v_cache` are [num_blocks, block_size, num_kv_heads, head_dim]. The last
dimension is contiguous, the other strides are free. Token `t` of a sequence lives in block
`block_table[t // block_size]`, slot `t % block_size`. Offsets into a cache are 64-bit: a cache of an H200 has more
elements than an int32 can count.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2 ** (x * LOG2_E); the hardware's exponential is base 2
LN_2 = tl.constexpr(0.6931471805599453)
H200_MULTIPROCESSORS = 132
SMALLEST_SHARED_MEMORY = 99 * 1024  # bytes a block may use on the consumer GPUs (sm_86, sm_89, sm_120)


@triton.jit
def load_pages(table_ptr, first, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Blocks of tokens first .. first+TILE-1 of one sequence: an int32 if the tile lies in one, else [TILE]; 0 for
    tokens >= end. `first` must be a multiple of TILE.

    Loops over tiles ask for a tile's blocks one tile ahead. In the pipelined loop, which fetches keys one tile ahead,
    that is two tiles ahead, so that the addresses of keys are known when they are to be fetched. (Two ahead here would
    make Triton give up the pipeline.)
    """
    if PAGE % TILE == 0:
        page = tl.load(table_ptr + first // PAGE, mask=first < end, other=0)
    else:
        tokens = first + tl.arange(0, TILE)
        page = tl.load(table_ptr + tokens // PAGE, mask=tokens < end, other=0)
    return page


@triton.jit
def scale_by_weight(normed, weight, DTYPE: tl.constexpr):
    """fp32 `normed` times `weight` as Hugging Face does: round to the model's dtype first, then multiply in it.

    Returns fp32 that holds DTYPE values. The product of two 16-bit floats is exact in fp32, so rounding it once gives
    the same bits as a multiplication in the 16-bit type.
    """
    return (normed.to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """Programmatic dependent launch: until here, this kernel runs beside the tail of the one launched before it, so
    nothing that that one writes may be read above. Every program must get here, or the order of the kernels after this
    one would be lost. Then lets the next kernel begin likewise.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether programmatic dependent launch works there: from Hopper on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments that launch a kernel with `wait_for_previous_kernel` on `device`."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}


def warps_of_row(block: int) -> int:
    """For programs of one row of `block` elements: 16 elements a thread, so that loads are 16 bytes wide."""
    return min(max(block // 512, 1), 16)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; an H200's count for the CPU, so that the interpreter takes its paths."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory_per_block(device: torch.device) -> int:
    """Bytes of shared memory that one block can use on `device`."""
    if device.type != "cuda":
        return SMALLEST_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int | None, head_dim: int) -> None:
    """Raise ValueError unless both caches are [num_blocks, block_size % 16 == 0, num_kv_heads, head_dim]."""
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4:
        raise ValueError(f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must be equal and 4-d")
    _, block_size, cache_heads, cache_dim = k_cache.shape
    if cache_dim != head_dim or (num_kv_heads is not None and cache_heads != num_kv_heads):
        raise ValueError(
            f"the caches hold {cache_heads} heads of {cache_dim}, the call has {num_kv_heads} heads of {head_dim}"
        )
    if block_size % 16:
        raise ValueError(f"block_size must be a multiple of 16, not {block_size}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the last dimension of the caches must be contiguous")


def check_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> int:
    """Check q [rows, num_heads, head_dim] against the caches; return the query heads of one KV head."""
    if q.dim() != 3 or q.stride(2) != 1:
        raise ValueError(f"q must be [rows, heads, head_dim] with a contiguous last dimension, not {tuple(q.shape)}")
    check_cache(k_cache, v_cache, None, q.shape[2])
    if q.dtype != k_cache.dtype or q.dtype != v_cache.dtype:
        raise ValueError(f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}")
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {num_kv_heads} KV heads")
    return num_heads // num_kv_heads


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: fp32 operands must not be rounded to tf32 on the way."""
    return "ieee" if dtype == torch.float32 else "tf32"
