"""Ray Data on two actors: results, rows that fail, an actor that is killed."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from nanovllm.integrations.ray import Predictor, predict  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS = {"device": "cpu", "num_kvcache_blocks": 64, "kvcache_block_size": 16}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
TEXTS = [f"{'x' * (index % 13)} row {index}" for index in range(60)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


class KilledOnce(Predictor):
    """Kills its process at its second batch, unless that has been done; of an engine of two ranks, the second one."""

    def __init__(self, *args: Any, marker: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._marker, self._num_batches = Path(marker), 0

    async def __call__(self, batch: pa.Table) -> pa.Table:
        self._num_batches += 1
        if self._num_batches == 2 and not self._marker.exists():
            self._marker.write_text(str(os.getpid()))
            is_shared = self._llm.config.tensor_parallel_size > 1
            os.kill(self._llm.runner._workers.pids[0] if is_shared else os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
        return await super().__call__(batch)


def _write(folder: Path, **columns: list[Any]) -> str:
    """Several files, so that there are several blocks."""
    folder.mkdir()
    table = pa.table(columns)
    for first in range(0, len(table), 15):
        pq.write_table(table.slice(first, 15), folder / f"{first:04}.parquet")
    return str(folder)


def _read(folder: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(folder).to_pylist(), key=lambda row: row["id"])


@pytest.fixture(scope="module")
def expected(byte_llama: Path) -> list[str]:
    with LLM(str(byte_llama), **SETTINGS) as llm:
        return [output["text"] for output in llm.generate(TEXTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("size", [1, 2])
def test_parquet_and_a_killed_actor(byte_llama: Path, expected: list[str], tmp_path: Path, size: int) -> None:
    """Guards against an actor that stays, with an engine that is closed, and fails all that it is given."""
    folder = _write(tmp_path / "in", id=list(range(60)), prompt=TEXTS)
    dataset = ray.data.read_parquet(folder).repartition(4)
    marker = tmp_path / "marker"
    settings = {
        **SETTINGS,
        "marker": str(marker),
        "tensor_parallel_size": size,
        "output_columns": {"answer": "text", "why": "finish_reason"},
    }
    dataset = predict(dataset, str(byte_llama), GREEDY, num_actors=2, batch_size=5, predictor=KilledOnce, **settings)
    dataset.write_parquet(str(tmp_path / "out"))
    assert marker.exists()
    rows = _read(tmp_path / "out")
    assert [row["answer"] for row in rows] == expected
    assert {(row["why"], row["error"]) for row in rows} == {("length", None)}


def test_rows_that_fail(byte_llama: Path, tmp_path: Path) -> None:
    prompts = ["one", "", None, "x" * 1000, "two"]
    dataset = ray.data.read_parquet(_write(tmp_path / "in", id=list(range(5)), prompt=prompts))
    rows = predict(dataset, str(byte_llama), GREEDY, num_actors=1, **SETTINGS).take_all()
    rows = sorted(rows, key=lambda row: row["id"])
    assert [row["generated_text"] is None for row in rows] == [False, True, True, True, False]
    reasons = [None, "ValueError: .*is empty", "TypeError: .*string", "ValueError: .*1000 tokens", None]
    for row, reason in zip(rows, reasons, strict=True):
        assert row["error"] is None if reason is None else re.match(reason, row["error"])


def test_messages(byte_llama: Path, tmp_path: Path) -> None:
    """Messages of different keys, and one that is none; the template comes from the tokenizer's folder."""
    folder = tmp_path / "model"
    shutil.copytree(byte_llama, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    user = {"role": "user", "content": "hello"}
    conversations = [[user], [user, {"role": "assistant", "content": "x", "name": "me"}], [{"role": "user"}]]
    dataset = ray.data.read_parquet(_write(tmp_path / "in", id=[0, 1, 2], messages=conversations))
    rows = predict(dataset, str(folder), GREEDY, num_actors=1, messages_column="messages", **SETTINGS).take_all()
    *answered, refused = sorted(rows, key=lambda row: row["id"])
    with LLM(str(folder), **SETTINGS) as llm:
        expected = [output["text"] for output in llm.chat(conversations[:2], GREEDY, use_tqdm=False)]
    assert [row["generated_text"] for row in answered] == expected
    assert refused["error"] == "ValueError: conversation 0, message 0: has no 'content'"


def test_bad_settings(byte_llama: Path) -> None:
    with pytest.raises(ValueError, match="'texts' is none of 'text', 'token_ids'"):
        Predictor(str(byte_llama), output_columns={"a": "texts"})
    with pytest.raises(ValueError, match="n must be 1, got 2"):
        Predictor(str(byte_llama), SamplingParams(n=2))
