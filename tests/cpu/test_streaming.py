"""Streams: deltas that add up to what `generate` returns, and nothing left of a stream that is dropped."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import OutputDelta
from nanovllm.engine.step_handle import StepHandle
from tests.checkpoints import save_byte_tokenizer, save_markov_model

EOS = 257
TEXT = "é漢🙂 STAr!"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
PARAMS = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
PROMPTS: list[Any] = ["hello", list(range(40, 75)), "hi é", [200, 0xE6], "hello"]


class Failure(Exception):
    """What the tests below make a step raise."""


@pytest.fixture(scope="module")
def shared_llm(byte_llama: Path, make_shared_llm: Any) -> LLM:
    llm: LLM = make_shared_llm(byte_llama, num_kvcache_blocks=40)
    return llm


@pytest.fixture
def llm(shared_llm: LLM, assert_idle: Any) -> Any:
    """A model of random bytes, idle before and after."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory, make_shared_llm: Any) -> LLM:
    """A model that says TEXT, then </s>, after "?"."""
    folder = tmp_path_factory.mktemp("speaker")
    logits = torch.zeros(300, 300)
    tokens = [ord("?"), *TEXT.encode(), EOS]
    assert len(set(tokens)) == len(tokens)
    for before, after in itertools.pairwise(tokens):
        logits[before, after] = 20.0
    save_markov_model(folder, logits)
    save_byte_tokenizer(folder, num_specials=44)
    engine: LLM = make_shared_llm(folder)
    return engine


def joined(deltas: list[Any]) -> dict[int, dict[str, Any]]:
    """What the deltas of each index add up to."""
    whole: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        assert set(delta) == OutputDelta.__required_keys__ and type(delta) is dict
        one = whole.setdefault(delta["index"], {"text": "", "token_ids": [], "finish_reason": None})
        assert one["finish_reason"] is None  # only the last has a reason
        assert delta["token_ids"] or delta["finish_reason"]
        one["text"] += delta["text"]
        one["token_ids"] += delta["token_ids"]
        one["finish_reason"], one["stop_reason"] = delta["finish_reason"], delta["stop_reason"]
    return whole


def assert_equals(deltas: list[Any], outputs: list[Any]) -> None:
    assert joined(deltas) == {
        index: {key: output[key] for key in ("text", "token_ids", "finish_reason", "stop_reason")}
        for index, output in enumerate(outputs)
    }


def finish(llm: LLM) -> dict[int, Any]:
    finished: dict[int, Any] = {}
    while not llm.is_finished():
        finished.update(llm.step().finished)
    return finished


# What comes


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"min_tokens": 5, "max_tokens": 9}], ids=str)
def test_equals_generate(llm: LLM, changes: dict[str, Any]) -> None:
    """Guards against text or tokens lost, doubled or changed: random bytes make every kind of broken character."""
    for seed in range(4):
        params = replace(PARAMS, seed=seed, **changes)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert_equals(list(llm.stream(PROMPTS, params)), outputs)
        # One that stops each output somewhere, with and without characters that are held back.
        texts = [output["text"] for output in outputs]
        each = [replace(params, stop=[text[i : i + 3] or "x", text[-2:], text[2:7]]) for i, text in enumerate(texts, 1)]
        stopped = llm.generate(PROMPTS, each, use_tqdm=False)
        assert str in {type(output["stop_reason"]) for output in stopped}
        assert_equals(list(llm.stream(PROMPTS, each)), stopped)


def test_deltas_of_a_step(llm: LLM) -> None:
    """Guards against deltas that are kept until the end: each step brings one token of every running prompt."""
    stream = llm.stream(PROMPTS[:3], replace(PARAMS, max_tokens=5))
    assert [(delta["index"], len(delta["token_ids"])) for delta in stream] == [(0, 1), (1, 1), (2, 1)] * 5


def test_characters_are_whole(speaker: LLM) -> None:
    """Guards against halves of a character: it comes with its last byte."""
    deltas = list(speaker.stream("?", GREEDY))
    expected = [part for character in TEXT for part in [""] * (len(character.encode()) - 1) + [character]]
    assert [delta["text"] for delta in deltas] == [*expected, ""]
    assert [delta["token_ids"] for delta in deltas] == [[token] for token in [*TEXT.encode(), EOS]]
    assert [delta["finish_reason"] for delta in deltas] == [None] * len(TEXT.encode()) + ["stop"]
    assert deltas[-1]["stop_reason"] == EOS


def test_cut_character(speaker: LLM) -> None:
    """What is left of one at the end comes with the end."""
    deltas = list(speaker.stream("?", replace(GREEDY, max_tokens=4)))
    assert [delta["text"] for delta in deltas] == ["", "é", "", "\ufffd"]


def test_beginning_of_a_stop_string_is_held_back(speaker: LLM) -> None:
    """Guards against text that has to be taken back, and against text that waits longer than it must."""
    texts = [delta["text"] for delta in speaker.stream("?", replace(GREEDY, stop=["STOP", "r?", " SX"]))]
    assert texts[9:] == ["", "", " ", "STA", "", "r!", ""]
    deltas = list(speaker.stream("?", replace(GREEDY, stop=["STAr", "STOP"])))
    assert "".join(delta["text"] for delta in deltas) == "é漢🙂 "
    assert (deltas[-1]["finish_reason"], deltas[-1]["stop_reason"]) == ("stop", "STAr")
    deltas = list(speaker.stream("?", replace(GREEDY, stop="STAr", include_stop_str_in_output=True)))
    assert [delta["text"] for delta in deltas][-4:] == ["", "", "", "STAr"]


def test_without_tokenizer(random_llama: Any, make_llm: Any) -> None:
    llm = make_llm(random_llama[0])
    assert_equals(list(llm.stream([[1], [2, 3]], GREEDY)), llm.generate([[1], [2, 3]], GREEDY, use_tqdm=False))


def test_preempted_requests(byte_llama: Path, make_llm: Any, shared_llm: LLM) -> None:
    """Guards against tokens that come again after a preemption."""
    llm = make_llm(byte_llama, num_kvcache_blocks=5)
    prompts, num_preemptions = PROMPTS * 2, 0
    params = [replace(PARAMS, seed=seed, ignore_eos=False, stop="never") for seed in range(len(prompts))]
    step = llm._step

    def counting_step() -> Any:
        nonlocal num_preemptions
        output = step()
        num_preemptions += output.num_preemptions
        return output

    llm._step = counting_step
    llm.scheduler.estimator._mean_output_tokens = 1.0  # far too optimistic
    assert_equals(list(llm.stream(prompts, params)), shared_llm.generate(prompts, params, use_tqdm=False))
    assert num_preemptions > 0


def test_refused_at_the_call(llm: LLM) -> None:
    """Before iteration, and nothing is left."""
    for prompts, params in ((["a", ""], PARAMS), (["a"], [PARAMS] * 2), ([[1], [-1]], PARAMS)):
        with pytest.raises(ValueError):
            llm.stream(prompts, params)
    with pytest.raises(TypeError):
        llm.stream(5)  # type: ignore[arg-type]
    assert list(llm.stream([])) == []


# Dropped, and beside others


@pytest.mark.parametrize("num_deltas", [0, 1, 4, 11])
@pytest.mark.parametrize("how", ["close", "break", "collect"])
def test_dropped(llm: LLM, assert_idle: Any, num_deltas: int, how: str) -> None:
    """Guards against requests that go on for nobody, and against ending others' requests, too."""
    other = llm.add_request("other", PARAMS)
    (expected,) = llm.generate(["other"], PARAMS, use_tqdm=False)
    stream = llm.stream(PROMPTS, PARAMS)
    for count, _ in enumerate(stream):
        if count + 1 >= num_deltas:
            break
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "break":
        del stream
    else:
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    assert {seq.seq_id for seq in llm.scheduler.unfinished()} <= {other}
    llm.block_manager.check_integrity(llm.scheduler.unfinished())
    assert finish(llm)[other]["token_ids"] == expected["token_ids"]
    assert_idle(llm)


def test_never_started(llm: LLM) -> None:
    """A stream that nobody iterates queues nothing."""
    stream = llm.stream(PROMPTS, PARAMS)
    assert llm.is_finished()
    del stream


def test_dropped_within_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the garbage collector changing queues that a step is in the middle of: it closes streams at any
    time."""
    streams = [llm.stream(PROMPTS, PARAMS)]
    next(streams[0])
    other = llm.add_request("other", replace(PARAMS, max_tokens=6))
    schedule = llm.scheduler.schedule

    def schedule_and_drop() -> Any:
        streams.clear()
        assert len(list(llm.scheduler.unfinished())) == len(PROMPTS) + 1
        return schedule()

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "schedule", schedule_and_drop)
        llm.step()
    llm.step()
    assert [seq.seq_id for seq in llm.scheduler.unfinished()] == [other]
    assert len(finish(llm)[other]["token_ids"]) == 6


def test_beside_others(llm: LLM) -> None:
    """Guards against results of others that a stream swallows, and the other way round: by hand, by generate and by
    another stream, at once."""
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    short = llm.add_request(PROMPTS[0], replace(PARAMS, max_tokens=3))
    first, second = llm.stream(PROMPTS, PARAMS), llm.stream(PROMPTS, PARAMS)
    deltas = [[next(first) for _ in range(7)], [next(second)]]
    first_step = llm.step()
    assert set(first_step.finished) <= {short} and set(first_step.new_token_ids) <= {short}
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output["token_ids"] for output in again] == [output["token_ids"] for output in expected]
    step = llm.step()  # by now all that was asked for has ended
    assert set(step.finished) <= {short}
    deltas[1] += second
    long = llm.add_request(PROMPTS[0], PARAMS)
    deltas[0] += first
    for one in deltas:
        assert_equals(one, expected)
    finished = {**first_step.finished, **step.finished, **finish(llm)}
    assert set(finished) == {short, long}
    assert finished[short]["token_ids"] == expected[0]["token_ids"][:3]
    assert finished[long]["token_ids"] == expected[0]["token_ids"]


def test_failed_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever iterates gets the error; another stream ends as aborted, with all its tokens and text."""
    expected = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)[0]
    streams = [llm.stream(PROMPTS[:1], replace(PARAMS, stop="never")) for _ in range(2)]
    deltas = [next(stream) for stream in streams]
    for _ in range(3):
        next(streams[0])

    def read(handle: Any) -> Any:
        raise Failure

    with monkeypatch.context() as patch, pytest.raises(Failure):
        patch.setattr(StepHandle, "read", read)
        list(streams[0])
    assert list(streams[0]) == []
    whole = joined([deltas[1], *streams[1]])[0]
    assert whole["finish_reason"] == "abort"
    assert 1 < len(whole["token_ids"]) < 24
    assert whole["token_ids"] == expected["token_ids"][: len(whole["token_ids"])]
    assert whole["text"].rstrip("\ufffd") in expected["text"]


def test_closed_engine(byte_llama: Path, make_llm: Any) -> None:
    llm = make_llm(byte_llama)
    stream = llm.stream(PROMPTS, PARAMS)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream(PROMPTS)


def test_no_cost_without(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that need no running text have none."""
    seen = []
    enqueue = LLMEngine._enqueue
    monkeypatch.setattr(LLMEngine, "_enqueue", lambda self, seq: (seen.append(seq), enqueue(self, seq))[1])
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [seq.text for seq in seen] == [None] * len(PROMPTS)


def test_prompt_logprobs_come_first(llm: LLM) -> None:
    params = replace(PARAMS, prompt_logprobs=1, max_tokens=4)
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    first, *others = llm.stream(["hello"], params)
    assert [entry and list(entry) for entry in first["prompt_logprobs"]] == [
        entry and list(entry) for entry in output["prompt_logprobs"]
    ]
    assert not any("prompt_logprobs" in delta for delta in others)


def test_step_within_a_step(llm: LLM) -> None:
    """Guards against wrong tokens, for everybody, when a logits processor (or another thread) uses the engine."""

    def nested(logits: torch.Tensor, rows: Any) -> None:
        llm.generate([[5]], GREEDY, use_tqdm=False)

    with pytest.raises(RuntimeError, match="a step is running"):
        llm.generate([[1, 2]], replace(PARAMS, logits_processor=nested), use_tqdm=False)
    assert len(llm.generate([[1, 2]], PARAMS, use_tqdm=False)[0]["token_ids"]) == PARAMS.max_tokens
