"""What the whole output of a request must match. Checked here as far as that takes no grammar library."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """One of the four kinds; equal ones are compiled once.

    Attributes:
        kind: the field of `SamplingParams` that it comes from.
        text: JSON of the schema or of the list of choices, the regular expression, or the grammar.
    """

    kind: Kind
    text: str


def check_constraints(**values: object) -> dict[str, Any]:
    """The four fields in the form that `SamplingParams` keeps: text, or a tuple of choices.

    Raises:
        TypeError, ValueError: a field is not what its name says, or more than one is set.
    """
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"an output follows one constraint, got {' and '.join(given)}")
    checks = {"json_schema": _check_json_schema, "choice": _check_choice}
    return {name: checks.get(name, _check_text)(name, values[name]) for name in given}


def make_constraint(**values: Any) -> Constraint | None:
    """The constraint of checked fields; None if none is set."""
    for kind in get_args(Kind):
        value = values[kind]
        if value is not None:
            return Constraint(kind, value if isinstance(value, str) else json.dumps(value))
    return None


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r:.80}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode, it holds a lone surrogate: {value!r:.80}") from error
    return value


def _check_json_schema(name: str, value: object) -> str:
    """The schema as JSON. The order of its keys stays: properties are generated in the order of the schema."""
    if not isinstance(value, dict | str):
        raise TypeError(f"{name} must be a dict or JSON text, got {value!r:.80}")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    except TypeError as error:
        raise TypeError(f"{name} holds what JSON can't: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{name} must be a JSON object, got {text:.80}")
    return text


def _check_choice(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of strings, got {value!r:.80}")
    choices = tuple(_check_text(f"each of {name}", one) for one in value)
    if not choices:
        raise ValueError(f"{name} must not be empty")
    return tuple(dict.fromkeys(choices))
