"""Greedy decoding in float32 equals transformers token by token, however the work is cut up."""

import random
from typing import Any

import pytest

from nanovllm import SamplingParams
from tests.checkpoints import VOCAB_SIZE, reference_greedy

BLOCK_SIZE = 16
NUM_TOKENS = 20
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 1)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def references(random_llama: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts and their continuations by transformers."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [(prompt, reference_greedy(random_llama[1], prompt, NUM_TOKENS)) for prompt in prompts]


def test_fixture_sees_faults(references: Any) -> None:
    """Outputs that ignored the prompt or repeated one token would hide errors of indexing."""
    outputs = [tuple(output) for _, output in references]
    assert len(set(outputs)) == len(outputs)
    assert all(len(set(output)) > NUM_TOKENS // 3 for output in outputs)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 16])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 48, 16384])
def test_equals_transformers(
    random_llama: Any,
    references: Any,
    make_llm: Any,
    rng: random.Random,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    llm = make_llm(random_llama[0], max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    for order in (references, rng.sample(references, len(references)), references[:1]):
        outputs = llm.generate([prompt for prompt, _ in order], GREEDY, use_tqdm=False)
        for (_, expected), output in zip(order, outputs, strict=True):
            assert output["token_ids"] == expected
            assert output["finish_reason"] == "length"
