"""Decode attention that reads shared prefixes once a step, against the same engine reading every context whole.

    python -m benchmarks.prefix_sharing                            # on a CPU: SmolLM2-135M in float32
    python -m benchmarks.prefix_sharing --shape qwen3-0.6b --tokens 2048 --outputs 128

Two jobs: `prompts` with one shared beginning of `tokens` tokens and 100 of their own, and `samples` samples each of
prompts / samples prompts of `tokens` tokens. Each way of each job gets a warm-up pass, then they alternate, with other
token ids in every pass; the prompts' computation, which both share alike, is part of the time. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.utils.demo import demo_model

NUM_OWN = 100


def main() -> None:
    args = parse_args()
    model = str(shape_folder(args.shape)) if args.shape else args.model or demo_model()
    rng = random.Random(0)

    def random_tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(10000) for _ in range(num_tokens)]

    def make_prefixed() -> list[list[int]]:
        shared = random_tokens(args.tokens)
        return [shared + random_tokens(NUM_OWN) for _ in range(args.prompts)]

    def make_sampled() -> list[list[int]]:
        return [random_tokens(args.tokens) for _ in range(args.prompts // args.samples)]

    result: dict[str, object] = {"shape": args.shape or model, **vars(args)}
    load_format = "dummy" if args.shape else "auto"
    with LLM(model, max_num_seqs=args.prompts, load_format=load_format) as llm:
        jobs = {"prefix": (make_prefixed, 1), f"n={args.samples}": (make_sampled, args.samples)}
        for name, (make, num_samples) in jobs.items():
            result[name] = figures = compare(llm, make, num_samples, args)
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    print(json.dumps({**result, **describe_environment()}))


def compare(
    llm: LLM, make: Callable[[], list[list[int]]], num_samples: int, args: argparse.Namespace
) -> dict[str, float]:
    """Output tokens a second of either way, and their ratio."""
    params = SamplingParams(temperature=0.6, max_tokens=args.outputs, ignore_eos=True, n=num_samples)
    grouper = llm._grouper
    capacity, rates = grouper.capacity, {"shared": list[float](), "whole": list[float]()}
    for repeat in range(1 + args.repeats):
        for way, seen in rates.items():
            grouper.capacity = capacity if way == "shared" else 0
            prompts = make()
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if repeat:
                seen.append(args.prompts * args.outputs / (time.perf_counter() - started))
    grouper.capacity = capacity
    shared, whole = (statistics.median(seen) for seen in rates.values())
    return {"shared_tok_s": round(shared, 1), "whole_tok_s": round(whole, 1), "ratio": round(shared / whole, 2)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known model's shape instead")
    parser.add_argument("--prompts", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
