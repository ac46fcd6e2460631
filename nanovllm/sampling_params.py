"""What one request may ask for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.utils.checks import check_bool, check_int, check_number

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
            "stop": _strings("stop", self.stop),
            "include_stop_str_in_output": check_bool("include_stop_str_in_output", self.include_stop_str_in_output),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "skip_special_tokens": check_bool("skip_special_tokens", self.skip_special_tokens),
            "n": check_int("n", self.n, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
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

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p can drop a token. Greedy keeps the best token under any filter."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


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


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(check_int(f"each of {name}", token_id, 0) for token_id in value)
