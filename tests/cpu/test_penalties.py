"""Penalties, biases, bad words and allowed tokens: as transformers has them, and the same under any schedule."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from nanovllm import LLM, SamplingParams
from nanovllm.engine import llm_engine
from nanovllm.engine.extras import PackedExtras
from nanovllm.engine.scheduler import Scheduler
from tests.checkpoints import VOCAB_SIZE
from tests.cpu.naive import INF, edit_naively

BLOCK_SIZE = 8
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (3, BLOCK_SIZE, 17, 1, 30, 17, 5, BLOCK_SIZE + 1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """One for each of `params`; the third and the sixth begin alike."""
    rng = random.Random(12)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[5][:14] = prompts[2][:14]
    return prompts


@pytest.fixture(scope="module")
def llm(random_llama: Any, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, num_kvcache_blocks=400)
    return engine


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens without any rule."""
    return generate(llm, prompts, GREEDY)


@pytest.fixture(scope="module")
def params(plain: list[list[int]]) -> list[SamplingParams]:
    """Rules that bite: against what the prompts give without them."""
    words = [plain[4][:1], plain[4][3:5], plain[4][5:9], [1, 2, 3]]
    stop_ids = tuple(range(0, VOCAB_SIZE, 2))
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -2.0, "repetition_penalty": 0.8},  # the same few again and again: counts grow
        {"bad_words": words},
        {"allowed_token_ids": range(5, 90), "logit_bias": {7: 2.5, 8: -4, 200: 100.0}},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {plain[6][0]: -100.0, 40: 3.0},
            "bad_words": [[plain[6][1]], [40, 40], [40, 41], [9, 40]],
            "allowed_token_ids": range(20, VOCAB_SIZE),
            "min_tokens": 10,
            "stop_token_ids": stop_ids,
        },
        {"allowed_token_ids": [3]},
    ]
    return [replace(GREEDY, **change) for change in changes]


@pytest.fixture(scope="module")
def expected(random_llama: Any, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """What the rules say, token by token, on transformers' logits."""
    return [naive_output(random_llama[1], *request) for request in zip(prompts, params, strict=True)]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def naive_output(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = model(torch.tensor([prompt + output])).logits[0, -1]
        row = edit_naively(logits, prompt, output, params)
        if len(output) < params.min_tokens:
            row[list(params.stop_token_ids)] = -INF
        output.append(int(row.argmax()))
        if output[-1] in params.stop_token_ids:
            break
    return output


def test_fixture_bites(plain: list[list[int]], expected: list[list[int]]) -> None:
    """Every rule must change the output, and penalties must see tokens that came more than once."""
    assert plain[0] == expected[0]
    assert all(ours != theirs for ours, theirs in zip(plain[1:], expected[1:], strict=True))
    assert max(Counter(expected[3]).values()) > 2
    assert 10 < len(expected[6]) < NUM_TOKENS  # stopped, when it was allowed to


def test_equals_naive(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], expected: list[list[int]]
) -> None:
    """All at once, then shuffled beside plain requests, with a cache that has all the prompts."""
    assert generate(llm, prompts, params) == expected
    for seed in range(3):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts)) * 2
        outputs = generate(llm, [prompts[i] for i in order], [params[i] for i in order])
        assert outputs == [expected[i] for i in order]


@pytest.mark.parametrize(
    "engine_settings",
    [
        {"max_num_seqs": 1},  # one slot: what the request before has left there must not be seen
        {"max_num_seqs": 2, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"kvcache_block_size": 3, "max_num_batched_tokens": 64},
    ],
    ids=str,
)
def test_other_schedules(
    random_llama: Any,
    make_llm: Any,
    prompts: list[list[int]],
    params: list[SamplingParams],
    expected: list[list[int]],
    engine_settings: dict[str, Any],
) -> None:
    """Guards against histories of another slot, or ones that lack what was not computed in the last chunk."""
    engine = make_llm(random_llama[0], **{"kvcache_block_size": BLOCK_SIZE, **engine_settings})
    for _ in range(2):  # the second time from the cache
        assert generate(engine, prompts, params) == expected


@pytest.mark.parametrize("budget", [16384, 9])
def test_preempted(
    random_llama: Any,
    make_llm: Any,
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    params: list[SamplingParams],
    expected: list[list[int]],
    budget: int,
) -> None:
    """Outputs that are recomputed are still outputs, of which the host knows all: they are sent to a new slot."""

    def fits(self: Scheduler, seq: Any, cached_block_ids: list[int], forecast: Any) -> bool:
        return self.block_manager.num_new_blocks(seq, cached_block_ids) <= self.block_manager.num_free_blocks

    monkeypatch.setattr(Scheduler, "_fits", fits)
    engine = make_llm(random_llama[0], kvcache_block_size=4, num_kvcache_blocks=14, max_num_batched_tokens=budget)
    outputs, steps = drive(engine, prompts, params)
    assert sum(step.num_preemptions for step in steps) > 3
    assert [output["token_ids"] for output in outputs] == expected


def test_sampled_rows(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    """Seeded requests with rules draw the same alone and in a batch; plain ones the same beside them as without."""
    ruled = [replace(one, temperature=1.2, seed=seed) for seed, one in enumerate(params)]
    solo = [generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, ruled, strict=True)]
    beside = [SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, top_p=0.9) for seed in range(8)]
    without = generate(llm, prompts, beside)
    outputs = generate(llm, prompts + prompts, ruled + beside)
    assert outputs == solo + without
    assert solo[7] == [3] * NUM_TOKENS


# Against transformers' own generate


@pytest.mark.parametrize("kind", ["repetition_penalty", "bad_words_ids", "sequence_bias", "allowed"])
def test_equals_transformers(
    llm: LLM, random_llama: Any, prompts: list[list[int]], plain: list[list[int]], kind: str
) -> None:
    """Token by token, prompt by prompt; no bad word begins at the end of a prompt (see below)."""
    params, theirs = [], []
    for prompt, tokens in zip(prompts, plain, strict=True):
        words = [tokens[1:2], tokens[2:4], tokens[4:7], [5, 6]]
        biases = {token: 3.0 - index for index, token in enumerate(dict.fromkeys(tokens))}
        settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "repetition_penalty": ({"repetition_penalty": 1.7},) * 2,
            "bad_words_ids": ({"bad_words_ids": words}, {"bad_words": words}),
            "sequence_bias": (
                {"sequence_bias": [[[token], bias] for token, bias in biases.items()]},
                {"logit_bias": biases},
            ),
            "allowed": (
                {"prefix_allowed_tokens_fn": lambda batch_id, ids: list(range(50, 100))},
                {"allowed_token_ids": range(50, 100)},
            ),
        }
        their_settings, ours = settings[kind]
        config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        ids = torch.tensor([prompt])
        output = random_llama[1].generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, **their_settings
        )
        theirs.append(output[0, len(prompt) :].tolist())
        params.append(replace(GREEDY, **ours))
    assert generate(llm, prompts, params) == theirs
    assert sum(tokens != without for tokens, without in zip(theirs, plain, strict=True)) > 4


def test_bad_words_look_at_the_output_alone(llm: LLM, prompts: list[list[int]], plain: list[list[int]]) -> None:
    """A word whose beginning is the prompt's end is not in the output when its last token comes. (transformers bans
    that token too.)"""
    word = [prompts[0][-1], plain[0][0]]
    assert generate(llm, [prompts[0]], replace(GREEDY, bad_words=(tuple(word),))) == [plain[0]]


# What goes to the device


def test_histories_are_sent_once(
    random_llama: Any,
    make_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> None:
    """A prompt goes to the device when its first token is sampled, however many chunks it had; from then on, nothing
    does. Requests without rules send nothing at all, nor does a step without others."""
    seen: list[PackedExtras | None] = []
    pack = llm_engine.pack
    monkeypatch.setattr(llm_engine, "pack", lambda *args: (packed := pack(*args), seen.append(packed.extras))[0])
    engine = make_llm(random_llama[0], kvcache_block_size=BLOCK_SIZE, max_num_batched_tokens=10)
    generate(engine, prompts, GREEDY)
    assert seen and set(seen) == {None}
    seen.clear()
    generate(engine, [prompts[2], prompts[0]], [replace(params[1], max_tokens=5), replace(GREEDY, max_tokens=12)])
    extras = [one for one in seen if one is not None]
    assert [one.fill_ids.tolist() for one in extras] == [prompts[2], [], [], [], []]
    assert extras[0].fill_columns.tolist() == list(range(17)) and len(set(extras[0].fill_slots.tolist())) == 1
    assert [one.history_lens.tolist() for one in extras] == [[17], [18], [19], [20], [21]]
    assert [one.prompt_lens.tolist() for one in extras] == [[17]] * 5
    assert seen[-5:] == [None] * 5
    seen.clear()
    generate(engine, prompts[5:6], params[5])
    assert [one.masks.shape[0] for one in seen if one is not None] == [1] + [0] * 15
    assert all(one is not None and not len(one.history_rows) for one in seen[-16:])
