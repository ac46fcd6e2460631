import pytest
import torch

from nanovllm.kernels.sampling import filter_logits_

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kept_by_sorting(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[vocab_size] bool: the definition, with a stable sort, in float64."""
    order = torch.sort(logits.double(), descending=True, stable=True).indices
    probabilities = (logits.double()[order] / temperature).softmax(0)
    keep = torch.ones(len(order), dtype=torch.bool)
    if 0 < top_k < len(order):
        keep[top_k:] = False
    probabilities = probabilities * keep
    probabilities /= probabilities.sum()
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        keep &= (before < top_p) | (torch.arange(len(order)) == 0)
    keep &= probabilities >= min_p * probabilities[0]
    return torch.zeros(len(order), dtype=torch.bool).scatter_(0, order, keep)


def run(rows, device, indices=None) -> torch.Tensor:
    """rows: (logits, temperature, top_k, top_p, min_p) each -> the filtered logits, on the CPU."""
    logits = torch.stack([row[0] for row in rows]).to(device)
    listed = torch.tensor(range(len(rows)) if indices is None else indices, dtype=torch.int32, device=device)
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device) for column in list(zip(*rows, strict=True))[1:]
    )
    result = filter_logits_(logits, listed, temperature, top_k.int(), top_p.float(), min_p)
    assert result is logits
    return result.cpu()


def check(rows, device) -> None:
    """Kept logits are unchanged, the others -inf; between the references a hair to either side of the thresholds."""
    hair = 2e-6
    for (logits, temperature, top_k, top_p, min_p), after in zip(rows, run(rows, device), strict=True):
        kept, live = after > float("-inf"), logits > float("-inf")
        assert torch.equal(after[kept], logits[kept])
        # a threshold that is off (top_p = 1) or exact (min_p = 0 or 1) stays as it is
        lower, upper = (top_p * (1 + sign * hair) if top_p < 1 else 1 for sign in (-1, 1))
        loose, strict = (min_p * (1 + sign * hair) if min_p < 1 else 1 for sign in (-1, 1))
        least = kept_by_sorting(logits, temperature, top_k, lower, strict)
        most = kept_by_sorting(logits, temperature, top_k, upper, loose)
        assert not (least & live & ~kept).any(), (temperature, top_k, top_p, min_p)
        assert not (kept & ~most).any(), (temperature, top_k, top_p, min_p)
        assert kept.any() or not live.any()


SETTINGS = [  # (temperature, top_k, top_p, min_p)
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 2, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (2.0, 0, 0.5, 0.0),
    (0.5, 0, 0.9999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.3, 0, 1.0, 1.0),
    (1.0, 10**6, 0.8, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.3, 100, 0.3, 0.02),
    (5.0, 7, 0.99, 0.5),
    (1e-6, 20, 0.95, 0.1),
    (50.0, 0, 0.97, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 1000, 9000])
def test_random_rows(vocab_size, dtype, device, generator):
    logits = (torch.randn(len(SETTINGS), vocab_size, generator=generator) * 3).to(dtype)
    check([(row, *settings) for row, settings in zip(logits, SETTINGS, strict=True)], device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_ties(dtype, device, generator):
    """Integers in -3 .. 3 and both zeros: nearly every cut falls inside a run of equal logits."""
    logits = torch.randint(-3, 4, (len(SETTINGS), 5000), generator=generator).to(dtype)
    logits[:, ::3] *= -1  # makes -0.0, which ties with 0.0
    assert (logits.float().signbit() & (logits == 0)).any()
    check([(row, *settings) for row, settings in zip(logits, SETTINGS, strict=True)], device)
    flat = torch.zeros(5000, dtype=dtype)
    for settings, count in (((1.0, 4500, 1.0, 0.0), 4500), ((1.0, 0, 0.5, 0.0), 2500), ((1.0, 100, 0.25, 1.0), 25)):
        after = run([(flat, *settings)], device)[0]
        assert (after == 0).nonzero().flatten().tolist() == list(range(count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype, device, generator):
    big = 3e38 if dtype != torch.float16 else 6e4
    tiny = torch.finfo(dtype).tiny / 4  # subnormal
    values = torch.tensor([big, -big, tiny, -tiny, 0.0, -0.0, 1.0, float("-inf"), 2 * tiny, -1.0]).to(dtype)
    rows = [
        (values[torch.randperm(10, generator=generator)], 1.0, k, p, 0.0)
        for k in (0, 1, 2, 5, 8, 9)
        for p in (1.0, 0.5)
    ]
    check(rows, device)


def test_masked_logits_stay_masked(device, generator):
    """Fewer live logits than k, one, and none: a vocabulary mask came first."""
    logits = torch.randn(5000, generator=generator)
    few, one, none = logits.clone(), logits.clone(), torch.full_like(logits, float("-inf"))
    few[torch.randperm(5000, generator=generator)[:4990]] = float("-inf")
    one[1:] = float("-inf")
    rows = [(row, 1.0, k, p, 0.0) for row in (few, one) for k in (0, 1, 10, 11) for p in (1.0, 0.7)]
    check(rows, device)
    assert (run([(none, 1.0, 5, 0.5, 0.1)], device) == float("-inf")).all()


def test_worked_example(device):
    """top_k = 2 of [.1, .2, .3, .4] leaves .3 / .7 and .4 / .7 = .571: top_p = .5 keeps one, .6 both."""
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    rows = [
        (logits, 1.0, 2, 0.5, 0.0),
        (logits, 1.0, 2, 0.6, 0.0),
        (logits, 1.0, 0, 0.5, 0.0),
        (logits, 1.0, 0, 1.0, 0.6),
    ]
    kept = (run(rows, device) > float("-inf")).tolist()
    assert kept == [
        [False, False, False, True],
        [False, False, True, True],
        [False, False, True, True],
        [False, False, True, True],
    ]


def test_only_listed_rows_change(device, generator):
    """All arguments are views whose row -1 exists in memory: an entry of -1 must not reach it."""
    before = torch.randn(6, 300, generator=generator).to(device)
    logits = before.clone()
    ones, top_k = torch.ones(6, device=device), torch.full((6,), 3, dtype=torch.int32, device=device)
    temperature = ones.clone()
    temperature[5] = 0  # greedy: left alone although it is listed
    rows = torch.tensor([3, -1, 0, 4], dtype=torch.int32, device=device)
    filter_logits_(logits[1:], rows, temperature[1:], top_k[1:], ones[1:], ones[1:] * 0.1)
    changed = (logits != before).any(dim=1).tolist()
    assert changed == [False, True, False, False, True, False]


def test_rows_with_a_stride(device, generator):
    wide = torch.randn(3, 700, generator=generator).to(device)
    before = wide.clone()
    index = torch.arange(3, dtype=torch.int32, device=device)
    ones = torch.ones(3, device=device)
    filter_logits_(wide[:, 100:600], index, ones, torch.full_like(index, 9), ones, ones * 0)
    assert torch.equal(wide[:, :100], before[:, :100])
    assert torch.equal(wide[:, 600:], before[:, 600:])
    assert ((wide[:, 100:600] > float("-inf")).sum(1) == 9).all()


def test_wrong_shapes_are_refused(device):
    logits, index, one = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32), torch.ones(2)
    logits, index, one = logits.to(device), index.to(device), one.to(device)
    with pytest.raises(ValueError, match="2 rows"):
        filter_logits_(logits, index, one[:1], index, one, one)
    with pytest.raises(ValueError, match="contiguous"):
        filter_logits_(logits.t().contiguous().t(), index, one, index, one, one)
    assert (filter_logits_(logits, index[:0], one, index, one, one) == 0).all()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
def test_large_vocabulary(dtype, spread, device, generator):
    logits = (torch.randn(len(SETTINGS), 151936, generator=generator) * spread).to(dtype)
    check([(row, *settings) for row, settings in zip(logits, SETTINGS, strict=True)], device)


@needs_cuda
def test_replayed_graph_reads_new_rows(device, generator):
    source = torch.randn(6, 20000, generator=generator).to(device)
    logits, rows = source.clone(), torch.full((4,), -1, dtype=torch.int32, device=device)
    ones, index = torch.ones(6, device=device), torch.full((6,), 5, dtype=torch.int32, device=device)
    filter_logits_(logits, rows, ones, index, ones, ones * 0)  # compiles outside of the capture
    assert torch.equal(logits, source)
    zeros = ones * 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filter_logits_(logits, rows, ones, index, ones, zeros)
    for listed in ([0, 1, 2, 3], [5, -1, -1, -1], [-1] * 4):
        logits.copy_(source)
        rows.copy_(torch.tensor(listed, dtype=torch.int32))
        graph.replay()
        kept = (logits > float("-inf")).sum(1).tolist()
        assert kept == [5 if row in listed else 20000 for row in range(6)]
