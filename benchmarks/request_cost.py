"""What a request's options cost: output throughput of each against plain requests, in one process, interleaved.

    python -m benchmarks.request_cost                                   # the demo model
    python -m benchmarks.request_cost --shape qwen3-0.6b --batch 256    # random weights, on a GPU

Every pass completes the same number of requests of the same lengths with other token ids. A variant's cost is the
median over the rounds of its time against the plain pass of the same round; `cpu_cost` is the same in processor time,
which other processes disturb less (on a GPU it includes waiting, and says little). JSON that follows the schema can't
end before the requested length. Below the table: what following the text of one output costs a token, alone, on the
host. The last line is JSON.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shapes import SHAPES, save_tokenizer, shape_folder
from benchmarks.throughput import waiting_time
from benchmarks.workloads import Request, describe_environment, mixed_requests, with_other_tokens
from nanovllm import LLM, SamplingParams
from nanovllm.engine.output_text import OutputTexts
from nanovllm.utils.demo import demo_model

PLAIN = "plain"
# Strings that never come, with beginnings that do.
ONE_STOP = (" the \ufdd0",)
FOUR_STOPS = (*ONE_STOP, "\n\ufdd0", "e\ufdd0", "\n\nUser:\ufdd0")
# A list that is longer than any output here, of what a model is typically asked for.
SCHEMA = {
    "type": "array",
    "minItems": 4096,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "score": {"type": "number"}, "is_new": {"type": "boolean"}},
        "required": ["name", "score", "is_new"],
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "again": {},  # how far two equal passes are apart
    "stop: 1 string": {"stop": ONE_STOP},
    "stop: 4 strings": {"stop": FOUR_STOPS},
    "stream": {},
    "stream, 4 stop strings": {"stop": FOUR_STOPS},
    "logprobs=5": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.2, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "json schema": {"json_schema": SCHEMA},
}


def main() -> None:
    args = parse_args()
    for name in [name for name in VARIANTS if args.variant and name not in (PLAIN, *args.variant)]:
        del VARIANTS[name]
    if importlib.util.find_spec("llguidance") is None:
        print("json schema: left out, llguidance is not installed")
        VARIANTS.pop("json schema", None)
    if args.shape:
        folder = shape_folder(args.shape)
        save_tokenizer(folder)
        model = str(folder)
    else:
        model = args.model or demo_model()
    load_format = "dummy" if args.shape else "auto"
    max_model_len = args.prompt_len + args.output_len
    with LLM(
        model, device=args.device, max_num_seqs=args.batch, max_model_len=max_model_len, load_format=load_format
    ) as llm:
        texts = llm.texts
        figures = measure(llm, args)
    figures["microseconds a token"] = {
        name: round(1e6 * seconds_a_token(texts, **VARIANTS[name]), 3) for name in VARIANTS if "stop" in VARIANTS[name]
    }
    for name, microseconds in figures["microseconds a token"].items():
        print(f"{name:24} {microseconds:8.3f} us a token, {1e-3 * args.batch * microseconds:.3f} ms a step")
    print(json.dumps({"model": args.shape or model, **vars(args), **figures, **describe_environment()}))


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """The table, printed and returned."""
    lengths = mixed_requests(args.batch, (args.prompt_len,) * 2, (args.output_len,) * 2, seed=0)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    host: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cpu: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(-1, args.repeats):
        for index, name in enumerate(VARIANTS):
            requests = with_other_tokens(lengths, seed=100 * repeat + index)
            cpu_started = time.process_time()
            with waiting_time() as waited:
                spent = run_pass(llm, name, requests)
            cpu_spent = time.process_time() - cpu_started
            if repeat >= 0:  # the first round warms up
                seconds[name].append(spent)
                cpu[name].append(cpu_spent)
                host[name].append((spent - sum(waited)) / len(waited))
    figures: dict[str, Any] = {}
    num_tokens = args.batch * args.output_len
    print(f"{args.batch} requests, {args.prompt_len} tokens in, {args.output_len} out, {args.repeats} rounds")
    for name in VARIANTS:
        ratios = [one / plain - 1 for one, plain in zip(seconds[name], seconds[PLAIN], strict=True)]
        cpu_ratios = [one / plain - 1 for one, plain in zip(cpu[name], cpu[PLAIN], strict=True)]
        figures[name] = {
            "output_tok_s": round(num_tokens / statistics.median(seconds[name]), 1),
            "cost": round(statistics.median(ratios), 4),
            "cost_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "cpu_cost": round(statistics.median(cpu_ratios), 4),
            "host_ms_a_step": round(1e3 * statistics.median(host[name]), 3),
        }
        print(f"{name:24} " + ", ".join(f"{key} {value}" for key, value in figures[name].items()), flush=True)
    return figures


def run_pass(llm: LLM, name: str, requests: list[Request]) -> float:
    """Seconds to complete the requests under a variant."""
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=request.max_tokens, **VARIANTS[name])
        for request in requests
    ]
    prompts = [request.prompt for request in requests]
    started = time.perf_counter()
    if name.startswith("stream"):
        num_tokens = sum(len(delta["token_ids"]) for delta in llm.stream(prompts, params))
    else:
        num_tokens = sum(len(output["token_ids"]) for output in llm.generate(prompts, params, use_tqdm=False))
    seconds = time.perf_counter() - started
    assert num_tokens == sum(request.max_tokens for request in requests), "a request ended early"
    return seconds


def seconds_a_token(texts: OutputTexts, num_tokens: int = 4096, **changes: Any) -> float:
    """What following an output costs the host a token: text, and stop strings. Median of several outputs."""
    ids = texts.tokenizer("The quick brown fox, 漢字 and é, jumps over\n\nthe lazy dog 🙂 at 12:30. ")["input_ids"]
    ids = (ids * (num_tokens // len(ids) + 1))[:num_tokens]
    params = SamplingParams(**changes)

    def run() -> float:
        text = texts.follow([ids[0]], params, is_streamed=False)
        assert text is not None
        push: Callable[[int], object] = text.push
        started = time.perf_counter()
        for token_id in ids:
            push(token_id)
        return (time.perf_counter() - started) / num_tokens

    return statistics.median(run() for _ in range(7))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known model's shape instead")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variant", nargs="+", choices=list(VARIANTS), help="only these, beside plain requests")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
