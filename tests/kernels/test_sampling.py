import pytest
import torch
import triton
import triton.language as tl

from nanovllm.kernels import sampling
from nanovllm.kernels.sampling import gumbel_noise, sample, uniform_noise

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MASK = 0xFFFFFFFF


def mix(x: torch.Tensor) -> torch.Tensor:
    """The hash of the noise, on uint32 values in int64; the products wrap in 64 bits, which the mask doesn't see."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def uniform(tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The noise in its own words: tokens [V] and a key of two int32 -> [V] fp32 in (0, 1)."""
    first, second = (key.long() & MASK).tolist()
    h = mix((tokens.long() * 0x9E3779B9 + first) & MASK) ^ second
    return (((h >> 8).float() + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)


def gumbel(u: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(u))


def random_keys(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).int()


@triton.jit
def _noise_kernel(token_ptr, key_ptr, uniform_ptr, noise_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + index)
    key_0 = tl.load(key_ptr).to(tl.uint32, bitcast=True)
    key_1 = tl.load(key_ptr + 1).to(tl.uint32, bitcast=True)
    u = uniform_noise(token, key_0, key_1)
    noise = gumbel_noise(token, key_0, key_1)
    tl.store(uniform_ptr + index, u)
    tl.store(noise_ptr + index, noise)


def kernel_noise(tokens: torch.Tensor, key: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    u, noise = torch.zeros(2, len(tokens), device=device)
    _noise_kernel[(1,)](tokens.int().to(device), key.to(device), u, noise, BLOCK=len(tokens))
    return u.cpu(), noise.cpu()


def test_noise_is_the_specified_one_bit_for_bit(device, generator):
    tokens = torch.cat((torch.arange(2048), torch.randint(2**18, (2048,), generator=generator)))
    for key in [*random_keys(4, generator), torch.tensor([0, -1]).int(), torch.tensor([-(2**31), 2**31 - 1]).int()]:
        u, noise = kernel_noise(tokens, key, device)
        expected = uniform(tokens, key)
        assert torch.equal(u, expected)
        exact = gumbel(expected.double())
        allowed = 2 * (gumbel(expected).double() - exact).abs().max() + 6e-6  # two hardware log2 of 2 ulp each
        assert (noise.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("top", [0, 1, 255, 256, 2 * 256, 3 * 256, 1000 * 256, 2**20 * 256])
def test_noise_at_both_ends(top, device):
    """The key is chosen so that token 5 gets the hash 2**32 - 1 - top, or top: u nearest to 1, and to 0."""
    raw = int(mix(torch.tensor(5 * 0x9E3779B9 & MASK)))
    for h in (MASK - top, top):
        second = raw ^ h
        key = torch.tensor([0, second - 2**32 if second >= 2**31 else second]).int()
        tokens = torch.full((16,), 5)
        u, noise = kernel_noise(tokens, key, device)
        assert 0 < u[0] < 1
        assert torch.equal(u, uniform(tokens, key))
        assert noise.isfinite().all()
        assert -3 < noise[0] < sampling.LARGEST_NOISE.value
        assert abs(noise[0].double() - gumbel(u.double())[0]) < 8e-6


def twin(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [num_rows, vocab_size] fp32 by the formula, in plain torch."""
    tokens = torch.arange(logits.shape[1])
    rows = []
    for row, value, key in zip(logits.float(), temperature.tolist(), keys, strict=True):
        rows.append(row if value == 0 else row / value + gumbel(uniform(tokens, key)))
    return torch.stack(rows)


def assert_maximal(tokens: torch.Tensor, scores: torch.Tensor) -> None:
    """Each token's score is its row's best, up to rounding; and it isn't -inf."""
    assert tokens.dtype == torch.int64
    chosen, best = scores.gather(1, tokens.cpu().unsqueeze(1)).squeeze(1), scores.max(1).values
    assert ((best - chosen) <= 4e-6 * best.abs().clamp(min=5)).all(), (best - chosen).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 2049, 6000])
def test_sample_is_the_argmax_of_the_formula(vocab_size, dtype, device, generator):
    logits = (torch.randn(6, vocab_size + 9, generator=generator) * 4).to(dtype)[:, :vocab_size]
    temperature = torch.tensor([0.0, 0.6, 1.0, 5.0, 0.01, 0.0])
    keys = random_keys(6, generator)
    out = torch.full((6,), -7, device=device)
    assert sample(logits.to(device), temperature.to(device), keys.to(device), out) is out
    assert_maximal(out, twin(logits, temperature, keys))
    assert torch.equal(out.cpu()[[0, 5]], logits.float().argmax(1)[[0, 5]])


def test_peaked_rows_skip_noise_without_changing_the_draw(device, generator):
    """Most tiles can't win here, wherever the peak is; the winner is still the formula's."""
    logits = torch.randn(4, 9000, generator=generator)
    for row, token in enumerate((0, 3000, 8999, 5000)):
        logits[row, token] += 30
    logits[3, 8500] = logits[3, 5000] - 1  # a rival in a later tile that noise can lift
    temperature, keys = torch.full((4,), 0.8), random_keys(4, generator)
    tokens = sample(logits.to(device), temperature.to(device), keys.to(device))
    assert_maximal(tokens, twin(logits, temperature, keys))


def test_a_row_gives_the_same_token_alone_in_a_batch_and_however_it_is_split(device, generator, monkeypatch):
    logits = torch.randn(5, 9000, generator=generator).to(device)
    temperature, keys = torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0]).to(device), random_keys(5, generator).to(device)
    together = sample(logits, temperature, keys)
    for row in range(5):
        part = slice(row, row + 1)
        assert torch.equal(sample(logits[part], temperature[part], keys[part]), together[part])
    for chunk in (2048, 4096, 10240):  # five programs a row, three, and one, which writes the token itself
        monkeypatch.setattr(sampling, "_chunk", lambda *args, chunk=chunk: chunk)
        assert torch.equal(sample(logits, temperature, keys), together)


def test_rows_are_split_until_the_gpu_is_full():
    for num_rows in (1, 2, 16, 256, 1000, 2000):
        chunk = sampling._chunk(num_rows, 151936, 132)
        programs = num_rows * -(-151936 // chunk)
        assert chunk % sampling.BLOCK == 0
        assert programs >= min(75 * num_rows, 1500), "75 tiles a row are the most"
        assert -(-151936 // chunk) <= sampling.MAX_SPLITS
    assert -(-(2**24) // sampling._chunk(1, 2**24, 132)) <= sampling.MAX_SPLITS


@pytest.mark.parametrize("value", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_temperatures_are_greedy(value, dtype, device, generator):
    """Logits up to 60, beside a row at temperature 1; ties of fp16 go to the lowest index."""
    logits = (torch.rand(3, 500, generator=generator) * 60).to(dtype)
    temperature = torch.tensor([value, 1.0, value])
    keys = random_keys(3, generator)
    tokens = sample(logits.to(device), temperature.to(device), keys.to(device)).cpu()
    top = logits.float().max(1)
    assert torch.equal(logits.float().gather(1, tokens[:, None])[[0, 2], 0], top.values[[0, 2]])
    if value == 0:
        assert torch.equal(tokens[[0, 2]], top.indices[[0, 2]])


@pytest.mark.parametrize("chunk", [2048, 4096, 10240])
def test_ties_go_to_the_lowest_index(chunk, device, monkeypatch):
    """Between lanes, tiles of one lane (2048 apart) and programs; greedy, and where the noise drowns in rounding."""
    monkeypatch.setattr(sampling, "_chunk", lambda *args: chunk)
    tied = [[4000, 17, 3000], [2100, 4148, 8244], [17 + 2048, 17 + 4096], [8999, 8998]]
    logits = torch.zeros(len(tied) + 1, 9000, device=device)
    for row, tokens in enumerate(tied):
        logits[row, tokens] = 1
    keys = torch.zeros(len(logits), 2, dtype=torch.int32, device=device)
    lowest = [min(tokens) for tokens in tied]
    assert sample(logits, torch.zeros(len(logits), device=device), keys).tolist() == [*lowest, 0]
    assert sample(logits * 1e9, torch.full((len(logits),), 1e-3, device=device), keys).tolist()[:-1] == lowest


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_minus_infinity_and_nan(value, device, generator):
    logits = torch.full((6, 5000), float("-inf"))
    logits[1, 4321] = -1000.0
    logits[2, [3, 4000]] = torch.tensor([float("nan"), 1.0])
    logits[3] = float("nan")
    logits[4, 2000:3000] = 0.0
    logits[5, 1:] = float("nan")
    temperature = torch.full((6,), value)
    tokens = sample(logits.to(device), temperature.to(device), random_keys(6, generator).to(device)).tolist()
    assert tokens[:3] == [0, 4321, 4000]
    assert 0 <= tokens[3] < 5000
    assert 2000 <= tokens[4] < 3000
    assert 0 <= tokens[5] < 5000


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of counts against probabilities, all of them positive."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


def test_frequencies_are_the_softmax(device, generator):
    """The same numbers refuse a distribution of another temperature, so the test has eyes."""
    num_rows = 200_000 if device.type == "cuda" else 300
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -0.5])
    rows = logits.expand(num_rows, -1).to(device)  # one row, stride 0
    temperature, keys = torch.full((num_rows,), 0.8, device=device), random_keys(num_rows, generator).to(device)
    counts = torch.bincount(sample(rows, temperature, keys).cpu(), minlength=7).double()
    assert p_value(counts, (logits / 0.8).softmax(0)) > 1e-6
    assert p_value(counts, (logits / 2.0).softmax(0)) < 1e-6


def test_noise_has_the_right_distribution(generator):
    """Of the formula itself, with many keys at once: single draws, and pairs of consecutive ones.

    The keys are hashes of a counter, as an engine's are: the noise relies on well mixed key words.
    """
    num_rows = 100_000
    words = mix(mix(torch.arange(2 * num_rows)) ^ int(torch.randint(2**31, (1,), generator=generator)))
    first, second = words.view(num_rows, 2, 1).unbind(1)
    h = mix((torch.arange(4) * 0x9E3779B9 + first) & MASK) ^ second
    u = (((h >> 8).float() + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    tokens = (logits + gumbel(u)).argmax(1)
    probabilities = logits.softmax(0)
    assert p_value(torch.bincount(tokens, minlength=4).double(), probabilities) > 1e-6
    pairs = torch.bincount(tokens[::2] * 4 + tokens[1::2], minlength=16).double()
    assert p_value(pairs, torch.outer(probabilities, probabilities).flatten()) > 1e-6
    assert p_value(torch.bincount((u * 64).long().flatten(), minlength=64).double(), torch.full((64,), 1 / 64)) > 1e-6


def test_wrong_shapes_are_refused(device):
    logits, keys = torch.zeros(2, 8, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="2 rows"):
        sample(logits, torch.zeros(3, device=device), keys)
    with pytest.raises(ValueError, match="contiguous"):
        sample(logits.t().contiguous().t(), torch.zeros(2, device=device), keys)
    with pytest.raises(ValueError, match="temperature and keys must be contiguous"):
        sample(logits, torch.ones(1, device=device).expand(2), keys)
    assert sample(logits[:0], torch.zeros(0, device=device), keys[:0]).shape == (0,)


@needs_cuda
@pytest.mark.parametrize("num_rows", [1, 7, 256, 2000])
def test_large_vocabulary(num_rows, device, generator):
    logits = (torch.randn(num_rows, 151936, generator=generator) * 3).bfloat16()
    temperature = torch.rand(num_rows, generator=generator)
    temperature[::3] = 0
    keys = random_keys(num_rows, generator)
    tokens = sample(logits.to(device), temperature.to(device), keys.to(device)).cpu()
    some = slice(0, 12)
    assert_maximal(tokens[some], twin(logits[some], temperature[some], keys[some]))
    assert torch.equal(tokens[::3], logits[::3].float().argmax(1))


@needs_cuda
def test_replayed_graph_reads_new_keys(device, generator):
    logits = torch.randn(4, 50000, generator=generator).to(device)
    temperature, keys = torch.ones(4, device=device), random_keys(4, generator).to(device)
    sample(logits, temperature, keys)  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, temperature, keys)
    for _ in range(3):
        keys.copy_(random_keys(4, generator))
        graph.replay()
        assert torch.equal(out, sample(logits, temperature, keys))
