"""How numbers are written for people: short, honest, and spelled the same everywhere.

Non-zero never prints as zero, not-quite-all never as all, and a count comes with its denominator. Non-finite values
are ``NaN``, ``Inf`` and ``-Inf`` in prose and tables alike (in JSON they are the strings of the serialiser).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["bits", "count", "error", "index", "kinds", "loss", "magnitude", "of", "plural", "seconds", "setting"]

ABSENT = "-"
"""What stands in a cell for a value that was not measured or does not apply."""

_PLAIN_FROM, _PLAIN_BELOW = 1e-3, 1e7


def magnitude(value: float | None) -> str:
    """Return a value's size to three significant digits ("0.42", "31.5", "65,472", "1.99e7").

    Numbers from 1,000 up to ten millions are written out to the unit, so that 65,519 and fp16's largest, 65,504, stay
    apart.
    """
    special = _special(value)
    if special is not None:
        return special
    assert value is not None
    size = abs(value)
    if not _PLAIN_FROM <= size < _PLAIN_BELOW:
        return _scientific(value, 2)
    if size >= 1000:
        return f"{value:,.0f}" if abs(round(value)) < _PLAIN_BELOW else _scientific(value, 2)
    return _trimmed(f"{value:.3g}") if size < 999.5 else f"{value:,.0f}"


def loss(value: float | None) -> str:
    """Return a loss to five significant digits ("4.8127")."""
    special = _special(value)
    if special is not None:
        return special
    assert value is not None
    size = abs(value)
    if size >= 1000 and round(size) < _PLAIN_BELOW:
        return _trimmed(f"{value:,.1f}") if size < 9999.95 else f"{value:,.0f}"
    return _trimmed(f"{value:#.5g}") if _PLAIN_FROM <= size < 1000 else _scientific(value, 4)


def error(value: float | None) -> str:
    """Return a relative error to two significant digits; below 1 always with an exponent, so that columns compare."""
    special = _special(value)
    if special is not None:
        return special
    assert value is not None
    return _scientific(value, 1, trim=False) if not 0.95 <= value < 100 else f"{value:.2g}"


def bits(value: float | None) -> str:
    """Return a headroom in bits to one decimal; a headroom that is not zero never reads as zero."""
    special = _special(value)
    if special is not None:
        return special
    assert value is not None
    text = f"{value:.1f}"
    return f"{value:.1g}" if float(text) == 0 else text


def seconds(value: float | None) -> str:
    """Return a duration in seconds or milliseconds ("1.25 s", "31 ms", "under 1 ms")."""
    if value is None:
        return ABSENT
    if value >= 0.9995:
        return f"{value:.2f} s" if value < 99.995 else f"{value:.0f} s"
    return "under 1 ms" if value < 0.001 else f"{value * 1000:.0f} ms"


def count(value: int) -> str:
    """Return a count with thousands separators ("49,152")."""
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    """Return a count and its noun ("1 element", "3 elements"); the noun takes a plain s."""
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


def of(part: int, whole: int, word: str = "element") -> str:
    """Return a count with its denominator: "97 of 49,152 elements", "all 12 elements", "the only element"."""
    if part == whole:
        return f"the only {word}" if whole == 1 else f"all {whole:,} {word}s"
    return f"{part:,} of {plural(whole, word)}"


def kinds(nan: int, posinf: int, neginf: int) -> str:
    """Return what kinds of non-finite values there are, with their counts: "90 NaN, 7 Inf"."""
    named = ((nan, "NaN"), (posinf, "Inf"), (neginf, "-Inf"))
    return ", ".join(f"{number:,} {word}" for number, word in named if number)


def index(position: Sequence[int]) -> str:
    """Return an element's index ("[0, 17, 212]"; "[]" is the only element of a scalar)."""
    return "[" + ", ".join(str(part) for part in position) + "]"


def setting(value: Any) -> str:
    """Return the value of a condition or an environment entry in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    if isinstance(value, Mapping):
        inner = (
            (key, f"({setting(item)})" if isinstance(item, Mapping) else setting(item)) for key, item in value.items()
        )
        return ", ".join(f"{key} {text}" for key, text in inner) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(item) for item in value) or "none"
    return str(value)


def _special(value: float | None) -> str | None:
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return "0" if value == 0 else None


def _scientific(value: float, decimals: int, *, trim: bool = True) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{_trimmed(mantissa) if trim else mantissa}e{int(exponent)}"


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
