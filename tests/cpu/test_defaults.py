"""The sampling settings of a checkpoint: offered, and never taken unasked."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from tests.checkpoints import save_byte_tokenizer, save_random_model, write_json

FILE = "generation_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random_model(tmp_path)
    (tmp_path / FILE).unlink(missing_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [5, 7], "bos_token_id": 1, "transformers_version": "4.51.0", "max_length": 20}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            {"temperature": 1, "min_p": 0.05, "max_new_tokens": 99},
            {"temperature": 1.0, "min_p": 0.05, "max_tokens": 99},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"do_sample": None, "temperature": None, "top_k": None, "top_p": None}, {}),
        ({"top_k": 0, "seed": 5, "n": 4, "stop_token_ids": [5], "min_tokens": 3, "ignore_eos": True}, {}),
    ],
    ids=str,
)
def test_settings(folder: Path, make_llm: Any, content: dict[str, Any], expected: dict[str, Any]) -> None:
    """The keys that mean what a field means, and no other."""
    write_json(folder, FILE, **content)
    assert make_llm(folder).default_sampling_params() == SamplingParams(**expected)


def test_setting_without_a_field(folder: Path, make_llm: Any) -> None:
    """A recommendation that SamplingParams can't express is left out, and taken once it can."""
    write_json(folder, FILE, repetition_penalty=1.1, top_k=3)
    params = make_llm(folder).default_sampling_params()
    assert params.top_k == 3
    assert getattr(params, "repetition_penalty", 1.1) == 1.1


def test_without_the_file(folder: Path, make_llm: Any) -> None:
    assert make_llm(folder).default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"top_p": 1.5}, r"top_p must be in \(0\.0, 1\.0\], got 1\.5"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
    ids=str,
)
def test_impossible_settings(folder: Path, make_llm: Any, content: dict[str, Any], message: str) -> None:
    """They are refused when they are asked for, and stop nobody from using the model."""
    write_json(folder, FILE, **content)
    llm = make_llm(folder)
    with pytest.raises(ValueError, match=rf"{FILE}: {message}"):
        llm.default_sampling_params()
    assert len(llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)) == 1


def test_not_taken_unasked(folder: Path, make_llm: Any) -> None:
    """Guards against settings of a file that nobody looked at: greedy there, but not here; only its end-of-sequence
    tokens count."""
    save_byte_tokenizer(folder)
    plain = make_llm(folder, seed=1).generate([[1]] * 4, SamplingParams(max_tokens=30), use_tqdm=False)
    write_json(folder, FILE, do_sample=False, max_new_tokens=3, top_k=1, eos_token_id=[257, 300])
    llm = make_llm(folder, seed=1)
    assert 300 in llm.eos_token_ids
    assert llm.generate([[1]] * 4, SamplingParams(max_tokens=30), use_tqdm=False) == plain
    (greedy,) = llm.generate([[1]], llm.default_sampling_params(), use_tqdm=False)
    assert len(greedy["token_ids"]) == 3
    assert greedy["token_ids"] == llm.generate([[1]], SamplingParams(temperature=0, max_tokens=3))[0]["token_ids"]
