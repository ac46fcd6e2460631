"""Constraints on the host: whatever allowed tokens are picked, the text matches; what can't be enforced is refused."""

import builtins
import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from nanovllm import SamplingParams
from nanovllm.engine import grammar_compiler
from nanovllm.engine.grammar_compiler import Grammar, GrammarCompiler
from nanovllm.engine.grammar_matcher import Matcher, fill_bitmasks
from nanovllm.utils.checkpoint import open_checkpoint
from tests.checkpoints import save_byte_tokenizer, smollm2_path

BYTE_EOS = 257  # of the byte tokenizer, whose other ids below 256 are the bytes
NUM_BYTE_IDS = 300


@pytest.fixture(scope="module")
def byte_compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = save_byte_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"), num_specials=44)
    return GrammarCompiler(tokenizer, NUM_BYTE_IDS, {BYTE_EOS})


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return open_checkpoint(str(smollm2_path()), with_weights=False).load_tokenizer()


@pytest.fixture(scope="module")
def smollm2_compiler(smollm2: Any) -> GrammarCompiler:
    return GrammarCompiler(smollm2, len(smollm2), {smollm2.eos_token_id})


def compile_now(compiler: GrammarCompiler, **constraint: Any) -> Grammar:
    params = SamplingParams(**constraint)
    assert params.constraint is not None
    return compiler.compile(params.constraint).result()


def allowed_ids(matcher: Matcher) -> list[int]:
    (row,) = fill_bitmasks([matcher])
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def walk(grammar: Grammar, eos: int, rng: random.Random, num_tokens: int = 300) -> list[int] | None:
    """Tokens picked at random among the allowed ones, without the end token; None if that takes too long."""
    matcher, tokens = grammar.start({eos}), []
    for _ in range(num_tokens):
        allowed = allowed_ids(matcher)
        assert allowed
        token = eos if eos in allowed and rng.random() < 0.5 else rng.choice(allowed)
        assert matcher.accept(token), matcher.error
        if token == eos:
            assert matcher.is_terminated
            return tokens
        tokens.append(token)
        if matcher.is_terminated:
            return tokens
    return None


def read(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def follow(matcher: Matcher, text: str) -> Matcher:
    for token in text.encode():
        assert token in allowed_ids(matcher)
        assert matcher.accept(token)
    return matcher


NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "size": {"type": "integer", "minimum": -3, "maximum": 120},
        "kind": {"enum": ["leaf", "branch", None]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SCHEMAS = {
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "union": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}, {"const": {"a": [1, "x"]}}]},
    "free": {"type": "object", "additionalProperties": {"type": ["boolean", "integer"]}, "maxProperties": 3},
    "text": {"type": "string", "minLength": 1, "maxLength": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "string", "format": "uuid"}],
        "items": False,
    },
    "all": {
        "allOf": [{"required": ["a"]}, {"type": "object", "properties": {"a": {"multipleOf": 5, "type": "integer"}}}]
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_random_walks_follow_the_schema(schema: Any, byte_compiler: GrammarCompiler, rng: random.Random) -> None:
    grammar = compile_now(byte_compiler, json_schema=schema)
    texts = [read(tokens) for _ in range(20) if (tokens := walk(grammar, BYTE_EOS, rng)) is not None]
    assert len(texts) >= 3
    for text in texts:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    "regex",
    ["[a-c]{2,4}", "^(ab|a)*c?$", r"\d{3}-[^,]{1,3}(, [A-Z]é?)*[\d.]", "é+|日本", 'a/b|\\\\n|"q"', "(?i)yes|no"],
)
def test_random_walks_match_the_regex(regex: str, byte_compiler: GrammarCompiler, rng: random.Random) -> None:
    grammar = compile_now(byte_compiler, regex=regex)
    for _ in range(10):
        tokens = walk(grammar, BYTE_EOS, rng)
        assert tokens is not None
        assert re.fullmatch(regex, read(tokens)), read(tokens)


def test_choice(byte_compiler: GrammarCompiler, rng: random.Random) -> None:
    """Every choice is reached, nothing else, whatever is in it; one can begin another."""
    choices = ["yes", "yes, but", "no", "a b", "x#y-z&~|", "tab\tnl\n", "nul\0", "é✓😀", "\\", "/", '"', "a.b*", "</s>"]
    grammar = compile_now(byte_compiler, choice=choices)
    assert {read(walk(grammar, BYTE_EOS, rng) or []) for _ in range(400)} == set(choices)


def test_grammar(byte_compiler: GrammarCompiler, rng: random.Random) -> None:
    """Balanced brackets: what no regular expression can do."""
    grammar = compile_now(byte_compiler, grammar='start: pair\npair: "(" pair? ")" | "[" pair "]"')
    for _ in range(20):
        text = read(walk(grammar, BYTE_EOS, rng) or [])
        while text:
            shorter = text.replace("()", "").replace("[]", "")
            assert shorter != text
            text = shorter


def test_tokens_of_many_bytes(smollm2_compiler: GrammarCompiler, smollm2: Any, rng: random.Random) -> None:
    """A tokenizer whose tokens cross the borders of the grammar's symbols, and cut characters."""
    schema = SCHEMAS["recursive"]
    grammar = compile_now(smollm2_compiler, json_schema=schema)
    for _ in range(5):
        tokens = walk(grammar, smollm2.eos_token_id, rng)
        if tokens is not None:
            jsonschema.validate(json.loads(smollm2.decode(tokens)), schema)
    choices = ["日本語😀", "unbelievable", "un"]
    grammar = compile_now(smollm2_compiler, choice=choices)
    assert {smollm2.decode(walk(grammar, smollm2.eos_token_id, rng) or []) for _ in range(60)} == set(choices)


def test_usual_layouts_of_json(byte_compiler: GrammarCompiler) -> None:
    """Compact, spaced and indented; but not blanks without end, which a small model never leaves."""
    grammar = compile_now(byte_compiler, json_schema=SCHEMAS["recursive"])
    value = {"name": "a", "size": 1, "kind": "leaf", "parts": [{"name": "b", "size": 2, "kind": None}]}
    for layout in ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"}):
        assert follow(grammar.start({BYTE_EOS}), json.dumps(value, **layout)).is_terminated
    for one in (grammar, *(compile_now(byte_compiler, json_schema=anything) for anything in ({}, "true"))):
        matcher = follow(one.start({BYTE_EOS}), '{"name": ')
        assert ord(" ") not in allowed_ids(matcher)


def test_options_in_a_schema(byte_compiler: GrammarCompiler) -> None:
    """The library's own, such as reading an ambiguous oneOf as anyOf; those not given stay ours."""
    schema = {"oneOf": [{"type": "object"}, {"type": "object"}]}
    with pytest.raises(ValueError, match="oneOf"):
        compile_now(byte_compiler, json_schema=schema)
    grammar = compile_now(byte_compiler, json_schema={**schema, "x-guidance": {"coerce_one_of": True}})
    assert ord(" ") not in allowed_ids(follow(grammar.start({BYTE_EOS}), "{ "))
    with pytest.raises(ValueError, match="json_schema can't be used"):
        compile_now(byte_compiler, json_schema={"x-guidance": 3})


def test_end_tokens_only_where_the_text_may_end(byte_compiler: GrammarCompiler) -> None:
    matcher = compile_now(byte_compiler, regex="ab*").start({BYTE_EOS, 260})
    assert allowed_ids(matcher) == [ord("a")]
    assert allowed_ids(follow(matcher, "a")) == [ord("b"), BYTE_EOS, 260]
    assert matcher.accept(260) and matcher.is_terminated and matcher.error is None


def test_end_token_too_early(byte_compiler: GrammarCompiler) -> None:
    matcher = compile_now(byte_compiler, regex="ab").start({BYTE_EOS})
    assert not matcher.accept(BYTE_EOS)
    assert matcher.is_terminated and matcher.error


def test_no_end_token_at_all(byte_compiler: GrammarCompiler) -> None:
    """As with ignore_eos: a text that can go on does, one that can't is complete."""
    grammar = compile_now(byte_compiler, regex="(ab)+c?")
    matcher = follow(grammar.start(), "ab")
    assert allowed_ids(matcher) == [ord("a"), ord("c")] and not matcher.is_terminated
    assert follow(matcher, "c").is_terminated


def test_complete_text_needs_no_end_token(byte_compiler: GrammarCompiler) -> None:
    assert follow(compile_now(byte_compiler, choice=["yes", "no"]).start({BYTE_EOS}), "no").is_terminated


def test_special_tokens_are_no_text(byte_compiler: GrammarCompiler) -> None:
    """Not even where anything goes, nor where the text spells one."""
    assert max(allowed_ids(compile_now(byte_compiler, regex="(.|\n)*").start({BYTE_EOS}))) == BYTE_EOS
    for constraint in ({"regex": "</s>"}, {"regex": "<x2>"}, {"choice": ["<s>"]}):
        assert allowed_ids(compile_now(byte_compiler, **constraint).start({BYTE_EOS})) == [ord("<")]
    const = compile_now(byte_compiler, json_schema={"const": "a<x2>b</s>"})
    assert follow(const.start({BYTE_EOS}), '"a<x2>b</s>"').is_terminated


def test_special_tokens_that_a_grammar_names(byte_compiler: GrammarCompiler) -> None:
    """They are allowed where it has them; one that ends the request does."""
    matcher = compile_now(byte_compiler, grammar='start: <x2> "a" </s>').start({BYTE_EOS})
    assert allowed_ids(matcher) == [258]
    assert matcher.accept(258) and matcher.accept(ord("a"))
    assert matcher.accept(BYTE_EOS) and matcher.is_terminated


def test_stop_token_with_text_is_left_to_the_grammar(byte_compiler: GrammarCompiler) -> None:
    matcher = compile_now(byte_compiler, regex="ab+").start({BYTE_EOS, ord("a"), ord("z")})
    assert allowed_ids(matcher) == [ord("a")]
    assert allowed_ids(follow(matcher, "ab")) == [ord("b"), BYTE_EOS]


def test_min_tokens(byte_compiler: GrammarCompiler) -> None:
    """No stop token before them, with or without text, unless there is nothing else."""
    stop_ids = {BYTE_EOS, ord("b")}
    matcher = compile_now(byte_compiler, regex="[ab]*").start(stop_ids, min_tokens=2)
    assert allowed_ids(matcher) == [ord("a")]
    assert allowed_ids(follow(matcher, "a")) == [ord("a")]
    assert allowed_ids(follow(matcher, "a")) == [ord("a"), ord("b"), BYTE_EOS]
    matcher = compile_now(byte_compiler, regex="bb").start(stop_ids, min_tokens=3)
    assert allowed_ids(matcher) == [ord("b")]
    assert follow(matcher, "bb").is_terminated


def test_ids_that_the_tokenizer_lacks(smollm2: Any) -> None:
    """A model's table of embeddings is often padded beyond its tokenizer."""
    num_ids = len(smollm2) + 100
    compiler = GrammarCompiler(smollm2, num_ids, {smollm2.eos_token_id})
    matcher = compile_now(compiler, regex="(.|\n)*").start({smollm2.eos_token_id})
    assert len(smollm2) // 2 < len(allowed_ids(matcher))
    assert max(allowed_ids(matcher)) < len(smollm2)
    assert fill_bitmasks([matcher]).shape == (1, -(-num_ids // 32))


def test_wrong_token_fails_one_matcher_only(byte_compiler: GrammarCompiler) -> None:
    """Its row, and that of an ended one, allow everything: the sampler must not see a row without a token."""
    grammar = compile_now(byte_compiler, regex="ab+")
    failed, ended, live = (grammar.start({BYTE_EOS}) for _ in range(3))
    assert not failed.accept(ord("z")) and failed.is_terminated and "z" in (failed.error or "")
    assert follow(ended, "ab").accept(BYTE_EOS)
    masks = fill_bitmasks([failed, live, ended])
    assert (masks[[0, 2]] == -1).all()
    assert np.unpackbits(masks[1].view(np.uint8), bitorder="little").sum() == 1


def test_matchers_are_independent(byte_compiler: GrammarCompiler) -> None:
    grammar = compile_now(byte_compiler, regex="[a-z]{3}")
    first, second = grammar.start({BYTE_EOS}), grammar.start({BYTE_EOS})
    assert follow(first, "abc").is_terminated
    assert not second.is_terminated and len(allowed_ids(second)) == 26


def test_no_matchers() -> None:
    assert fill_bitmasks([]).shape[0] == 0


def test_equal_constraints_compile_once(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one is a dict and the other text; beyond the cache's size the one used longest ago is dropped."""
    compiled: list[str] = []
    compile_ = grammar_compiler._compile
    monkeypatch.setattr(grammar_compiler, "_compile", lambda one, _: compiled.append(one.text) or compile_(one, _))
    compiler = GrammarCompiler(smollm2, len(smollm2), {0}, cache_size=2)
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert compile_now(compiler, json_schema=schema) is compile_now(compiler, json_schema=json.dumps(schema, indent=1))
    compile_now(compiler, regex="a")
    compile_now(compiler, json_schema=schema)
    compile_now(compiler, regex="b")
    compile_now(compiler, json_schema=schema)
    assert len(compiled) == 3
    compile_now(compiler, regex="a")
    assert len(compiled) == 4
    compiler.close()


def test_slow_compilation_is_not_waited_for(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its result nor for its failure, which stays in the future."""
    go_on = threading.Event()
    compile_ = grammar_compiler._compile
    monkeypatch.setattr(grammar_compiler, "_compile", lambda *args: go_on.wait(60) and compile_(*args))
    compiler = GrammarCompiler(smollm2, len(smollm2), {0}, patience=0.01)
    constraints = [SamplingParams(regex=regex).constraint for regex in ("a", "[")]
    good, bad = (compiler.compile(one) for one in constraints if one is not None)
    assert not good.done() and not bad.done()
    go_on.set()
    assert allowed_ids(good.result(60).start({0}))
    with pytest.raises(ValueError, match="regex"):
        bad.result(60)
    compiler.close()


WRONG = [
    ({"regex": "["}, "regex .*unclosed character class"),
    ({"regex": "(?=a)b"}, "regex .*look-around"),
    ({"regex": "a$b"}, "regex .*lookaround"),
    ({"regex": "$"}, "regex .*empty text only"),
    ({"json_schema": {"type": "objec"}}, "json_schema .*objec"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema .*uniqueItems"),
    ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "json_schema .*minimum"),
    ({"json_schema": {"$ref": "#/$defs/nowhere"}}, "json_schema .*nowhere"),
    ({"json_schema": {"$ref": "#"}}, "json_schema .*no text satisfies"),
    ({"json_schema": {"enum": []}}, "json_schema"),
    ({"json_schema": "false"}, "json_schema .*false"),
    ({"grammar": "start: other"}, "grammar .*other"),
    ({"grammar": "root ::= "}, "grammar "),
    ({"grammar": "start: start"}, "grammar .*no text satisfies"),
]


@pytest.mark.parametrize("constraint, message", WRONG, ids=[str(wrong[0]) for wrong in WRONG])
def test_refused_by_name(constraint: dict[str, Any], message: str, byte_compiler: GrammarCompiler) -> None:
    """What can't be enforced is an error that names the parameter and the reason, the second time as well."""
    for _ in range(2):
        with pytest.raises(ValueError, match=re.compile(f"^{message}", re.DOTALL)):
            compile_now(byte_compiler, **constraint)


def test_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        compile_now(GrammarCompiler(None, 10, {0}), regex="a")


def test_tokenizer_without_eos(tmp_path: Path) -> None:
    """Any special token serves to ask the library whether the text may end; it is never sampled."""
    compiler = GrammarCompiler(save_byte_tokenizer(tmp_path), 260, {1000})
    matcher = follow(compile_now(compiler, regex="a+").start(), "a")
    assert allowed_ids(matcher) == [ord("a")]


def test_library_missing(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import: Callable[..., Any] = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=r"pip install llguidance"):
        compile_now(GrammarCompiler(smollm2, len(smollm2), {0}), regex="a")
