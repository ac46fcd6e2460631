"""What the order of admission saves where many groups of prompts share a prefix each, and few prefixes fit the cache.

    python -m benchmarks.prefix_order                       # on a CPU: SmolLM2-135M in float32, short prefixes
    python -m benchmarks.prefix_order --shape qwen3-0.6b    # on a GPU: prefixes of 2,048 tokens, random weights
    python -m benchmarks.prefix_order --simulate            # the same job by the scheduler alone: counts, no seconds

64 groups of 32 prompts, shuffled, in one `generate`; the KV cache holds half of the prefixes (`--cached-prefixes`).
First come first served meets a prompt of a group when the group's prefix has mostly been evicted; by prefix, one group
comes after the other. Each policy has an engine of its own, and a first pass over a small job with other tokens. The
least that has to be computed comes first; the last line is JSON.
"""

import argparse
import json
import random
import time
from array import array
from typing import Any

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import LOOK_AHEAD, ScheduledBatch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.demo import demo_model

# Tokens of a prefix, of what follows it in each prompt, of each output, and of a KV block.
CPU_SIZES, GPU_SIZES = (16, 2, 2, 8), (2048, 64, 64, 64)
VOCAB_SIZE = 10_000
POLICIES = ("fcfs", "prefix")
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

    def figures(self, job: Prompts) -> dict[str, Any]:
        return {
            "hit_rate": round(self.num_cached_tokens / sum(map(len, job)), 3),
            "prefill_tokens": self.num_prefill_tokens,
            "steps": self.num_steps,
            "preemptions": self.num_preemptions,
        }


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
    figures = counts.figures(job) | {
        "seconds": round(seconds, 2),
        "output_tok_s": round(num_output / seconds, 1),
        "prompt_and_output_tok_s": round((num_prompt + num_output) / seconds, 1),
    }
    return figures, [output["token_ids"] for output in outputs]


def simulate(policy: str, settings: dict[str, Any], job: Prompts, output_len: int, look_ahead: int) -> dict[str, Any]:
    """Counts of a policy, with the default limits of an engine and without a model; `generate` would see as far."""
    manager = BlockManager(settings["num_kvcache_blocks"], settings["kvcache_block_size"])
    scheduler = Scheduler(manager, max_num_seqs=512, max_num_batched_tokens=16384, schedule_policy=policy)
    counts = CountingScheduler(scheduler)
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    num_queued, in_flight = 0, None
    while num_queued < len(job) or scheduler.has_sequences or in_flight:
        num_wanted = look_ahead if scheduler.waiting.is_sharing else 0
        for _ in range(min(512, len(job) - num_queued, max(512, num_wanted) - len(scheduler.waiting))):
            prompt = array("i", job[num_queued])
            scheduler.add(Sequence(num_queued, prompt, params, max_total_tokens=len(prompt) + output_len))
            num_queued += 1
        batch = scheduler.schedule()
        previous, in_flight = in_flight, batch if batch.sequences else None
        if previous is not None:
            scheduler.postprocess(previous, [VOCAB_SIZE] * len(previous.sampled_sequences))
    return counts.figures(job)


def main() -> None:
    args = parse_args()
    is_large = args.simulate or args.shape is not None
    prefix_len, own_len, output_len, block_size = GPU_SIZES if is_large else CPU_SIZES
    prefix_len = args.prefix_len or prefix_len
    num_kv_tokens = (args.cached_prefixes or args.groups // 2) * prefix_len
    settings: dict[str, Any] = {
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": num_kv_tokens // block_size,
        "load_format": "auto" if args.shape is None else "dummy",
    }
    job = make_job(args.groups, args.members, prefix_len, own_len, seed=1)

    shared = prefix_len // block_size * block_size  # of a last block that is not full, each computes its own
    num_prompt = sum(map(len, job))
    least = args.groups * shared + len(job) * (prefix_len + own_len - shared)
    lengths = f"{prefix_len} shared and {own_len} own tokens, {output_len} out"
    print(f"{args.groups} groups of {args.members} prompts: {lengths}")
    print(f"KV cache of {num_kv_tokens:,} tokens; {args.groups} prefixes have {args.groups * prefix_len:,}")
    print(f"least possible: {least:,} prompt tokens of {num_prompt:,}, a hit rate of {1 - least / num_prompt:.3f}")
    result: dict[str, Any] = {"least_prefill_tokens": least, "prompt_tokens": num_prompt}
    if args.simulate:
        for policy in POLICIES:
            result[policy] = simulate(policy, settings, job, output_len, args.look_ahead)
            report(policy, result[policy])
    else:
        result["shape"] = args.shape or args.model or demo_model()
        model = str(shape_folder(args.shape)) if args.shape else result["shape"]
        warm_up = make_job(4, 4, prefix_len, own_len, seed=0)
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = {}
        for policy in POLICIES:
            result[policy], outputs[policy] = measure(policy, model, settings, job, warm_up, params)
            report(policy, result[policy])
        result["speedup"] = round(result["fcfs"]["seconds"] / result["prefix"]["seconds"], 2)
        pairs = zip(outputs["fcfs"], outputs["prefix"], strict=True)
        result["equal_outputs"] = sum(plain == ordered for plain, ordered in pairs)
        print(f"{result['speedup']} times as fast; {result['equal_outputs']} of {len(job)} outputs are equal")
    print(json.dumps({**result, **describe_environment()}))


def report(policy: str, figures: dict[str, Any]) -> None:
    print(f"{policy:8}" + ", ".join(f"{name} {value:,}" for name, value in figures.items()), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, on a GPU")
    parser.add_argument("--simulate", action="store_true", help="the lengths of a GPU's job, without a model")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--members", type=int, default=32, help="prompts of a group")
    parser.add_argument("--prefix-len", type=int, help="tokens of a prefix; default: 2,048 on a GPU, 16 on a CPU")
    parser.add_argument("--cached-prefixes", type=int, help="prefixes that the KV cache holds; default: half of them")
    parser.add_argument("--look-ahead", type=int, default=LOOK_AHEAD, help="requests that a simulated order sees")
    args = parser.parse_args()
    sizes = (args.members, args.prefix_len, args.cached_prefixes, args.look_ahead)
    if args.groups < 2 or any(size is not None and size < 1 for size in sizes):
        parser.error("there must be 2 groups at least, and 1 of everything else")
    return args


if __name__ == "__main__":
    main()
