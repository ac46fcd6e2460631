"""What one request may ask for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.constraint import Constraint, check_constraints, make_constraint
from nanovllm.utils.checks import check_bool, check_int, check_number

# Below this temperature the scaled gap between any two distinct float logits dwarfs the noise, while the
# division itself starts to overflow: such a request is greedy.
GREEDY_TEMPERATURE = 1e-6
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Checked on construction.

    The filters apply in this order: temperature, top_k, top_p over the renormalised survivors (the token that
    crosses the threshold stays), min_p.

    Attributes:
        temperature: divides the logits; 0 is greedy. Finite, at least 0.
        max_tokens: most tokens to generate, at least 1. Clipped to what the engine can hold.
        ignore_eos: go on when the model emits an end-of-sequence token.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this times the most probable one, in [0, 1].
        seed: of the request's random numbers, in [0, 2**64): its tokens are repeatable alone or in any batch, as far
            as the logits are (exactly in float32 on a CPU; a GPU rounds differently in batches of other sizes).
        stop_token_ids: end the request when one of these is emitted (also when `ignore_eos` is set).
        min_tokens: neither an end-of-sequence token nor a stop token is sampled before this many.
        skip_special_tokens: leave special tokens out of the text.
        json_schema: the output is JSON that this schema allows: a dict, or JSON text (which is what is kept).
        regex: the output matches this regular expression as a whole.
        choice: the output is one of these strings.
        grammar: the output is a sentence of this context-free grammar, in Lark's syntax.
            At most one of the four can be set; they need `pip install nanovllm[structured]`.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        max_tokens = check_int("max_tokens", self.max_tokens, 1)
        checked = {
            "temperature": check_number("temperature", self.temperature, 0.0),
            "max_tokens": max_tokens,
            "min_tokens": check_int("min_tokens", self.min_tokens, 0, max_tokens),
            "ignore_eos": check_bool("ignore_eos", self.ignore_eos),
            "top_p": check_number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": check_int("top_k", self.top_k, -1),
            "min_p": check_number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if self.seed is None else check_int("seed", self.seed, 0, MAX_SEED),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "skip_special_tokens": check_bool("skip_special_tokens", self.skip_special_tokens),
            **check_constraints(
                json_schema=self.json_schema, regex=self.regex, choice=self.choice, grammar=self.grammar
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def constraint(self) -> Constraint | None:
        """What the output must match, if anything."""
        return make_constraint(json_schema=self.json_schema, regex=self.regex, choice=self.choice, grammar=self.grammar)

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p can drop a token. Greedy keeps the best token under any filter."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(check_int(f"each of {name}", token_id, 0) for token_id in value)
