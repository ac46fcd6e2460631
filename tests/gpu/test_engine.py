"""The engine on a GPU: every backend gives transformers' tokens, graphs change nothing, memory comes back."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import CHOICES
from nanovllm.engine.batch import dummy_batch, pad_decode
from nanovllm.engine.prefix_groups import PrefixGrouper
from nanovllm.engine.step_tensors import upload, view_flat
from tests.checkpoints import VOCAB_SIZE, prompts_that_begin_alike, reference_greedy, save_random_model

NUM_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_random_model(folder, request.param)


@pytest.fixture(scope="module")
def qwen3_wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Heads of 64, which every flash-attn build has."""
    folder = tmp_path_factory.mktemp("qwen3_wide")
    return folder, save_random_model(folder, "qwen3", hidden_size=256, head_dim=64, std=0.05)


@pytest.fixture(scope="module")
def references(checkpoint: tuple[Path, Any]) -> list[tuple[list[int], list[int]]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [(prompt, reference_greedy(checkpoint[1], prompt, NUM_TOKENS)) for prompt in prompts]


def generate(llm: LLM, references: Any, params: Any = GREEDY) -> list[list[int]]:
    return [o["token_ids"] for o in llm.generate([prompt for prompt, _ in references], params, use_tqdm=False)]


@pytest.mark.parametrize("attention_backend", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [48, 16384])
def test_float32_equals_transformers(
    checkpoint: Any, references: Any, attention_backend: str, enforce_eager: bool, max_num_batched_tokens: int
) -> None:
    with LLM(
        str(checkpoint[0]),
        dtype="float32",
        attention_backend=attention_backend,
        enforce_eager=enforce_eager,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=6,
        num_kvcache_blocks=64,
        kvcache_block_size=16,
    ) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert generate(llm, references) == [expected for _, expected in references]
        llm.block_manager.check_integrity(llm.scheduler.unfinished())


def test_preemption_changes_nothing(checkpoint: Any, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed sequences, whose last token came from the host and not from the device's table, go on the same."""
    monkeypatch.setattr("nanovllm.engine.scheduler.BlockForecast.peak_growth", lambda self: 0)
    monkeypatch.setattr("nanovllm.engine.scheduler.BlockForecast.worst_growth", lambda self: 0)
    with LLM(str(checkpoint[0]), dtype="float32", num_kvcache_blocks=16, kvcache_block_size=16) as llm:
        prompts = [(prompt, expected) for prompt, expected in references if len(prompt) < 100]
        for prompt, _ in prompts:
            llm.add_request(prompt, GREEDY)
        tokens, num_preemptions = {}, 0
        while not llm.is_finished():
            step = llm.step()
            num_preemptions += step.num_preemptions
            tokens.update({seq_id: output["token_ids"] for seq_id, output in step.finished.items()})
    assert num_preemptions > 0
    assert [tokens[i] for i in sorted(tokens)] == [expected for _, expected in prompts]


@pytest.mark.parametrize("attention_backend", sorted(CHOICES))
def test_bfloat16_error_is_that_of_transformers(qwen3_wide: Any, attention_backend: str) -> None:
    """Teacher-forced logits are no further from float32 than twice transformers' own in bfloat16."""
    folder, reference = qwen3_wide
    try:
        llm = LLM(str(folder), dtype="bfloat16", attention_backend=attention_backend, num_kvcache_blocks=8)
    except ValueError as error:
        pytest.skip(str(error))
    rng = random.Random(2)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(300)]
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        exact = reference.float().cuda()(ids).logits[0]
        theirs = reference.bfloat16()(ids).logits[0].float()
        reference.float().cpu()
    ours = torch.stack([teacher_forced_logits(llm, prompt, length) for length in (1, 2, 100, 257, 299, 300)])
    rows = torch.tensor([1, 2, 100, 257, 299, 300], device="cuda") - 1
    tolerance = 2 * (theirs - exact)[rows].abs().max()
    assert (ours - exact[rows]).abs().max() <= tolerance
    llm.close()


def teacher_forced_logits(llm: LLM, prompt: list[int], length: int) -> torch.Tensor:
    """Logits [V] after the first `length` tokens: all but the last by prefill, the last one as a decode row."""
    seen: list[torch.Tensor] = []
    compute = llm.runner.model.compute_logits
    graphs, llm.runner.graphs = llm.runner.graphs, None
    llm.runner.model.compute_logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]  # type: ignore
    llm.generate([prompt[: max(length - 1, 1)]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.generate([prompt[:length]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    llm.runner.model.compute_logits = compute  # type: ignore[method-assign]
    llm.runner.graphs = graphs
    return seen[-1][0].float()


@pytest.mark.parametrize("attention_backend", ["auto", "flash"])
def test_graph_equals_eager(qwen3_wide: Any, attention_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a replayed step are bitwise those of the same step launched kernel by kernel."""
    seen: list[torch.Tensor] = []
    from nanovllm.models.decoder import DecoderForCausalLM

    compute = DecoderForCausalLM.compute_logits
    monkeypatch.setattr(
        DecoderForCausalLM, "compute_logits", lambda self, hidden: seen.append(compute(self, hidden)) or seen[-1]
    )
    try:
        llm = LLM(
            str(qwen3_wide[0]),
            dtype="bfloat16",
            attention_backend=attention_backend,
            max_num_seqs=8,
            num_kvcache_blocks=32,
        )
    except ValueError as error:
        pytest.skip(str(error))
    runner = llm.runner
    assert runner.graphs is not None
    runner.kv_cache.normal_()
    captured = seen[-2 * len(runner.graphs.batch_sizes) :]  # of each size, the largest first: run once, then captured
    for size, has_groups in ((1, False), (4, False), (8, False), (8, True), (4, True)):
        graph_logits = captured[2 * runner.graphs.batch_sizes[::-1].index(size) + 1]
        batch = dummy_batch(size, 1, dummy_slot=8)
        batch.context_lens[:] = torch.arange(1, size + 1).numpy() * 7 + 3 * runner.block_size * has_groups
        batch.token_ids[:] = torch.arange(size).numpy() + 3
        tables = torch.randperm(32)[: 4 * size].int().view(size, 4).numpy()
        tables[:, :3] = tables[0, :3]  # so much is shared if the contexts reach beyond
        grouper = PrefixGrouper(runner.block_size, runner.group_capacity)
        groups = grouper.find(list(range(size)), tables, batch.context_lens)
        batch = replace(batch, block_tables=tables, groups=groups)
        if has_groups != batch.has_groups:
            continue  # the backend reads whole contexts
        num_seen = len(seen)
        runner.graphs.replay_forward(batch)
        if has_groups:  # captured just now
            graph_logits = seen[num_seen + 1]
        tokens = runner.graphs.replay_sampling(batch).clone()
        replayed = graph_logits.clone()
        padded = pad_decode(batch, size, 8)
        with torch.inference_mode():
            inputs = view_flat(upload(padded, runner.device), padded, max_context_len=runner.max_model_len)
            assert torch.equal(runner._sample(runner._forward(inputs), inputs), tokens)
        assert torch.equal(seen[-1], replayed)
    llm.close()


def test_seeds_and_filters(checkpoint: Any, references: Any) -> None:
    """A seeded request draws the same tokens alone and in a batch; graphs and eager agree."""
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = []
    for enforce_eager in (False, True):
        with LLM(str(checkpoint[0]), dtype="float32", enforce_eager=enforce_eager, num_kvcache_blocks=64) as llm:
            outputs.append(generate(llm, references, params))
            alone = [generate(llm, [reference], params)[0] for reference in references]
            assert alone == outputs[-1]
    assert outputs[0] == outputs[1]
    assert outputs[0] != [expected for _, expected in references]


def test_memory_is_returned(checkpoint: Any) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with LLM(str(checkpoint[0]), gpu_memory_utilization=0.2, max_num_seqs=16) as llm:
            generate(llm, [([1, 2, 3], None)])
            assert torch.cuda.memory_allocated() > before
        assert torch.cuda.memory_allocated() == before


def test_too_little_memory_names_the_number(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        LLM(str(checkpoint[0]), gpu_memory_utilization=0.0005)
    with LLM(str(checkpoint[0]), gpu_memory_utilization=0.1, max_num_seqs=4) as llm:
        assert len(generate(llm, [([1, 2, 3], None)])[0]) == NUM_TOKENS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flash", "dtype": "float32"}, "float16 or bfloat16"),
        ({"attention_backend": "flash_attn_2", "kvcache_block_size": 64}, "256"),
        ({"attention_backend": "triton", "kvcache_block_size": 24}, "multiple of 16"),
        ({"device": "cuda:99"}, "CUDA devices"),
    ],
)
def test_impossible_settings(checkpoint: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint[0]), **settings)


def test_shared_prefixes(checkpoint: Any) -> None:
    """Prompts with common beginnings, nested ones, decoded together: through graphs and without, the tokens are those
    of the same model reading every context whole."""
    prompts = prompts_that_begin_alike(seed=3)
    outputs = []
    for enforce_eager in (False, True):
        settings: dict[str, Any] = {
            "dtype": "float32",
            "kvcache_block_size": 16,
            "num_kvcache_blocks": 512,
            "max_num_seqs": 24,
        }
        with LLM(str(checkpoint[0]), enforce_eager=enforce_eager, **settings) as llm:
            for capacity in (llm._grouper.capacity, 0):
                llm._grouper.capacity = capacity
                results = llm.generate(prompts, GREEDY, use_tqdm=False)
                outputs.append([result["token_ids"] for result in results])
                assert (len(llm._grouper._groups.lens) > 0) == (capacity > 0)
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
