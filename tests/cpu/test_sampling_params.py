"""Every field of SamplingParams: what is accepted, what is refused, and how."""

import dataclasses
import fractions
import json
import re
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.constraint import Constraint
from nanovllm.sampling_params import GREEDY_TEMPERATURE

NAN, INF = float("nan"), float("inf")


def test_defaults() -> None:
    """The first three are nano-vLLM's; the others change nothing unless set."""
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert (params.top_p, params.top_k, params.min_p, params.seed) == (1.0, 0, 0.0, None)
    assert (params.stop_token_ids, params.min_tokens, params.skip_special_tokens) == ((), 0, True)
    assert (params.stop, params.include_stop_str_in_output) == ((), False)
    assert not params.is_greedy and not params.has_filter
    assert params.n == 1


@pytest.mark.parametrize(
    "name, values",
    {
        "temperature": [0, 0.0, 1e-8, 1, 2.5, fractions.Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.int64(1)],
        "max_tokens": [1, 2**40, np.int32(5), np.uint8(200)],
        "ignore_eos": [True, False],
        "top_p": [1e-9, 0.5, 1, 1.0, np.float32(0.5)],
        "top_k": [-1, 0, 1, 2**40, np.int64(5)],
        "min_p": [0, 0.5, 1, np.float16(0.5)],
        "seed": [None, 0, 2**64 - 1, np.uint64(2**64 - 1), np.int64(5)],
        "stop": [(), [], "a", ["a"], ("a", "b", "a"), {"a"}, iter(["a"])],
        "include_stop_str_in_output": [True, False],
        "stop_token_ids": [(), [], [0], (5, 7), {5}, np.array([5, 7]), range(3), iter([1])],
        "min_tokens": [0, 64, np.int64(5)],
        "skip_special_tokens": [True, False],
        "n": [1, 2, 1000, np.int64(3)],
        "logprobs": [None, 0, 1, 20, np.int64(5)],
        "prompt_logprobs": [None, 0, 1, 20, np.int64(5)],
        "presence_penalty": [-2, 0, 0.5, 2.0, np.float32(1)],
        "frequency_penalty": [-2.0, 0, 0.5, 2, np.float32(1)],
        "repetition_penalty": [1e-9, 1, 1.3, 100.0, np.float32(1)],
        "logit_bias": [{}, {5: 1.0}, {np.int64(5): np.float32(-100)}, {0: 100}, (), ((5, 1.0),), [(5, -1)]],
        "bad_words": [(), [], ["a b", [5]], [(5, 7)], [np.array([5])], iter(["x"])],
        "allowed_token_ids": [None, [0], {5, 7}, np.array([5]), range(3)],
        "logits_processor": [None, lambda logits, rows: None, max],
        "json_schema": [None, {}, {"type": "object"}, '{"type": "object"}', "true"],
        "regex": [None, "a+", "é"],
        "choice": [None, ["a"], ("a", "b"), {"a": 1}.keys(), iter(["a"]), ["a", "a"]],
        "grammar": [None, 'start: "a"'],
    }.items(),
)
def test_accepted(name: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, values",
    {
        "temperature": [-1e-9, -1, NAN, INF, -INF, np.float32("nan")],
        "max_tokens": [0, -1],
        "top_p": [0, 0.0, -0.1, 1.0001, 2, NAN, INF],
        "top_k": [-2, -100],
        "min_p": [-0.001, 1.001, NAN, INF],
        "seed": [-1, 2**64],
        "stop": ["", [""], ["a", ""]],
        "stop_token_ids": [[-1], [5, -7]],
        "min_tokens": [-1, 65],  # more than max_tokens
        "n": [0, -1],
        "logprobs": [-1, 21],
        "prompt_logprobs": [-1, 21],
        "presence_penalty": [-2.001, 2.001, NAN, INF],
        "frequency_penalty": [-2.001, 2.001, NAN, -INF],
        "repetition_penalty": [0, 0.0, -1, NAN, INF],
        "logit_bias": [{-1: 1.0}, {5: 100.5}, {5: -101}, {5: NAN}, {5: -INF}],
        "bad_words": [[""], [[]], ["a", ""], [[5, -1]]],
        "allowed_token_ids": [[], [-1], [5, -7]],
        "json_schema": ["", "{", "[1]", "1", '{"a": NaN}', {"a": NAN}, "\ud800", '{"a": ' * 100_000],
        "regex": ["", "\ud800"],
        "choice": [[], [""], ["a", ""], ["\udfff"]],
        "grammar": ["", "\ud800"],
    }.items(),
)
def test_out_of_range(name: str, values: list[Any]) -> None:
    """The message names the field. NaN passes every comparison that is written the other way round."""
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, values",
    {
        "temperature": [True, "1", None, [1.0], 1j],
        "max_tokens": [True, 1.0, "1", None, np.float64(1)],
        "ignore_eos": [0, 1, None, "yes", np.True_],
        "top_p": [True, "1", None],
        "top_k": [True, 5.0, "5", None],
        "min_p": [False, "0", None],
        "seed": [True, 1.0, "1", [1]],
        "stop": [5, b"a", [5], ["a", None], [["a"]], [b"a"]],
        "include_stop_str_in_output": [0, 1, None, "yes"],
        "stop_token_ids": [5, "5", b"5", [5.0], ["5"], [True], [None], [[5]]],
        "min_tokens": [False, 0.0, "0", None],
        "skip_special_tokens": [0, 1, None, "no"],
        "n": [True, 2.0, "2", None],
        "logprobs": [True, 1.0, "1"],
        "prompt_logprobs": [False, 1.0, "1"],
        "presence_penalty": [True, "1", None],
        "frequency_penalty": [True, "1", None],
        "repetition_penalty": [True, "1", None],
        "logit_bias": [5, "5", {"5": 1.0}, {5.0: 1.0}, {5: "1"}, {5: None}, [5], [(5, 1.0, 2)]],
        "bad_words": ["word", b"word", 5, [5], [None], [[5.0]], [["a"]]],
        "allowed_token_ids": [5, "5", [5.0], ["5"], [True], [[5]]],
        "logits_processor": ["name", 5, [max]],
        "json_schema": [True, 1, [1], b"{}", {"a": object()}, {(1, 2): 3}],
        "regex": [1, b"a", ["a"], re.compile("a")],
        "choice": ["ab", b"ab", 1, {"a": 1}, [1], ["a", None], [["a"]]],
        "grammar": [1, b"a", ["a"]],
    }.items(),
)
def test_wrong_type(name: str, values: list[Any]) -> None:
    """A bool is an int to Python, and a string of digits is iterable: neither is what was meant."""
    for value in values:
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_number_beyond_float(name: str) -> None:
    """An int too large for a float is a value out of range like any other, not an OverflowError."""
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: 10**400})  # type: ignore[arg-type]


def test_message_has_the_range_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"top_p must be in \(0\.0, 1\.0\], got 1\.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"temperature must be in \[0\.0, inf\), got -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match=r"max_tokens must be at least 1, got 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match=r"min_tokens must be in \[0, 8\], got 9"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_several_greedy_samples() -> None:
    """They would all be the same."""
    for temperature in (0, 1e-8):
        with pytest.raises(ValueError, match=rf"n must be 1 for greedy sampling \(temperature={temperature}.*got 2"):
            SamplingParams(temperature=temperature, n=2)
        assert SamplingParams(temperature=temperature, n=1).is_greedy


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_every_field_is_tested() -> None:
    """A field added without validation tests would pass unseen."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    for test in (test_accepted, test_wrong_type):
        assert {name for mark in test.pytestmark for name, _ in mark.args[1]} == names


def test_frozen() -> None:
    """One object may serve many requests."""
    params = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, getattr(params, field.name))


def test_stop_token_ids_are_copied() -> None:
    """A list that the caller changes later must not reach into a queued request."""
    stop_token_ids = [5]
    params = SamplingParams(stop_token_ids=stop_token_ids)  # type: ignore[arg-type]
    stop_token_ids.append(7)
    assert params.stop_token_ids == (5,)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(5,)))


def test_stop_is_a_tuple() -> None:
    """A string is one stop string, not its characters; and the caller's list is copied."""
    stop = ["ab", "c", "ab"]
    params = SamplingParams(stop=stop)
    stop.append("d")
    assert params.stop == ("ab", "c")
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert hash(params) == hash(SamplingParams(stop=("ab", "c")))


def test_rules_are_copied() -> None:
    """The same for everything else that is a list or a dict, in a form that one can hand on and hash."""
    biases, words, inner, allowed = {5: 1}, ["a"], [5, 7], [1, 2, 1]
    params = SamplingParams(logit_bias=biases, bad_words=[*words, inner], allowed_token_ids=allowed)  # type: ignore
    biases[5] = 9
    inner.append(3)
    allowed.append(9)
    assert params.logit_bias == ((5, 1.0),)
    assert params.bad_words == ("a", (5, 7))
    assert params.allowed_token_ids == (1, 2)
    assert hash(dataclasses.replace(params)) == hash(params)
    assert dataclasses.replace(params, seed=3).logit_bias == ((5, 1.0),)


def test_unhashable_processor() -> None:
    """Rows are grouped by their processor."""

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, logits: Any, rows: Any) -> None: ...

    @dataclasses.dataclass(frozen=True)
    class HoldsAList:
        """Its type can be hashed; it can't."""

        token_ids: list[int]

        def __call__(self, logits: Any, rows: Any) -> None: ...

    for processor in (Unhashable(), HoldsAList([1])):
        with pytest.raises(TypeError, match="hashed"):
            SamplingParams(logits_processor=processor)


def test_none_is_nothing() -> None:
    """As it is for the users of other libraries."""
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, bad_words=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_at_most_one_constraint() -> None:
    with pytest.raises(ValueError, match="one constraint, got json_schema and regex"):
        SamplingParams(json_schema={}, regex="a")
    assert SamplingParams().constraint is None


def test_constraints_are_kept_as_text() -> None:
    """So params can be hashed, equal schemas are equal constraints, and a dict changed later changes nothing."""
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    params = SamplingParams(json_schema=schema)
    assert hash(params) == hash(SamplingParams(json_schema=json.dumps(schema, indent=2)))
    assert params.constraint == SamplingParams(json_schema=json.dumps(schema, indent=2)).constraint
    schema.clear()
    assert json.loads(params.json_schema)["type"] == "object"  # type: ignore[arg-type]
    assert params.json_schema.index('"b"') < params.json_schema.index('"a"')  # type: ignore[union-attr]
    assert dataclasses.replace(params, seed=1).constraint == params.constraint
    choice = SamplingParams(choice=["b", "a", "b"])  # type: ignore[arg-type]
    assert choice.choice == ("b", "a") and choice.constraint == Constraint("choice", '["b", "a"]')
    assert dataclasses.replace(choice, seed=1).constraint == choice.constraint
    assert SamplingParams(regex="a").constraint != SamplingParams(grammar="a").constraint


def test_numpy_integers_behave_as_python_ones() -> None:
    """A narrow numpy integer that is kept as it is overflows in the engine's arithmetic: 100 + uint8(200) is 44."""
    with np.errstate(over="raise"):
        params = SamplingParams(max_tokens=np.uint8(200), min_tokens=np.int8(100))
        assert 100 + params.max_tokens == 300
        assert 100 + params.min_tokens == 200
        assert type(SamplingParams(seed=np.int32(7)).seed) is int


@pytest.mark.parametrize("temperature", [0, 1e-12, GREEDY_TEMPERATURE / 2])
def test_greedy(temperature: float) -> None:
    """Under greedy no filter can drop the best token, so none is run."""
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.5, min_p=0.5)
    assert params.is_greedy and not params.has_filter


@pytest.mark.parametrize("temperature", [GREEDY_TEMPERATURE, 1e-4, 1.0])
def test_not_greedy(temperature: float) -> None:
    assert not SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize(
    "settings, has_filter",
    [
        ({}, False),
        ({"top_k": -1}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.999}, True),
        ({"top_p": 1.0}, False),
        ({"min_p": 0.001}, True),
    ],
)
def test_has_filter(settings: dict[str, Any], has_filter: bool) -> None:
    assert SamplingParams(**settings).has_filter is has_filter
