"""Where the time goes from starting Python to the first token.

    python -m benchmarks.startup --shape qwen3-0.6b

Runs in a fresh process each time: first with an empty cache of compiled kernels, then with the one that the first
run has filled. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

CHILD = "--child"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="random weights of a known model's shape")
    parser.add_argument("--model", help="a model with weights on disk instead")
    parser.add_argument(CHILD, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        result = {}
        for kernels in ("compiled", "cached"):
            command = [sys.executable, "-m", "benchmarks.startup", *sys.argv[1:], CHILD, str(time.time())]
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            result[kernels] = json.loads(output.splitlines()[-1])
            print(f"kernels {kernels}: " + ", ".join(f"{name} {value}" for name, value in result[kernels].items()))
    print(json.dumps(result))


def child(args: argparse.Namespace) -> None:
    seconds = {"python": round(time.time() - args.child, 2)}
    started = time.perf_counter()
    from benchmarks.shapes import shape_folder
    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import llm_engine, model_runner

    seconds["imports"] = round(time.perf_counter() - started, 2)

    def timed(owner: object, name: str, label: str) -> None:
        function = getattr(owner, name)

        def wrapper(*a: object, **k: object) -> object:
            begun = time.perf_counter()
            try:
                return function(*a, **k)
            finally:
                seconds[label] = round(seconds.get(label, 0) + time.perf_counter() - begun, 2)

        setattr(owner, name, wrapper)

    timed(llm_engine, "open_checkpoint", "config")
    timed(model_runner, "resolve_device", "cuda context")
    timed(model_runner, "select_backends", "attention backends")
    timed(model_runner, "build_model", "build model")
    timed(model_runner, "load_weights", "load weights")
    timed(model_runner, "load_dummy_weights", "load weights")
    timed(model_runner.ModelRunner, "_measure_reserve", "warm-up")
    timed(model_runner.ModelRunner, "_capture", "graphs (part of the warm-up included)")
    llm = LLM(args.model or str(shape_folder(args.shape)), load_format="auto" if args.model else "dummy")
    begun = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    seconds["first token"] = round(time.perf_counter() - begun, 2)
    seconds["total"] = round(time.time() - args.child, 2)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
