"""How long a large job waits for its first step.

    python -m benchmarks.first_step

100,000 texts of 60 words (--num-prompts). Printed next to it: what tokenising all of them takes, which would be the
wait if it came first. The last line is JSON.
"""

import argparse
import json
import random
import time
from typing import Any, NoReturn

from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.utils.demo import demo_model

NUM_WORDS = 60
WORDS = __doc__.split()


class FirstStep(Exception):
    """Ends the call once it is about to schedule."""


def seconds_to_first_step(llm: LLM, texts: list[str]) -> float:
    def stop() -> NoReturn:
        raise FirstStep

    schedule: Any = llm.scheduler.schedule
    llm.scheduler.schedule = stop  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        llm.generate(texts, SamplingParams(max_tokens=1))
    except FirstStep:
        return time.perf_counter() - started
    finally:
        llm.scheduler.schedule = schedule  # type: ignore[method-assign]
    raise RuntimeError("there was no step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    parser.add_argument("--num-prompts", type=int, default=100_000)
    args = parser.parse_args()
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=NUM_WORDS)) for _ in range(args.num_prompts)]
    with LLM(args.model or demo_model()) as llm:
        llm.generate(texts[:1], SamplingParams(max_tokens=1), use_tqdm=False)  # warm
        first = seconds_to_first_step(llm, texts)
        started = time.perf_counter()
        num_tokens = sum(map(len, llm.inputs.process_prompts(texts)))
        whole = time.perf_counter() - started
    print(f"first step after {first:.3f} s; tokenising all {num_tokens:,} tokens takes {whole:.1f} s")
    result = {"num_prompts": args.num_prompts, "seconds_to_first_step": first, "seconds_to_tokenise": whole}
    print(json.dumps({**result, **describe_environment()}))


if __name__ == "__main__":
    main()
