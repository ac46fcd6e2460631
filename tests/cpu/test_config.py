"""Every field of Config: what is accepted, what is refused, and how."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.config import Config

NAN, INF = float("nan"), float("inf")


def test_defaults() -> None:
    """nano-vLLM's names and defaults."""
    config = Config("m")
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) == (16384, 512, 4096)
    assert (config.gpu_memory_utilization, config.tensor_parallel_size, config.enforce_eager) == (0.9, 1, False)
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (None, None)
    assert (config.device, config.dtype, config.attention_backend, config.load_format) == ("auto",) * 4
    assert config.enable_prefix_caching is True and config.kv_offload_gb == 0 and config.seed is None


@pytest.mark.parametrize(
    "name, values",
    {
        "model": ["m"],
        "max_num_batched_tokens": [1, 2**20, np.int64(64)],
        "max_num_seqs": [1, 3, 12, 700, np.int32(5)],
        "max_model_len": [2, 2**20, np.int64(64)],
        "gpu_memory_utilization": [1e-6, 0.5, 1, 1.0, np.float32(0.5)],
        "tensor_parallel_size": [1, np.int64(1)],
        "data_parallel_size": [1, 8, np.int64(2)],
        "enforce_eager": [True, False],
        "kvcache_block_size": [None, 1, 256, np.int64(16)],
        "num_kvcache_blocks": [None, 1, 10**6, np.int64(16)],
        "device": ["auto", "cpu", "cuda", "cuda:1"],
        "dtype": ["auto", "float32", "bfloat16", "float16"],
        "attention_backend": ["auto", "sdpa"],
        "load_format": ["auto", "dummy"],
        "enable_prefix_caching": [True, False],
        "schedule_policy": ["prefix", "fcfs"],
        "kv_offload_gb": [0, 0.0, 0.25, 64, np.float32(1.5)],
        "seed": [None, 0, 2**64 - 1, np.int64(5)],
    }.items(),
)
def test_accepted(name: str, values: list[Any]) -> None:
    for value in values:
        Config(**{"model": "m", name: value})


@pytest.mark.parametrize(
    "name, values",
    {
        "max_num_batched_tokens": [0, -1],
        "max_num_seqs": [0, -1],
        "max_model_len": [1, 0, -1],  # one token of prompt and one of output are the least
        "gpu_memory_utilization": [0, 0.0, -0.5, 1.001, 1.5, 90, NAN, INF, -INF],
        "tensor_parallel_size": [0, -1],
        "data_parallel_size": [0, -1],
        "kvcache_block_size": [0, -16],
        "num_kvcache_blocks": [0, -1],
        "dtype": ["fp32", "", "int8", "Float32"],
        "load_format": ["pt", ""],
        "schedule_policy": ["lpm", "", "FCFS"],
        "kv_offload_gb": [-1, -0.001, NAN, INF, -INF],
        "seed": [-1],
    }.items(),
)
def test_out_of_range(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            Config(**{"model": "m", name: value})


@pytest.mark.parametrize(
    "name, values",
    {
        "model": [None, 5, True],
        "max_num_batched_tokens": [True, 1.0, "1", None, np.float64(8)],
        "max_num_seqs": [True, 1.0, "1", None],
        "max_model_len": [True, 4096.0, "1", None],
        "gpu_memory_utilization": [True, "0.9", None, [0.9]],
        "tensor_parallel_size": [True, 1.0, "1", None],
        "data_parallel_size": [True, 1.0, "1", None],
        "enforce_eager": [0, 1, None, "yes", np.True_],
        "kvcache_block_size": [True, 16.0, "16"],
        "num_kvcache_blocks": [True, 16.0, "16"],
        "device": [None, 0, True],
        "dtype": [None, 16, float],
        "attention_backend": [None, 0, ["sdpa"]],
        "load_format": [None, 0],
        "enable_prefix_caching": [0, 1, None, "no"],
        "schedule_policy": [None, 0, ["fcfs"]],
        "kv_offload_gb": [True, "8", None, [8]],
        "seed": [True, 1.0, "1"],
    }.items(),
)
def test_wrong_type(name: str, values: list[Any]) -> None:
    """`from_kwargs` and its docstring promise a TypeError for a wrong type, naming the field."""
    for value in values:
        with pytest.raises(TypeError, match=name):
            Config(**{"model": "m", name: value})


def test_every_field_is_tested() -> None:
    """A field added without validation tests would pass unseen."""
    names = {field.name for field in dataclasses.fields(Config)}
    for test in (test_accepted, test_wrong_type):
        assert {name for mark in test.pytestmark for name, _ in mark.args[1]} == names


def test_message_has_the_value() -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be in \(0\.0, 1\.0\], got 1\.5"):
        Config("m", gpu_memory_utilization=1.5)
    with pytest.raises(ValueError, match=r"dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', got 'fp8'"):
        Config("m", dtype="fp8")


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("max_num_sequences", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("num_kv_cache_blocks", "num_kvcache_blocks"),
        ("eager", "enforce_eager"),
        ("prefix_caching", "enable_prefix_caching"),
        ("backend", "attention_backend"),
    ],
)
def test_unknown_keyword_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"{wrong}.*did you mean '{right}'"):
        Config.from_kwargs("m", **{wrong: 1})


def test_unknown_keyword_without_any_likeness() -> None:
    """There is always some nearest; the lookup must not fail on a name that resembles none."""
    for name in ("zzz", "q", "\u00fc"):
        with pytest.raises(TypeError, match="unknown keyword"):
            Config.from_kwargs("m", **{name: 1})


def test_from_kwargs() -> None:
    config = Config.from_kwargs("m", max_num_seqs=3, enforce_eager=True)
    assert (config.model, config.max_num_seqs, config.enforce_eager) == ("m", 3, True)
    assert Config.from_kwargs(Path("some") / "folder").model == str(Path("some") / "folder")


@pytest.mark.parametrize("model", [None, 5, True])
def test_model_must_be_a_name_or_a_path(model: Any) -> None:
    """Turned into a string first, None would be looked up as a model called "None"."""
    with pytest.raises(TypeError, match="model"):
        Config.from_kwargs(model)


def test_frozen() -> None:
    """Derived sizes are returned, never written back."""
    config = Config("m")
    for field in dataclasses.fields(Config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


def test_numpy_integers_behave_as_python_ones() -> None:
    """Kept as they are, they fail where the engine needs a plain int (`random.Random`), change the type of index
    arrays (int32 // int64 is int64), or overflow."""
    config = Config(
        "m",
        seed=np.int64(5),
        kvcache_block_size=np.int64(16),
        num_kvcache_blocks=np.uint8(200),
    )
    assert config.kvcache_block_size is not None and config.num_kvcache_blocks is not None
    assert random.Random(config.seed).random() == random.Random(5).random()
    assert (np.zeros(1, dtype=np.int32) // config.kvcache_block_size).dtype == np.int32
    with np.errstate(over="raise"):
        assert config.num_kvcache_blocks * 100 == 20_000
