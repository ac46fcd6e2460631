"""Log-probabilities and everything that edits logits on a GPU: the same as on a CPU, within the memory set aside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, random_prompts, save_random_model
from tests.cpu.naive import check_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts((1, 15, 16, 17, 63, 200, 7))


def ban_newest(logits: torch.Tensor, rows: Any) -> None:
    """No token twice in a row."""
    newest = rows.token_ids.gather(1, rows.num_tokens[:, None].long() - 1)
    logits.scatter_(1, newest.long(), -torch.inf)


CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.6, "presence_penalty": 0.5},
    {"frequency_penalty": -2.0, "logits_processor": ban_newest},
    {"bad_words": [[token] for token in range(0, VOCAB_SIZE, 5)] + [[token, token + 2] for token in range(200)]},
    {"allowed_token_ids": range(5, 90), "logit_bias": {7: 2.5, 8: -4}},
    {"min_tokens": 20, "stop_token_ids": range(0, VOCAB_SIZE, 2), "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
]
PARAMS = [replace(GREEDY, logprobs=index % 4, prompt_logprobs=2, **change) for index, change in enumerate(CHANGES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_random_model(folder, "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    with LLM(str(checkpoint[0]), device="cpu", num_kvcache_blocks=64, kvcache_block_size=16) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [40, 16384])
def test_equals_cpu(
    checkpoint: tuple[Path, Any], expected: list[list[int]], enforce_eager: bool, max_num_batched_tokens: int
) -> None:
    """With extras on every row, then on one beside plain ones, whose sampling graph must not be replayed then."""
    with LLM(
        str(checkpoint[0]),
        dtype="float32",
        enforce_eager=enforce_eager,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kvcache_blocks=64,
        kvcache_block_size=16,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
            check_logprobs(checkpoint[1], outputs, PARAMS)
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        mixed = llm.generate(PROMPTS, [PARAMS[1] if row == 1 else GREEDY for row in range(7)], use_tqdm=False)
        assert mixed[1]["token_ids"] == expected[1] != plain[1]["token_ids"]
        assert [mixed[row]["token_ids"] for row in (0, 2, 3, 4, 5, 6)] == [
            plain[row]["token_ids"] for row in (0, 2, 3, 4, 5, 6)
        ]


def test_memory_of_the_largest_step(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    """A vocabulary that dwarfs the model: what extras need on top must have been set aside."""
    save_random_model(tmp_path, "llama", vocab_size=120_000)
    torch.cuda.empty_cache()
    with LLM(str(tmp_path), gpu_memory_utilization=0.5, max_num_seqs=256, max_model_len=64) as llm:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.reset_peak_memory_stats()
        prompts = random_prompts([40] * 256, vocab_size=120_000)
        params = [replace(one, logprobs=20, prompt_logprobs=20, max_tokens=8, min_tokens=0) for one in PARAMS]
        llm.generate(prompts, [params[row % 7] for row in range(256)], use_tqdm=False)
        assert torch.cuda.max_memory_allocated() <= 0.5 * total
