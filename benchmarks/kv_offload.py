"""What a second level of the prefix cache in host memory is worth.

    python -m benchmarks.kv_offload
    python -m benchmarks.kv_offload --model PATH --device cpu --prefix-len 256 --num-prefixes 6 --num-requests 24

For each shape, in one engine:

- copying: GB/s in both directions, and what a copy takes beside its blocks; tokens/s of a large prefill step; and the
  crossover, the number of tokens from which a load is faster than computing them.
- a job whose shared beginnings don't fit the KV cache: `num-requests` prompts in random order, each one of
  `num-prefixes` beginnings of `prefix-len` tokens and some of its own, in a pool that holds half of the beginnings;
  first without host memory, then with it.

"decode blocked" is the time by which pure decode steps that ran beside copies took longer than the median of those
that ran alone, as a share of the whole. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.engine import block_copier
from nanovllm.engine.host_cache import BlockCopies, min_blocks_worth_copying

MAX_NUM_SEQS = 16
NUM_TOKEN_IDS = 256
BLOCKS_TIMED = 32


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_to_copy(llm: LLM, *, num_loads: int = 0, num_saves: int = 0) -> float:
    """The least of three; of an idle engine that has not copied anything yet. Copies block 0 and slot 0."""
    copier, times = llm.runner._copier, []
    assert copier is not None
    for _ in range(3):
        synchronize()
        started = time.perf_counter()
        copier.begin(BlockCopies(0, 0, 0, [(0, 0)] * num_loads, [(0, 0)] * num_saves))
        copier.flush()
        synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_copies(llm: LLM) -> dict[str, Any]:
    runner, block_size = llm.runner, llm.runner.block_size
    assert runner._copier is not None
    gigabytes = runner._copier.block_bytes / 1e9
    one_load = seconds_to_copy(llm, num_loads=1)
    loads, saves = (seconds_to_copy(llm, **{name: BLOCKS_TIMED}) for name in ("num_loads", "num_saves"))
    both = seconds_to_copy(llm, num_loads=BLOCKS_TIMED, num_saves=BLOCKS_TIMED)
    a_block = (loads - one_load) / (BLOCKS_TIMED - 1)
    latency, compute = max(0.0, one_load - a_block), prefill_seconds(llm) * block_size
    crossover = min_blocks_worth_copying(latency, a_block, compute)
    return {
        "block_tokens": block_size,
        "block_mb": round(gigabytes * 1e3, 3),
        "load_gb_s": round(gigabytes / a_block, 1),
        "save_gb_s": round(gigabytes * BLOCKS_TIMED / saves, 1),
        "both_gb_s": round(2 * gigabytes * BLOCKS_TIMED / both, 1),
        "latency_us": round(1e6 * latency),
        "load_tok_s": round(block_size / a_block),
        "prefill_tok_s": round(block_size / compute),
        "crossover_tokens": None if crossover is None else crossover * block_size,
    }


def prefill_seconds(llm: LLM) -> float:
    """Seconds a token, of prompts that fill a step: the least of three."""
    budget, pool, times = llm.config.max_num_batched_tokens, llm.runner.num_kv_blocks * llm.runner.block_size, []
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    length = min(512, budget, llm.max_model_len - 1, pool // 2)
    num_prompts = max(1, min(budget, pool // 2) // length)
    rng = random.Random(9)
    for _ in range(4):
        prompts = [[rng.randrange(NUM_TOKEN_IDS) for _ in range(length)] for _ in range(num_prompts)]
        synchronize()
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - started)
    return min(times[1:]) / (num_prompts * length)


@dataclass
class Run:
    """One run of the job. `decode_seconds`: of pure decode steps, alone and beside copies."""

    seconds: float = 0.0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    decode_seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def figures(self) -> dict[str, Any]:
        alone, beside = self.decode_seconds
        usual = statistics.median(alone) if alone else 0.0
        blocked = sum(max(0.0, seconds - usual) for seconds in beside) if alone else 0.0
        return {
            "seconds": round(self.seconds, 3),
            "output_tok_s": round(self.num_output_tokens / self.seconds, 1),
            "prefill_tokens": self.num_prefill_tokens,
            "cached_tokens": self.num_cached_tokens,
            "decode_step_ms": round(1e3 * usual, 3),
            "decode_step_beside_copies_ms": round(1e3 * statistics.median(beside), 3) if beside else None,
            "decode_blocked": round(blocked / self.seconds, 4),
        }


def run_job(llm: LLM, args: argparse.Namespace, num_requests: int) -> Run:
    rng = random.Random(0)

    def random_tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(NUM_TOKEN_IDS) for _ in range(num_tokens)]

    prefixes = [random_tokens(args.prefix_len) for _ in range(args.num_prefixes)]
    params = SamplingParams(temperature=0, max_tokens=args.num_output, ignore_eos=True)
    order = [index % args.num_prefixes for index in range(num_requests)]
    rng.shuffle(order)
    for index in order:
        llm.add_request(prefixes[index] + random_tokens(args.num_own), params)
    run, host = Run(), llm.host_cache
    synchronize()
    is_cuda = llm.runner.device.type == "cuda"
    waited_for: bool | None = None  # whether copies ran beside it; None if it is no pure decode step
    started = last = time.perf_counter()
    while not llm.is_finished():
        step = llm.step()
        now = time.perf_counter()
        is_decode = step.num_decode_tokens and not step.num_prefill_tokens
        launched = (host is not None and host.is_copying) if is_decode else None
        # On a GPU, a step that is launched is waited for when the next one has been launched.
        measured = waited_for if is_cuda else launched
        if measured is not None:
            run.decode_seconds[measured].append(now - last)
        last, waited_for = now, launched
        run.num_prefill_tokens += step.num_prefill_tokens
        run.num_cached_tokens += step.num_cached_tokens
        run.num_output_tokens += len(step.new_token_ids)
    run.seconds = time.perf_counter() - started
    return run


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    found: list[int | None] = []  # by the engine, on a GPU

    def at_least_one(*figures: float) -> int:
        found.append(min_blocks_worth_copying(*figures))
        return found[-1] or 1  # what computes faster than it copies is measured, too: a copy leaves the GPU to others

    block_copier.min_blocks_worth_copying = at_least_one  # type: ignore[assignment]
    llm = LLM(
        model,
        load_format="auto" if args.model else "dummy",
        device=args.device,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=args.prefix_len + args.num_own + args.num_output,
        num_kvcache_blocks=args.num_blocks,
        kvcache_block_size=args.block_size,
        kv_offload_gb=args.offload_gb,
        schedule_policy="fcfs",  # requests in the order in which they come, as from users
    )
    with llm:
        result: dict[str, Any] = {"startup_s": round(time.perf_counter() - started, 2)}
        result |= {"pool_blocks": args.num_blocks, "host_blocks": llm.runner.num_host_blocks}
        result |= measure_copies(llm)
        result["engine_loads_from_tokens"] = found[-1] * llm.runner.block_size if found and found[-1] else None
        host = llm.host_cache
        for name in ("warm-up", "without", "with"):
            # The same engine without and with its second level.
            llm.host_cache = llm.block_manager.host_cache = host if name == "with" else None
            llm.block_manager.reset()
            run = run_job(llm, args, MAX_NUM_SEQS if name == "warm-up" else args.num_requests)
            if name != "warm-up":
                result[name] = run.figures()
                print(f"  {name:8} {result[name]}", flush=True)
        if host is not None:
            result |= {"saved_blocks": host.num_saved_blocks, "loaded_blocks": host.num_loaded_blocks}
            result["loaded_tokens"] = host.num_loaded_tokens
        result["speedup"] = round(result["without"]["seconds"] / result["with"]["seconds"], 3)
    return result


def main() -> None:
    args = parse_args()
    result: dict[str, Any] = {"settings": vars(args)}
    for name in [args.model] if args.model else args.shape:
        print(name, flush=True)
        result[name] = measure(name if args.model else str(shape_folder(name)), args)
        print(f"  {result[name]}", flush=True)
    print(json.dumps({**result, **describe_environment()}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--model", help="directory or .gguf file, instead of shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--offload-gb", type=float, default=12.0)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--num-prefixes", type=int, default=32)
    parser.add_argument("--prefix-len", type=int, default=2048)
    parser.add_argument("--num-requests", type=int, default=160)
    parser.add_argument("--num-own", type=int, default=64)
    parser.add_argument("--num-output", type=int, default=48)
    args = parser.parse_args()
    own_blocks = 1 - (-(args.num_own + args.num_output) // args.block_size)
    args.num_blocks = args.num_prefixes // 2 * (args.prefix_len // args.block_size) + MAX_NUM_SEQS * own_blocks
    return args


if __name__ == "__main__":
    main()
