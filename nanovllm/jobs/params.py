"""The sampling params of each row: the format's defaults, then the flags, then what the row says."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from nanovllm.jobs.errors import JobError, RowError
from nanovllm.sampling_params import SamplingParams

# A function is nothing that a file or a flag could hold.
NOT_IN_FILES = ("logits_processor",)
FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in NOT_IN_FILES)


@dataclass(frozen=True)
class RowParams:
    """Makes the params of rows.

    Attributes:
        flags: fields that hold for all rows that don't say otherwise; not the seed.
        seed: from which, with its index, each row gets the seed that it doesn't bring: so it doesn't matter which rows
            were completed before, and in what order.
    """

    flags: Mapping[str, Any]
    seed: int

    def make(self, index: int, own: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> SamplingParams:
        """The params of a row.

        Args:
            own: what the row says, by field; None is the same as nothing.
            defaults: of the row's format.
            prefix: where in the row `own` was found, for messages.

        Raises:
            RowError: an unknown field, or a value that `SamplingParams` refuses.
        """
        own = {name: _from_json(name, value) for name, value in own.items() if value is not None}
        for name in own:
            if name not in FIELDS:
                raise RowError(f"{prefix}.{name}", f"no such field{_nearest(name)}")
        values = {"seed": self.seed_of(index), **defaults, **self.flags, **own}
        try:
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise RowError(field_of(str(error), own, prefix), str(error)) from error

    def seed_of(self, index: int) -> int:
        """The seed of a row that brings none."""
        return row_seed(self.seed, index)


def row_seed(seed: int, index: int) -> int:
    """The seed of a row, from the job's: a hash, so that the rows of jobs with neighbouring seeds differ, too."""
    return xxhash.xxh3_64_intdigest(b"row" + index.to_bytes(8, "little"), seed=seed)


def _from_json(name: str, value: Any) -> Any:
    """JSON has strings as keys where token ids are meant."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: bias
                for key, bias in value.items()}  # fmt: skip
    return value


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name, FIELDS, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def field_of(message: str, own: Iterable[str], prefix: str) -> str:
    """The field that a message is about: of the row's own, that which it names first."""
    places = {name: message.find(name) for name in own}
    named = [name for name, place in places.items() if place >= 0]
    return f"{prefix}.{min(named, key=lambda name: (places[name], -len(name)))}" if named else prefix


def check_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags in the form that `SamplingParams` takes. Raises JobError if it refuses one."""
    values = {name: _from_json(name, value) for name, value in flags.items()}
    try:
        SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise JobError(str(error)) from error
    return values
