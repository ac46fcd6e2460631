"""What goes wrong for a newcomer is said in one line, and can be put right."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.cli import main
from nanovllm.engine.output_text import OutputTexts
from nanovllm.jobs import bench as bench_module
from nanovllm.jobs.run import _Loop
from tests.cpu.command_line import ENGINE, cli, here, read_rows, run_args, write_rows

Capture = pytest.CaptureFixture[str]


def _error(capsys: Capture, *args: object) -> str:
    """The only line of an error."""
    text = here(capsys, *args, status=1)
    assert text.startswith("nanovllm: error: ") and text.endswith("\n") and text.count("\n") == 1, text
    return text.removeprefix("nanovllm: error: ").rstrip("\n")


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "nanovllm: error: the following arguments are required: COMMAND; nanovllm --help says more"),
        (("run",), "nanovllm run: error: the following arguments are required: INPUT, --model; "),
        (
            ("run", "x", "--model", "m", "--max_tokens", "3"),
            "no such argument: --max_tokens (did you mean --max-tokens?)",
        ),
        (
            ("run", "x", "--model", "m", "--temprature=3"),
            "no such argument: --temprature=3 (did you mean --temperature?)",
        ),
        (("run", "x", "y", "--model", "m"), "nanovllm run: error: no such argument: y; nanovllm run --help says more"),
        (("run", "x", "--model", "m", "--temperature", "hot"), "argument --temperature: invalid float value: 'hot'"),
        (("run", "x", "--model", "m", "--json-schema", "{"), "argument --json-schema: not valid JSON: "),
        (("info", "m", "--dtyp", "x", "--qwx"), "nanovllm info: error: no such argument: --qwx; nanovllm info --help"),
        (("serve",), "invalid choice: 'serve'"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as info:
        main(args)
    error = capsys.readouterr().err
    assert info.value.code == 2
    assert message in error and error.count("\n") == 1


def test_bench(byte_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert _error(capsys, "bench", "--model", byte_llama / "none").startswith(f"{byte_llama / 'none'}: no such file")
    small = ("bench", "--model", byte_llama, "--num-seqs", 2, "--device", "cpu")
    assert "temperature must be in" in _error(capsys, *small, "--max-len", 4, "--temperature", -1)
    assert "prompt 0: has 3255 tokens" in _error(capsys, *small, "--max-len", 6000)
    with monkeypatch.context() as patch:
        patch.setattr(bench_module, "demo_model", lambda: Path(byte_llama / "none").read_text())
        assert _error(capsys, "bench").endswith("; or pass --model")


def test_models_that_cannot_be_loaded(byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """The output file that such a job leaves is empty, and in nobody's way."""
    source, output = write_rows(tmp_path / "in.txt", ["x"]), tmp_path / "out.jsonl"
    too_much = ("--num-kvcache-blocks", 10**9)
    for flags, reason in {
        ("--attention-backend", "flash"): "no attention backend can serve this model",
        ("--tensor-parallel-size", 3): "does not divide the model's 4 query heads; these do: 1, 2, 4",
        too_much: "num_kvcache_blocks=1000000000 of ",
        (
            *too_much,
            "--data-parallel-size",
            2,
        ): "can't be loaded: WorkerError: data parallelism: replica ",
    }.items():
        error = _error(capsys, *run_args(byte_llama, source, output, *flags))
        assert reason in error and "Traceback" not in error and "File " not in error, error
        assert output.read_bytes() == b""
    here(capsys, *run_args(byte_llama, source, output, "--max-tokens", 2))
    assert len(read_rows(output)) == 1
    assert "exists already; --resume goes on with it" in _error(capsys, *run_args(byte_llama, source, output))


def test_verbose(byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Tracebacks are there for those who ask, and unexpected errors say how."""
    source, output = write_rows(tmp_path / "in.txt", ["x"]), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output)

    def fail(*args: Any) -> Any:
        raise LookupError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "step", fail)
        message = "the engine failed: LookupError: a fault; --resume goes on with what is there"
        assert _error(capsys, *args) == message
        text = here(capsys, *args, "--verbose", status=1)
        assert "in fail\n" in text and text.endswith(f"nanovllm: error: {message}\n")
        assert _error(capsys, *run_args(byte_llama, source, "/dev/null")) == "the engine failed: LookupError: a fault"
    with monkeypatch.context() as patch:
        patch.setattr(_Loop, "_prepare", fail)
        assert _error(capsys, *args) == "LookupError: a fault (--verbose shows where)"
        assert "in fail\n" in here(capsys, *args, "--verbose", status=1)
    here(capsys, *args)


def test_result_that_cannot_be_decoded(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Is an error of its row."""
    output_of = OutputTexts.output_of

    def failing(self: OutputTexts, seq: Any) -> Any:
        if seq.num_prompt_tokens == 5:
            raise LookupError("this one")
        return output_of(self, seq)

    monkeypatch.setattr(OutputTexts, "output_of", failing)
    source, output = write_rows(tmp_path / "in.txt", ["abc", "abcde", "abcdefg"]), tmp_path / "out.jsonl"
    text = here(capsys, *run_args(byte_llama, source, output, "--max-tokens", 2))
    first, second, third = read_rows(output)
    assert "output" in first and "output" in third
    reason = f"{source}:2: its result can't be decoded: this one"
    assert second["error"]["message"] == reason
    assert "2 rows in" in text and f"1 rows failed (one of them: {reason})" in text


def test_flags_that_no_row_can_use(byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """End the job, instead of failing every row; a dry run finds them, too."""
    source, output = write_rows(tmp_path / "in.txt", ["a", "b"]), tmp_path / "out.jsonl"
    for flags, reason in {
        ("--regex", "("): "regex can't be used: ",
        ("--stop-token-ids", 999): "stop token 999 is outside [0, 320)",
        ("--allowed-token-ids", 999): "token of allowed_token_ids 999 is outside [0, 320)",
    }.items():
        error = _error(capsys, *run_args(byte_llama, source, output, *flags))
        assert error.startswith(reason), error
        assert _error(capsys, "run", source, "--model", byte_llama, "--dry-run", *flags) == error


def test_json_documents(byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """A list, and an object over several lines, are no rows; lines of objects are, whatever the file is called."""
    path, rows = tmp_path / "in.json", [{"prompt": "x"}, {"prompt": "y"}]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), json.dumps(rows[0], indent=1)):
        path.write_text(text)
        error = _error(capsys, "run", path, "--model", byte_llama, "--dry-run")
        assert error.startswith(f"{path}:1: ") and "JSON lines are an object in each line" in error
    write_rows(path, rows)
    here(capsys, "run", path, "--model", byte_llama, "--dry-run")


def test_no_rows(byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n")
    assert here(capsys, *run_args(byte_llama, source, output)) == f"{source}: has no rows; {output}\n"


def test_all_rows_fail(byte_llama: Path, tmp_path: Path) -> None:
    """The summary has an example: else one would have to look into the file to know why."""
    source = write_rows(tmp_path / "in.txt", ["x" * 40] * 3)
    small = ("--num-kvcache-blocks", 2)
    assert ENGINE[-2] == small[0]
    args = run_args(byte_llama, source, tmp_path / "o.jsonl", *small)
    text = cli(*args, status=1).stderr
    assert f"3 rows failed (one of them: {source}:1: prompt: has 40 tokens, but the whole KV cache holds 32" in text
    assert "all 3 rows are done, 3 of them with an error; " in cli(*args, "--resume", status=1).stderr


def test_status_of_a_resumed_job(byte_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """It is that of the whole job: rows that were completed before count."""
    source, output = write_rows(tmp_path / "in.txt", ["x", "y" * 40, "z" * 40]), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--num-kvcache-blocks", 2, "--max-tokens", 2)
    here(capsys, *args)
    lines = output.read_bytes().splitlines(keepends=True)
    for kept in (b'"output"', b'"error"'):
        output.write_bytes(next(line for line in lines if kept in line))
        assert "2 rows failed" in here(capsys, *args, "--resume")


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.zst", "out.parquet"])
def test_output_that_would_not_be_what_its_name_says(
    byte_llama: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    source = write_rows(tmp_path / "in.txt", ["x"])
    error = _error(capsys, *run_args(byte_llama, source, tmp_path / name))
    assert f"{name}: the output is JSON lines, not compressed" in error
    assert not (tmp_path / name).exists()
