"""Output throughput on nano-vLLM's own workload: 256 requests, prompts and outputs of 100 to 1024 tokens.

`nanovllm bench --model PATH` on a GPU; on a laptop, `nanovllm bench --num-seqs 16 --max-len 128`.
A full warm-up pass with other token ids comes first, so that nothing is measured twice or found in the cache.
The last line is JSON.
"""

import argparse
import json
import statistics
import time

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.jobs.engine import load
from nanovllm.jobs.errors import JobError
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.demo import demo_model
from nanovllm.utils.workloads import Request, describe_environment, mixed_requests, with_other_tokens


def bench(args: argparse.Namespace) -> int:
    """Measures, prints, and returns the exit status. `args` are those of `add_bench_flags`.

    Raises:
        JobError: there is no such model, or it can't do what is asked.
    """
    try:
        return _measure(args)
    except ValueError as error:
        raise JobError(str(error)) from error


def _measure(args: argparse.Namespace) -> int:
    lens = (min(100, args.max_len), args.max_len)
    requests = mixed_requests(args.num_seqs, lens, lens, seed=0)
    started = time.perf_counter()
    with load(
        args.model or _demo_model(),
        max_model_len=4096,
        enforce_eager=args.enforce_eager,
        load_format=args.load_format,
        device=args.device,
        dtype=args.dtype,
    ) as llm:
        startup = time.perf_counter() - started
        _run(llm, with_other_tokens(requests, seed=1), args.temperature)
        seconds = []
        for repeat in range(args.repeats):
            # Other ids each time: the cache of one pass must not help the next.
            seconds.append(_run(llm, with_other_tokens(requests, seed=2 + repeat), args.temperature))
        backend = llm.runner.attention_name
    num_output = sum(request.max_tokens for request in requests)
    rates = [num_output / s for s in seconds]
    result = {
        "workload": f"{args.num_seqs} requests of {lens[0]}..{lens[1]} tokens in and out",
        "output_tokens": num_output,
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens_per_second": round(statistics.median(rates), 1),
        "slowest_and_fastest": [round(min(rates), 1), round(max(rates), 1)],
        "startup_seconds": round(startup, 2),
        "attention_backend": backend,
        **describe_environment(),
    }
    for key, value in result.items():
        print(f"{key:>26}: {value}")
    print(json.dumps(result))
    return 0


def _demo_model() -> str:
    try:
        return demo_model()
    except FileNotFoundError as error:
        raise JobError(f"{error}; or pass --model") from error


def _run(llm: LLMEngine, requests: list[Request], temperature: float) -> float:
    """Seconds to complete the requests."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=r.max_tokens) for r in requests]
    started = time.perf_counter()
    llm.generate([request.prompt for request in requests], params)
    return time.perf_counter() - started


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--num-seqs", type=_positive, default=256)
    parser.add_argument("--max-len", type=_positive, default=1024, help="longest prompt, and longest output")
    parser.add_argument("--repeats", type=_positive, default=3, help="timed passes after a warm-up; the median counts")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, a config.json is enough")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
