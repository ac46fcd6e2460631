"""What `nanovllm run` costs beside a plain `generate` of the same texts: reading, preparing and writing rows.

    python -m benchmarks.cli_overhead
    python -m benchmarks.cli_overhead --shape qwen3-0.6b --token-ids --num-rows 20000 --num-words 20 --max-num-seqs 1024

With --token-ids, `generate` gets texts that are tokenised already, and nothing is tokenised in its time. Both run in
processes of their own, in turn. Seconds are those of the job alone; CPU seconds, which a busy machine disturbs less,
are those of the whole process, start and loading included. The last line is JSON.
"""

import argparse
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shapes import SHAPES, save_tokenizer, shape_folder
from benchmarks.workloads import describe_environment
from nanovllm.utils.demo import demo_model

# argv: model, input, load format, whether to tokenise ahead, max_num_seqs, max_tokens, replicas. Prints seconds.
_GENERATE = """
import json, sys, time
from nanovllm import LLM, SamplingParams
model, source, load_format, is_tokenised, num_seqs, max_tokens, num_replicas = sys.argv[1:]
llm = LLM(model, max_num_seqs=int(num_seqs), load_format=load_format, data_parallel_size=int(num_replicas))
ids = None
if is_tokenised == "True":
    ids = [llm.tokenizer.encode(json.loads(line)["prompt"]) for line in open(source)]
started = time.perf_counter()
prompts = ids or [json.loads(line)["prompt"] for line in open(source)]
params = SamplingParams(max_tokens=int(max_tokens), ignore_eos=True, seed=0)
llm.generate(prompts, params, use_tqdm=False)
print(time.perf_counter() - started)
"""
_WORDS = ("the", "a", "of", "time", "people", "river", "stone", "light", "under", "over", "quick", "slow", "paper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known model's shape instead")
    parser.add_argument("--token-ids", action="store_true", help="tokenise for `generate` before its time counts")
    parser.add_argument("--num-rows", type=int, default=64)
    parser.add_argument("--num-words", type=int, default=50, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(0)
    if args.shape:
        folder = shape_folder(args.shape)
        save_tokenizer(folder)
        model, load_format = str(folder), "dummy"
    else:
        model, load_format = args.model or demo_model(), "auto"
    sizes = [str(args.max_num_seqs), str(args.max_tokens), str(args.data_parallel_size)]
    with tempfile.TemporaryDirectory() as files:
        source, output = Path(files) / "in.jsonl", Path(files) / "out.jsonl"
        with source.open("w") as file:
            for _ in range(args.num_rows):
                file.write(json.dumps({"prompt": " ".join(rng.choices(_WORDS, k=args.num_words))}) + "\n")
        generate, run, generate_cpu, run_cpu = [], [], [], []
        for _ in range(args.repeats):
            started = _cpu_seconds()
            settings = [load_format, str(args.token_ids), *sizes]
            generate.append(float(_output_of(["-c", _GENERATE, model, str(source), *settings]).split()[-1]))
            generate_cpu.append(_cpu_seconds() - started)
            for path in (output, Path(f"{output}.job")):
                path.unlink(missing_ok=True)
            started = _cpu_seconds()
            run.append(
                _seconds_of_run(["--model", model, "--load-format", load_format, str(source), "-o", str(output)], sizes)
            )
            run_cpu.append(_cpu_seconds() - started)
    result = {
        "job": f"{args.num_rows} rows of {args.num_words} words, {args.max_tokens} tokens out",
        "data_parallel_size": args.data_parallel_size,
        "prompts_of_generate": "token ids" if args.token_ids else "texts",
        "generate_seconds": [round(seconds, 2) for seconds in generate],
        "run_seconds": [round(seconds, 2) for seconds in run],
        "generate_cpu_seconds": [round(seconds, 2) for seconds in generate_cpu],
        "run_cpu_seconds": [round(seconds, 2) for seconds in run_cpu],
        "throughput_of_generate": round(statistics.median(generate) / statistics.median(run), 3),
        "the_same_by_cpu_seconds": round(statistics.median(generate_cpu) / statistics.median(run_cpu), 3),
        **describe_environment(),
    }
    for key, value in result.items():
        print(f"{key:>24}: {value}")
    print(json.dumps(result))


def _seconds_of_run(arguments: list[str], sizes: list[str]) -> float:
    flags = ["--quiet", "--ignore-eos", "--seed", "0", "--max-num-seqs", sizes[0], "--max-tokens", sizes[1]]
    flags += ["--data-parallel-size", sizes[2]]
    match = re.search(r"rows in ([\d.]+) s", _output_of(["-m", "nanovllm", "run", *arguments, *flags]))
    assert match is not None
    return float(match.group(1))


def _cpu_seconds() -> float:
    """Of all processes that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _output_of(arguments: list[str]) -> str:
    """What Python prints, on standard output and error alike."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


if __name__ == "__main__":
    main()
