"""What the order of admission saves where many groups of prompts share a prefix each, and few prefixes fit the cache.

    python -m benchmarks.prefix_order                       # on a CPU: SmolLM2-135M in float32, short prefixes
    python -m benchmarks.prefix_order --shape qwen3-0.6b    # on a GPU: prefixes of 2,048 tokens, random weights

64 groups of 32 prompts, shuffled, in one `generate`; the KV cache holds half of the prefixes. First come first served
meets a prompt of a group when the group's prefix has mostly been evicted; by prefix, one group comes after the other.
Each policy has an engine of its own, and a first pass over a small job with other tokens. The least that has to be
computed comes first; the last line is JSON.
"""

import argparse
import json
import random
import time
from typing import Any

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.utils.demo import demo_model

# Tokens of a prefix, of what follows it in each prompt, of each output, and of a KV block.
CPU_SIZES, GPU_SIZES = (16, 2, 2, 8), (2048, 64, 64, 64)
VOCAB_SIZE = 10_000
Prompts = list[list[int]]


class CountingScheduler:
    """Adds up the counts of an engine's steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._schedule = scheduler.schedule
        self.num_steps = self.num_prefill_tokens = self.num_cached_tokens = self.num_preemptions = 0
        scheduler.schedule = self.schedule  # type: ignore[method-assign]

    def schedule(self) -> ScheduledBatch:
        batch = self._schedule()
        self.num_steps += bool(batch.sequences)
        self.num_prefill_tokens += batch.num_prefill_tokens
        self.num_cached_tokens += batch.num_cached_tokens
        self.num_preemptions += batch.num_preemptions
        return batch


def make_job(num_groups: int, num_members: int, prefix_len: int, own_len: int, seed: int) -> Prompts:
    rng = random.Random(seed)

    def random_tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    prefixes = [random_tokens(prefix_len) for _ in range(num_groups)]
    prompts = [prefix + random_tokens(own_len) for prefix in prefixes for _ in range(num_members)]
    rng.shuffle(prompts)
    return prompts


def measure(
    policy: str, model: str, settings: dict[str, Any], job: Prompts, warm_up: Prompts, params: SamplingParams
) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of a policy, and the outputs' token ids."""
    with LLM(model, schedule_policy=policy, **settings) as llm:
        llm.generate(warm_up, params, use_tqdm=False)
        counts = CountingScheduler(llm.scheduler)
        started = time.perf_counter()
        outputs = llm.generate(job, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    num_output, num_prompt = len(job) * params.max_tokens, sum(map(len, job))
    figures = {
        "hit_rate": round(counts.num_cached_tokens / num_prompt, 3),
        "prefill_tokens": counts.num_prefill_tokens,
        "steps": counts.num_steps,
        "preemptions": counts.num_preemptions,
        "seconds": round(seconds, 2),
        "output_tok_s": round(num_output / seconds, 1),
        "prompt_and_output_tok_s": round((num_prompt + num_output) / seconds, 1),
    }
    return figures, [output["token_ids"] for output in outputs]


def main() -> None:
    args = parse_args()
    is_gpu = args.shape is not None
    model = str(shape_folder(args.shape)) if is_gpu else args.model or demo_model()
    prefix_len, own_len, output_len, block_size = GPU_SIZES if is_gpu else CPU_SIZES
    num_kv_tokens = args.groups * prefix_len // 2
    settings = {"kvcache_block_size": block_size, "num_kvcache_blocks": num_kv_tokens // block_size}
    if is_gpu:
        settings["load_format"] = "dummy"
    job = make_job(args.groups, args.members, prefix_len, own_len, seed=1)
    warm_up = make_job(4, 4, prefix_len, own_len, seed=0)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)

    shared = prefix_len // block_size * block_size  # of a last block that is not full, each computes its own
    num_prompt = sum(map(len, job))
    least = args.groups * shared + len(job) * (prefix_len + own_len - shared)
    lengths = f"{prefix_len} shared and {own_len} own tokens, {output_len} out"
    print(f"{args.groups} groups of {args.members} prompts: {lengths}")
    print(f"KV cache of {num_kv_tokens:,} tokens; {args.groups} prefixes have {args.groups * prefix_len:,}")
    print(f"least possible: {least:,} prompt tokens of {num_prompt:,}, a hit rate of {1 - least / num_prompt:.3f}")
    result: dict[str, Any] = {"shape": args.shape or model, "least_prefill_tokens": least, "prompt_tokens": num_prompt}
    outputs = {}
    for policy in ("fcfs", "prefix"):
        result[policy], outputs[policy] = measure(policy, model, settings, job, warm_up, params)
        print(f"{policy:8}" + ", ".join(f"{name} {value}" for name, value in result[policy].items()), flush=True)
    result["speedup"] = round(result["fcfs"]["seconds"] / result["prefix"]["seconds"], 2)
    pairs = zip(outputs["fcfs"], outputs["prefix"], strict=True)
    result["equal_outputs"] = sum(plain == ordered for plain, ordered in pairs)
    print(f"{result['speedup']} times as fast; {result['equal_outputs']} of {len(job)} outputs are equal")
    print(json.dumps({**result, **describe_environment()}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, on a GPU")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--members", type=int, default=32, help="prompts of a group")
    args = parser.parse_args()
    if args.groups < 2 or args.members < 1:
        parser.error("there must be 2 groups and 1 member at least")
    return args


if __name__ == "__main__":
    main()
