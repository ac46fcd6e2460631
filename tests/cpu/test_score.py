"""`LLM.score`: log-probabilities of continuations are those of transformers, however they are computed."""

import random
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import extra_sampler
from nanovllm.engine.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE, load_reference, save_byte_tokenizer, save_markov_model, save_random_model

BLOCK_SIZE = 8
# Of prompts and continuations: around a block's, so that their border falls on every side of one.
LENGTHS = [(1, 1), (1, 9), (7, 1), (8, 1), (8, 8), (9, 7), (16, 3), (17, 40), (40, 2), (39, 1)]
Pairs = tuple[list[list[int]], list[list[int]]]


@pytest.fixture
def pairs(rng: random.Random) -> Pairs:
    """Half of the prompts begin alike."""
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length, _ in LENGTHS]
    prompts[::2] = [shared[: len(prompt)] for prompt in prompts[::2]]
    return prompts, [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _, length in LENGTHS]


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


@torch.inference_mode()
def check(model: Any, results: list[Any], prompts: Any, continuations: Any) -> None:
    """Every number against a forward pass over the pair alone, right to 1e-4."""
    assert len(results) == len(prompts)
    for result, prompt, continuation in zip(results, prompts, continuations, strict=True):
        logits = model(torch.tensor([[*prompt, *continuation]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert result["token_ids"] == continuation
        assert result["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert result["logprob"] == pytest.approx(expected.sum().item(), abs=1e-4)
        assert result["is_greedy"] == (logits.argmax(-1).tolist() == continuation)


def record_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    steps: list[Any] = []
    step = llm._step
    monkeypatch.setattr(llm, "_step", lambda: (steps.append(step()), steps[-1])[1])
    return steps


def test_equals_transformers(llm: LLM, random_llama: Any, pairs: Pairs) -> None:
    """Twice, so that the second time the cache has every block: what it gives must end before the first target."""
    for _ in range(2):
        results = llm.score(*pairs, use_tqdm=False)
        check(random_llama[1], results, *pairs)
    found = [result["num_cached_tokens"] for result in results]
    assert found == [(num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE for num_prompt, _ in LENGTHS]
    with pytest.raises(AssertionError):  # the comparison sees what is one position off
        check(random_llama[1], llm.score([[5, 6]], [[7, 8]], use_tqdm=False), [[5, 6, 7]], [[8]])


def test_greedy(llm: LLM, random_llama: Any, pairs: Pairs) -> None:
    """What the engine generates greedily is greedy, and isn't with one other token, be it the first or the last."""
    prompts = pairs[0]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    best = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert all(result["is_greedy"] for result in llm.score(prompts, best, use_tqdm=False))
    for position in (0, 4):
        other = [[*ids[:position], (ids[position] + 1) % VOCAB_SIZE, *ids[position + 1 :]] for ids in best]
        assert not any(result["is_greedy"] for result in llm.score(prompts, other, use_tqdm=False))


def test_equally_likely(tmp_path: Any, make_llm: Any) -> None:
    """Of two best tokens the greedy one is that with the lower id, which an argmax finds."""
    save_markov_model(tmp_path, torch.tensor([[0.0, 1.0, 1.0, 0.0]] * 4))
    results = make_llm(tmp_path).score([[0], [0], [3]], [[1], [2], [1, 1, 1]], use_tqdm=False)
    assert [result["is_greedy"] for result in results] == [True, False, True]
    assert results[0]["logprob"] == pytest.approx(results[1]["logprob"])


@pytest.mark.parametrize("budget", [1, 3, BLOCK_SIZE, 30, 16384])
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_chunks(random_llama: Any, make_llm: Any, pairs: Pairs, budget: int, enable_prefix_caching: bool) -> None:
    """Guards against targets that are lost or doubled where a chunk ends, and against a last chunk of one token, which
    looks like the next token of a sequence that decodes."""
    settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": enable_prefix_caching}
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, **settings)
    check(random_llama[1], llm.score(*pairs, use_tqdm=False), *pairs)


def test_shared_prefix_is_computed_once(random_llama: Any, make_llm: Any, monkeypatch: Any, rng: Any) -> None:
    """Four continuations of a long prompt: its full blocks once, then what is left of it with each; the tokens of the
    last step alone, and none is sampled."""
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(100)]
    choices = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 3, 6)]
    steps = record_steps(llm, monkeypatch)
    results = llm.score([prompt] * 4, choices, use_tqdm=False)
    assert steps[0].num_prefill_tokens == 96 + sum(4 + len(choice) - 1 for choice in choices)
    assert steps[0].num_cached_tokens == 3 * 96
    assert [result["num_cached_tokens"] for result in results] == [0, 96, 96, 96]
    assert len(steps) == 2 and not any(step.new_token_ids for step in steps)
    assert steps[1].num_prefill_tokens == steps[1].num_decode_tokens == 0
    check(random_llama[1], results, [prompt] * 4, choices)


def test_logits_of_continuations_alone(random_llama: Any, make_llm: Any, monkeypatch: Any, pairs: Pairs) -> None:
    """One row a continuation's token, and only so many at a time."""
    monkeypatch.setattr(extra_sampler, "PROMPT_ROWS", 16)
    llm = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE)
    compute_logits, num_rows = llm.runner.model.compute_logits, []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute_logits(hidden)

    llm.runner.model.compute_logits = compute
    check(random_llama[1], llm.score(*pairs, use_tqdm=False), *pairs)
    assert sum(num_rows) == sum(length for _, length in LENGTHS) and max(num_rows) == 16


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize(
    ("num_blocks", "budget", "progress"), [(10, 6, "none"), (12, 4, "some"), (16, 8, "some"), (20, 14, "all")]
)
def test_preempted_among_others(
    random_llama: Any, make_llm: Any, drive: Any, monkeypatch: Any, num_blocks: int, budget: int, progress: str
) -> None:
    """Requests of another user decode meanwhile, and take the blocks of what has been scored in part, or in full but is
    not read yet: nothing is lost or doubled, and their tokens are as if they were alone."""
    rng = random.Random(0)
    lengths = ((5, 8, 9, 12) * 2, (30, 41, 20, 33) * 2)
    pairs = [[[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in one] for one in lengths]
    users, params = [[1] * 7, [2] * 7, [3] * 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    settings = {"kvcache_block_size": BLOCK_SIZE, "max_num_batched_tokens": budget, "num_kvcache_blocks": num_blocks}
    llm = make_llm(random_llama[0], **settings)
    preempted, preempt = [], Scheduler._preempt

    def record(self: Scheduler, seq: Any) -> None:
        if seq.is_only_scored:
            is_full = seq.num_scored_tokens == seq.last_scored
            preempted.append("all" if is_full else "some" if seq.prompt_logprobs else "none")
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", record)
    seq_ids = [llm.add_request(prompt, params) for prompt in users]
    steps = record_steps(llm, monkeypatch)
    for _ in range(3):
        llm.step()
    check(random_llama[1], llm.score(*pairs, use_tqdm=False), *pairs)
    while not llm.is_finished():
        llm.step()
    assert preempted == [progress]
    finished = {seq_id: output for step in steps for seq_id, output in step.finished.items()}
    expected, _ = drive(llm, users, params)
    assert [finished[seq_id]["token_ids"] for seq_id in seq_ids] == [output["token_ids"] for output in expected]


def test_seeds_are_untouched(byte_llama: Any, make_llm: Any) -> None:
    """Scoring draws no random number: what an engine with a seed generates doesn't depend on it."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = []
    for scores in (False, True):
        llm = make_llm(byte_llama, seed=3)
        if scores:
            llm.score("ab", "cd", use_tqdm=False)
        outputs.append(llm.generate("ab", params, use_tqdm=False)[0]["token_ids"])
    assert outputs[0] == outputs[1]


def test_rotation_by_length(tmp_path: Any, make_llm: Any, rng: Any) -> None:
    """Under a rotary embedding that depends on the length, that of what is computed counts, without the last token."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = save_random_model(tmp_path, max_position_embeddings=16, rope_parameters=rope)
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    (result,) = make_llm(tmp_path).score([ids[:20]], [ids[20:]], use_tqdm=False)
    logits = model(torch.tensor([ids[:-1]])).logits[0, 19:]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[20:])[:, None])[:, 0]
    assert result["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_texts(byte_llama: Any, make_llm: Any) -> None:
    """Strings are scored as their tokens; spaces that end the prompt belong to the continuation."""
    llm = make_llm(byte_llama)
    model = load_reference(byte_llama)
    prompts, continuations = ["Who? ", "a \n", "é", "x"], ["Me", "b", " über", " "]
    results = llm.score(prompts, continuations, use_tqdm=False)
    tokens = [
        [list(text.encode()) for text in texts] for texts in (["Who?", "a", "é", "x"], [" Me", " \nb", " über", " "])
    ]
    check(model, results, *tokens)
    assert llm.score("Who? ", "Me", use_tqdm=False)[0]["logprob"] == pytest.approx(results[0]["logprob"], abs=1e-4)
    mixed = llm.score(["Who?", tokens[0][2]], [" Me", tokens[1][2]], use_tqdm=False)
    assert [one["token_ids"] for one in mixed] == [tokens[1][0], tokens[1][2]]


def test_first_token_of_the_tokenizer(tmp_path: Any, make_llm: Any) -> None:
    """A tokenizer that begins texts with a token makes an empty prompt one of that token; also of mere spaces."""
    model = save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path, num_specials=44, add_bos=True)
    results = make_llm(tmp_path).score(["", " ", "<s>a", "a"], ["bc"] * 4, use_tqdm=False)
    texts = [list(b"bc"), list(b" bc"), list(b"bc"), list(b"bc")]
    check(model, results, [[256], [256], [256, 97], [256, 97]], texts)


def test_merged_border(tmp_path: Any, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prompt and whole text have different tokens at the border, the prompt's own number counts, and its own
    tokens come first; a continuation of which none is left is refused."""
    save_random_model(tmp_path)
    save_byte_tokenizer(tmp_path)
    llm = make_llm(tmp_path)
    encoded = {"ab": [1, 2], "abcd": [1, 9, 4], "abc": [1, 9]}
    monkeypatch.setattr(llm.inputs, "tokenise", lambda texts, *_: [torch.tensor(encoded[text]) for text in texts])
    (result,) = llm.score("ab", "cd", use_tqdm=False)
    assert result["token_ids"] == [4]
    assert result["logprob"] == llm.score([[1, 2]], [[4]], use_tqdm=False)[0]["logprob"]
    with pytest.raises(ValueError, match=r"continuation 0: has no tokens of its own: .* \(2\) than the prompt alone"):
        llm.score("ab", "c", use_tqdm=False)


BAD: list[tuple[Any, Any, type[Exception], str]] = [
    (["a"], ["b", "c"], ValueError, "1 prompts, but 2 continuations"),
    (5, ["b"], TypeError, "prompts must be a list"),
    (["a"], {"b": 1}, TypeError, "continuations must be a list"),
    (["a", "a"], ["b", [3]], TypeError, "prompt 1 and its continuation must both be"),
    ([[1], 5], [[1], [2]], TypeError, "prompt 1"),
    ([[1], [1]], [[1], [1.5]], TypeError, "continuation 1"),
    ([[1], [1]], [[1], []], ValueError, "continuation 1: has no tokens"),
    ([[1], []], [[1], [1]], ValueError, "prompt 1: has no tokens"),
    (["a", "a"], ["b", ""], ValueError, "continuation 1: is empty"),
    (["a", " \n"], ["b", "c"], ValueError, r"prompt 1: ' \\n' has nothing for a continuation to follow"),
    (["a", "a"], ["b", "\ud800"], ValueError, "continuation 1: is not valid Unicode"),
    ([[1], [1, 320]], [[1], [1]], ValueError, "prompt 1: token id 320 at position 1 is outside"),
    ([[1], [1]], [[1], [-1]], ValueError, "continuation 1: token id -1"),
    ([[1], [1] * 40], [[1], [1] * 12], ValueError, "prompt 1 .* 52 tokens, but max_model_len=50 leaves room for 50"),
    (["a", "a" * 40], ["b", "b" * 12], ValueError, "prompt 1 .* 52 tokens, but max_model_len=50"),
]


@pytest.mark.parametrize(("prompts", "continuations", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(
    byte_llama: Any, make_llm: Any, assert_idle: Any, prompts: Any, continuations: Any, error: Any, message: str
) -> None:
    llm = make_llm(byte_llama, max_model_len=50)
    with pytest.raises(error, match=message):
        llm.score(prompts, continuations, use_tqdm=False)
    assert_idle(llm)


def test_longest(byte_llama: Any, make_llm: Any) -> None:
    """`max_model_len` and one token, in chunks too; and as many as the whole cache holds, and one; not one more."""
    model = load_reference(byte_llama)
    for settings in (
        {"max_model_len": 50},
        {"max_model_len": 50, "max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 3},
    ):
        llm = make_llm(byte_llama, kvcache_block_size=16, **settings)
        limit = min(llm.max_model_len, llm.inputs.num_kv_tokens)
        check(model, llm.score([[5] * 40], [[6] * (limit - 39)], use_tqdm=False), [[5] * 40], [[6] * (limit - 39)])
        with pytest.raises(ValueError, match=str(limit)):
            llm.score([[5] * 41], [[6] * (limit - 39)], use_tqdm=False)


def test_nothing_and_no_tokenizer(llm: LLM) -> None:
    assert llm.score([], [], use_tqdm=False) == []
    with pytest.raises(ValueError, match="prompt 0: this model has no tokenizer"):
        llm.score("a", "b", use_tqdm=False)


def test_interrupted(byte_llama: Any, make_llm: Any, assert_idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails ends the call, and leaves nothing of it."""
    llm = make_llm(byte_llama, max_num_batched_tokens=4)
    steps = record_steps(llm, monkeypatch)
    step = llm._step
    monkeypatch.setattr(llm, "_step", lambda: pytest.fail("interrupted") if len(steps) == 2 else step())
    with pytest.raises(pytest.fail.Exception, match="interrupted"):
        llm.score(["abcdefgh", "abcdefgh"], ["ijkl", "mnop"], use_tqdm=False)
    monkeypatch.undo()
    assert_idle(llm)
    assert len(llm.score("abcdefgh", "ijkl", use_tqdm=False)) == 1
