"""CUDA graphs without a GPU: which batch sizes are captured, and whether a replay finds its input.

A graph reads fixed places. A stand-in that runs the same code again on the tensors of its capture reads them, too.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import PackedBatch
from nanovllm.engine.cuda_graphs import DecodeGraphs, graph_batch_sizes
from nanovllm.engine.step_tensors import StepTensors
from tests.checkpoints import VOCAB_SIZE, prompts_that_begin_alike


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 4, 7, 8, 9, 12, 16, 100, 256, 512, 700, 1024, 5000])
def test_every_batch_is_covered_and_none_is_above(max_num_seqs: int) -> None:
    """A batch without a size would have no graph to replay; a size above the limit would be captured for nothing."""
    sizes = graph_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1 and sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = sizes[bisect.bisect_left(sizes, num_seqs)]
        assert size - num_seqs < max(8, num_seqs / 8), "too much padding"


def test_number_of_graphs_stays_small() -> None:
    """Each costs tens of milliseconds at start."""
    assert len(graph_batch_sizes(512)) < 40
    assert len(graph_batch_sizes(5000)) < 80


class _Rerun:
    """In place of a CUDA graph."""

    num_replays = 0

    def __init__(self, run: Callable[..., torch.Tensor], *args: Any) -> None:
        self._run, self._args, self.output = run, args, run(*args)

    def replay(self) -> None:
        _Rerun.num_replays += 1
        self.output.copy_(self._run(*self._args))


class _RerunGraphs(DecodeGraphs):
    def _capture(self, run: Callable[..., torch.Tensor], *args: Any) -> Any:
        graph = _Rerun(run, *args)
        return graph, graph.output

    def replay_sampling(self, batch: PackedBatch) -> torch.Tensor:
        return super().replay_sampling(batch).clone()  # a GPU copies them to the host before the next replay


def use_graphs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> _RerunGraphs:
    """Lets the engine replay pure decode steps. Each batch size has its own, as a CPU can't store nothing for a row of
    padding; of the dummy batches, which are all padding, nothing is computed."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner = llm.runner

    def forward(inputs: StepTensors) -> torch.Tensor:
        if (inputs.kv_slots < 0).all():
            return torch.zeros(len(inputs.slots), runner.model.spec.hidden_size)
        return runner._forward(inputs)

    runner.graphs = graphs = _RerunGraphs(
        forward,
        runner._sample,
        list(range(1, runner.config.max_num_seqs + 1)),
        table_width=-(-runner.max_model_len // runner.block_size),
        max_context_len=runner.max_model_len,
        dummy_slot=runner.config.max_num_seqs,
        group_capacity=runner.group_capacity,
        is_alone=True,
        device=runner.device,
    )
    return graphs


def test_replays_find_their_input(random_llama: Any, make_llm: Callable[..., LLM], monkeypatch: Any) -> None:
    """Batches of all sizes in turn, with groups and without, filters and none, and tokens that must not be sampled."""
    prompts = prompts_that_begin_alike(seed=3) + [[index, 5, 7] for index in range(4)]
    plain = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.8, "seed": 5},
        {"min_tokens": 8, "stop_token_ids": range(0, VOCAB_SIZE, 2)},
        {"repetition_penalty": 1.5, "max_tokens": 17},
        {"logprobs": 2, "max_tokens": 4},
    ]
    params = [replace(plain, **changes[index % 5]) for index in range(len(prompts))]
    llm = make_llm(random_llama[0], kvcache_block_size=16, max_num_seqs=12)
    for some in (params, [plain] * len(prompts)):
        expected = [output["token_ids"] for output in llm.generate(prompts, some, use_tqdm=False)]
        graphs = use_graphs(llm, monkeypatch)
        monkeypatch.setattr(_Rerun, "num_replays", 0)
        assert [output["token_ids"] for output in llm.generate(prompts, some, use_tqdm=False)] == expected
        llm.runner.graphs = None
        assert _Rerun.num_replays > 20
        assert {has_groups for _, has_groups in graphs._steps} == {False, True}


def test_no_memory_for_graphs_with_groups(
    random_llama: Any, make_llm: Callable[..., LLM], monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes for which there is memory keep their groups; the others do without, and are not tried again."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = prompts_that_begin_alike(seed=3)
    llm = make_llm(random_llama[0], kvcache_block_size=16, max_num_seqs=12)
    expected = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    graphs = use_graphs(llm, monkeypatch)
    capture, tried = graphs._capture_step, []

    def capture_step(size: int, has_groups: bool) -> Any:
        tried.append(size)
        if size % 2:
            raise torch.OutOfMemoryError
        return capture(size, has_groups)

    monkeypatch.setattr(graphs, "_capture_step", capture_step)
    for _ in range(2):
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    llm.runner.graphs = None
    assert len(tried) == len(set(tried)) and {size % 2 for size in tried} == {0, 1}
    assert {size for size, has_groups in graphs._steps if has_groups} == {size for size in tried if size % 2 == 0}
    assert f"batches of {next(size for size in tried if size % 2)} do without shared prefixes" in caplog.text
    graphs._is_alone = False  # several ranks have to do the same
    graphs._without_groups.clear()
    with pytest.raises(torch.OutOfMemoryError):
        graphs._can_capture_groups(1)
