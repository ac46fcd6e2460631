"""Output tokens a second, this engine and its peers in one run.

    python -m benchmarks.throughput --engine nanovllm hf

Shows that on a CPU the engine is at least 1.5 times as fast as transformers' `generate` at its best batch size:
64 requests of 16 to 128 tokens in and out, SmolLM2-135M in float32, greedy, every output at its full length.
transformers pads a batch to its longest prompt and runs it to its longest output; only tokens that were asked
for count. Each engine warms up with other token ids. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import Request, describe_environment, mixed_requests, with_other_tokens
from nanovllm import LLM, SamplingParams
from nanovllm.utils.demo import demo_model

HF_BATCH_SIZES = (8, 16, 32, 64)


def main() -> None:
    args = parse_args()
    requests = mixed_requests(args.num_seqs, (16, 128), (16, 128), seed=0)
    num_output = sum(request.max_tokens for request in requests)
    result: dict[str, Any] = {"num_requests": len(requests), "output_tokens": num_output, **describe_environment()}
    for engine in args.engine:
        seconds_by_setting = ENGINES[engine](requests, args)
        for setting, seconds in seconds_by_setting.items():
            print(f"{setting:>20}: {num_output / statistics.median(seconds):8.1f} output tok/s", flush=True)
        result[engine] = round(max(num_output / statistics.median(s) for s in seconds_by_setting.values()), 1)
    if "nanovllm" in result and "hf" in result:
        result["ratio"] = round(result["nanovllm"] / result["hf"], 2)
    print(json.dumps(result))


def run_nanovllm(requests: list[Request], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each pass."""
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.max_tokens) for r in requests]
    with LLM(args.model or demo_model(), dtype=args.dtype, device="cpu") as llm:
        return {
            "nanovllm": time_passes(lambda rs: llm.generate([r.prompt for r in rs], params), requests, args.repeats)
        }


def run_hf(requests: list[Request], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each pass for each batch size."""
    from transformers import AutoModelForCausalLM

    path = Path(args.model or demo_model())
    location: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        location = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype=getattr(torch, args.dtype)).eval()
    return {
        f"hf, batch {size}": time_passes(lambda rs, size=size: generate_hf(model, rs, size), requests, args.repeats)
        for size in HF_BATCH_SIZES
        if size <= len(requests)
    }


@torch.inference_mode()
def generate_hf(model: Any, requests: list[Request], batch_size: int) -> None:
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt) for request in batch)
        num_tokens = max(request.max_tokens for request in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)


def time_passes(run: Callable[[list[Request]], object], requests: list[Request], repeats: int) -> list[float]:
    run(with_other_tokens(requests, seed=1))
    seconds = []
    for repeat in range(repeats):
        fresh = with_other_tokens(requests, seed=2 + repeat)
        started = time.perf_counter()
        run(fresh)
        seconds.append(time.perf_counter() - started)
    return seconds


ENGINES = {"nanovllm": run_nanovllm, "hf": run_hf}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=sorted(ENGINES), default=["nanovllm", "hf"])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
