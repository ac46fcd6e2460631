"""The attention contract on named batch shapes, the choice of a backend, and the forward context.

Blocks are permuted at random and every slot that holds no token is poisoned with NaN: whatever a backend reads by
mistake shows in its output.
"""

import logging
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import nanovllm.attention
from nanovllm.attention import CHOICES, AttentionBackend, AttentionSpec, SelectedBackends, select_backends
from nanovllm.attention.sdpa import SDPABackend
from nanovllm.engine import prefix_groups
from nanovllm.engine.prefix_groups import PrefixGrouper
from nanovllm.utils.context import ForwardContext, SharedPrefixes, forward_context, get_forward_context

# Name -> (query length, context length) of each sequence; those with one query token come first.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(1, 37)],
    "decode": [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65), (1, 130)],
    "one prefill": [(50, 50)],
    "prefill": [(2, 2), (15, 15), (16, 16), (17, 17), (64, 64), (65, 65), (130, 130)],
    "mixed": [(1, 40), (1, 64), (1, 1), (33, 33), (2, 2)],
    "chunks with context": [(2, 18), (16, 32), (17, 80), (64, 128), (3, 131)],
    "everything": [(1, 1), (1, 66), (5, 5), (16, 64), (7, 100), (65, 65)],
    "prompts of one token": [(1, 1), (1, 1), (1, 1)],
}
GROUPS = {"group of 1": (2, 2), "group of 3": (6, 2), "group of 4": (4, 1)}


@dataclass
class Batch:
    """A batch, and what its attention sees in each sequence."""

    spec: AttentionSpec
    context: ForwardContext
    query: torch.Tensor  # [T, num_heads, head_dim]
    new_key: torch.Tensor  # [T, num_kv_heads, head_dim], and new_value: what this step adds
    new_value: torch.Tensor
    k_cache: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], and v_cache: before the step
    v_cache: torch.Tensor
    keys: list[torch.Tensor]  # of each sequence [context_len, num_kv_heads, head_dim], and values: after the step
    values: list[torch.Tensor]


def make_spec(num_heads: int, num_kv_heads: int, head_dim: int, **differences: Any) -> AttentionSpec:
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, torch.float32, torch.device("cpu"), 16)
    return replace(spec, **differences)


def make_batch(spec: AttentionSpec, lengths: list[tuple[int, int]], is_contiguous: bool = False) -> Batch:
    """Random queries, keys and values. The blocks of a sequence are neighbours in order, or anywhere."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(spec.dtype)

    block_size = spec.block_size
    assert block_size is not None
    query_lens, context_lens = (list(column) for column in zip(*lengths, strict=True))
    tables = _block_tables([-(-length // block_size) for length in context_lens], is_contiguous)
    num_blocks = 2 + max(max(table) for table in tables)
    shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=spec.dtype) for _ in range(2))
    keys = [randn(length, *shape[2:]) for length in context_lens]
    values = [randn(length, *shape[2:]) for length in context_lens]
    kv_slots, new_key, new_value = [], [], []
    for (query_len, context_len), table, key, value in zip(lengths, tables, keys, values, strict=True):
        positions = torch.arange(context_len)
        slots = torch.tensor(table)[positions // block_size] * block_size + positions % block_size
        num_before = context_len - query_len
        k_cache.flatten(0, 1)[slots[:num_before]] = key[:num_before]
        v_cache.flatten(0, 1)[slots[:num_before]] = value[:num_before]
        kv_slots.append(slots[num_before:])
        new_key.append(key[num_before:])
        new_value.append(value[num_before:])
    num_decode = query_lens.count(1)
    assert all(length == 1 for length in query_lens[:num_decode])
    width = max(map(len, tables))
    context = ForwardContext(
        kv_slots=torch.cat(kv_slots),
        query_starts=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        num_decode_seqs=num_decode,
        max_query_len=max(query_lens[num_decode:], default=0),
        max_context_len=max(context_lens),
        prefixes=SharedPrefixes.none(torch.tensor(context_lens[:num_decode], dtype=torch.int32)),
    )
    query = randn(sum(query_lens), spec.num_heads, spec.head_dim)
    new = torch.cat(new_key), torch.cat(new_value)
    return Batch(spec, context, query, *new, k_cache, v_cache, keys, values)


def _block_tables(sizes: list[int], is_contiguous: bool) -> list[list[int]]:
    """Block ids of each sequence, none of them 0, which pads the tables and belongs to nobody."""
    rng = random.Random(0)
    if is_contiguous:
        starts = {}
        next_block = 1
        for row in rng.sample(range(len(sizes)), len(sizes)):
            starts[row] = next_block
            next_block += sizes[row] + 1  # and one of nobody between them
        return [list(range(starts[row], starts[row] + size)) for row, size in enumerate(sizes)]
    ids = rng.sample(range(1, 2 * sum(sizes) + 1), sum(sizes))
    return [[ids.pop() for _ in range(size)] for size in sizes]


def run(backend_class: type[AttentionBackend], batch: Batch) -> torch.Tensor:
    """Output [T, num_heads, head_dim] of the backend, in the order of calls that the contract gives."""
    backend, context = backend_class(batch.spec), batch.context
    context.decode_plan = backend.prepare_decode(context)
    context.prefill_plan = backend.prepare_prefill(context)
    batch.k_cache.flatten(0, 1)[context.kv_slots] = batch.new_key
    batch.v_cache.flatten(0, 1)[context.kv_slots] = batch.new_value
    num_decode, outputs = context.num_decode_seqs, []
    if num_decode:
        outputs.append(backend.decode(batch.query[:num_decode], batch.k_cache, batch.v_cache, context))
    if num_decode < len(batch.query):
        outputs.append(backend.prefill(batch.query[num_decode:], batch.k_cache, batch.v_cache, context))
    return torch.cat(outputs)


def reference(batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Attention in plain torch in a dtype: one sequence and one head at a time, softmax written out."""
    outputs, starts = [], batch.context.query_starts.tolist()
    for row, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[starts[row] : starts[row + 1]]
        num_before = len(key) - len(query)
        heads = []
        for head in range(batch.spec.num_heads):
            kv_head = head // (batch.spec.num_heads // batch.spec.num_kv_heads)
            scores = query[:, head].to(dtype) @ key[:, kv_head].to(dtype).T * batch.spec.scale
            for index in range(len(query)):
                scores[index, num_before + index + 1 :] = -torch.inf
            heads.append(scores.softmax(-1) @ value[:, kv_head].to(dtype))
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


def assert_as_exact_as_torch(output: torch.Tensor, batch: Batch) -> None:
    """The error against float64 is at most twice that of plain torch in the batch's dtype."""
    exact = reference(batch, torch.float64)
    plain_error = (reference(batch, batch.spec.dtype).double() - exact).abs().max()
    # Where plain torch happens to be exact, one rounding of the largest output is still allowed.
    rounding = torch.finfo(batch.spec.dtype).eps * exact.abs().max()
    assert output.dtype == batch.spec.dtype and output.shape == exact.shape
    assert output.isfinite().all(), "a slot without a token was read"
    assert (output.double() - exact).abs().max() <= 2 * plain_error + rounding


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("heads", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("is_contiguous", [False, True], ids=["scattered", "contiguous"])
def test_sdpa_equals_reference(
    lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, block_size: int, is_contiguous: bool
) -> None:
    """Guards masks, block tables, lengths and the sharing of KV heads, and that no other slot is read or written."""
    batch = make_batch(make_spec(*heads, head_dim, block_size=block_size), lengths, is_contiguous)
    expected_caches = []
    for cache, new in ((batch.k_cache, batch.new_key), (batch.v_cache, batch.new_value)):
        expected = cache.clone()
        expected.flatten(0, 1)[batch.context.kv_slots] = new
        expected_caches.append(expected)
    assert_as_exact_as_torch(run(SDPABackend, batch), batch)
    assert torch.equal(batch.k_cache.nan_to_num(99.0), expected_caches[0].nan_to_num(99.0))
    assert torch.equal(batch.v_cache.nan_to_num(99.0), expected_caches[1].nan_to_num(99.0))


@pytest.mark.parametrize("is_contiguous", [False, True], ids=["scattered", "contiguous"])
def test_sdpa_in_bfloat16(is_contiguous: bool) -> None:
    """Guards against sums in a narrower dtype than torch's own."""
    batch = make_batch(make_spec(6, 2, 64, dtype=torch.bfloat16), BATCHES["everything"], is_contiguous)
    assert_as_exact_as_torch(run(SDPABackend, batch), batch)


def test_scale_is_the_specs() -> None:
    """Guards against the default scale of a library, which fits only until a model has another."""
    batch = make_batch(make_spec(4, 2, 20, scale=0.7), BATCHES["everything"])
    assert_as_exact_as_torch(run(SDPABackend, batch), batch)


def test_batch_equals_single_sequences() -> None:
    """A sequence's result must not depend on its company, nor on where its blocks lie."""
    spec = make_spec(6, 2, 20)
    batch = make_batch(spec, BATCHES["everything"])
    together, starts = run(SDPABackend, batch), batch.context.query_starts.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        alone = make_batch(spec, [BATCHES["everything"][row]], is_contiguous=True)
        num_before = len(batch.keys[row]) - (end - start)
        alone.k_cache.flatten(0, 1)[16 : 16 + num_before] = batch.keys[row][:num_before]  # from block 1
        alone.v_cache.flatten(0, 1)[16 : 16 + num_before] = batch.values[row][:num_before]
        alone.new_key, alone.new_value = batch.keys[row][num_before:], batch.values[row][num_before:]
        alone.query = batch.query[start:end]
        rounding = 8 * torch.finfo(torch.float32).eps  # of sums in another order, over values of about 1
        torch.testing.assert_close(run(SDPABackend, alone), together[start:end], rtol=0, atol=rounding)


def test_sequences_share_blocks_of_the_same_step() -> None:
    """A block that one sequence of a batch stores is read by another in the same forward, as the scheduler wants."""
    spec = make_spec(4, 2, 20)
    batch = make_batch(spec, [(1, 17), (16, 16)])
    table = batch.context.block_tables
    table[0, 0] = table[1, 0]  # the decode sequence's first block is the one that the prefill fills now
    batch.keys[0] = torch.cat((batch.keys[1], batch.keys[0][16:]))
    batch.values[0] = torch.cat((batch.values[1], batch.values[0][16:]))
    assert_as_exact_as_torch(run(SDPABackend, batch), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", GROUPS.values(), ids=GROUPS.keys())
def test_sdpa_reads_shared_prefixes_once(
    heads: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of some sequences, nested ones, and a sequence without company: as if each read its whole context."""
    batch = make_batch(
        make_spec(*heads, 20, dtype=dtype), [(1, 70), (1, 40), (1, 99), (1, 65), (1, 33), (1, 5), (7, 40)]
    )
    table = batch.context.block_tables
    for row, parent, num_blocks in ((1, 0, 2), (2, 0, 4), (3, 0, 4)):
        table[row, :num_blocks] = table[parent, :num_blocks]
        batch.keys[row][: 16 * num_blocks] = batch.keys[parent][: 16 * num_blocks]
        batch.values[row][: 16 * num_blocks] = batch.values[parent][: 16 * num_blocks]
    monkeypatch.setattr(prefix_groups, "_GROUP_COST", 0)
    monkeypatch.setattr(prefix_groups, "_MEMBER_COST", 0)
    groups = PrefixGrouper(16, 3).find(list(range(6)), table[:6].numpy(), batch.context.context_lens[:6].numpy())
    assert groups.lens.tolist() == [32, 32, 32] and groups.shared_lens.tolist() == [64, 32, 64, 64, 0, 0]
    batch.context.prefixes = SharedPrefixes(**{name: torch.from_numpy(array) for name, array in vars(groups).items()})
    sizes = []
    read = SDPABackend._read
    monkeypatch.setattr(SDPABackend, "_read", lambda *args: (sizes.append(args[2].num_tokens), read(*args))[1])
    assert_as_exact_as_torch(run(SDPABackend, batch), batch)
    own = [70 - 64, 40 - 32, 99 - 64, 65 - 64, 33, 5]
    assert sum(sizes) == 2 * (sum(own) + 3 * 32 + 40)


@pytest.mark.parametrize("fault", ["table", "length", "mask", "group"])
def test_reference_sees_faults(fault: str) -> None:
    """The comparison must fail for a wrong block, one token too many or too few, a wrong KV head."""

    class Faulty(SDPABackend):
        def prepare_prefill(self, context: ForwardContext) -> Any:
            if fault == "table":
                context.block_tables = context.block_tables.flip(0)
            elif fault == "length":
                context.context_lens = (context.context_lens - 1).clamp(min=1)
            return super().prepare_prefill(context)

        def prefill(self, query: torch.Tensor, *args: Any) -> torch.Tensor:
            if fault == "mask":
                return super().prefill(query.flip(0), *args).flip(0)
            if fault == "group":
                return super().prefill(query.flip(1), *args).flip(1)
            return super().prefill(query, *args)

    batch = make_batch(make_spec(4, 2, 20), [(16, 64), (16, 64)])
    with pytest.raises(AssertionError):
        assert_as_exact_as_torch(run(Faulty, batch), batch)


# The choice of a backend


class _Picky(SDPABackend):
    name = "picky"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["needs a GPU", "needs the package picky"] if spec.head_dim == 20 else []


def test_auto_serves_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Something always runs on a CPU; the choice is logged, with why nothing better was taken."""
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        selected = select_backends(replace(make_spec(4, 2, 20), block_size=None))
    assert selected == SelectedBackends(SDPABackend, SDPABackend, SDPABackend.preferred_block_size)
    assert selected.name == "sdpa"
    assert "attention: sdpa, blocks of 256 tokens" in caplog.text
    assert "triton: needs a CUDA device" in caplog.text


def test_unknown_name_is_refused() -> None:
    """A mistyped backend must not fall back to another one; the known names are in the message."""
    with pytest.raises(ValueError, match=r"attention_backend.*'sdpa'.*'sdpaa'"):
        select_backends(make_spec(4, 2, 20), "sdpaa")


def test_refusals_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a silent fallback: an explicit choice that can't work raises with all reasons, and so does "auto"
    when nothing is left."""
    monkeypatch.setitem(CHOICES, "picky", (_Picky,))
    monkeypatch.setattr(nanovllm.attention, "PREFILL_BACKENDS", (_Picky, SDPABackend))
    monkeypatch.setattr(nanovllm.attention, "DECODE_BACKENDS", (SDPABackend, _Picky))
    assert select_backends(make_spec(4, 2, 64)) == SelectedBackends(_Picky, SDPABackend, 16)
    assert select_backends(make_spec(4, 2, 64), "picky") == SelectedBackends(_Picky, _Picky, 16)
    assert select_backends(make_spec(4, 2, 20)) == SelectedBackends(SDPABackend, SDPABackend, 16)
    with pytest.raises(ValueError, match="picky: needs a GPU, needs the package picky"):
        select_backends(make_spec(4, 2, 20), "picky")
    monkeypatch.setattr(nanovllm.attention, "PREFILL_BACKENDS", (_Picky,))
    with pytest.raises(ValueError, match="picky: needs a GPU, needs the package picky"):
        select_backends(make_spec(4, 2, 20))


@pytest.mark.parametrize("choice", ["flash", "flash_attn_2", "flash_attn_3", "flash_attn_4", "triton"])
def test_gpu_backends_refuse_a_cpu(choice: str) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        select_backends(make_spec(4, 2, 64), choice)


def test_engine_passes_the_choice_on(random_llama: Any, make_llm: Any) -> None:
    """The config's `attention_backend` reaches the model, and a wrong one is a ValueError."""
    assert isinstance(make_llm(random_llama[0], attention_backend="sdpa").runner.decode_backend, SDPABackend)
    with pytest.raises(ValueError, match="attention_backend"):
        make_llm(random_llama[0], attention_backend="flush")


# The forward context


def empty_context() -> ForwardContext:
    return make_batch(make_spec(4, 2, 20), [(1, 1)]).context


def test_context_is_there_only_inside() -> None:
    """A layer called outside a forward must not find the metadata of the last one."""
    context = empty_context()
    with pytest.raises(RuntimeError, match="no forward is running"):
        get_forward_context()
    with forward_context(context):
        assert get_forward_context() is context
    with pytest.raises(RuntimeError, match="no forward is running"):
        get_forward_context()


def test_context_refuses_nesting() -> None:
    """An inner forward would leave the outer one with its metadata; the outer one goes on after the refusal."""
    context = empty_context()
    with forward_context(context):
        with pytest.raises(RuntimeError, match="nest"), forward_context(empty_context()):
            pass
        assert get_forward_context() is context


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_context_ends_with_an_exception(error: type[BaseException]) -> None:
    """A forward that fails, or is interrupted, must not block all that follow."""
    with pytest.raises(error), forward_context(empty_context()):
        raise error
    with forward_context(empty_context()):
        pass
