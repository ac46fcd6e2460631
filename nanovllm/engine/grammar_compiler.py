"""Constrained output: compiles a request's `Constraint` for the model's tokenizer, once, in the background.

The grammar library is llguidance (docs/structured_output.md compares it with others). It is imported on first use.

    grammar = compiler.compile(params.constraint)            # a future; equal constraints are compiled once
    matcher = grammar.result().start(stop_ids, min_tokens)   # one a sequence
    masks = MaskFilling([matcher, ...]).result()             # before a token of each is sampled
    matcher.accept(token_id)                                 # after it was
"""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.constraint import Constraint
from nanovllm.engine.grammar_matcher import Matcher, Vocabulary, fill_bitmasks

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

# Between the parts of JSON: nothing, a space, or a new line with its indentation. Any amount, which the JSON syntax
# allows, lets a small model write blanks until it runs out of tokens.
_JSON_WHITESPACE = r" |\n[ \t]{0,64}"
# Where only one text can follow, the library would otherwise allow only the tokens that the tokenizer makes of it, and
# the tokenizer makes a special token of a text that spells one.
_DIRECTIVE = '\n%llguidance {"no_forcing": true}'


@dataclass(frozen=True)
class Grammar:
    """A compiled constraint."""

    state: "LLMatcher"  # at the start; copied, never moved
    vocabulary: Vocabulary

    def start(self, stop_ids: Iterable[int] = (), min_tokens: int = 0) -> Matcher:
        """A matcher of an empty output.

        Args:
            stop_ids: what ends the request. Those without text, such as an end-of-sequence token, are allowed where
                the output may end; those with text where the grammar has them.
            min_tokens: no stop token is allowed before so many tokens, unless the grammar allows nothing else.
        """
        return Matcher(self.state.deep_copy(), self.vocabulary, stop_ids, min_tokens)


class GrammarCompiler:
    """Compiles constraints in the background for one model's tokenizer, and keeps the latest ones."""

    def __init__(
        self,
        tokenizer: Any | None,
        num_ids: int,
        eos_token_ids: Iterable[int],
        *,
        cache_size: int = 256,
        patience: float = 1.0,
        num_threads: int = 2,
    ) -> None:
        """
        Args:
            tokenizer: of transformers, or None: then nothing can be compiled.
            num_ids: token ids below this can be sampled.
            eos_token_ids: the model's end-of-sequence tokens.
            cache_size: constraints to keep.
            patience: seconds that `compile` waits for a new constraint, to raise what is wrong with it at once.
            num_threads: constraints compiled at the same time.
        """
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache_size = cache_size
        self._patience = patience
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nanovllm-grammar")
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> "Future[Grammar]":
        """The grammar of a constraint, now or later; most take a few milliseconds. Any thread may call this.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: the constraint is wrong or not supported, for the reason that the library gives, or this
                model's tokenizer can't be used. A constraint that takes longer than `patience` fails later, in the
                future.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _make_vocabulary(self._tokenizer, self._num_ids, self._eos_token_ids)
            future = self._grammars.get(constraint)
            is_new = future is None
            if future is None:
                future = self._grammars[constraint] = self._pool.submit(_compile, constraint, self._vocabulary)
                if len(self._grammars) > self._cache_size:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(constraint)
        if is_new:
            wait([future], self._patience)
        if future.done():
            future.result()
        return future

    def close(self) -> None:
        """Drops what is still to be compiled."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _make_vocabulary(tokenizer: Any | None, num_ids: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: its output can't be constrained")
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise ImportError("constrained output needs llguidance: pip install llguidance") from error
    num_ids = max(num_ids, 1 + max(tokenizer.get_vocab().values()))
    end_ids = [id for id in [*sorted(eos_token_ids), *tokenizer.all_special_ids] if id < num_ids]
    if not end_ids:
        raise ValueError("this model's tokenizer has no special token: its output can't be constrained")
    try:
        known = from_tokenizer(tokenizer, n_vocab=num_ids, eos_token=end_ids[0])
    except ValueError as error:
        raise ValueError(f"the grammar library can't read this model's tokenizer: {error}") from error
    return Vocabulary(known, num_ids, end_ids[0], eos_token_ids)


def _compile(constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    grammar_text = LLMatcher.grammar_from_lark(_to_lark(constraint) + _DIRECTIVE)
    limits = LLParserLimits(verbose_errors=False)
    state = LLMatcher(vocabulary.tokenizer, grammar_text, log_level=0, limits=limits)
    grammar = Grammar(state, vocabulary)
    probe = grammar.start()
    fill_bitmasks([probe])
    if probe.is_terminated:
        reason = probe.error or "it allows the empty text only"
        if constraint.kind != "grammar":  # the place is one in the text that `_to_lark` makes
            reason = re.sub(r"^at \d+\(\d+\): ", "", reason)
        raise ValueError(f"{constraint.kind} can't be used: {reason}")
    for warning in state.get_grammar_warnings():
        logger.warning("%s: %s", constraint.kind, warning)
    return grammar


def _to_lark(constraint: Constraint) -> str:
    """The constraint in the library's dialect of Lark, which can hold the other kinds."""
    from llguidance import regex_to_lark

    if constraint.kind == "grammar":
        return constraint.text
    if constraint.kind == "json_schema":
        return f"start: %json {json.dumps(_with_options(json.loads(constraint.text)))}"
    regex = constraint.text
    if constraint.kind == "choice":
        regex = "|".join(map(re.escape, json.loads(constraint.text)))
    return f"start: /{regex_to_lark(regex, 'd')}/"  # a \d is one of the ten ASCII digits


def _with_options(schema: Any) -> Any:
    """The schema with our options for the library where it has none of its own."""
    options = {"whitespace_pattern": _JSON_WHITESPACE}
    if schema is True:  # allows all JSON, as {} does
        return {"x-guidance": options}
    if isinstance(schema, dict) and isinstance(schema.get("x-guidance", {}), dict):
        return {**schema, "x-guidance": {**options, **schema.get("x-guidance", {})}}
    return schema
