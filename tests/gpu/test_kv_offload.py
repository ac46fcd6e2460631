"""The second level of the prefix cache on a GPU: copies are exact, ordered, and in nobody's way."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_copier import StreamCopier, make_copier
from nanovllm.engine.host_cache import BlockCopies
from tests.checkpoints import random_prompts, save_random_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TINY = {
    "dtype": "float32",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 24,
    "kv_offload_gb": 0.05,
    "schedule_policy": "fcfs",  # by the order of prefixes, hardly any would be evicted before everybody has used it
    "max_num_seqs": 8,
}
LONG = 1 << 30  # clock cycles: about half a second


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(folder)
    return folder


def job() -> list[list[int]]:
    """60 prompts in random order behind six beginnings of 128 tokens: 48 blocks, twice the pool."""
    rng = random.Random(0)
    heads = random_prompts([128] * 6)
    return [rng.choice(heads) + random_prompts([rng.randint(1, 40)], seed=index)[0] for index in range(60)]


def token_ids(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(autouse=True)
def worth_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes its blocks faster than they are copied: here they are copied all the same."""
    monkeypatch.setattr("nanovllm.engine.block_copier.min_blocks_worth_copying", lambda *figures: 1)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}])
def test_equals_big_pool(llama: Path, settings: dict[str, Any]) -> None:
    prompts = job()
    with LLM(str(llama), dtype="float32", kvcache_block_size=16, num_kvcache_blocks=800) as big:
        expected = token_ids(big, prompts)
    with LLM(str(llama), **TINY, **settings) as llm:
        for _ in range(3):
            assert token_ids(llm, prompts) == expected
        assert llm.host_cache is not None
        assert llm.host_cache.num_saved_blocks >= 24 and llm.host_cache.num_loaded_blocks >= 48
        llm.block_manager.check_integrity(llm.scheduler.unfinished())


def test_preempted_sequences_come_back_by_copy(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([50, 33, 40, 61, 17, 48])
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with LLM(str(llama), dtype="float32", kvcache_block_size=16, num_kvcache_blocks=800) as big:
        expected = [output["token_ids"] for output in big.generate(prompts, params, use_tqdm=False)]
    monkeypatch.setattr("nanovllm.engine.scheduler.BlockForecast.peak_growth", lambda self: 0)
    monkeypatch.setattr("nanovllm.engine.scheduler.BlockForecast.worst_growth", lambda self: 0)
    with LLM(str(llama), **TINY) as llm:
        ids = [llm.add_request(prompt, params) for prompt in prompts]
        finished: dict[int, Any] = {}
        num_preemptions = 0
        while not llm.is_finished():
            step = llm.step()
            num_preemptions += step.num_preemptions
            finished.update(step.finished)
        assert num_preemptions > 0
        assert llm.host_cache is not None and llm.host_cache.num_loaded_blocks > 0
    assert [finished[seq_id]["token_ids"] for seq_id in ids] == expected


def test_decode_goes_on_during_a_load(llama: Path) -> None:
    """While the stream of loads is busy, others are admitted, decode and finish; guards against a step that waits."""
    prompts = job()
    with LLM(str(llama), **TINY) as llm:
        expected = token_ids(llm, prompts)
        host, copier = llm.host_cache, llm.runner._copier
        assert host is not None and isinstance(copier, StreamCopier)
        evicted = next(
            prompt
            for prompt in prompts
            if not llm.block_manager.find_cached_blocks(seq := llm.requests.make(*_prepared(llm, prompt)))
            and llm.block_manager.find_offloaded_blocks(seq, [])
        )
        with torch.cuda.stream(copier._loads.stream):
            torch.cuda._sleep(LONG)
            busy = torch.cuda.Event()
            busy.record()
        loading = llm.add_request(evicted, GREEDY)
        other = llm.add_request([5, 6, 7], GREEDY)
        finished: dict[int, Any] = {}
        while other not in finished:
            finished.update(llm.step().finished)
        assert not busy.query() and loading not in finished
        while loading not in finished:
            finished.update(llm.step().finished)
        assert finished[loading]["token_ids"] == expected[prompts.index(evicted)]
        assert finished[loading]["num_cached_tokens"] >= 128


def _prepared(llm: LLM, prompt: list[int]) -> tuple[Any, Any]:
    (ids,) = llm.inputs.process_prompts([prompt])
    (params,) = llm.inputs.process_params(GREEDY, 1)
    return ids, params


@pytest.fixture
def kv_cache() -> torch.Tensor:
    return torch.randn(3, 2, 6, 16, 2, 64, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def copier(kv_cache: torch.Tensor) -> Any:
    copier = make_copier(kv_cache, num_bytes=5 * kv_cache[:, :, 0].numel() * 2)
    assert isinstance(copier, StreamCopier) and copier.num_slots == 5 and copier._host.is_pinned()
    yield copier
    copier.close()


def test_copies_are_exact(kv_cache: torch.Tensor, copier: StreamCopier) -> None:
    before = kv_cache.clone()
    copier.begin(BlockCopies(1, 0, 0, [], [(1, 3), (4, 0)]))
    copier.flush()
    torch.cuda.synchronize()
    assert copier.finished() == (1, 1)
    kv_cache.zero_()
    copier.begin(BlockCopies(2, 1, 1, [(0, 2), (3, 5)], []))
    copier.wait()
    assert copier.finished()[0] == 2
    copier.begin(BlockCopies(3, 2, 1, [], []))
    assert torch.equal(kv_cache[:, :, 2], before[:, :, 4]) and torch.equal(kv_cache[:, :, 5], before[:, :, 1])
    assert not kv_cache[:, :, [0, 1, 3, 4]].any()


def test_copies_come_after_what_was_launched(kv_cache: torch.Tensor, copier: StreamCopier) -> None:
    """And not after what is launched between `begin` and `flush`: a step that takes long holds up no copy."""
    torch.cuda._sleep(LONG // 4)
    kv_cache.fill_(7)
    copier.begin(BlockCopies(1, 0, 0, [], [(2, 1)]))
    torch.cuda._sleep(LONG)
    late = torch.cuda.Event()
    late.record()
    copier.flush()
    copier._saves.stream.synchronize()
    assert not late.query()
    assert (copier._host[1] == 7).all()


@pytest.mark.parametrize("direction", ["loads", "saves"])
def test_what_is_launched_waits_for_copies_that_are_done(
    kv_cache: torch.Tensor, copier: StreamCopier, direction: str
) -> None:
    """On a rank that lags behind the first, which has found its own copies finished."""
    before = kv_cache.clone()
    copier._host.fill_(9)
    lane = copier._loads if direction == "loads" else copier._saves
    with torch.cuda.stream(lane.stream):
        torch.cuda._sleep(LONG // 2)
    pairs = ([(1, 3)], []) if direction == "loads" else ([], [(3, 1)])
    copier.begin(BlockCopies(1, 0, 0, *pairs))
    copier.flush()
    assert min(copier.finished()) == 0
    copier.begin(BlockCopies(2, 1, 1, [], []))
    kv_cache.zero_()  # after the copy
    torch.cuda.synchronize()
    if direction == "saves":
        assert torch.equal(copier._host[1].cuda(), before[:, :, 3])
    assert not kv_cache.any()


def test_memory_is_returned(llama: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with LLM(str(llama), **TINY) as llm:
            copier = llm.runner._copier
            assert copier is not None
            host = copier._host
            assert host.is_pinned()
            token_ids(llm, job()[:8])
        assert not host.is_pinned()
        assert torch.cuda.memory_allocated() == before


def test_more_than_can_be_pinned(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses; the error is not left for the next kernel to raise."""
    register = torch.cuda.cudart().cudaHostRegister
    cudart = torch.cuda.cudart()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(cudart, name)

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
            return register(0, num_bytes, flags)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Refusing)
        with pytest.raises(ValueError, match="can't be pinned"):
            LLM(str(llama), **TINY)
    with LLM(str(llama), **TINY) as llm:
        assert len(token_ids(llm, job()[:2])) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel(llama: Path) -> None:
    prompts = job()
    with LLM(str(llama), dtype="float32", kvcache_block_size=16, num_kvcache_blocks=800) as big:
        expected = token_ids(big, prompts)
    with LLM(str(llama), tensor_parallel_size=2, **TINY) as llm:
        for _ in range(3):
            assert token_ids(llm, prompts) == expected
        assert llm.host_cache is not None and llm.host_cache.num_loaded_blocks >= 48
