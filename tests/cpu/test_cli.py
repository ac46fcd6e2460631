"""`nanovllm run` on every format, with good rows and bad ones; `nanovllm info`. In processes of their own."""

import dataclasses
import datetime
import gc
import gzip
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm import cli as command_line
from nanovllm.config import Config
from nanovllm.engine.grammar_compiler import GrammarCompiler
from nanovllm.jobs.engine import JobEngine
from nanovllm.jobs.params import NOT_IN_FILES, row_seed
from nanovllm.jobs.results import ResultFile
from tests.checkpoints import save_byte_tokenizer, save_random_model, write_json
from tests.cpu.command_line import ENGINE, ENVIRONMENT, ROOT, cli, command, here, read_rows, run_args, write_rows

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def chat_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("chat_llama")
    save_random_model(folder, "llama")
    save_byte_tokenizer(folder, num_specials=44)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    write_json(folder, "tokenizer_config.json", chat_template=TEMPLATE)
    return folder


def test_rows_are_what_generate_gives(chat_llama: Path, tmp_path: Path) -> None:
    """Texts, token ids and conversations; flags, rows' own params and seeds; other columns pass through."""
    conversation = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "one", "id": "a"},
        {"prompt": [5, 6, 7], "nested": {"x": [1, None, "é\u2028"]}},
        {"messages": conversation, "index": 7, "output": "gold"},
        {"prompt": "two", "sampling_params": {"temperature": 0, "max_tokens": 3, "seed": None}},
        {"prompt": "three", "sampling_params": {"seed": 5, "n": 2, "logit_bias": {"65": 3}}},
        {"prompt": "four", "sampling_params": {"logprobs": 1, "max_tokens": 2}},
    ]
    source, output = write_rows(tmp_path / "in.jsonl", [*rows[:2], "", *rows[2:]]), tmp_path / "out.jsonl"
    result = cli(*run_args(chat_llama, source, output, "--seed", 11, "--max-tokens", 9, "--token-ids"))
    assert "6 rows in" in result.stderr and "failed" not in result.stderr
    records = read_rows(output)
    assert [record["index"] for record in records] == list(range(6))
    params = [
        SamplingParams(seed=row_seed(11, 0), max_tokens=9),
        SamplingParams(seed=row_seed(11, 1), max_tokens=9),
        SamplingParams(seed=row_seed(11, 2), max_tokens=9),
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(seed=5, max_tokens=9, n=2, logit_bias={65: 3.0}),
        SamplingParams(seed=row_seed(11, 5), max_tokens=2, logprobs=1),
    ]
    prompts = ["one", [5, 6, 7], "[user]hi[assistant]", "two", "three", "four"]
    with LLM(str(chat_llama), device="cpu", kvcache_block_size=16, num_kvcache_blocks=128) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    for record, want in zip(records, expected, strict=True):
        for key in ("text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids"):
            assert record["output"][key] == want[key]  # type: ignore[literal-required]
    assert len({tuple(record["output"]["token_ids"]) for record in records}) == 6
    assert records[0]["id"] == "a" and records[1]["nested"] == rows[1]["nested"]
    assert records[2]["input"] == {"index": 7, "output": "gold"}
    assert [one["token_ids"] for one in records[4]["output"]["samples"]] == [
        one["token_ids"] for one in expected[4]["samples"]
    ]
    logprobs = records[5]["output"]["logprobs"]
    assert [position[0][0] for position in logprobs] == expected[5]["token_ids"]
    assert logprobs[0][0][1] == pytest.approx(next(iter(expected[5]["logprobs"][0].values())).logprob, abs=1e-4)
    assert not any({"prompt", "messages", "sampling_params"} & record.keys() for record in records)


BAD = {
    '{"prompt": ': (None, "not valid JSON"),
    '{"prompt": NaN}': (None, "NaN is no JSON number"),
    '["prompt"]': (None, "must be a JSON object"),
    "[" * 100_000: (None, "nested too deeply"),
    '{"text": "x"}': ("prompt", "has neither 'prompt' nor 'messages'; it has 'text'"),
    '{"prompt": null}': ("prompt", "must be a string, a list of token ids or a list of messages, got None"),
    '{"prompt": ""}': ("prompt", "is empty"),
    '{"prompt": []}': ("prompt", "is empty"),
    '{"prompt": "\\ud800"}': ("prompt", "lone surrogate"),
    '{"prompt": [1, 320]}': ("prompt", "token id 320 at position 1 is outside [0, 320)"),
    '{"prompt": [1, "x"]}': ("prompt", "must be a flat list of integers"),
    json.dumps({"prompt": "x" * 600}): ("prompt", "has 600 tokens, but max_model_len=512"),
    '{"messages": [{"role": "user"}]}': ("messages[0]", "has no 'content'"),
    '{"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}': ("messages[1]", "has no 'role'"),
    '{"prompt": "x", "sampling_params": 3}': ("sampling_params", "must be an object, got 3"),
    '{"prompt": "x", "sampling_params": {"temprature": 1}}': (
        "sampling_params.temprature",
        "no such field; did you mean 'temperature'?",
    ),
    '{"prompt": "x", "sampling_params": {"logits_processor": "f"}}': ("sampling_params.logits_processor", "no such"),
    '{"prompt": "x", "sampling_params": {"temperature": -1}}': ("sampling_params.temperature", "must be in [0.0, inf)"),
    '{"prompt": "x", "sampling_params": {"max_tokens": "9"}}': ("sampling_params.max_tokens", "must be an int"),
    '{"prompt": "x", "sampling_params": {"stop_token_ids": [999]}}': ("sampling_params", "stop token 999 is outside"),
    '{"prompt": "x", "sampling_params": {"regex": "("}}': ("sampling_params.regex", "unclosed group"),
    '{"prompt": "x", "sampling_params": {"json_schema": {"type": "foo"}}}': (
        "sampling_params.json_schema",
        "json_schema can't be used",
    ),
}


def test_bad_rows(chat_llama: Path, tmp_path: Path) -> None:
    """Each is a record that says where and why, and the good rows around it are completed. A dry run says the same."""
    lines = [line for bad in BAD for line in (bad, '{"prompt": "good", "id": 1}')]
    source, output = write_rows(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with source.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    result = cli(*run_args(chat_llama, source, output, "--max-tokens", 2))
    assert f"{len(BAD) + 1} rows failed" in result.stderr
    records = read_rows(output)
    assert [record["index"] for record in records] == list(range(2 * len(BAD) + 1))
    assert all("output" in record and record["id"] == 1 for record in records[1:-1:2])
    wanted = [*BAD.values(), (None, "not valid UTF-8 at byte 13")]
    for record, (field, reason) in zip(records[::2], wanted, strict=True):
        error, line = record["error"], record["index"] + 1
        place = f"{source}:{line}: " if field is None else f"{source}:{line}: {field}: "
        assert error["message"].startswith(place) and reason in error["message"], error
        assert (error["line"], error["field"]) == (line, field)

    dry = cli("run", source, "--model", chat_llama, "--dry-run", status=1)
    *problems, summary = dry.stdout.splitlines()
    assert problems == [record["error"]["message"] for record in records[::2]]
    assert summary.startswith(f"{source}: {len(records)} rows, {len(wanted)} of them bad")


def test_constraint_that_compiles_slowly(
    chat_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for it, and what is wrong with it comes out when the row is queued, or later."""
    defaults = {**GrammarCompiler.__init__.__kwdefaults__, "patience": 0.0}
    monkeypatch.setattr(GrammarCompiler.__init__, "__kwdefaults__", defaults)
    rows = [{"prompt": "x", "sampling_params": {"regex": f"{index}("}} for index in range(5)]
    source, output = write_rows(tmp_path / "in.jsonl", [*rows, {"prompt": "x"}]), tmp_path / "out.jsonl"
    here(capsys, *run_args(chat_llama, source, output, "--max-num-seqs", 1, "--max-tokens", 3))
    records = read_rows(output)
    for index, record in enumerate(records[:5]):
        start = f"{source}:{index + 1}: sampling_params.regex: regex can't be used: "
        assert record["error"]["message"].startswith(start)
    assert "output" in records[5]
    error = here(capsys, "run", source, "--model", chat_llama, "--dry-run", status=1)
    assert not error


def test_dry_run_needs_no_weights(chat_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no_weights"
    folder.mkdir()
    for path in chat_llama.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    source = write_rows(tmp_path / "in.txt", ["four", "fifteen letters"])
    assert "2 rows, 0 of them bad; 19 prompt tokens" in cli("run", source, "--model", folder, "--dry-run").stdout
    assert "needs weights" in cli(*run_args(folder, source, tmp_path / "out.jsonl"), status=1).stderr


def test_fail_fast(chat_llama: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": ""}])
    result = cli(*run_args(chat_llama, source, tmp_path / "out.jsonl", "--fail-fast"), status=1)
    assert result.stderr == f"nanovllm: error: {source}:2: prompt: is empty\n"


def test_text_and_gzip(chat_llama: Path, tmp_path: Path) -> None:
    """Each line of text is a row; with --chat it is what a user says. A cut archive is found
    before any work."""
    source, output = tmp_path / "in.txt.gz", tmp_path / "out.jsonl"
    packed = gzip.compress("\ufeffone\r\n\ntwo — three".encode())
    source.write_bytes(packed)
    cli(*run_args(chat_llama, source, output, "--max-tokens", 2, "--chat", "--keep-prompt", "--token-ids"))
    first, second, third = read_rows(output)
    assert first["prompt"] == "one" and bytes(first["output"]["prompt_token_ids"]) == b"[user]one[assistant]"
    assert second["prompt"] == "" and bytes(second["output"]["prompt_token_ids"]) == b"[user][assistant]"
    assert third["prompt"] == "two — three"
    source.write_bytes(packed[:-12])
    error = cli(*run_args(chat_llama, source, tmp_path / "cut.jsonl"), status=1).stderr
    assert error.startswith(f"nanovllm: error: {source}: damaged or cut off") and error.count("\n") == 1


def test_zstandard(chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several frames are one file. One that is cut off or damaged is found before any work, whatever its frames say."""
    source = tmp_path / "in.jsonl.zst"
    try:
        import zstandard
    except ImportError:
        source.write_bytes(b"")
        error = cli("run", source, "--model", chat_llama, "--dry-run", status=1).stderr
        assert error == f"nanovllm: error: {source}: a .zst file needs the package zstandard: pip install zstandard\n"
        return
    lines = [json.dumps({"prompt": f"{index:05}" * 3}).encode() + b"\n" for index in range(5000)]
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"".join(lines))
    source.write_bytes(frame + zstandard.ZstdCompressor().compress(lines[0] * 2))
    assert "5002 rows, 0 of them bad" in cli("run", source, "--model", chat_llama, "--dry-run").stdout
    args = ("run", source, "--model", chat_llama, "--dry-run")
    cut = f"nanovllm: error: {source}: damaged or cut off after line "
    for content, least, reason in (
        (frame[:-1], 1000, "Compressed file ended before the end of its last frame"),
        (frame[: len(frame) // 2], 0, "Compressed file ended before the end of its last frame"),
        (frame + frame[:3], 5000, "Compressed file ended before the end of its last frame"),
        (frame + b"not a frame, not at all", 5000, ""),
        (b"{}\n" * 100, 0, ""),
    ):
        source.write_bytes(content)
        error = here(capsys, *args, status=1)
        assert error.startswith(cut) and reason in error and error.count("\n") == 1, error
        assert least <= int(error.removeprefix(cut).split(":")[0]) <= 5000


def test_gzip_that_is_cut_off(chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl.gz"
    lines = [json.dumps({"prompt": f"{index:05}" * 3}).encode() + b"\n" for index in range(5000)]
    packed = gzip.compress(b"".join(lines))
    cut = f"nanovllm: error: {source}: damaged or cut off after line "
    middle = len(packed) // 2
    for content in (packed[:middle], packed[:-4], packed[:middle] + bytes(8) + packed[middle + 8 :], packed + b"more"):
        source.write_bytes(content)
        error = here(capsys, "run", source, "--model", chat_llama, "--dry-run", status=1)
        assert error.startswith(cut) and error.count("\n") == 1, error
        assert 1000 < int(error.removeprefix(cut).split(":")[0]) <= 5000
    source.write_bytes(b"no archive")
    error = here(capsys, "run", source, "--model", chat_llama, "--dry-run", status=1)
    assert error.startswith(f"{cut}0: ")


def test_damaged_parquet(chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its description is whole, but not what it describes."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in.parquet"
    table = pyarrow.table({"prompt": [f"{index:05}" * 3 for index in range(1000)]})
    parquet.write_table(table, source, row_group_size=500, use_dictionary=False)
    content = bytearray(source.read_bytes())
    content[4:44] = b"\xff" * 40
    source.write_bytes(content)
    error = here(capsys, "run", source, "--model", chat_llama, "--dry-run", status=1)
    assert error.startswith(f"nanovllm: error: {source}: damaged after row 0: ") and error.count("\n") == 1


def test_parquet(chat_llama: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "prompt": ["a", None, "c"],
        "when": [datetime.date(2024, 1, 2)] * 3,
        "score": [1.5, float("nan"), None],
        "sampling_params": [{"max_tokens": 2}, None, {"max_tokens": None}],
    }
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    parquet.write_table(pyarrow.table(columns), source)
    cli(*run_args(chat_llama, source, output, "--max-tokens", 3, "--ignore-eos"))
    first, second, third = read_rows(output)
    assert (first["when"], first["score"], first["output"]["num_output_tokens"]) == ("2024-01-02", 1.5, 2)
    assert second["score"] is None and second["error"]["line"] == 2
    assert third["output"]["num_output_tokens"] == 3


def test_parquet_without_pyarrow(chat_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    source.write_bytes(b"PAR1")
    error = cli("run", source, "--model", chat_llama, "--dry-run", status=1).stderr
    assert error.startswith(f"nanovllm: error: {source}: ") and error.count("\n") == 1


def _openai(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def test_openai_batch(chat_llama: Path, tmp_path: Path) -> None:
    """Batch files run unchanged, and the results have the format of OpenAI's."""
    chat, completion = "/v1/chat/completions", "/v1/completions"
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    talk = [{"role": "user", "content": "hi"}]
    rows = [
        _openai("a", chat, messages=parts, max_completion_tokens=4, temperature=0, logprobs=True, top_logprobs=2),
        _openai("b", chat, messages=talk, max_tokens=3, seed=1, n=2, top_p=0.9, stop=["zz"], user="u", stream=False),
        _openai("c", completion, prompt="one", temperature=0, logprobs=1),
        _openai("d", completion, prompt=[[1, 2, 3]], max_tokens=2, logit_bias={"65": 100}),
        _openai("e", chat, messages=talk, response_format={"type": "json_object"}, max_tokens=30),
        _openai("f", chat, messages=talk, tools=[{"type": "function"}]),
        _openai("g", "/v1/embeddings", input="x"),
        {**_openai("h", chat, messages=talk), "method": "GET"},
        _openai("i", chat, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        _openai("j", chat, messages=talk, temperature=-1),
        _openai("k", chat, max_tokens=3),
        "{",
    ]
    source, output = write_rows(tmp_path / "batch.jsonl", rows), tmp_path / "out.jsonl"
    cli(*run_args(chat_llama, source, output, "--seed", 1))
    records = [json.loads(line) for line in output.read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in records}
    assert len(records) == len(by_id) == 12 and len({record["id"] for record in records}) == 12
    assert all(list(record) == ["id", "custom_id", "response", "error"] for record in records)

    response = by_id["a"]["response"]
    assert response["status_code"] == 200 and response["request_id"] and by_id["a"]["error"] is None
    body = response["body"]
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "m", 1)
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len("[user]hi[assistant]")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert len(choice["logprobs"]["content"]) == usage["completion_tokens"] <= 4
    for token in choice["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 2 and token["top_logprobs"][0]["logprob"] == token["logprob"]
    two = by_id["b"]["response"]["body"]
    assert [one["index"] for one in two["choices"]] == [0, 1] and two["usage"]["completion_tokens"] <= 6
    text = by_id["c"]["response"]["body"]
    assert text["object"] == "text_completion" and text["usage"]["completion_tokens"] <= 16
    logprobs = text["choices"][0]["logprobs"]
    assert {len(logprobs[key]) for key in logprobs} == {text["usage"]["completion_tokens"]}
    assert by_id["d"]["response"]["body"]["choices"][0]["text"] == "AA"
    assert by_id["e"]["response"]["body"]["choices"][0]["message"]["content"].lstrip().startswith("{")
    wrong = {
        "f": "body.tools", "g": "url", "h": "method", "i": "body.messages[0].content[0]", "j": "body.temperature",
        "k": "body.messages", None: None,
    }  # fmt: skip
    for custom_id, field in wrong.items():
        record = by_id[custom_id]
        assert record["response"] is None and record["error"]["param"] == field
        line = 12 if custom_id is None else 1 + "abcdefghijk".index(custom_id)
        assert record["error"]["message"].startswith(f"{source}:{line}: ")
    cli(*run_args(chat_llama, source, output, "--resume"))
    assert len(output.read_text().splitlines()) == 12


def test_memory_is_constant(byte_llama: Path, tmp_path: Path) -> None:
    """Ten times the rows, 100 MB more of them: the process needs about as much as before."""
    peaks = []
    for number in (40, 400):
        source = tmp_path / f"{number}.jsonl"
        with source.open("w") as file:
            for index in range(number):
                file.write(json.dumps({"prompt": f"{index}", "other": "x" * 280_000}) + "\n")
        output = tmp_path / f"{number}.out.jsonl"
        args = run_args(byte_llama, source, output, "--max-num-seqs", 2, "--max-tokens", 1)
        process = subprocess.Popen(command(*args), env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0 and len(output.read_bytes().splitlines()) == number
        peaks.append(usage.ru_maxrss / 1024)
    assert peaks[1] - peaks[0] < 30, f"peaks of {peaks} MiB"


def test_engine_is_full_until_the_rows_end(byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every step it holds as many rows as it wants, never more, as long as there are any."""
    sizes = []
    step = JobEngine.step

    def watched(self: JobEngine) -> Any:
        sizes.append(self.num_rows)
        return step(self)

    monkeypatch.setattr(JobEngine, "step", watched)
    source = write_rows(tmp_path / "in.txt", [f"row {index}" for index in range(40)])
    args = run_args(byte_llama, source, tmp_path / "out.jsonl", "--max-num-seqs", 3, "--max-tokens", 5)
    assert command_line.main([str(arg) for arg in args]) == 0
    assert max(sizes) == 6 and sizes[:20] == [6] * 20
    assert sizes == sorted(sizes, reverse=True)
    assert len(read_rows(tmp_path / "out.jsonl")) == 40


def test_every_field_is_a_flag() -> None:
    words = cli("run", "--help").stdout.split()
    for settings in (SamplingParams, Config):
        for field in dataclasses.fields(settings):
            if field.name not in (*NOT_IN_FILES, "model"):
                assert f"--{field.name.replace('_', '-')}" in words or f"--{field.name.replace('_', '-')}," in words


def test_wrong_flags(chat_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.txt", ["x"])
    for flags, reason in {
        ("--temperature", "-1"): "temperature must be in [0.0, inf), got -1.0",
        ("--device", "tpu"): "device must be",
        ("--max-model-len", "0"): "max_model_len must be at least 2, got 0",
        ("--resume", "-o", "-"): "--resume needs an output file",
    }.items():
        error = here(capsys, *run_args(chat_llama, source, tmp_path / "out.jsonl", *flags), status=1)
        assert error.startswith("nanovllm: error: ") and reason in error and error.count("\n") == 1
    error = here(capsys, "run", tmp_path / "none.jsonl", "--model", chat_llama, "--dry-run", status=1)
    assert error == f"nanovllm: error: {tmp_path / 'none.jsonl'}: no such file\n"


def test_info(byte_llama: Path) -> None:
    text = cli("info", byte_llama, "--device", "cpu").stdout
    facts = dict(line.strip().split(": ", 1) for line in text.splitlines())
    # Two layers of 64: embedding and head, 2 * (q, k, v, o, three of the feed-forward, two norms), the last norm.
    num_parameters = 2 * 320 * 64 + 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert facts["parameters"] == f"{num_parameters:,}"
    assert facts["weights"] == f"{4 * num_parameters:,} bytes there"
    assert facts["KV cache"] == f"{2 * 2 * 2 * 16 * 4} bytes a token"
    assert facts["attention sdpa"] == "yes" and facts["attention triton"] == "no: needs a CUDA device"
    assert int(facts["fits"].split()[0].replace(",", "")) > 100_000
    error = cli("info", byte_llama / "nothing", status=1).stderr
    assert error.startswith("nanovllm: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("page", ["README.md", "docs/jobs.md"])
def test_commands_of_the_docs(
    page: str, chat_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They run as they stand, with another model in the place of its path."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "hi"}]}])
    lines = re.findall(r"^nanovllm (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert len(lines) == {"README.md": 3, "docs/jobs.md": 4}[page]
    for line in lines:
        words = line.replace("path/to/Qwen3-0.6B", str(chat_llama)).split()
        here(capsys, *words, *(ENGINE if words[0] == "run" else ("--device", "cpu")))
    assert len(read_rows(tmp_path / "results.jsonl")) == 2


def test_engine_flags_are_used(byte_llama: Path, tmp_path: Path) -> None:
    """Else the tests' sizes would mean nothing."""
    assert "--num-kvcache-blocks" in ENGINE
    source = write_rows(tmp_path / "in.txt", ["x" * 100])
    output = tmp_path / "out.jsonl"
    cli(*run_args(byte_llama, source, output, "--num-kvcache-blocks", "2"), status=1)
    assert "the whole KV cache holds 32" in read_rows(output)[0]["error"]["message"]


def test_garbage_of_a_job(
    byte_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job looks for garbage rarely, since its rows leave none that need be looked for. After it all is as before."""
    source, output = write_rows(tmp_path / "in.txt", ["a"] * 60), tmp_path / "o.jsonl"
    before, append = gc.get_threshold(), ResultFile.append
    num_found: list[int] = []

    def collect(self: ResultFile, records: Any) -> None:
        append(self, records)
        assert gc.get_threshold()[0] >= 10_000
        num_found.append(gc.collect())

    monkeypatch.setattr(ResultFile, "append", collect)
    here(capsys, *run_args(byte_llama, source, output, "--max-num-seqs", 2, "--max-tokens", 3))
    assert len(num_found) > 20 and sum(num_found[5:]) < 10
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
