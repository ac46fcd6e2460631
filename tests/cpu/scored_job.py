"""The job that tests of log-probabilities have in common."""

import random
from typing import Any

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 8
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 41)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def make_prompts() -> list[list[int]]:
    """Lengths around a block's; the last three begin alike."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE + 1)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return prompts[:4] + [(shared + prompt)[: len(prompt)] for prompt in prompts[4:]]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)
