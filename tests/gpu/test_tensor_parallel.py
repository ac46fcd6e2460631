"""Two GPUs give one GPU's tokens; ranks end with the engine, and a lost one is reported."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.workers import WorkerError
from tests.checkpoints import VOCAB_SIZE, random_prompts, save_random_model
from tests.gpu.test_engine import teacher_forced_logits
from tests.gpu.test_extras import PARAMS as EXTRA_PARAMS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts((1, 15, 16, 17, 63, 200, 7))
SMALL = {"dtype": "float32", "num_kvcache_blocks": 64, "kvcache_block_size": 16, "max_num_seqs": 16}


# Greedy, with extras on every row, and with seeds and filters; the second time from the prefix cache.
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=24, ignore_eos=True)
JOBS = [GREEDY, EXTRA_PARAMS, DRAWN] * 2


def generate(llm: LLM, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder, "llama")
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def one_rank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[list[int]]]]:
    """A checkpoint, and what one rank makes of the jobs."""
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(folder, request.param)
    with LLM(str(folder), **SMALL) as llm:
        return folder, [generate(llm, params) for params in JOBS]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [48, 16384])
def test_equals_one_rank(
    one_rank: tuple[Path, list[list[list[int]]]], enforce_eager: bool, max_num_batched_tokens: int
) -> None:
    folder, expected = one_rank
    with LLM(
        str(folder),
        tensor_parallel_size=2,
        enforce_eager=enforce_eager,
        max_num_batched_tokens=max_num_batched_tokens,
        **SMALL,
    ) as llm:
        if torch.cuda.can_device_access_peer(0, 1):  # decode steps don't need NCCL then; prompts, which are longer, do
            assert llm.runner.parallel.peers is not None
        assert [generate(llm, params) for params in JOBS] == expected
        llm.block_manager.check_integrity(llm.scheduler.unfinished())


def test_bfloat16_error_is_that_of_transformers(tmp_path: Path) -> None:
    """Teacher-forced logits are no further from float32 than twice transformers' own in bfloat16."""
    reference = save_random_model(tmp_path, "qwen3", hidden_size=256, head_dim=64, std=0.05)
    (prompt,) = random_prompts((300,))
    ids = torch.tensor([prompt], device="cuda")
    lengths = (1, 2, 100, 257, 299, 300)
    with torch.inference_mode():
        exact = reference.float().cuda()(ids).logits[0]
        theirs = reference.bfloat16()(ids).logits[0].float()
    with LLM(str(tmp_path), dtype="bfloat16", tensor_parallel_size=2, num_kvcache_blocks=8, enforce_eager=True) as llm:
        ours = torch.stack([teacher_forced_logits(llm, prompt, length) for length in lengths])
    rows = torch.tensor(lengths, device="cuda") - 1
    assert (ours - exact[rows]).abs().max() <= 2 * (theirs - exact)[rows].abs().max()


def test_replayed_steps_equal_eager_ones(tmp_path: Path) -> None:
    """In bfloat16, with the exchanges inside the graphs."""
    save_random_model(tmp_path, "qwen3", hidden_size=256, head_dim=64, std=0.05)
    outputs = []
    for enforce_eager in (False, True):
        with LLM(
            str(tmp_path),
            dtype="bfloat16",
            tensor_parallel_size=2,
            enforce_eager=enforce_eager,
            max_num_seqs=8,
            num_kvcache_blocks=8,
        ) as llm:
            outputs.append(generate(llm, GREEDY))
    assert outputs[0] == outputs[1]


def test_memory_is_returned(checkpoint: Path) -> None:
    torch.cuda.empty_cache()
    before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    for _ in range(2):
        with LLM(str(checkpoint), tensor_parallel_size=2, gpu_memory_utilization=0.3, max_num_seqs=16) as llm:
            assert len(generate(llm, GREEDY)) == len(PROMPTS)
    after = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    # What stays is the context and the libraries' own of this process, on its device.
    assert all(now > then - 2**30 for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank(checkpoint: Path, enforce_eager: bool, what: signal.Signals) -> None:
    """Killed, or stuck, between two steps: the device waits inside an exchange, the caller must not."""
    settings = {**SMALL, "tensor_parallel_size": 2}
    llm = LLM(str(checkpoint), enforce_eager=enforce_eager, **settings)
    llm.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    for _ in range(10):
        llm.step()
    (pid,) = llm.runner._workers.pids  # type: ignore[attr-defined]
    os.kill(pid, what)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        while True:
            llm.step()
    assert time.monotonic() - started < 15
    with pytest.raises(RuntimeError, match="closed"):
        llm.step()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with LLM(str(checkpoint), **settings) as again:
        assert len(generate(again, GREEDY)) == len(PROMPTS)


def test_too_little_memory(checkpoint: Path) -> None:
    """Both ranks find that out, in the midst of exchanges; the caller gets the reason, and a device that is free."""
    for _ in range(2):
        with pytest.raises(ValueError, match="KV cache"):
            LLM(str(checkpoint), tensor_parallel_size=2, gpu_memory_utilization=1e-4, max_num_seqs=16)
    torch.cuda.synchronize()
    with LLM(str(checkpoint), tensor_parallel_size=2, **SMALL) as llm:
        assert len(generate(llm, GREEDY)) == len(PROMPTS)


def test_two_engines_at_once(checkpoint: Path) -> None:
    settings = {**SMALL, "tensor_parallel_size": 2}
    with LLM(str(checkpoint), **settings) as first, LLM(str(checkpoint), **settings) as second:
        expected = generate(first, GREEDY)
        assert generate(second, GREEDY) == expected == generate(first, GREEDY)


def test_too_few_devices(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="CUDA devices"):
        LLM(str(checkpoint), device=f"cuda:{torch.cuda.device_count() - 1}", tensor_parallel_size=2)


def test_vocabulary_is_the_models(checkpoint: Path) -> None:
    with LLM(str(checkpoint), tensor_parallel_size=2, **SMALL) as llm:
        tokens = generate(llm, SamplingParams(temperature=1e3, seed=1, max_tokens=100, ignore_eos=True))
    assert all(0 <= token < VOCAB_SIZE for output in tokens for token in output)
