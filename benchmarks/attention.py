"""Attention backends against what the device could do: decode against its read bandwidth, prefill its arithmetic.

    python -m benchmarks.attention [--heads 16 --kv-heads 8 --head-dim 128] [--backend triton flash_attn_3]

Each case runs in a CUDA graph of several layers' caches, larger together than the L2 cache; the median of repeated
replays counts. Context lengths are uniform between 1/8 of the number given and the number. The last line is JSON.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.roofline import measure_rates
from benchmarks.workloads import describe_environment
from nanovllm.attention import CHOICES, AttentionBackend, AttentionSpec
from nanovllm.utils.context import ForwardContext, SharedPrefixes

DECODE_CASES = ((256, 800), (1024, 800), (128, 1000), (64, 900), (16, 1200), (1, 4096))  # batch, longest context
PREFILL_CASES = ((32, 512, 512), (4, 4096, 4096), (64, 128, 2176))  # sequences, query length, context length
CACHE_BYTES = 2 << 30


def main() -> None:
    args = parse_args()
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    rates = measure_rates(device, dtype)
    print(f"read {rates.bytes_per_second / 1e12:.2f} TB/s, multiply {rates.flops_per_second / 1e12:.0f} TFLOP/s")
    spec = AttentionSpec(args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5, dtype, device)
    result: dict[str, object] = {"spec": f"{args.heads}/{args.kv_heads} heads of {args.head_dim}"}
    for name in args.backend:
        backend_class = CHOICES[name][0]
        own = replace(spec, block_size=args.block_size or backend_class.preferred_block_size)
        if reasons := backend_class.unsupported(own):
            print(f"{name}: not measured: {', '.join(reasons)}")
            continue
        backend = backend_class(own)
        for num_seqs, longest in DECODE_CASES:
            lens = torch.linspace(longest / 8, longest, num_seqs).int().tolist()
            lens = [lens[i * 7919 % num_seqs] for i in range(num_seqs)] if num_seqs > 1 else [longest]
            seconds = time_case(backend, [1] * num_seqs, lens)
            num_bytes = sum(lens) * 2 * own.num_kv_heads * own.head_dim * dtype.itemsize
            share = num_bytes / seconds / rates.bytes_per_second
            report(result, f"{name} decode {num_seqs} x {longest}", seconds, share)
        for num_seqs, query_len, context_len in PREFILL_CASES:
            seconds = time_case(backend, [query_len] * num_seqs, [context_len] * num_seqs)
            pairs = num_seqs * query_len * (context_len - query_len / 2)
            share = 4 * pairs * own.num_heads * own.head_dim / seconds / rates.flops_per_second
            report(result, f"{name} prefill {num_seqs} x {query_len} of {context_len}", seconds, share)
    print(json.dumps({**result, **describe_environment()}))


def report(result: dict[str, object], case: str, seconds: float, share: float) -> None:
    print(f"  {case:>44}: {1e6 * seconds:8.1f} us, {share:6.1%} of the ceiling", flush=True)
    result[case] = {"us": round(1e6 * seconds, 1), "share": round(share, 3)}


@torch.inference_mode()
def time_case(backend: AttentionBackend, query_lens: list[int], context_lens: list[int]) -> float:
    """Seconds of one layer's attention over randomly placed blocks."""
    spec = backend.spec
    assert spec.block_size is not None
    num_blocks = [-(-length // spec.block_size) for length in context_lens]
    total = sum(num_blocks)
    block_bytes = 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    num_layers = max(1, min(64, CACHE_BYTES // (total * block_bytes)))
    cache_shape = (num_layers, 2, total, spec.block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.randn(cache_shape, dtype=spec.dtype, device=spec.device)
    query = torch.randn(sum(query_lens), spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    ids = iter(torch.randperm(total).tolist())
    tables = torch.zeros(len(query_lens), max(num_blocks), dtype=torch.int32)
    for row, count in zip(tables, num_blocks, strict=True):
        row[:count] = torch.tensor([next(ids) for _ in range(count)])
    is_decode = query_lens[0] == 1
    lens = torch.tensor(context_lens, dtype=torch.int32, device=spec.device)
    context = ForwardContext(
        kv_slots=torch.empty(0, dtype=torch.int32),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0).int().to(spec.device),
        context_lens=lens,
        block_tables=tables.to(spec.device),
        num_decode_seqs=len(query_lens) if is_decode else 0,
        max_query_len=0 if is_decode else max(query_lens),
        max_context_len=4096,
        prefixes=SharedPrefixes.none(lens if is_decode else lens[:0]),
    )
    context.decode_plan = backend.prepare_decode(context) if is_decode else None
    context.prefill_plan = None if is_decode else backend.prepare_prefill(context)
    attend = backend.decode if is_decode else backend.prefill

    def all_layers() -> None:
        for k_cache, v_cache in cache:
            attend(query, k_cache, v_cache, context)

    return median_graph_seconds(all_layers) / num_layers


def median_graph_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["triton", "flash_attn_3", "flash_attn_2", "flash_attn_4"]
    parser.add_argument("--backend", nargs="+", choices=names, default=names)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, help="default: what each backend prefers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
