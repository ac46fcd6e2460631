"""Two engines on two GPUs, behind one queue, give one engine's tokens, also when one of them dies."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.checkpoints import random_prompts, save_random_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SMALL = {"dtype": "float32", "num_kvcache_blocks": 128, "kvcache_block_size": 16, "max_num_seqs": 16, "seed": 3}
PROMPTS = random_prompts(range(3, 103))
PARAMS = [
    SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=100, ignore_eos=True),
]


def generate(llm: LLM) -> list[list[list[int]]]:
    return [[output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)] for params in PARAMS]


def _memory_free(index: int) -> int:
    return torch.cuda.mem_get_info(index)[0]


def test_equals_one_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each replica has a device of its own, and the one that is killed gets its device again."""
    save_random_model(tmp_path, "qwen3")
    with LLM(str(tmp_path), **SMALL) as one:
        expected = [generate(one) for _ in range(3)]
    free = [_memory_free(index) for index in range(2)]
    with LLM(str(tmp_path), data_parallel_size=2, **SMALL) as two:
        # A context alone takes hundreds of megabytes.
        assert all(_memory_free(index) < free[index] - 2**28 for index in range(2))
        assert generate(two) == expected[0]
        os.kill(two._replicas.pids[1], signal.SIGKILL)
        assert generate(two) == expected[1]
        assert "replica 1 of 2 is restarted" in caplog.text
        deadline = time.monotonic() + 60
        while _memory_free(1) > free[1] - 2**28:  # the other one may have done it all meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert generate(two) == expected[2]
