"""Several ranks give exactly one rank's tokens."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import dummy_batch
from nanovllm.engine.grammar_matcher import MaskFilling
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.prefix_groups import MAX_CAPACITY
from nanovllm.engine.step_memory import StepLimits, StepMemory
from nanovllm.engine.tensor_parallel import TensorParallelRunner
from nanovllm.layers.linear import RowLinear
from nanovllm.layers.parallel import SINGLE, Parallel, connect, make_store
from nanovllm.models import build_model, resolve_architecture
from nanovllm.utils.checkpoint import DirectoryCheckpoint
from nanovllm.utils.loader import checkpoint_targets, load_weights
from tests.checkpoints import random_prompts, save_gguf, save_random_model

VOCAB_SIZE = 301  # no number of ranks divides it
# Between them: biases everywhere or nowhere, tied or not, one KV head, one each, and KV heads that the ranks cut apart.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 4, "intermediate_size": 50},
    "qwen3": {"num_attention_heads": 12, "num_key_value_heads": 3},
}
# Four sequences at a time, which need more blocks than there are, in chunks of a prompt.
TIGHT = {"num_kvcache_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folder and transformers model of each architecture."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    return {
        name: (folder, save_random_model(folder, name, vocab_size=VOCAB_SIZE, **MODELS[name]))
        for name, folder in folders.items()
    }


def _jobs() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which some begin alike, and params of every kind."""
    prompts = random_prompts((70, 5, 33, 16, 1, 20), vocab_size=VOCAB_SIZE)
    prompts[1:1] = [prompts[0][:48] + prompts[1], prompts[2]]
    common = {"max_tokens": 20, "ignore_eos": True}
    greedy = SamplingParams(temperature=0, **common)
    drawn = SamplingParams(temperature=2.0, top_p=0.95, seed=5, **common)
    penalized = SamplingParams(
        temperature=1.0, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, bad_words=[[3], [5, 6]], **common
    )
    scored = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **common)
    stopped = SamplingParams(temperature=3.0, seed=1, stop_token_ids=[4, 9, 200], min_tokens=4, **common)
    return prompts, [greedy, drawn, greedy, penalized, scored, stopped, scored, greedy]


def _flat_logprobs(output: Any) -> list[tuple[int, float]]:
    entries = [*(output.get("logprobs") or []), *filter(None, output.get("prompt_logprobs") or [])]
    return [(token_id, entry[0]) for entry in entries for token_id, entry in entry.items()]


def _assert_equal(outputs: list[Any], expected: list[Any]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert output["token_ids"] == other["token_ids"]
        assert output["finish_reason"] == other["finish_reason"]
        ours, theirs = _flat_logprobs(output), _flat_logprobs(other)
        assert [token_id for token_id, _ in ours] == [token_id for token_id, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-3)


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_rank(models: Any, make_llm: Any, drive: Any, assert_idle: Any, name: str, size: int) -> None:
    """With preemptions, chunks and prefix hits."""
    folder = models[name][0]
    single, several = make_llm(folder), make_llm(folder, tensor_parallel_size=size, **TIGHT)
    prompts, params = _jobs()
    expected, _ = drive(single, prompts, params)
    outputs, steps = drive(several, prompts, params)
    _assert_equal(outputs, expected)
    assert len({tuple(output["token_ids"]) for output in outputs}) >= 6  # outputs that see their prompts
    assert sum(step.num_preemptions for step in steps) > 0
    assert sum(step.num_cached_tokens for step in steps) > 0
    assert all(token_id < VOCAB_SIZE for output in outputs for token_id in output["token_ids"])
    assert_idle(several)


def test_error_of_a_users_function(models: Any, make_llm: Any) -> None:
    """Guards against ranks that are left waiting for the tokens of a step whose sampling failed."""
    llm = make_llm(models["llama"][0], tensor_parallel_size=2)
    prompts = random_prompts((5, 20), vocab_size=VOCAB_SIZE)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = llm.generate(prompts, greedy, use_tqdm=False)

    def refuse(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        raise LookupError("refused")

    for _ in range(2):
        with pytest.raises(LookupError, match="refused"):
            llm.generate(prompts, SamplingParams(temperature=0, logits_processor=refuse), use_tqdm=False)
        _assert_equal(llm.generate(prompts, greedy, use_tqdm=False), expected)


def test_constraints(byte_llama: Path, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that wait for their masks before they sample, and one that is given up there: the others must get some
    tokens, or they would wait for them for ever."""
    pytest.importorskip("llguidance")
    settings = {"num_kvcache_blocks": 64, "kvcache_block_size": 16}
    drawn = SamplingParams(regex="[a-f]{3}-[0-9]{5,30}!", max_tokens=40, temperature=1.0, seed=3)
    params = [drawn, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), drawn]
    several = make_llm(byte_llama, tensor_parallel_size=2, **settings)
    expected = make_llm(byte_llama, **settings).generate(["a", "b", "c"], params, use_tqdm=False)
    _assert_equal(several.generate(["a", "b", "c"], params, use_tqdm=False), expected)
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(LookupError):
            patch.setattr(MaskFilling, "result", lambda self: {}["no masks"])
            several.generate(["a"], drawn, use_tqdm=False)
        _assert_equal(several.generate(["a", "b", "c"], params, use_tqdm=False), expected)


def test_gguf(models: Any, make_llm: Any, tmp_path: Path) -> None:
    """Ranks read rows and columns of quantised tensors, and whole heads of interleaved ones."""
    pytest.importorskip("gguf")
    settings = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}
    save_gguf(tmp_path / "m.gguf", save_random_model(tmp_path, "llama", **settings), "llama", tensor_type="Q8_0")
    prompts = random_prompts((5, 33))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = make_llm(tmp_path / "m.gguf").generate(prompts, greedy, use_tqdm=False)
    outputs = make_llm(tmp_path / "m.gguf", tensor_parallel_size=2).generate(prompts, greedy, use_tqdm=False)
    _assert_equal(outputs, expected)


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_cannot_be_shared_out(models: Any, size: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size} does not divide the model's 4 query heads"):
        LLM(str(models["llama"][0]), device="cpu", tensor_parallel_size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_shards_cover_everything_once(size: int) -> None:
    ranks = [Parallel(rank, size) for rank in range(size)]
    for length in (1, 7, 8, 50, 96, 301, 11008):
        for shards in ([rank.shard(length) for rank in ranks], [rank.shard_vocab(length) for rank in ranks]):
            pieces = [piece for shard in shards for piece in shard.pieces]
            assert (pieces[0].start, pieces[-1].stop) == (0, length)
            assert all(piece.stop == following.start for piece, following in pairwise(pieces))
        assert all(len(rank.shard_vocab(length)) <= rank.padded_vocab(length) for rank in ranks)


def test_heads_meet_their_kv_heads() -> None:
    """Whatever the numbers, a rank's query head i is served by the KV head that the model gives it."""
    for num_kv_heads in (1, 2, 3, 4, 6):
        for group in (1, 2, 3, 4):
            num_heads = num_kv_heads * group
            for size in (size for size in range(1, num_heads + 1) if num_heads % size == 0):
                for rank in range(size):
                    share = Parallel(rank, size).shard_heads(num_heads, num_kv_heads, 1)
                    served = share.num_heads // len(share.kv_heads)
                    first = share.query_rows.pieces[0].start
                    for head in range(share.num_heads):
                        assert share.kv_heads[head // served] == (first + head) // group
                    rows = [row for piece in share.kv_rows.pieces for row in range(piece.start, piece.stop)]
                    assert rows == list(share.kv_heads)
            one_each = Parallel(0, num_kv_heads).shard_heads(num_heads, num_kv_heads, 1)
            assert len(one_each.kv_heads) == 1
            assert len(Parallel(0, num_heads).shard_heads(num_heads, num_kv_heads, 1).kv_heads) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_only_its_part(models: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What four ranks read adds up to the file, but for what each of them needs whole: norms and biases of outputs."""
    checkpoint = DirectoryCheckpoint(models[name][0])
    cls, spec = resolve_architecture(checkpoint.config)
    whole = build_model(cls, spec, 64, torch.float32, torch.device("cpu"))
    load_weights(whole, checkpoint)
    expected = checkpoint_targets(whole)
    for rank in range(4):
        model = build_model(cls, spec, 64, torch.float32, torch.device("cpu"), Parallel(rank, 4))
        load_weights(model, checkpoint)
        for tensor_name, target in checkpoint_targets(model).items():
            assert target.shape == tuple(expected[tensor_name].tensor.shape)
            if target.shard is not None:
                pieces = [
                    expected[tensor_name].tensor.narrow(target.dim, piece.start, piece.stop - piece.start)
                    for piece in target.shard.pieces
                ]
                assert torch.equal(target.tensor, torch.cat(pieces, dim=target.dim))
                assert len(target.shard) < target.shard.size or MODELS[name].get("num_key_value_heads") in (1, 3)


def test_step_memory_holds_the_largest_step() -> None:
    limits = StepLimits(num_tokens=64, num_seqs=4, table_width=16)
    memory = StepMemory(limits)
    rng = random.Random(0)
    for num_seqs, query_len in ((4, 16), (4, 1), (1, 1)):
        batch = dummy_batch(num_seqs, query_len, dummy_slot=rng.randrange(100), group_capacity=MAX_CAPACITY)
        for array in vars(batch.groups).values():
            array[:] = np.arange(array.size).reshape(array.shape)
        memory.write(batch)
        copy, prompt_rows = memory.read()
        assert prompt_rows is None
        for name in ("token_ids", "positions", "query_starts", "block_tables", "sampled_slots", "logits_indices"):
            assert (getattr(copy, name) == getattr(batch, name)).all()
        for name, array in vars(batch.groups).items():
            assert (getattr(copy.groups, name) == array).all() and getattr(copy.groups, name).shape == array.shape
        assert (copy.num_decode_seqs, copy.max_query_len) == (batch.num_decode_seqs, batch.max_query_len)
        assert copy.is_pure_decode == batch.is_pure_decode
    assert SINGLE.size == 1


def test_a_capture_leaves_nobody_to_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """It samples for no step: if it fails, the others are in the midst of one, and have to be ended."""

    def sample(self: ModelRunner, *args: Any) -> Any:
        self._num_awaited = 0  # type: ignore[attr-defined]
        raise MemoryError

    monkeypatch.setattr(ModelRunner, "_sample", sample)
    runner = object.__new__(TensorParallelRunner)
    with pytest.raises(MemoryError):
        runner._sample_for_capture(None, None)  # type: ignore[arg-type]
    assert runner._num_awaited is None


@pytest.mark.parametrize("num_rows", [1, 2047, 2048, 2051])
@pytest.mark.parametrize("bias", [False, True])
def test_long_prompts_are_added_up_in_parts(num_rows: int, bias: bool) -> None:
    """The ranks are threads here."""
    device, store = torch.device("cpu"), make_store()
    x, weight, added = torch.randn(num_rows, 12), torch.randn(5, 12), torch.randn(5)

    def multiply(rank: int) -> torch.Tensor:
        parallel = connect(device, store.port, rank, 2, 10)
        columns = parallel.shard(12)
        layer = RowLinear(columns, 5, bias, parallel)
        layer.weight.data = weight[:, columns.pieces[0]].contiguous()
        if layer.bias is not None:
            layer.bias.data = added
        return layer.in_pieces(x[:, columns.pieces[0]])  # type: ignore[return-value]

    with ThreadPoolExecutor() as executor:
        first, second = executor.map(multiply, range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, F.linear(x, weight, added if bias else None))
