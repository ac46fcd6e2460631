"""Fixtures that several test files share."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLM
from tests.checkpoints import save_byte_tokenizer, save_random_model

if not torch.cuda.is_available():
    # Read when triton is first imported, by whichever test that is: without a GPU, kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and transformers model of a random two-layer Llama without a tokenizer."""
    folder = tmp_path_factory.mktemp("random_llama")
    return folder, save_random_model(folder, "llama")


@pytest.fixture(scope="session")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama of 320 ids with a byte tokenizer of 300 ids; </s> = 257 ends a sequence."""
    folder = tmp_path_factory.mktemp("byte_llama")
    save_random_model(folder, "llama")
    save_byte_tokenizer(folder, num_specials=44)
    return folder


def _engines() -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def make(model: Any, **kwargs: Any) -> LLM:
        kwargs.setdefault("num_kvcache_blocks", 64)
        kwargs.setdefault("kvcache_block_size", 16)
        kwargs.setdefault("device", "cpu")
        llm = LLM(str(model), **kwargs)
        engines.append(llm)
        return llm

    yield make
    for llm in engines:
        llm.block_manager.check_integrity(llm.scheduler.unfinished())
        llm.close()
        assert llm.block_manager.num_used_blocks == 0


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes engines that are closed at the end; every one must then have all its KV blocks back."""
    yield from _engines()


@pytest.fixture(scope="module")
def make_shared_llm() -> Iterator[Callable[..., LLM]]:
    """Like `make_llm`, for engines that a whole test file shares."""
    yield from _engines()


@pytest.fixture
def make_async_llm(byte_llama: Path) -> Iterator[Callable[[], AsyncLLM]]:
    """Makes engines; each must end idle, with all blocks back and without its thread."""
    made: list[tuple[AsyncLLM, LLM]] = []

    def make() -> AsyncLLM:
        llm = LLM(str(byte_llama), device="cpu", num_kvcache_blocks=512, kvcache_block_size=16)
        made.append((AsyncLLM(llm), llm))
        return made[-1][0]

    yield make
    for engine, llm in made:
        engine.close()
        llm.block_manager.check_integrity([])
        assert llm.block_manager.num_used_blocks == 0
        assert not engine._driver._thread.is_alive()


@pytest.fixture(scope="session")
def drive() -> Callable[..., tuple[list[Any], list[Any]]]:
    """Runs prompts through an engine by hand: `drive(llm, prompts, params)` gives the results in the prompts' order
    and every StepOutput."""

    def run(llm: LLM, prompts: list[Any], params: Any) -> tuple[list[Any], list[Any]]:
        params = params if isinstance(params, list) else [params] * len(prompts)
        seq_ids = [llm.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        steps = []
        while not llm.is_finished():
            steps.append(llm.step())
            assert len(steps) < 100_000, "the engine makes no progress"
        finished = {seq_id: output for step in steps for seq_id, output in step.finished.items()}
        return [finished[seq_id] for seq_id in seq_ids], steps

    return run


@pytest.fixture(scope="session")
def assert_idle() -> Callable[[LLM], None]:
    """Asserts that an engine has nothing left to do and all its KV blocks back."""

    def check(llm: LLM) -> None:
        llm.block_manager.check_integrity(llm.scheduler.unfinished())
        assert not list(llm.scheduler.unfinished())
        assert llm.block_manager.num_used_blocks == 0
        assert llm.is_finished()

    return check


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


@pytest.fixture
def eager_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admits whatever fits at the moment: the look-ahead would leave little to preempt."""

    from nanovllm.engine.scheduler import Scheduler

    def fits(self: Scheduler, seq: Any, cached_block_ids: list[int], forecast: Any) -> bool:
        return self.block_manager.num_new_blocks(seq, cached_block_ids) <= self.block_manager.num_free_blocks

    monkeypatch.setattr(Scheduler, "_fits", fits)
