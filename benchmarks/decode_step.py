"""Where the time of a pure decode step goes on a GPU, and how much of it the GPU is idle.

    python -m benchmarks.decode_step --shape qwen3-0.6b --batch 256 16

Fills the batch, lets it decode, and profiles some steps: kernels by time, the share of the span between the first
and the last kernel in which none runs, and the host's own time a step. The last line is JSON.
"""

import argparse
import json
import time
from collections import defaultdict

from benchmarks.gpu_time import idle_share, profile_device
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.throughput import waiting_time
from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams

NUM_STEPS = 30


def main() -> None:
    args = parse_args()
    parallel = {"tensor_parallel_size": args.tensor_parallel_size}
    started = time.perf_counter()
    llm = LLM(str(shape_folder(args.shape)), load_format="dummy", max_num_seqs=max(args.batch), **parallel)
    result: dict[str, object] = {"startup_s": round(time.perf_counter() - started, 2), "shape": args.shape}
    for batch in args.batch:
        result[f"batch {batch}"] = measure(llm, batch, args)
    print(json.dumps({**result, **describe_environment()}))


def measure(llm: LLM, batch: int, args: argparse.Namespace) -> dict[str, object]:
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, ignore_eos=True, max_tokens=400)
    for index in range(batch):
        llm.add_request([index % 1000 + 1] * args.context, params)
    while llm.step().num_prefill_tokens or llm.scheduler.waiting:
        pass
    for _ in range(5):
        llm.step()
    with waiting_time() as waited:
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            llm.step()
        seconds = time.perf_counter() - started
    spans = profile_device(lambda: [llm.step() for _ in range(NUM_STEPS)])
    by_name: dict[str, list[float]] = defaultdict(list)
    for start, end, name in spans:
        by_name[name].append(end - start)
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"  {sum(times) / NUM_STEPS:9.1f} us a step, {len(times) / NUM_STEPS:6.1f} x {name[:90]}")
    for seq in list(llm.scheduler.unfinished()):
        llm.abort(seq.seq_id)
    while not llm.is_finished():
        llm.step()
    figures = {
        "step_ms": round(1e3 * seconds / NUM_STEPS, 3),
        "idle_share": round(idle_share(spans), 4),
        "host_ms": round(1e3 * (seconds - sum(waited)) / NUM_STEPS, 3),
    }
    print(f"batch {batch}, context {args.context}: {figures}", flush=True)
    return figures


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 16])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
