"""What the README promises runs: its commands are CI's, its example works, its tables name what exists."""

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm.config import Config
from nanovllm.models import ARCHITECTURES
from nanovllm.sampling_params import SamplingParams
from tests.checkpoints import save_byte_tokenizer, save_random_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_ci_runs_the_command_of_the_readme() -> None:
    """Two commands set everything up; the second is what CI runs, letter for letter."""
    example, tests = (block.strip() for block in code_blocks("bash"))
    assert "\n" not in example and "\n" not in tests
    assert example.endswith("python example.py")
    assert tests in (ROOT / ".ci" / "run").read_text().splitlines()


def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first example, with another model in the place of its path."""
    save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path)
    (example,) = code_blocks("python")
    example = re.sub(r'LLM\(".*?"\)', f'LLM("{tmp_path}", num_kvcache_blocks=8, device="cpu")', example)
    names: dict[str, Any] = {}
    exec(example, names)
    names["llm"].close()
    assert len(capsys.readouterr().out.splitlines()) >= len(names["prompts"])


def test_constrained_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path)
    with nanovllm.LLM(str(tmp_path), num_kvcache_blocks=16, device="cpu") as llm:
        exec(code_blocks("py")[0], {**vars(nanovllm), "llm": llm})
    json_text, answer = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json_text.startswith("{") and answer in ("yes", "no")


def test_streaming_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plain one, then that for asyncio, with another model in the place of its path."""
    save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path)
    model = f'LLM("{tmp_path}", num_kvcache_blocks=8, device="cpu")'
    plain, coroutine = code_blocks("py")[-2:]
    exec(f"with {model} as llm:\n" + textwrap.indent(plain, "    "), {**vars(nanovllm)})
    assert capsys.readouterr().out
    exec(re.sub(r'LLM\(".*?"\)', model, coroutine).replace("max_tokens=500", "max_tokens=5"), {})
    assert len(capsys.readouterr().out.splitlines()) > 1


def test_scoring_example(byte_llama: Path, make_llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = code_blocks("python3")
    exec(example, {"llm": make_llm(byte_llama)})
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("settings", [Config, SamplingParams])
def test_tables_are_complete(settings: type) -> None:
    """Each setting has a row with its default; None and tuples are described in words."""
    for field in dataclasses.fields(settings):
        if field.name == "model":
            continue
        row = re.search(rf"^\| `{field.name}` \| (.*?) \|", README, re.MULTILINE)
        assert row, f"{field.name} is not in the README"
        default = row.group(1).strip("`").replace('"', "'")
        assert field.default is None or default == repr(field.default), field.name


def test_architectures_are_named() -> None:
    for name in ARCHITECTURES:
        assert name.removesuffix("ForCausalLM") in README


def test_version_has_one_source() -> None:
    assert "version = {" in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", nanovllm.__version__)
