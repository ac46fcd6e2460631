"""Large jobs: texts become tokens between the steps, and a bad one leaves nothing behind."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import feed as feed_module
from nanovllm.engine import llm_engine
from nanovllm.engine.feed import PromptFeed
from nanovllm.engine.inputs import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler

MAX_MODEL_LEN = 60
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# With it, a chunk holds ten texts of twenty characters.
CHUNK_CHARACTERS = 10 * (20 + feed_module._TEXT_OVERHEAD)


@pytest.fixture(scope="module")
def shared_llm(byte_llama: Path, make_shared_llm: Any) -> LLM:
    llm: LLM = make_shared_llm(byte_llama, max_model_len=MAX_MODEL_LEN, max_num_seqs=16)
    return llm


@pytest.fixture
def llm(shared_llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(feed_module, "_CHUNK_CHARACTERS", CHUNK_CHARACTERS)
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """What happens in order: the number of texts of each call of the tokenizer, and "step"."""
    records: list[str | int] = []
    tokenise, step = InputProcessor.tokenise, LLMEngine._step

    def recorded_tokenise(self: Any, texts: list[str], add_special_tokens: bool) -> Any:
        records.append(len(texts))
        return tokenise(self, texts, add_special_tokens)

    def recorded_step(self: Any) -> Any:
        records.append("step")
        return step(self)

    monkeypatch.setattr(InputProcessor, "tokenise", recorded_tokenise)
    monkeypatch.setattr(LLMEngine, "_step", recorded_step)
    return records


def texts_of(num_texts: int) -> list[str]:
    rng = random.Random(num_texts)
    return ["".join(rng.choices("abcdefgh", k=20)) for _ in range(num_texts)]


def test_steps_begin_after_one_chunk(llm: LLM, events: list[str | int]) -> None:
    """Guards against a job that tokenises everything first, or so late that a bad text is found after hours: there is
    one chunk before each step until all is done."""
    llm.generate(texts_of(45), GREEDY, use_tqdm=False)
    assert events[:10] == [10, "step", 10, "step", 10, "step", 10, "step", 5, "step"]
    assert set(events[10:]) == {"step"}


def test_results_are_those_of_small_jobs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against prompts that change places, or get others' params, where chunks meet: texts and ids mixed, in
    every order of their ends."""
    prompts: list[Any] = texts_of(60)
    prompts[3:30:4] = [list(prompt.encode()) for prompt in prompts[3:30:4]]
    params = [replace(GREEDY, max_tokens=1 + index % 7) for index in range(60)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(feed_module, "_CHUNK_CHARACTERS", 1 << 30)
    for output, prompt, one, alone in zip(
        outputs, prompts, params, llm.generate(prompts, params, use_tqdm=False), strict=True
    ):
        assert output["prompt_token_ids"] == list(prompt.encode() if isinstance(prompt, str) else prompt)
        assert (output["token_ids"], output["text"]) == (alone["token_ids"], alone["text"])
        assert len(output["token_ids"]) == one.max_tokens


def test_seeds_do_not_depend_on_chunks(byte_llama: Path, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's seed repeats a run however it is cut up."""
    outputs = []
    for num_characters in (CHUNK_CHARACTERS, 1 << 30, 1):
        monkeypatch.setattr(feed_module, "_CHUNK_CHARACTERS", num_characters)
        llm = make_llm(byte_llama, seed=4)
        drawn = llm.generate(texts_of(30), SamplingParams(max_tokens=4), use_tqdm=False)
        outputs.append([output["token_ids"] for output in drawn])
    assert outputs[0] == outputs[1] == outputs[2]


def test_little_waits_in_the_scheduler(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sequence, or n of them, for each prompt of a large job at once: what can't start now stays in
    the feed."""
    most = 0
    add = Scheduler.add

    def recorded_add(self: Scheduler, seq: Any) -> None:
        nonlocal most
        add(self, seq)
        most = max(most, len(self.waiting))

    monkeypatch.setattr(Scheduler, "add", recorded_add)
    outputs = llm.generate([[index] for index in range(200)], replace(GREEDY, temperature=1.0, n=3), use_tqdm=False)
    assert len(outputs) == 200
    assert most < llm.config.max_num_seqs + 3


# Bad input


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([*texts_of(30), 5], GREEDY, TypeError, "prompt 30: must be"),
        ([*texts_of(30), [320]], GREEDY, ValueError, "prompt 30: token id 320"),
        ([*texts_of(30), [1] * 60], GREEDY, ValueError, "prompt 30: has 60 tokens"),
        ([*texts_of(30), ""], GREEDY, ValueError, "prompt 30: is empty"),
        ([*texts_of(30), "\ud800"], GREEDY, ValueError, "prompt 30: .*surrogate"),
        (texts_of(30), [GREEDY] * 29, ValueError, "30 prompts, but 29 sampling params"),
        (texts_of(2), [GREEDY, None], TypeError, "sampling params 1"),
        (
            texts_of(2),
            [GREEDY, replace(GREEDY, stop_token_ids=(320,))],
            ValueError,
            "sampling params 1: stop token 320",
        ),
        (
            texts_of(2),
            [GREEDY, replace(GREEDY, stop_token_ids=tuple(range(300)), min_tokens=2)],
            ValueError,
            "sampling params 1: min_tokens=2.* none of the 300 tokens",
        ),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_refused_before_any_work(
    llm: LLM, events: list[str | int], prompts: Any, params: Any, error: type[Exception], message: str
) -> None:
    """What needs no tokeniser is found before any text is tokenised; an empty text by tokenising it alone."""
    with pytest.raises(error, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert events in ([], [1])


@pytest.mark.parametrize("index", [0, 9, 10, 44])
def test_text_that_is_too_long(llm: LLM, events: list[str | int], index: int) -> None:
    """It is found when its chunk is tokenised, which may be after some steps; the call leaves nothing, and others'
    requests go on."""
    prompts = texts_of(45)
    prompts[index] = "x" * MAX_MODEL_LEN
    other = llm.add_request([1, 2], replace(GREEDY, max_tokens=40))
    llm.step()
    events.clear()
    with pytest.raises(ValueError, match=f"prompt {index}: has {MAX_MODEL_LEN} tokens, .*max_model_len"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert events.count("step") == index // 10
    assert [seq.seq_id for seq in llm.scheduler.unfinished()] == [other]
    finished: dict[int, Any] = {}
    while not llm.is_finished():
        finished.update(llm.step().finished)
    assert set(finished) == {other}
    assert len(finished[other]["token_ids"]) == 40


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_tokenizer_that_fails(
    llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In the third chunk, after two steps."""
    original = InputProcessor.tokenise
    num_calls = 0

    def tokenise(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise error
        return original(*args)

    monkeypatch.setattr(InputProcessor, "tokenise", tokenise)
    with pytest.raises(error):
        llm.generate(texts_of(45), GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert len(llm.generate(texts_of(45), GREEDY, use_tqdm=False)) == 45


def test_tokenizer_without_a_token_for_the_unknown(llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = InputProcessor.tokenise

    def tokenise(self: Any, texts: list[str], *args: Any) -> Any:
        encoded = original(self, texts, *args)
        return [[*ids[:-1], None] if text == "?" else ids for text, ids in zip(texts, encoded, strict=True)]

    monkeypatch.setattr(InputProcessor, "tokenise", tokenise)
    with pytest.raises(ValueError, match="prompt 17: the tokenizer has no token for some of this text"):
        llm.generate([*texts_of(17), "?"], GREEDY, use_tqdm=False)
    assert_idle(llm)


# Progress and results


def test_bar_comes_before_the_tokeniser(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a user who sees nothing while the first texts are tokenised."""
    shown = []
    original = InputProcessor.tokenise

    def tokenise(*args: Any) -> Any:
        shown.append(capsys.readouterr().err)
        return original(*args)

    monkeypatch.setattr(InputProcessor, "tokenise", tokenise)
    llm.generate(texts_of(12), GREEDY)
    assert "0/12" in shown[0]
    assert "12/12" in capsys.readouterr().err


def test_results_do_not_stall_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against many results of one step becoming text before the next step: there is a limit of time, after
    which the rest waits; all arrive."""
    counts = []
    original = LLMEngine._collect

    def collect(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    monkeypatch.setattr(LLMEngine, "_collect", collect)
    prompts = texts_of(10)
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert max(counts) > 1
    counts.clear()
    monkeypatch.setattr(llm_engine, "_SECONDS_OF_OUTPUT_A_STEP", 0.0)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert max(counts) == 1 and sum(counts) == 10
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


# The feed itself


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is bounded by what its texts cost; token ids cost nothing, a message what its content does."""
    monkeypatch.setattr(feed_module, "_CHUNK_CHARACTERS", 500)
    calls: list[tuple[int, list[Any]]] = []

    def encode(part: list[Any], first_index: int) -> list["array[int]"]:
        calls.append((first_index, part))
        return [array("i", [first_index + offset]) for offset in range(len(part))]

    conversation = [{"role": "user", "content": "c" * 350}, {"role": "assistant", "content": None, "tool_calls": []}]
    prompts: list[Any] = [array("i", [1])] * 1000 + ["a" * 150, "b" * 150, "", conversation, "d" * 9999, "e"]
    given = list(prompts)
    feed = PromptFeed(prompts, [GREEDY] * len(prompts), encode)
    sizes: list[int] = []
    taken: list[int] = []
    while feed.num_prompts > (sizes[-1] if sizes else 0):
        feed.encode_chunk()
        while feed.can_take:
            token_ids, params = feed.take()
            assert params is GREEDY
            taken.append(token_ids[0])
        sizes.append(len(taken))
    assert taken == list(range(1006))
    assert sizes == [1002, 1004, 1005, 1006]
    assert [first for first, _ in calls] == [0, 1002, 1004, 1005]
    assert prompts == given  # the caller's list
    feed.encode_chunk()
    assert len(calls) == 4 and not feed.can_take
