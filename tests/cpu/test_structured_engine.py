"""Constrained output through the engine: every output matches, whatever the schedule, and nobody else notices."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import launched_step
from nanovllm.engine.grammar_matcher import MaskFilling, Matcher
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_handle import StepHandle
from tests.checkpoints import smollm2_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "a\u00e9b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},  # a random model would indent until it runs out of tokens
}
JSON = SamplingParams(json_schema=SCHEMA, max_tokens=200, temperature=2.0)
REGEX = SamplingParams(regex=r"\d{3}-[a-f]{2,9}!", max_tokens=60)
CHOICE = SamplingParams(choice=("yes", "no", "no way", "n\u00f6"), max_tokens=60)  # type: ignore[arg-type]
GRAMMAR = SamplingParams(grammar='start: "(" start ")" | "x" "y"?', max_tokens=60)
KINDS = {"json_schema": JSON, "regex": REGEX, "choice": CHOICE, "grammar": GRAMMAR}
PLAIN = SamplingParams(max_tokens=40, ignore_eos=True)


def is_match(params: SamplingParams, text: str) -> bool:
    if params.json_schema is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if params.regex is not None:
        return re.fullmatch(params.regex, text) is not None
    if params.choice is not None:
        return text in params.choice
    inner = text.strip("()")
    return inner in ("x", "xy") and text.count("(") == text.count(")") and re.fullmatch(r"\(*xy?\)*", text) is not None


def check(outputs: list[Any], params: list[SamplingParams]) -> int:
    """Asserts that each output that was not cut off matches; returns the number of those."""
    num_whole = 0
    for output, one in zip(outputs, params, strict=True):
        assert output["finish_reason"] in ("stop", "length")
        if output["finish_reason"] == "stop":
            assert is_match(one, output["text"]), output["text"]
            num_whole += 1
    return num_whole


def generate(llm: LLM, prompts: list[Any], params: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def seeded(params: SamplingParams, num: int, first: int = 0) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(first, first + num)]


@pytest.fixture(scope="module")
def llm(byte_llama: Path, make_shared_llm: Any) -> LLM:
    engine: LLM = make_shared_llm(byte_llama, num_kvcache_blocks=1024)
    return engine


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> dict[Matcher, list[int]]:
    """The tokens that each matcher was told."""
    tokens: dict[Matcher, list[int]] = {}
    accept = Matcher.accept

    def record(self: Matcher, token_id: int) -> bool:
        tokens.setdefault(self, []).append(token_id)
        return accept(self, token_id)

    monkeypatch.setattr(Matcher, "accept", record)
    return tokens


# What comes out


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_matches(llm: LLM, kind: str) -> None:
    params = seeded(KINDS[kind], 24)
    outputs = generate(llm, ["prompt"] * 24, params)
    assert check(outputs, params) >= 20
    assert len({output["text"] for output in outputs}) > 1


def test_demo_model(make_llm: Any) -> None:
    """A vocabulary of tokens that cross the parts of JSON; with chat, and greedy."""
    llm = make_llm(smollm2_path(), num_kvcache_blocks=256)
    params = [
        *seeded(replace(JSON, max_tokens=100), 4),
        REGEX,
        CHOICE,
        GRAMMAR,
        replace(JSON, temperature=0.0, max_tokens=50),
    ]
    assert check(generate(llm, ["Describe a person as JSON: "] * len(params), params), params) >= len(params) - 2
    (output,) = llm.chat(
        [{"role": "user", "content": "Is water wet?"}], replace(CHOICE, temperature=0.0), use_tqdm=False
    )
    assert output["text"] in CHOICE.choice and output["finish_reason"] == "stop"


def test_others_are_not_changed(llm: LLM, byte_llama: Path, make_llm: Any) -> None:
    """Guards against masks that fall on other rows, in steps that mix both kinds and prompts of all lengths."""
    prompts = ["p" * (1 + 7 * index) for index in range(8)]
    plain = [replace(PLAIN, seed=index, logprobs=index % 2 or None, min_tokens=index % 3) for index in range(8)]
    params = [one for pair in zip(plain, [JSON, REGEX, CHOICE, GRAMMAR] * 2, strict=True) for one in pair]
    outputs = generate(llm, [prompt for prompt in prompts for _ in range(2)], params)
    alone = make_llm(byte_llama, num_kvcache_blocks=1024)
    for output, expected in zip(outputs[::2], generate(alone, prompts, plain), strict=True):
        assert output["token_ids"] == expected["token_ids"]
        assert [list(row) for row in output.get("logprobs", [])] == [list(row) for row in expected.get("logprobs", [])]
    assert check(outputs[1::2], params[1::2]) >= 7


def test_no_constraint_no_masks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without constrained rows go the way they went: nothing is read before a launch is complete, and the grammar
    library is not looked at, which may not be there."""
    for name in ("fill_bitmasks", "MaskFilling"):
        monkeypatch.setattr(launched_step, name, lambda *_: pytest.fail("masks were filled"))
    seen = []
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch: (handle := run(self, batch), seen.append(handle))[0])
    generate(llm, ["a"], replace(PLAIN, logprobs=1))
    assert None not in seen
    monkeypatch.undo()
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch: (handle := run(self, batch), seen.append(handle))[0])
    generate(llm, ["a"], REGEX)
    assert None in seen


def test_order_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass of a step is launched before the tokens of the step before are waited for."""
    events: list[str] = []

    def log(cls: Any, name: str, event: str) -> None:
        function: Callable[..., Any] = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args: (events.append(event), function(*args))[1])

    log(ModelRunner, "_logits", "forward")
    log(StepHandle, "read", "read")
    log(Scheduler, "postprocess", "postprocess")
    generate(llm, ["a"], replace(REGEX, regex="abcd"))
    step = ["forward", "read", "postprocess"]
    assert events == ["forward", *step * 4]  # the last was launched before "d" was known; nobody reads its token


@pytest.mark.parametrize("budget", [3, 16])
def test_chunked_prompts(llm: LLM, byte_llama: Path, make_llm: Any, budget: int) -> None:
    params = [*seeded(JSON, 3), *seeded(GRAMMAR, 3), replace(PLAIN, seed=1)]
    prompts = [bytes(range(33, 33 + 13 * index)).decode() or "x" for index in range(7)]
    chunked = make_llm(byte_llama, max_num_batched_tokens=budget, num_kvcache_blocks=512)
    expected = generate(llm, prompts, params)
    assert [o["token_ids"] for o in generate(chunked, prompts, params)] == [o["token_ids"] for o in expected]


@pytest.mark.usefixtures("eager_admission")
@pytest.mark.parametrize("budget", [16384, 7])
def test_preempted(
    llm: LLM, byte_llama: Path, make_llm: Any, drive: Any, accepted: dict[Matcher, list[int]], budget: int
) -> None:
    """A sequence that is computed again goes on where its matcher was: the matcher saw each token once."""
    params = [*seeded(JSON, 5), *seeded(replace(REGEX, regex="[a-z]{40}"), 5)]
    prompts = [f"prompt {index}" for index in range(10)]
    expected = generate(llm, prompts, params)
    accepted.clear()
    tiny = make_llm(byte_llama, num_kvcache_blocks=18, max_num_batched_tokens=budget)
    outputs, steps = drive(tiny, prompts, params)
    assert sum(step.num_preemptions for step in steps) > 2
    assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in expected]
    assert [o["finish_reason"] for o in outputs] == [o["finish_reason"] for o in expected]
    assert sorted(accepted.values()) == sorted(output["token_ids"] for output in outputs)


def test_samples(llm: LLM) -> None:
    """Each has its own matcher; the first is what n=1 gives."""
    one = replace(JSON, seed=7)
    (output,) = generate(llm, ["a"], replace(one, n=5))
    (alone,) = generate(llm, ["a"], one)
    assert output["token_ids"] == alone["token_ids"]
    assert check(output["samples"], [one] * 5) >= 3
    assert len({sample["text"] for sample in output["samples"]}) == 5


def test_stream(llm: LLM) -> None:
    params = [*seeded(JSON, 3), CHOICE, replace(PLAIN, seed=3)]
    params[3] = replace(CHOICE, seed=4)
    prompts = ["a", "b", "c", "d", "e"]
    expected = generate(llm, prompts, params)
    deltas = list(llm.stream(prompts, params))
    for index, output in enumerate(expected):
        own = [delta for delta in deltas if delta["index"] == index]
        assert "".join(delta["text"] for delta in own) == output["text"]
        assert [token_id for delta in own for token_id in delta["token_ids"]] == output["token_ids"]
        assert own[-1]["finish_reason"] == output["finish_reason"]


# With other params


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_complete_output_ends(llm: LLM, ignore_eos: bool) -> None:
    """Nothing can follow: "stop" without a stop token, also where that is the last token that was asked for."""
    params = replace(REGEX, regex="abc", ignore_eos=ignore_eos)
    for one in (params, replace(params, max_tokens=3), replace(params, min_tokens=20)):
        (output,) = generate(llm, ["x"], one)
        assert (output["text"], output["finish_reason"], output["stop_reason"]) == ("abc", "stop", None)
    (output,) = generate(llm, ["x"], replace(params, max_tokens=2))
    assert (output["text"], output["finish_reason"]) == ("ab", "length")


def test_end_token_where_more_may_follow(llm: LLM) -> None:
    """The end-of-sequence token comes where the text may end, if the model wants it and `min_tokens` are over."""
    params = replace(REGEX, regex="a+", temperature=100.0, max_tokens=100)
    outputs = generate(llm, ["x"] * 8, seeded(params, 8))
    assert {output["stop_reason"] for output in outputs} == {257}
    assert all(re.fullmatch("a+", output["text"]) for output in outputs)
    outputs = generate(llm, ["x"] * 8, seeded(replace(params, min_tokens=30), 8))
    assert all(len(output["token_ids"]) > 30 and output["stop_reason"] == 257 for output in outputs)
    (output,) = generate(llm, ["x"], replace(params, ignore_eos=True))
    assert output["text"] == "a" * 100 and output["finish_reason"] == "length"


def test_stop_strings_and_tokens(llm: LLM) -> None:
    params = replace(REGEX, regex="ab+c{10}", seed=1)
    (output,) = generate(llm, ["x"], replace(params, stop="ccc"))
    assert re.fullmatch("ab+", output["text"]) and output["stop_reason"] == "ccc"
    (output,) = generate(llm, ["x"], replace(params, stop_token_ids=(ord("b"),)))
    assert output["text"] == "ab" and output["stop_reason"] == ord("b")


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    """Before the mask: those of the whole text as a prompt."""
    (output,) = generate(llm, ["x"], replace(REGEX, logprobs=2))
    prompt = output["prompt_token_ids"] + output["token_ids"]
    (scored,) = generate(llm, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))
    expected = scored["prompt_logprobs"][len(output["prompt_token_ids"]) :]
    assert len(output["logprobs"]) == len(output["token_ids"])
    for ours, theirs in zip(output["logprobs"], expected, strict=True):
        assert list(ours) == list(theirs)
        assert [one.logprob for one in ours.values()] == pytest.approx(
            [one.logprob for one in theirs.values()], abs=1e-4
        )


def test_with_penalties_biases_filters(llm: LLM) -> None:
    """What leaves out or moves tokens chooses among those that the constraint allows."""
    params = replace(
        JSON, presence_penalty=1.0, repetition_penalty=1.5, logit_bias={ord("x"): 50.0}, top_k=3, top_p=0.9
    )
    some = seeded(params, 8)
    outputs = generate(llm, ["a"] * 8, some)
    assert check(outputs, some) >= 6
    assert sum(output["text"].count("x") for output in outputs) > 16


@pytest.mark.parametrize("name, value", [("bad_words", ["a"]), ("allowed_token_ids", [1, 2])])
def test_refused_together(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"regex and {name} exclude each other"):
        replace(REGEX, **{name: value})


def test_processor_that_leaves_nothing(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Then no token can be right: the sequence ends without it, and says so; others go on."""

    def ban_dashes(logits: Any, rows: Any) -> None:
        logits[:, ord("-")] = -float("inf")

    params = [replace(REGEX, logits_processor=ban_dashes, logprobs=1), replace(REGEX, seed=1)]
    with caplog.at_level(logging.ERROR):
        outputs = generate(llm, ["x", "y"], params)
    assert outputs[0]["finish_reason"] == "abort" and re.fullmatch(r"\d{3}", outputs[0]["text"])
    assert len(outputs[0]["logprobs"]) == 3
    assert "its constraint can't be followed" in caplog.text
    assert outputs[1]["finish_reason"] == "stop" and is_match(REGEX, outputs[1]["text"])


# Errors


@pytest.mark.parametrize("wrong", [{"regex": "["}, {"json_schema": {"type": "objec"}}, {"grammar": "start: other"}])
def test_wrong_constraints_are_named(llm: LLM, assert_idle: Any, wrong: dict[str, Any]) -> None:
    params = [PLAIN, SamplingParams(**wrong)]
    with pytest.raises(ValueError, match=rf"sampling params 1: {next(iter(wrong))} "):
        generate(llm, ["a", "b"], params)
    with pytest.raises(ValueError, match="sampling params 0: "):
        llm.add_request("a", params[1])
    with pytest.raises(ValueError, match="sampling params 1: "):
        llm.stream(["a", "b"], params)
    assert_idle(llm)


def test_model_without_tokenizer(random_llama: Any, make_llm: Any) -> None:
    with pytest.raises(ValueError, match="sampling params 0: this model has no tokenizer"):
        make_llm(random_llama[0]).add_request([1], REGEX)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(MaskFilling, "__init__"), (MaskFilling, "result"), (Matcher, "accept"), (ModelRunner, "sample")],
    ids=["begin", "result", "accept", "sample"],
)
def test_failure_between_two_steps(
    llm: LLM, assert_idle: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """What raises while the masks are made ends all requests, drops their matchers, and leaves a usable engine."""
    function, calls = getattr(owner, name), []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(owner, name, fail)
    seq_ids = [llm.add_request("x", REGEX), llm.add_request("y", PLAIN)]
    sequences = list(llm.scheduler.unfinished())
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.step()
    assert [seq.matcher for seq in sequences] == [None, None]
    finished = llm.step().finished
    assert [finished[seq_id]["finish_reason"] for seq_id in seq_ids] == ["abort"] * 2
    assert_idle(llm)
    monkeypatch.undo()
    assert generate(llm, ["x"], replace(CHOICE, choice=("ok",)))[0]["text"] == "ok"


def test_aborted_midway(llm: LLM, assert_idle: Any) -> None:
    """The token in flight of an aborted sequence goes to no matcher."""
    seq_ids = [llm.add_request("x", one) for one in seeded(JSON, 3)]
    finished = {}
    for _ in range(5):
        finished.update(llm.step().finished)
    llm.abort(seq_ids[1])
    while not llm.is_finished():
        finished.update(llm.step().finished)
    assert finished[seq_ids[1]]["finish_reason"] == "abort" and len(finished[seq_ids[1]]["token_ids"]) == 4
    assert check([finished[seq_ids[0]], finished[seq_ids[2]]], [JSON, JSON]) == 2
    assert_idle(llm)
