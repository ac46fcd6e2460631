"""Command-line flags made from the fields of a settings class, so that none is ever missing."""

import argparse
import json
import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, Union, get_args, get_origin


def add_flags(parser: argparse.ArgumentParser, settings: type, title: str, skip: Collection[str] = ()) -> None:
    """A flag for each field, in a group of its own. What is not given on the command line is not in `given_flags`."""
    group = parser.add_argument_group(title)
    helps = _attribute_docs(settings)
    for field in _fields_of(settings):
        if field.name not in skip:
            group.add_argument(
                flag_of(field.name),
                dest=_dest(settings, field.name),
                default=None,
                help=helps.get(field.name, "").replace("%", "%%"),
                **_kind(field),
            )


def given_flags(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields that the command line sets, by name."""
    values = {field.name: getattr(args, _dest(settings, field.name), None) for field in _fields_of(settings)}
    return {name: value for name, value in values.items() if value is not None}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fields_of(settings: Any) -> tuple[Field[Any], ...]:
    return fields(settings)


def _dest(settings: type, name: str) -> str:
    return f"{settings.__name__}.{name}"


def _kind(field: "Field[Any]") -> dict[str, Any]:
    """What argparse has to know about values of a field's type."""
    is_union = get_origin(field.type) in (Union, types.UnionType)
    options = get_args(field.type) if is_union else (field.type,)
    metavar = field.name.upper()
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(one) in (dict, Mapping) for one in options):
        return {"type": _json_object, "metavar": "JSON"}
    sequences = [get_args(one) for one in options if get_origin(one) in (tuple, Sequence)]
    if sequences:
        return {"action": "append", "type": int if sequences[0][0] is int else str, "metavar": metavar}
    return {"type": next((kind for kind in (float, int) if kind in options), str), "metavar": metavar}


def _json_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text:.80}")
    return value


def _attribute_docs(settings: type) -> dict[str, str]:
    """What the `Attributes:` section of a class's docstring says about each name."""
    _, _, section = (settings.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
