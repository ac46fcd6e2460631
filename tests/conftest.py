"""Fixtures that several test files share."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from tests.checkpoints import save_random_model


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and transformers model of a random two-layer Llama without a tokenizer."""
    folder = tmp_path_factory.mktemp("random_llama")
    return folder, save_random_model(folder, "llama")


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes engines that are closed at the end; every one must then have all its KV blocks back."""
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
def rng() -> random.Random:
    return random.Random(0)
