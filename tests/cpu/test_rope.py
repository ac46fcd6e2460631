"""Rotary embeddings: every supported type, in every spelling of config.json, within and beyond the original length."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm import LLM, SamplingParams
from nanovllm.layers.rotary_embedding import RopeSpec, RotaryEmbedding
from nanovllm.models import resolve_architecture
from tests.checkpoints import (
    greedy_choices,
    load_reference,
    random_prompts,
    reference_greedy,
    refusal,
    save_random_model,
    write_json,
)

BLOCK_SIZE = 16
ORIGINAL = 32  # length that the models "were trained on": two blocks
NUM_TOKENS = 18
# Within the original length to the end; crossing it while decoding; at it; beyond it from the start.
LENGTHS = (5, ORIGINAL - NUM_TOKENS, 20, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL, 3 * ORIGINAL + 5)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
THETA = 500.0  # unlike any default; small, so that slow dimensions turn within a test's length

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
# Name -> (rope type, its parameters, max_position_embeddings, longest context that results).
ROPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "default": ("default", {}, 4 * ORIGINAL, 4 * ORIGINAL),
    "linear": ("linear", {"factor": 4.0}, ORIGINAL, 4 * ORIGINAL),
    "dynamic": ("dynamic", {"factor": 4.0}, ORIGINAL, 4 * ORIGINAL),
    "llama3": ("llama3", LLAMA3, 4 * ORIGINAL, 4 * ORIGINAL),
    "yarn": ("yarn", YARN, 4 * ORIGINAL, 4 * ORIGINAL),
    "yarn-config-says-original": ("yarn", YARN, ORIGINAL, 4 * ORIGINAL),
    "yarn-original-implied": ("yarn", {"factor": 4.0}, ORIGINAL, 4 * ORIGINAL),
    "yarn-betas": ("yarn", YARN | {"beta_fast": 1.0, "beta_slow": 0.25}, ORIGINAL, 4 * ORIGINAL),
    "yarn-untruncated": ("yarn", YARN | {"truncate": False}, ORIGINAL, 4 * ORIGINAL),
    "yarn-attention-factor": ("yarn", YARN | {"attention_factor": 1.5}, ORIGINAL, 4 * ORIGINAL),
    "yarn-mscale": ("yarn", YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, ORIGINAL, 4 * ORIGINAL),
}
SPELLINGS = ("rope_parameters", "rope_scaling with rope_type", "rope_scaling with type")


def write_rope(folder: Path, name: str, spelling: str) -> None:
    """Writes one of ROPES into config.json."""
    rope_type, parameters, max_position_embeddings, _ = ROPES[name]
    if spelling == "rope_parameters":
        new = {"rope_type": rope_type, "rope_theta": THETA} | parameters
        keys: dict[str, Any] = {"rope_parameters": new, "rope_theta": ..., "rope_scaling": ...}
    else:
        type_key = spelling.rpartition(" ")[2]
        old = {type_key: rope_type} | parameters if rope_type != "default" else None
        keys = {"rope_parameters": ..., "rope_theta": THETA, "rope_scaling": old}
    write_json(folder, "config.json", max_position_embeddings=max_position_embeddings, **keys)


@pytest.fixture
def rope_model(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Writes a model with one of ROPES; gives its folder, and the model as transformers reads it."""

    def make(name: str, spelling: str = SPELLINGS[0], architecture: str = "llama") -> tuple[Path, Any]:
        folder = tmp_path / f"{architecture} {name} {spelling}"
        save_random_model(folder, architecture)
        write_rope(folder, name, spelling)
        return folder, load_reference(folder)

    return make


def dynamic_greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """`reference_greedy` of a dynamic embedding, which otherwise remembers the length of the call before."""
    reference(torch.tensor([[0]]))  # one short pass resets it
    return reference_greedy(reference, prompt, num_tokens)


def is_greedy(name: str, reference: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether the output is the continuation by transformers."""
    if name == "dynamic":
        return output == dynamic_greedy(reference, prompt, NUM_TOKENS)
    return len(output) == NUM_TOKENS and output == greedy_choices(reference, prompt, output)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ROPES)
def test_greedy_equals_transformers(name: str, spelling: str, rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """Guards the frequencies in use, and that no spelling of the config falls back to unscaled ones."""
    folder, reference = rope_model(name, spelling)
    llm = make_llm(folder)
    prompts = random_prompts(LENGTHS if spelling == SPELLINGS[0] else LENGTHS[::3])
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert is_greedy(name, reference, prompt, output["token_ids"])
    assert llm.max_model_len == ROPES[name][3]


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn"])
def test_other_architectures(architecture: str, name: str, rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """The same for the architectures whose configs default to other lengths, thetas and head sizes."""
    folder, reference = rope_model(name, architecture=architecture)
    prompts = random_prompts((20, 2 * ORIGINAL))
    for prompt, output in zip(prompts, make_llm(folder).generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert is_greedy(name, reference, prompt, output["token_ids"])


def test_fixture_sees_faults(rope_model: Any) -> None:
    """A rope type whose loss left the tokens of the long prompt as they are would not be tested at all."""
    (prompt,) = random_prompts([2 * ORIGINAL])
    outputs = {name: tuple(dynamic_greedy(rope_model(name)[1], prompt, 6)) for name in ROPES}
    same = {"yarn", "yarn-config-says-original", "yarn-original-implied"}  # three ways to say the same
    assert len({outputs[name] for name in same}) == 1
    assert len(set(outputs.values())) == len(ROPES) - len(same) + 1


# The published settings of well-known models: (head_dim, max_position_embeddings, rope parameters).
PUBLISHED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Llama 2": (128, 4096, {"rope_type": "default", "rope_theta": 10000.0}),
    "Llama 3.1": (128, 131072, {"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3),
    "Llama 3.2": (64, 131072, {"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3 | {"factor": 32.0}),
    "Qwen2.5 1M": (128, 1010000, {"rope_type": "default", "rope_theta": 10000000.0}),
    "Qwen3 YaRN": (
        128,
        40960,
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "linear": (128, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}),
    "dynamic": (128, 2048, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
}
for _settings in (PUBLISHED["Llama 3.1"][2], PUBLISHED["Llama 3.2"][2]):
    _settings["original_max_position_embeddings"] = 8192


def published_config(name: str) -> LlamaConfig:
    head_dim, max_position_embeddings, parameters = PUBLISHED[name]
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=dict(parameters),
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("num_tokens", [100, 12345])
def test_frequencies_equal_transformers(name: str, num_tokens: int) -> None:
    """Guards the formulas at the sizes of real models, where an error is too small to change a tiny model's tokens.

    A frequency may be off by a few float32 roundings, an angle by that times the position.
    """
    config = published_config(name)
    theirs = LlamaRotaryEmbedding(config)
    ours = RotaryEmbedding(RopeSpec.from_config(config, config.head_dim), num_tokens)
    positions = torch.arange(num_tokens)
    their_cos, their_sin = theirs(torch.empty(0), positions[None])
    rotation = ours(positions, torch.full((num_tokens,), num_tokens))
    our_cos, our_sin = rotation.table[rotation.rows].chunk(2, dim=-1)
    epsilon = torch.finfo(torch.float32).eps
    if name != "dynamic":
        torch.testing.assert_close(ours.inverse_frequencies, theirs.inv_freq, rtol=8 * epsilon, atol=0)
    # The fastest dimension turns by one radian a token, so its angle is as large as the position.
    tolerance = {"rtol": 0.0, "atol": 16 * epsilon * num_tokens}
    half = config.head_dim // 2
    torch.testing.assert_close(our_cos, their_cos[0, :, :half], **tolerance)
    torch.testing.assert_close(our_sin, their_sin[0, :, :half], **tolerance)


def test_dynamic_prompts_do_not_share_blocks(rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """Under dynamic scaling the same prefix has other keys in a prompt of another length: no reuse between them.

    Within the original length, and between prompts of one length, there is.
    """
    folder, reference = rope_model("dynamic")
    (long_prefix,) = random_prompts([3 * ORIGINAL])
    prompts = [long_prefix[:length] for length in (3 * ORIGINAL, 2 * ORIGINAL + 5, 2 * ORIGINAL, ORIGINAL + 1)]
    expected = [dynamic_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    llm = make_llm(folder)
    for _ in range(2):  # the second time the cache is full of the first one's blocks
        for prompt, output in zip(prompts, expected, strict=True):
            assert llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"] == output
        together = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in together] == expected

    cold = make_llm(folder)
    first = cold.generate([prompts[0]], GREEDY, use_tqdm=False)[0]
    other_length = cold.generate([prompts[1]], GREEDY, use_tqdm=False)[0]
    same_length = cold.generate([[*prompts[0][:-1], 7]], GREEDY, use_tqdm=False)[0]
    counts = [output["num_cached_tokens"] for output in (first, other_length, same_length)]
    assert counts == [0, 0, (3 * ORIGINAL - 1) // BLOCK_SIZE * BLOCK_SIZE]
    short = [long_prefix[: BLOCK_SIZE + 1], long_prefix[:ORIGINAL]]
    assert [cold.generate([p], GREEDY, use_tqdm=False)[0]["num_cached_tokens"] for p in short] == [0, BLOCK_SIZE]


def test_dynamic_output_continued_as_prompt(rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """What was generated beyond the original length has been rotated token by token: sent back as a prompt, it is
    rotated for the prompt's length instead, so its blocks must not be found."""
    folder, reference = rope_model("dynamic")
    llm = make_llm(folder)
    (prompt,) = random_prompts([ORIGINAL - 4])
    for _ in range(3):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"]
        assert output == dynamic_greedy(reference, prompt, NUM_TOKENS)
        prompt = prompt + output


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": BLOCK_SIZE}, {"max_num_seqs": 2}], ids=str)
def test_dynamic_whatever_the_schedule(limits: dict[str, int], rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """A chunk of a prompt must be rotated for the whole prompt."""
    folder, reference = rope_model("dynamic")
    prompts = random_prompts((20, ORIGINAL - 2, ORIGINAL + 1, 2 * ORIGINAL, 2 * ORIGINAL + 9))
    outputs = make_llm(folder, **limits).generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == dynamic_greedy(reference, prompt, NUM_TOKENS)


@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_dynamic_preempted(
    enable_prefix_caching: bool, rope_model: Any, make_llm: Callable[..., LLM], drive: Callable[..., Any]
) -> None:
    """Outputs that a preempted sequence computes again must be rotated as the first time, one length each."""
    folder, reference = rope_model("dynamic")
    llm = make_llm(folder, num_kvcache_blocks=14, enable_prefix_caching=enable_prefix_caching)
    prompts = random_prompts((20, ORIGINAL - 2, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL))
    expected = [dynamic_greedy(reference, prompt, 3 * NUM_TOKENS) for prompt in prompts]
    # After a request that stopped at once, the scheduler expects those that could stop to be short, and admits more.
    llm.generate([prompts[0]], SamplingParams(temperature=0, stop_token_ids=(expected[0][0],)), use_tqdm=False)
    never = next(token for token in range(320) if not any(token in output for output in expected))
    params = SamplingParams(temperature=0, max_tokens=3 * NUM_TOKENS, stop_token_ids=(never,))
    outputs, steps = drive(llm, prompts, params)
    assert [output["token_ids"] for output in outputs] == expected
    assert sum(step.num_preemptions for step in steps) > 0, "this test needs preemptions: make the pool smaller"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": THETA,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "factor": 4.0,
                    "original_max_position_embeddings": ORIGINAL,
                }
            },
            "longrope",
        ),
        ({"rope_parameters": {"rope_type": "fancy", "rope_theta": THETA, "factor": 2.0}}, "fancy"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "fancy", "factor": 2.0}}, "fancy"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": THETA}}, "proportional"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
        (
            {
                "layer_types": ["full_attention", "full_attention"],
                "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": THETA}},
            },
            "layer",
        ),
    ],
    ids=[
        "longrope",
        "unknown",
        "unknown-old-spelling",
        "proportional",
        "partial",
        "partial-in-parameters",
        "per-layer",
    ],
)
def test_unsupported_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What isn't implemented is an error that names it, never an unscaled or fully rotated model."""
    save_random_model(tmp_path)
    write_json(tmp_path, "config.json", **keys)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("rope_type", "factor"),
    [
        *((rope_type, factor) for rope_type in ("linear", "dynamic", "yarn", "llama3") for factor in (..., None)),
        *(("linear", factor) for factor in ("4.0", 0, -2.0)),
    ],
)
def test_bad_factor_is_refused(rope_type: str, factor: Any, tmp_path: Path) -> None:
    """A stretch without its factor (`...`), or by a senseless one, is a ValueError that says so when the model is
    loaded, not a KeyError out of the arithmetic, nor a model that runs on infinite frequencies."""
    save_random_model(tmp_path)
    parameters = {"rope_type": rope_type, "rope_theta": THETA} | (LLAMA3 if rope_type == "llama3" else {})
    parameters = {key: value for key, value in (parameters | {"factor": factor}).items() if value is not ...}
    write_json(tmp_path, "config.json", rope_parameters=parameters)
    assert "factor" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("rope_type", "missing"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_missing_parameter_is_a_value_error(rope_type: str, missing: str) -> None:
    """The same where transformers has not looked at the config first, as some of its versions don't."""
    parameters = LLAMA3 | {"rope_type": rope_type}
    del parameters[missing]
    config = SimpleNamespace(rope_scaling=parameters, rope_theta=THETA, max_position_embeddings=4 * ORIGINAL)
    with pytest.raises(ValueError, match=missing):
        RotaryEmbedding(RopeSpec.from_config(config, 16))


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("mistral", {"sliding_window": 48}),
        ("qwen2", {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_sliding_window_limits_the_length(
    architecture: str, keys: dict[str, Any], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """A window isn't computed, so it must end the context; up to its length it changes nothing."""
    save_random_model(tmp_path, architecture, **keys)
    reference = load_reference(tmp_path)
    llm = make_llm(tmp_path)
    assert llm.max_model_len == 48
    prompts = random_prompts((10, 30, 47))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len(output["token_ids"]) == 48 - len(prompt)
        assert output["token_ids"] == greedy_choices(reference, prompt, output["token_ids"])
    with pytest.raises(ValueError, match="48"):
        llm.generate(random_prompts([48]), GREEDY, use_tqdm=False)


def test_unused_sliding_window_is_no_limit(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Qwen's configs name a window that `use_sliding_window` switches off."""
    save_random_model(tmp_path, "qwen2", sliding_window=48, use_sliding_window=False)
    write_json(tmp_path, "config.json", sliding_window=48)
    assert make_llm(tmp_path).max_model_len == 512
    config = AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = 48  # as versions of transformers leave it that look at the switch elsewhere
    assert resolve_architecture(config)[1].max_model_len == 512


def test_asked_length_is_kept(rope_model: Any, make_llm: Callable[..., LLM]) -> None:
    """The model's own limit caps `max_model_len`; it never raises it."""
    folder, _ = rope_model("yarn")
    assert make_llm(folder, max_model_len=40).max_model_len == 40
