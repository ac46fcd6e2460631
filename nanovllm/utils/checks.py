"""Checks of user-given numbers: a wrong type is a TypeError, a wrong value a ValueError with the range."""

import math
import numbers


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int. Raises unless it is an integer (numpy's too, bool not) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {limits}, got {value}")
    return int(value)


def check_number(name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """`value` as a float. Raises unless it is a finite number in [low, high], or in (low, high] with `open_low`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        upper = "inf)" if high == math.inf else f"{high}]"
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {upper}, got {value}")
    return number


def check_bool(name: str, value: object) -> bool:
    """`value`; raises unless it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def check_unicode(text: str, name: str) -> None:
    """Raises ValueError for what no tokenizer can encode."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: is not valid Unicode, it holds a lone surrogate") from None
