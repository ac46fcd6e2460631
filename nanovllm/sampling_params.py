"""What one request may ask for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

from nanovllm.constraint import Constraint, Kind, check_constraints, make_constraint
from nanovllm.utils.checks import check_bool, check_int, check_number

if TYPE_CHECKING:
    import torch

    from nanovllm.layers.logits import LogitsRows

LogitsProcessor = Callable[["torch.Tensor", "LogitsRows"], "torch.Tensor | None"]
# Below this temperature the scaled gap between any two distinct float logits dwarfs the noise, while the
# division itself starts to overflow: such a request is greedy.
GREEDY_TEMPERATURE = 1e-6
MAX_SEED = 2**64 - 1
# Key of a transformers `generation_config.json` -> field, where there is such a field.
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
MAX_LOGPROBS = 20  # best tokens that a request may ask for at each position
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_BIAS = 100.0  # of a token, either way
_MAX_TOP_K = 2**31 - 1
_MAX_TEMPERATURE = 1e38  # finite in float32: -inf divided by infinity would be NaN, which an argmax prefers


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Checked on construction.

    What changes the logits applies in this order: the constraint, allowed_token_ids, logit_bias, bad_words;
    repetition_penalty, then frequency_penalty and presence_penalty; logits_processor; min_tokens; temperature; top_k;
    top_p over the renormalised survivors (the token that crosses the threshold stays); min_p. Log-probabilities are of
    the model's own logits, before all of these.

    Attributes:
        temperature: divides the logits; 0 is greedy. Finite, at least 0.
        max_tokens: most tokens to generate, at least 1. Clipped to what the engine can hold.
        ignore_eos: go on when the model emits an end-of-sequence token.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this times the most probable one, in [0, 1].
        seed: of the request's random numbers, in [0, 2**64): its tokens are repeatable alone or in any batch, as far
            as the logits are (exactly in float32 on a CPU; a GPU rounds differently in batches of other sizes).
        stop: a string, or several: the request ends with the token that completes one of them in the text of its output
            (also when `ignore_eos` is set). The text ends before it, while the token ids have all tokens up to that
            one. If a token completes several, the one that begins first counts, then the shortest.
        include_stop_str_in_output: the text ends after the stop string instead.
        stop_token_ids: end the request when one of these is emitted (also when `ignore_eos` is set).
        min_tokens: neither an end-of-sequence token nor a stop token is sampled before this many. Stop strings are not
            looked for in the text that these tokens complete: one that begins there and ends later counts, one that
            ends there doesn't.
        skip_special_tokens: leave special tokens out of the text.
        n: independent samples of the prompt, at least 1; more than one only if sampling is not greedy. Sample 0 is
            what n=1 gives, and the samples of a seeded request are repeatable.
        logprobs: report the log-probability of each output token and of this many best ones, at most 20; None reports
            nothing.
        prompt_logprobs: the same for the prompt's tokens. Such a prompt is computed from its first token on, whatever
            of it the prefix cache holds.
        presence_penalty: subtracted from the logit of each token that the output has, in [-2, 2].
        frequency_penalty: subtracted once for each time that the output has the token, in [-2, 2].
        repetition_penalty: divides the logit of each token that prompt or output have if it is positive, else
            multiplies it; above 0, 1 is off.
        logit_bias: {token id: number in [-100, 100]} added to logits; kept as pairs.
        bad_words: strings, or lists of token ids, that the output won't contain. A string stands for its tokens with
            and without a space before it; of several tokens, the last is banned where the others have come before it
            in the output.
        allowed_token_ids: nothing else is sampled, end-of-sequence tokens included; None allows everything.
        logits_processor: a function `f(logits, rows)` that may change the logits [M, V] in place, or return others, of
            all M running requests that ask for that same function; `layers.logits.LogitsRows` says what `rows` has.
            It must leave each row a finite logit: else some token comes, whatever the other params say.
        json_schema: the output is JSON that this schema allows: a dict, or JSON text (which is what is kept).
        regex: the output matches this regular expression as a whole.
        choice: the output is one of these strings.
        grammar: the output is a sentence of this context-free grammar, in Lark's syntax.
            At most one of the four can be set, and neither bad_words nor allowed_token_ids with it. They need
            `pip install llguidance`.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processor: "LogitsProcessor | None" = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        # What is left at its default needs no check: jobs make these by the thousands, and most fields are.
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name]:
                object.__setattr__(self, name, check(self, value))
        constraints = {name: getattr(self, name) for name in _CONSTRAINTS}
        if any(value is not None for value in constraints.values()):
            for name, value in check_constraints(**constraints).items():
                object.__setattr__(self, name, value)
        processor = self.logits_processor
        if processor is not None and not (callable(processor) and _is_hashable(processor)):
            raise TypeError(f"logits_processor must be a function that can be hashed, got {processor!r}")
        if (self.bad_words or self.allowed_token_ids is not None) and self.constraint is not None:
            name = "bad_words" if self.bad_words else "allowed_token_ids"
            raise ValueError(f"{self.constraint.kind} and {name} exclude each other: together they can allow no token")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 for greedy sampling (temperature={self.temperature}), got {self.n}")

    @classmethod
    def from_generation_config(cls, content: dict[str, Any]) -> "SamplingParams":
        """What a checkpoint's `generation_config.json` says about sampling; the defaults for what it doesn't say.

        `do_sample: false` is a temperature of 0. Raises like the constructor.
        """
        names = {field.name for field in fields(cls)}
        settings = {
            name: content[key]
            for key, name in _GENERATION_KEYS.items()
            if name in names and content.get(key) is not None
        }
        if content.get("do_sample") is False:
            settings["temperature"] = 0.0
        return cls(**settings)

    def with_seed(self, seed: int | None) -> "SamplingParams":
        """A copy with another seed. Raises like the constructor, but checks nothing else again: so it takes little."""
        copy = object.__new__(type(self))
        checked = None if seed is None else check_int("seed", seed, 0, MAX_SEED)
        vars(copy).update(vars(self), seed=checked)  # with cached properties: none depends on the seed
        return copy

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the output must match, if anything."""
        return make_constraint(json_schema=self.json_schema, regex=self.regex, choice=self.choice, grammar=self.grammar)

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p can drop a token. Greedy keeps the best token under any filter."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @cached_property
    def sampling_numbers(self) -> tuple[float, float, float, float, float]:
        """Temperature (0 if greedy), top_k (0 if off), top_p, min_p, and whether there is a filter, in the ranges of
        float32 and int32: asked for in every step."""
        temperature = 0.0 if self.is_greedy else min(self.temperature, _MAX_TEMPERATURE)
        return temperature, min(max(self.top_k, 0), _MAX_TOP_K), self.top_p, self.min_p, self.has_filter

    def token_ids(self) -> Iterator[tuple[str, int]]:
        """Every token id that is named here, with what it is."""
        yield from (("stop token", token_id) for token_id in self.stop_token_ids)
        yield from (("token of logit_bias", token_id) for token_id in dict(self.logit_bias))
        yield from (("token of allowed_token_ids", token_id) for token_id in self.allowed_token_ids or ())
        for word in self.bad_words:
            yield from (("token of bad_words", token_id) for token_id in word if isinstance(token_id, int))

    @property
    def has_penalty(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but min_tokens, temperature and filters does."""
        has_rule = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        has_function = self.logits_processor is not None or self.constraint is not None
        return bool(has_rule) or self.has_penalty or has_function


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, bytes) or not isinstance(strings, Iterable):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"each of {name} must be a string, got {string!r}")
        if not string:
            raise ValueError(f"{name} must not hold the empty string, which ends every text")
    return tuple(dict.fromkeys(strings))


def _given(value: Any) -> Any:
    """None, which other libraries take for nothing, as nothing."""
    return () if value is None else value


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # a frozen dataclass with a list in it has __hash__, too
        return False
    return True


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(check_int(f"each of {name}", token_id, 0) for token_id in value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a mapping, or pairs as they are (a checked `SamplingParams` that is copied has those)."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
        token_id = check_int("each token id of logit_bias", pair[0], 0)
        biases[token_id] = check_number(f"logit_bias of token {token_id}", pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple(biases.items())


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"bad_words must be a list of strings or lists of token ids, got {value!r}")
    words = [word if isinstance(word, str) else _token_ids("the words of bad_words", word) for word in value]
    if any(len(word) == 0 for word in words):
        raise ValueError(f"each of bad_words must have at least 1 character or token id, got {words!r}")
    return tuple(words)


def _allowed_ids(value: object) -> tuple[int, ...]:
    token_ids = tuple(dict.fromkeys(_token_ids("allowed_token_ids", value)))
    if not token_ids:
        raise ValueError("allowed_token_ids must have at least 1 token id, or be None, got none")
    return token_ids


_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_CONSTRAINTS = get_args(Kind)
# What makes of a field's value the one that is kept, or raises. In this order: min_tokens needs max_tokens.
_CHECKS: dict[str, Callable[[SamplingParams, Any], Any]] = {
    "max_tokens": lambda params, value: check_int("max_tokens", value, 1),
    "temperature": lambda params, value: check_number("temperature", value, 0.0),
    "min_tokens": lambda params, value: check_int("min_tokens", value, 0, params.max_tokens),
    "ignore_eos": lambda params, value: check_bool("ignore_eos", value),
    "top_p": lambda params, value: check_number("top_p", value, 0.0, 1.0, open_low=True),
    "top_k": lambda params, value: check_int("top_k", value, -1),
    "min_p": lambda params, value: check_number("min_p", value, 0.0, 1.0),
    "seed": lambda params, value: check_int("seed", value, 0, MAX_SEED),
    "stop": lambda params, value: _strings("stop", _given(value)),
    "include_stop_str_in_output": lambda params, value: check_bool("include_stop_str_in_output", value),
    "stop_token_ids": lambda params, value: _token_ids("stop_token_ids", _given(value)),
    "skip_special_tokens": lambda params, value: check_bool("skip_special_tokens", value),
    "n": lambda params, value: check_int("n", value, 1),
    "logprobs": lambda params, value: check_int("logprobs", value, 0, MAX_LOGPROBS),
    "prompt_logprobs": lambda params, value: check_int("prompt_logprobs", value, 0, MAX_LOGPROBS),
    "presence_penalty": lambda params, value: check_number("presence_penalty", value, -MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": lambda params, value: check_number("frequency_penalty", value, -MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": lambda params, value: check_number("repetition_penalty", value, 0.0, open_low=True),
    "logit_bias": lambda params, value: _biases(_given(value)),
    "bad_words": lambda params, value: _bad_words(_given(value)),
    "allowed_token_ids": lambda params, value: _allowed_ids(value),
}
