"""Every supported architecture, with every option of its config, computes what transformers computes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.utils.context import ForwardContext, SharedPrefixes, forward_context
from tests.checkpoints import (
    VOCAB_SIZE,
    greedy_choices,
    load_reference,
    random_prompts,
    reference_greedy,
    refusal,
    save_random_model,
    write_json,
)

BLOCK_SIZE = 16
NUM_TOKENS = 18  # so that each prompt's output crosses into a new block
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Variant:
    """A model: architecture, arguments of `save_random_model`, and keys of config.json that are set or removed
    afterwards without changing its meaning."""

    architecture: str
    overrides: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)


ODD_SIZES = {"vocab_size": 301, "intermediate_size": 100, "head_dim": 20}
VARIANTS = {
    f"{architecture}-{num_kv_heads}kv-{'tied' if is_tied else 'untied'}": Variant(
        architecture, {"num_key_value_heads": num_kv_heads, "tie_word_embeddings": is_tied}
    )
    for architecture, (num_kv_heads, is_tied) in product(
        ("llama", "mistral", "qwen2", "qwen3"), ((2, False), (4, True), (1, False))
    )
} | {
    "llama-attention-bias": Variant("llama", {"attention_bias": True}),
    "llama-mlp-bias": Variant("llama", {"mlp_bias": True}),
    "llama-all-biases-tied": Variant("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-head-dim": Variant("llama", {"head_dim": 24}),
    "llama-odd": Variant("llama", ODD_SIZES | {"num_key_value_heads": 1}),
    "mistral-head-dim": Variant("mistral", {"head_dim": 32}),
    "mistral-odd": Variant("mistral", ODD_SIZES),
    "qwen2-odd": Variant("qwen2", {"vocab_size": 301, "intermediate_size": 100, "hidden_size": 80}),
    "qwen3-attention-bias": Variant("qwen3", {"attention_bias": True}),
    "qwen3-head-dim": Variant("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-odd": Variant("qwen3", ODD_SIZES),
    "llama-head-dim-absent": Variant("llama", {}, {"head_dim": ...}),
    "llama-head-dim-null": Variant("llama", {}, {"head_dim": None}),
    "mistral-head-dim-absent": Variant("mistral", {}, {"head_dim": ...}),
    "mistral-head-dim-null": Variant("mistral", {}, {"head_dim": None}),
    "qwen2-head-dim-absent": Variant("qwen2", {}, {"head_dim": ...}),
    "qwen2-head-dim-null": Variant("qwen2", {}, {"head_dim": None}),
    "qwen3-head-dim-absent": Variant("qwen3", {"head_dim": 128, "seed": 1}, {"head_dim": ...}),  # 128 by default
    "llama-kv-heads-absent": Variant("llama", {"num_key_value_heads": 4}, {"num_key_value_heads": ...}),
    "llama-rms-eps": Variant("llama", {"rms_norm_eps": 0.5}),
    "llama-one-layer": Variant("llama", {"num_hidden_layers": 1}),
    "llama-five-layers": Variant("llama", {"num_hidden_layers": 5}),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_equals_transformers(variant: Variant, make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Guards what tells architectures apart: norms, biases, sharing of KV heads, sizes, tying, config defaults.

    The prompts' lengths surround the block size; all are generated in one batch.
    """
    reference = save_random_model(tmp_path, variant.architecture, **variant.overrides)
    write_json(tmp_path, "config.json", **variant.written)
    prompts = random_prompts(LENGTHS, vocab_size=reference.config.vocab_size)
    outputs = make_llm(tmp_path).generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = output["token_ids"]
        assert token_ids == greedy_choices(reference, prompt, token_ids)
        assert len(token_ids) == NUM_TOKENS
        assert len(set(token_ids)) > NUM_TOKENS // 3, "an output that repeats itself hides faults: change the seed"


@pytest.mark.parametrize(
    ("architecture", "overrides", "part", "neutral"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, "q_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "k_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "v_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "o_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "gate_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "up_proj.bias", 0.0),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "down_proj.bias", 0.0),
        ("qwen2", {}, "q_proj.bias", 0.0),
        ("qwen2", {}, "k_proj.bias", 0.0),
        ("qwen2", {}, "v_proj.bias", 0.0),
        ("qwen3", {}, "q_norm.weight", 1.0),
        ("qwen3", {}, "k_norm.weight", 1.0),
        ("qwen3", {"attention_bias": True}, "o_proj.bias", 0.0),
    ],
)
def test_fixture_sees_faults(
    architecture: str, overrides: dict[str, Any], part: str, neutral: float, tmp_path: Path
) -> None:
    """Parity proves nothing about a bias or a norm whose loss would not change the tokens."""
    model = save_random_model(tmp_path, architecture, **overrides)
    (prompt,) = random_prompts([BLOCK_SIZE + 1])
    before = reference_greedy(model, prompt, NUM_TOKENS)
    for name, parameter in model.named_parameters():
        if name.endswith(part):
            parameter.data.fill_(neutral)
    assert reference_greedy(model, prompt, NUM_TOKENS) != before


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", ODD_SIZES), ("mistral", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_error_within_twice_transformers(
    architecture: str, overrides: dict[str, Any], dtype: torch.dtype, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Teacher-forced logits, of a prefill and of decode steps, are no further from an exact reference than twice
    transformers' own error in the same dtype.

    Guards precision: a rotation, norm or softmax in the wrong dtype changes few tokens, but doubles the error.
    """
    save_random_model(tmp_path, architecture, **overrides).to(dtype).save_pretrained(tmp_path)
    llm = make_llm(tmp_path, dtype=str(dtype).removeprefix("torch."))
    (ids,) = random_prompts([5 * BLOCK_SIZE + 3], vocab_size=llm.runner.model.spec.vocab_size)
    exact = _transformers_logits(load_reference(tmp_path, torch.float64), ids)
    theirs = (_transformers_logits(load_reference(tmp_path, dtype), ids) - exact).square()
    ours = (_teacher_forced_logits(llm, ids, num_decoded=BLOCK_SIZE + 2) - exact).square()
    assert exact.std() > 1 > theirs.mean().sqrt() > 0
    assert ours.mean().sqrt() <= 2 * theirs.mean().sqrt()
    assert ours.max().sqrt() <= 2 * theirs.max().sqrt()


def test_bfloat16_generates(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Guards the dtypes between layers, cache and sampler: bfloat16 runs on a CPU, alone as in a batch."""
    save_random_model(tmp_path, "qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    llm = make_llm(tmp_path, dtype="bfloat16")
    assert llm.runner.kv_cache.dtype == torch.bfloat16
    prompts = random_prompts(LENGTHS)
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [len(output["token_ids"]) for output in together] == [NUM_TOKENS] * len(prompts)
    assert all(0 <= token < VOCAB_SIZE for output in together for token in output["token_ids"])


def test_config_contradiction_is_refused(tmp_path: Path) -> None:
    """KV heads that don't divide the query heads can't be grouped: an error by name, not a wrong grouping."""
    save_random_model(tmp_path, "llama")
    write_json(tmp_path, "config.json", num_key_value_heads=3)
    message = refusal(tmp_path)
    assert "4 query heads" in message and "3 KV heads" in message


@torch.inference_mode()
def _transformers_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].double()


@torch.inference_mode()
def _teacher_forced_logits(llm: LLM, ids: list[int], num_decoded: int) -> torch.Tensor:
    """Logits [len(ids), vocab_size] of the engine's model: all but the last ids in one prefill, those one by one.

    The KV blocks are used backwards, so that a sequence never lies in the cache in one piece.
    """
    runner = llm.runner
    num_blocks = -(-len(ids) // runner.block_size)
    table = torch.arange(num_blocks, 0, -1, dtype=torch.int32)
    steps = [(0, len(ids) - num_decoded), *((start, start + 1) for start in range(len(ids) - num_decoded, len(ids)))]
    logits = []
    for start, end in steps:
        positions = torch.arange(start, end)
        is_decode = end - start == 1
        context = ForwardContext(
            kv_slots=table[positions // runner.block_size].long() * runner.block_size + positions % runner.block_size,
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=table[None],
            num_decode_seqs=int(is_decode),
            max_query_len=0 if is_decode else end - start,
            max_context_len=end,
            prefixes=SharedPrefixes.none(torch.full((int(is_decode),), end, dtype=torch.int32)),
        )
        context.decode_plan = runner.decode_backend.prepare_decode(context)
        context.prefill_plan = runner.prefill_backend.prepare_prefill(context)
        with forward_context(context):
            hidden = runner.model(torch.tensor(ids[start:end], dtype=torch.int32), positions.int())
            logits.append(runner.model.compute_logits(hidden))
    return torch.cat(logits).double()
