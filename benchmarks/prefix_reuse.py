"""How much prefill work shared prompt beginnings save.

    python -m benchmarks.prefix_reuse

64 prompts share their first 512 tokens; each has 32 of its own. The shared part is computed once in the first call,
and not at all in the second. Tokens are counted, not seconds. The last line is JSON.
"""

import argparse
import json
import random

from benchmarks.workloads import describe_environment
from nanovllm import LLM, SamplingParams
from nanovllm.utils.demo import demo_model

NUM_PROMPTS, NUM_SHARED, NUM_OWN, NUM_OUTPUT = 64, 512, 32, 8


def count_prefill_tokens(llm: LLM, prompts: list[list[int]]) -> tuple[int, int]:
    """Completes the prompts; returns the prompt tokens computed and those taken from the cache."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for prompt in prompts:
        llm.add_request(prompt, params)
    num_computed = num_cached = 0
    while not llm.is_finished():
        step = llm.step()
        num_computed += step.num_prefill_tokens
        num_cached += step.num_cached_tokens
    return num_computed, num_cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, .gguf file or hub id; default: the demo model")
    args = parser.parse_args()
    rng = random.Random(0)

    def random_tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(10000) for _ in range(num_tokens)]

    shared = random_tokens(NUM_SHARED)
    result: dict[str, object] = {"prompt_tokens": NUM_PROMPTS * (NUM_SHARED + NUM_OWN)}
    with LLM(args.model or demo_model()) as llm:
        for call, minimum in (("first", NUM_SHARED + NUM_PROMPTS * NUM_OWN), ("second", NUM_PROMPTS * NUM_OWN)):
            prompts = [shared + random_tokens(NUM_OWN) for _ in range(NUM_PROMPTS)]
            num_computed, num_cached = count_prefill_tokens(llm, prompts)
            print(f"{call} call: computed {num_computed} (least possible {minimum}), from the cache {num_cached}")
            result[f"{call}_call_computed"] = num_computed
    print(json.dumps({**result, **describe_environment()}))


if __name__ == "__main__":
    main()
