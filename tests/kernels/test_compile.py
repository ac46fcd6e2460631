"""Every kernel compiles for a GPU, whether there is one or not.

The interpreter takes Python that Triton's compiler refuses, such as two return statements of different types. Here the
launchers run in another process, on CPU tensors, with a driver that only says which GPU is meant; each launch ends with
the machine code. The process knows of no GPU, so it doesn't matter whether there is one.
"""

import os
import subprocess
import sys

_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    get_active_torch_device = lambda self: torch.device("cpu")

driver.set_active(Driver())
run = JITFunction.run
compiled = []

def compile_only(kernel, *args, **options):
    result = run(kernel, *args, **{**options, "warmup": True})
    assert len(result.asm["cubin"]) > 0
    compiled.append(kernel.fn.__name__)
    return result

JITFunction.run = compile_only
from nanovllm.kernels import common
common.has_dependent_launch = lambda device: True
common.shared_memory_per_block = lambda device: 227 * 1024

from nanovllm.engine.prefix_groups import PrefixGroups
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_plan import plan_decode
from nanovllm.kernels.kv_store import store_kv
from nanovllm.kernels.logits_edits import apply_masks_
from nanovllm.kernels.logits_filter import filter_logits_
from nanovllm.kernels.logprobs import score_tokens
from nanovllm.kernels.norm import add_rms_norm, rms_norm, sum_add_rms_norm
from nanovllm.kernels.paged_decode import paged_decode_attention
from nanovllm.kernels.paged_prefill import paged_prefill_attention
from nanovllm.kernels.peer_exchange import Exchange, broadcast_first, meet_others, sum_parts
from nanovllm.kernels.rope_store import qk_norm_rope_store
from nanovllm.kernels.sampling import sample
from nanovllm.kernels.shared_prefix import group_capacity, plan_shared, shared_prefix_attention
from nanovllm.kernels.skinny_linear import skinny_linear
from nanovllm.utils.context import SharedPrefixes

def ints(*shape):
    return torch.ones(shape, dtype=torch.int32)

def attention(num_heads, num_kv_heads, head_dim, page, dtype):
    q = torch.zeros(4, num_heads, head_dim, dtype=dtype)
    cache = torch.zeros(4, page, num_kv_heads, head_dim, dtype=dtype)
    sizes = (num_heads, num_kv_heads, head_dim, dtype)
    groups = PrefixGroups.none(ints(4).numpy(), group_capacity(num_heads, num_kv_heads, dtype), 2)
    prefixes = SharedPrefixes(**{name: torch.from_numpy(array) for name, array in vars(groups).items()})
    shared_plan, plan = plan_shared(prefixes, *sizes), plan_decode(prefixes.own_lens, *sizes)
    tables = (q, cache, cache, ints(4, 4))
    shared_prefix_attention(*tables, prefixes, 1.0, shared_plan)
    paged_decode_attention(*tables, prefixes.own_lens, 1.0, plan, prefixes.shared_lens, shared_plan)
    paged_decode_attention(*tables, prefixes.own_lens, 1.0, plan)
    paged_prefill_attention(*tables, torch.arange(5).int(), ints(4), 1, 1.0)
    key = torch.zeros(4, num_kv_heads, head_dim, dtype=dtype)
    store_kv(key, key, cache, cache, ints(4))
    qkv = torch.zeros(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    for weight in (None, torch.ones(head_dim, dtype=dtype)):
        qk_norm_rope_store(
            qkv, weight, weight, 1e-6, torch.zeros(64, head_dim), ints(4), cache, cache, ints(4),
            num_heads=num_heads, num_kv_heads=num_kv_heads,
        )

attention(16, 8, 128, 64, torch.bfloat16)
attention(14, 2, 64, 16, torch.float16)
x, weight = torch.zeros(4, 512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
rms_norm(x, weight, 1e-6)
add_rms_norm(x, x.clone(), weight, 1e-6)
silu_and_mul(x)
boxes = tuple(torch.zeros(2, 32, dtype=torch.int64) for rank in range(3))
for rank in range(3):
    exchange = Exchange(rank, boxes, boxes[0])
    sum_add_rms_norm((x,) * 3, x, weight, 1e-6, exchange)
    sum_parts((x,) * 3, x, exchange)
    broadcast_first(boxes[0][0, :5], boxes, exchange)
    meet_others(exchange)
for way in ({}, {"in_pieces": True}, {"silu_and_mul": True}):
    for size in (128, 384):
        skinny_linear(x[:, :size], torch.zeros(64, size, dtype=torch.bfloat16), **way)
    for rows in (4, 20):
        for width in (256, 64 * 140, 128 * 140):
            skinny_linear(x[:1].expand(rows, 512), torch.zeros(width, 512, dtype=torch.bfloat16), **way)
logits, floats = torch.zeros(4, 5000, dtype=torch.bfloat16), torch.ones(4)
sample(logits, floats, ints(4, 2))
filter_logits_(logits, ints(4), floats, ints(4), floats, floats)
score_tokens(logits, None, ints(4), 3)
apply_masks_(logits, ints(4), ints(4, 157))
print(len(compiled), "launches of", len(set(compiled)), "kernels")
"""


def test_every_kernel_compiles() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "launches" in result.stdout
