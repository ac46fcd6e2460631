"""Output tokens a second of this engine and its peers, against the least time that the job can take.

    python -m benchmarks.throughput     # on a CPU: SmolLM2-135M in float32, side by side with transformers
    python -m benchmarks.throughput --shape qwen3-0.6b --job mixed256 mixed1024 --engine nanovllm [vllm]

Every output has its full length. Each engine gets a full warm-up pass, and other token ids in every pass.
transformers pads a batch to its longest prompt and runs it to its longest output; only tokens that were asked for
count, and the best of several batch sizes is taken. The bound comes first; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_time import idle_share, profile_device
from benchmarks.roofline import bound, measure_rates
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workloads import JOBS, Job, Request, describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.engine.step_handle import StepHandle
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.demo import demo_model

HF_BATCH_SIZES = (8, 16, 32, 64)
PROFILED_STEPS = range(100, 150)
Pass = dict[str, float]


def main() -> None:
    args = parse_args()
    model = str(shape_folder(args.shape)) if args.shape else args.model or demo_model()
    settings = {name: getattr(args, name) for name in ("temperature", "tensor_parallel_size")}
    result: dict[str, Any] = {"shape": args.shape or model, **settings, **describe_environment()}
    for engine in args.engine:
        for name, figures in ENGINES[engine](model, args):
            print(f"{engine} {name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            result[f"{engine} {name}"] = figures
    for name in args.job:
        ours, theirs = (result.get(f"{engine} {name}", {}).get("output_tok_s") for engine in ("nanovllm", "hf"))
        if ours and theirs:
            result[f"ratio to hf {name}"] = round(ours / theirs, 2)
    print(json.dumps(result))


def run_nanovllm(model: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each job its name and figures. One engine serves all jobs of one `max_num_seqs`."""
    for name in args.job:
        job = JOBS[name]
        with LLM(
            model,
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=job.max_num_seqs,
            enforce_eager=args.enforce_eager,
            attention_backend=args.attention_backend,
            tensor_parallel_size=args.tensor_parallel_size,
            load_format="dummy" if args.shape else "auto",
        ) as llm:
            is_gpu = llm.runner.device.type == "cuda"
            rates = measure_rates(llm.runner.device, llm.runner.dtype).of_devices(args.tensor_parallel_size)
            limit = bound(job.make(0), llm.runner.model.spec, llm.runner.dtype, rates, job.max_num_seqs)
            num_output = sum(request.max_tokens for request in job.make(0))
            print(
                f"{name}: {job.description}\n  {rates.bytes_per_second / 1e12:.2f} TB/s, "
                f"{rates.flops_per_second / 1e12:.0f} TFLOP/s; bound {num_output / limit.seconds:,.0f} output tok/s: "
                f"weights {limit.weight_seconds:.2f} s, KV {limit.kv_seconds:.2f} s, "
                f"prompts {limit.prefill_seconds:.2f} s"
            )
            run_pass(llm, job.make(1), args)
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            passes = [run_pass(llm, job.make(2 + repeat), args) for repeat in range(args.repeats)]
            median = sorted(passes, key=lambda p: p["seconds"])[len(passes) // 2]
            rate = num_output / median["seconds"]
            idle = round(measure_idle(llm, job.make(2 + args.repeats), args), 4) if is_gpu else None
            yield (
                name,
                {
                    "output_tok_s": round(rate, 1),
                    "spread": [round(num_output / p["seconds"], 1) for p in passes],
                    "bound_share": round(rate * limit.seconds / num_output, 3),
                    **{key: round(value, 3) for key, value in median.items()},
                    "gpu_idle_share": idle,
                    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_gpu else None,
                    "attention": llm.runner.attention_name,
                },
            )


def measure_idle(llm: LLM, requests: list[Request], args: argparse.Namespace) -> float:
    """Share of the time of some steps, in the middle of another pass, in which the GPU has nothing to do."""
    seq_ids = add_requests(llm, requests, args)
    for _ in range(PROFILED_STEPS.start):
        llm.step()
    spans = profile_device(lambda: [llm.step() for _ in PROFILED_STEPS])
    for seq_id in seq_ids:
        llm.abort(seq_id)
    while not llm.is_finished():
        llm.step()
    return idle_share(spans)


def add_requests(llm: LLM, requests: list[Request], args: argparse.Namespace) -> list[int]:
    """Queues the requests of a pass; returns their seq_ids."""
    filters = {"top_p": args.top_p} if args.top_p < 1 else {}
    return [
        llm.add_request(
            r.prompt,
            SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=r.max_tokens, **filters),
        )
        for r in requests
    ]


def run_pass(llm: LLM, requests: list[Request], args: argparse.Namespace) -> Pass:
    """Completes the requests step by step; what it took."""
    started = time.perf_counter()
    add_requests(llm, requests, args)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    counts: dict[int, int] = {}
    num_steps, num_preemptions, max_blocks = 0, 0, 0
    with waiting_time() as waited:
        steps_started = time.perf_counter()
        while not llm.is_finished():
            step = llm.step()
            now = time.perf_counter() - started
            for seq_id in step.new_token_ids:
                first.setdefault(seq_id, now)
                last[seq_id] = now
                counts[seq_id] = counts.get(seq_id, 0) + 1
            num_steps += 1
            num_preemptions += step.num_preemptions
            max_blocks = max(max_blocks, step.num_used_blocks)
        stepping = time.perf_counter() - steps_started
    seconds = time.perf_counter() - started
    per_token = [(last[i] - first[i]) / (counts[i] - 1) for i in first if counts[i] > 1]
    return {
        "seconds": seconds,
        "ttft_p50_s": float(np.percentile(list(first.values()), 50)),
        "ttft_p99_s": float(np.percentile(list(first.values()), 99)),
        "tpot_p50_ms": 1e3 * float(np.percentile(per_token, 50)),
        "tpot_p99_ms": 1e3 * float(np.percentile(per_token, 99)),
        "num_steps": num_steps,
        # What the host itself needs for a step: the rest of the time it waits for the device.
        "host_ms_per_step": 1e3 * (stepping - sum(waited)) / num_steps,
        "kv_use": max_blocks / llm.block_manager.num_blocks,
        "num_preemptions": num_preemptions,
    }


@contextmanager
def waiting_time() -> Iterator[list[float]]:
    """Collects the seconds that the host spends waiting for tokens."""
    waited: list[float] = []
    read = StepHandle.read

    def timed_read(handle: StepHandle) -> list[int]:
        started = time.perf_counter()
        tokens = read(handle)
        waited.append(time.perf_counter() - started)
        return tokens

    StepHandle.read = timed_read  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        StepHandle.read = read  # type: ignore[method-assign]


def run_hf(model: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """transformers' `generate`, at its best batch size."""
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    network = load_hf(model, default if args.dtype == "auto" else getattr(torch, args.dtype), device)
    for name in args.job:
        job = JOBS[name]
        num_output = sum(request.max_tokens for request in job.make(0))
        generate_hf(network, job.make(1)[:8], 8, args.temperature)  # enough to warm up eager code
        rates = {}
        for size in HF_BATCH_SIZES:
            seconds = time_passes(lambda rs, size=size: generate_hf(network, rs, size, args.temperature), job, args)
            rates[size] = round(num_output / statistics.median(seconds), 1)
        yield name, {"output_tok_s": max(rates.values()), "by_batch_size": rates}


def load_hf(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers model with the weights that this library reads (transformers wants more packages for GGUF)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(model)
    settings = vars(checkpoint.config)
    config = AutoConfig.for_model(settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"})
    # Since transformers 4.56 "dtype" is the keyword, but the old one goes on working.
    network = AutoModelForCausalLM.from_config(config, torch_dtype=dtype).to(device).eval()
    state = network.state_dict()
    if any(Path(model).glob("*.safetensors")) or Path(model).is_file():
        for name, source in checkpoint.tensors():
            source.copy_to(state[name])
    return network


@torch.inference_mode()
def generate_hf(model: Any, requests: list[Request], batch_size: int, temperature: float) -> None:
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt) for request in batch)
        num_tokens = max(request.max_tokens for request in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=model.device)
        settings: dict[str, Any] = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens, "do_sample": False}
        if temperature:
            settings.update(do_sample=True, temperature=temperature, top_k=0)
        model.generate(ids, attention_mask=mask, pad_token_id=0, **settings)


def run_vllm(model: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """vLLM, for whoever has it installed."""
    import vllm

    for name in args.job:
        job = JOBS[name]
        llm = vllm.LLM(
            model,
            skip_tokenizer_init=True,
            load_format="dummy" if args.shape else "auto",
            max_model_len=4096,
            max_num_seqs=job.max_num_seqs,
        )

        def generate(requests: list[Request], llm: Any = llm) -> None:
            params = [
                vllm.SamplingParams(
                    temperature=args.temperature, ignore_eos=True, max_tokens=r.max_tokens, detokenize=False
                )
                for r in requests
            ]
            llm.generate([{"prompt_token_ids": r.prompt} for r in requests], params, use_tqdm=False)

        generate(job.make(1))
        seconds = time_passes(generate, job, args)
        num_output = sum(request.max_tokens for request in job.make(0))
        yield name, {"output_tok_s": round(num_output / statistics.median(seconds), 1)}
        del llm


def time_passes(run: Callable[[list[Request]], object], job: Job, args: argparse.Namespace) -> list[float]:
    """Seconds of each pass."""
    seconds = []
    for repeat in range(args.repeats):
        requests = job.make(2 + repeat)
        started = time.perf_counter()
        run(requests)
        seconds.append(time.perf_counter() - started)
    return seconds


ENGINES = {"nanovllm": run_nanovllm, "hf": run_hf, "vllm": run_vllm}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=sorted(ENGINES), default=["nanovllm", "hf"])
    parser.add_argument("--job", nargs="+", choices=sorted(JOBS), default=["small64"])
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known model's shape instead")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
