"""Constrained output on a GPU: what a CPU gives, where decode steps are graphs and where they aren't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams

PLAIN = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
SCHEMA = {"type": "array", "items": {"enum": ["red", "green", 5, None]}, "minItems": 3, "maxItems": 9}
PARAMS = [
    SamplingParams(json_schema=SCHEMA, max_tokens=80, temperature=0, logprobs=1),
    PLAIN,
    SamplingParams(regex=r"[a-f]{3}-\d{5,30}!", max_tokens=60, temperature=1.0, seed=3),
    replace(PLAIN, repetition_penalty=1.3),
    SamplingParams(choice=("yes", "no"), max_tokens=9, temperature=0),  # type: ignore[arg-type]
    SamplingParams(grammar='start: "(" start ")" | "x"', max_tokens=40, temperature=0, top_p=0.9),
]
PROMPTS = ["a", "prompt " * 9, "b", "e", "c" * 40, "d"]


def generate(model: Path, **settings: Any) -> list[Any]:
    with LLM(str(model), dtype="float32", num_kvcache_blocks=64, kvcache_block_size=16, **settings) as llm:
        first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        again = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
        plain = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    assert [output["token_ids"] for output in again] == [output["token_ids"] for output in first] * 2
    assert plain[1]["token_ids"] == first[1]["token_ids"]
    return first


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}], ids=str)
def test_equals_cpu(byte_llama: Path, settings: dict[str, Any]) -> None:
    expected = generate(byte_llama, device="cpu")
    outputs = generate(byte_llama, device="cuda", **settings)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert [output["finish_reason"] for output in outputs] == [output["finish_reason"] for output in expected]
    assert [output["finish_reason"] for output in outputs].count("stop") >= 3
