"""Whatever ends a job, it can be gone on with, and each row has one result in the end."""

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main
from tests.cpu.command_line import ENVIRONMENT, cli, command, here, read_rows, run_args, write_rows

NUM_KILLS = int(os.environ.get("NANOVLLM_TEST_KILLS", "3"))
SLOW = ("--max-num-seqs", 2, "--max-tokens", 100, "--ignore-eos")


def _rows(number: int) -> list[Any]:
    """Some bad, some with a seed of their own, some with several samples."""
    rows: list[Any] = [{"prompt": f"row {index}", "id": index} for index in range(number)]
    rows[3::10] = [{**row, "prompt": ""} for row in rows[3::10]]
    rows[5::10] = [{**row, "sampling_params": {"seed": 9, "n": 2}} for row in rows[5::10]]
    return rows


def _tokens(path: Path) -> list[Any]:
    """What must be the same whenever a row was completed."""
    records = read_rows(path)
    for record in records:
        record.get("output", {}).pop("num_cached_tokens", None)
    return records


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _start(*args: object, until_lines: int, output: Path) -> "subprocess.Popen[bytes]":
    """Starts a command, and waits until it has written so many lines, or ended."""
    process = subprocess.Popen(command(*args), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while _num_lines(output) < until_lines and process.poll() is None:
        time.sleep(0.005)
    return process


@pytest.mark.timeout(60 + 20 * NUM_KILLS)
def test_killed_again_and_again(byte_llama: Path, tmp_path: Path) -> None:
    """SIGKILL at random times, and now and then half a line at the end, as a kill inside of a write would leave. The
    result is that of a job that was never interrupted, tokens included."""
    rng = random.Random(0)
    number = 20 + 10 * NUM_KILLS
    source, output = write_rows(tmp_path / "in.jsonl", _rows(number)), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--seed", 4, "--resume", *SLOW)
    num_kills = 0
    while num_kills < NUM_KILLS:
        before = _num_lines(output)
        process = _start(*args, until_lines=before + rng.randint(0, 4), output=output)
        time.sleep(rng.random() * 0.2)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the job ended before it was killed: it needs more rows"
        num_kills += 1
        if num_kills % 2:
            with output.open("ab") as file:
                file.write(b'{"index": 0, "id": 0, "output": {"text": "ha')
    assert 0 < _num_lines(output) < number
    result = cli(*args)
    assert f"{number // 10} rows failed" in result.stderr
    whole = tmp_path / "whole.jsonl"
    cli(*run_args(byte_llama, source, whole, "--seed", 4, *SLOW))
    assert [record["index"] for record in read_rows(output)] == list(range(number))
    assert _tokens(output) == _tokens(whole)


def test_seed_is_drawn_once(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --seed, a row that is computed again has the same tokens: the seed is kept with the job."""
    source, output = write_rows(tmp_path / "in.txt", ["same"] * 6), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--max-tokens", 20)
    here(capsys, *args)
    first = _tokens(output)
    assert len({record["output"]["text"] for record in first}) > 1
    kept = sorted(output.read_bytes().splitlines(keepends=True))[::2]
    output.write_bytes(b"".join(kept))
    assert "3 rows in" in here(capsys, *args, "--resume")
    assert _tokens(output) == first
    assert "all 6 rows are done" in here(capsys, *args, "--resume")


def test_sigterm(byte_llama: Path, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", _rows(60)), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, *SLOW)
    process = _start(*args, until_lines=2, output=output)
    other = cli(*args, "--resume", status=1).stderr
    assert other == f"nanovllm: error: {output}: another process is writing to it\n"
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert 2 <= len(read_rows(output)) < 60


def test_full_disk(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of an error; the file has whole lines only, and the job can go on when there is room."""
    source, output = write_rows(tmp_path / "in.txt", [f"row {index}" for index in range(30)]), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--max-tokens", 5, "--max-num-seqs", 2)

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    error = cli(*args, status=1, preexec_fn=limit_file_size).stderr.splitlines()
    hint = "--resume goes on with what is there"
    assert error == [f"nanovllm: error: {output}: can't write results: File too large; {hint}"]
    num_written = len(read_rows(output))
    assert 0 < num_written < 30
    here(capsys, *args, "--resume")
    assert [record["index"] for record in read_rows(output)] == list(range(30))

    error = here(capsys, *run_args(byte_llama, source, "/dev/full"), status=1).splitlines()
    assert error == ["nanovllm: error: /dev/full: can't write results: No space left on device"]


def test_closed_pipe(byte_llama: Path, tmp_path: Path) -> None:
    """Standard output has nothing but results; when nobody reads them any more, the job ends."""
    source = write_rows(tmp_path / "in.txt", [f"row {index}" for index in range(200)])
    args = run_args(byte_llama, source, "-", "--max-tokens", 5, "--max-num-seqs", 2)
    process = subprocess.Popen(command(*args), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert "output" in json.loads(process.stdout.readline())
    process.stdout.close()
    error = process.stderr.read().decode()
    assert process.wait() == 1
    assert error == "nanovllm: error: standard output: nobody reads it any more (Broken pipe)\n"


def test_refusals(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is overwritten, and no job goes on with another's results; a mere engine setting is a warning."""
    source, output = write_rows(tmp_path / "in.txt", ["a", "b", "c"]), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--max-tokens", 3, "--seed", 1)
    here(capsys, *args)
    assert "exists already; --resume goes on with it" in here(capsys, *args, status=1)
    content = output.read_bytes()
    output.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    half = output.read_bytes()

    def refusal(*more: object) -> str:
        error = here(capsys, *args, "--resume", *more, status=1)
        assert error.startswith(f"nanovllm: error: {output}") and error.count("\n") == 1
        assert output.read_bytes() == half
        return error

    assert 'params was {"max_tokens": 3}, is {"max_tokens": 4}' in refusal("--max-tokens", 4)
    assert "seed was 1, is 2" in refusal("--seed", 2)
    source.write_text("a\nb\nd\n")
    assert "belongs to another job: input was" in refusal()
    source.write_text("a\nb\nc\n")
    job_file = tmp_path / "out.jsonl.job"
    job_file.rename(tmp_path / "away")
    assert "which says what job it belongs to" in refusal()
    (tmp_path / "away").rename(job_file)
    half += half.splitlines(keepends=True)[0]
    output.write_bytes(half)
    assert f"{output}:3: row " in refusal()
    half = b'{"other": 1}\n' + content
    output.write_bytes(half)
    assert f"{output}:1: not a result of this job" in refusal()
    half = content.splitlines(keepends=True)[0] + b'{"other": 1}\n'
    output.write_bytes(half)
    assert f"{output}:2: not a result of this job" in refusal()

    output.write_bytes(content.splitlines(keepends=True)[0])
    warning = here(capsys, *args, "--resume", "--max-num-seqs", 7)
    assert "was begun with other settings: max_num_seqs was null, is 7" in warning
    assert len(read_rows(output)) == 3


def test_lock_ends_with_its_process(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While somebody holds the file, the job is refused; a moment later it isn't."""
    source, output = write_rows(tmp_path / "in.txt", ["a"]), tmp_path / "out.jsonl"
    args = run_args(byte_llama, source, output, "--resume")
    with output.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing to it" in here(capsys, *args, status=1)
    here(capsys, *args)
    assert len(read_rows(output)) == 1


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "1/0", "a/b", "1/2/3"])
def test_impossible_shards(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "in.jsonl", "--model", "m", f"--shard={text}"])
    assert "must be I/N with 0 <= I < N" in capsys.readouterr().err


def test_shards_add_up(byte_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several jobs complete a file's rows, each once, with the tokens of a single job; one shard goes on as another
    one is refused."""
    source = write_rows(tmp_path / "in.jsonl", _rows(11))
    args = ("--seed", 4, "--max-tokens", 8, "--ignore-eos")
    here(capsys, *run_args(byte_llama, source, tmp_path / "whole.jsonl", *args))
    records = []
    for index in range(3):
        output = tmp_path / f"{index}.jsonl"
        shard = (*args, "--shard", f"{index}/3")
        here(capsys, *run_args(byte_llama, source, output, *shard))
        assert "are done" in here(capsys, *run_args(byte_llama, source, output, *shard, "--resume"))
        assert "shard was" in here(capsys, *run_args(byte_llama, source, output, *args, "--resume"), status=1)
        own = _tokens(output)
        assert [record["index"] for record in own] == list(range(index, 11, 3))
        records += own
    assert sorted(records, key=lambda record: record["index"]) == _tokens(tmp_path / "whole.jsonl")
