"""What each value may be, said once: the file, the flags and the Python interface are all held to it.

A check takes a value and returns the value to use, or raises :class:`Unfit` with what was expected. Who calls it adds
where the value stood.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanprobe.nearest import nearest

__all__ = [
    "ATTENTIONS",
    "AUTOCAST_POLICIES",
    "CALLS",
    "FP8_SCALINGS",
    "MODES",
    "Check",
    "Unfit",
    "any_int",
    "boolean",
    "describe",
    "device",
    "keyword_arguments",
    "loss_scale",
    "one_of",
    "optional",
    "path",
    "positive_number",
    "seed",
    "text",
    "texts",
]

MODES = ("autocast", "cast")
AUTOCAST_POLICIES = ("cuda", "cpu")
ATTENTIONS = ("fused", "math", "math-half")
FP8_SCALINGS = ("tensor", "none")
CALLS = ("auto", "kwargs", "args", "single")

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_LARGEST_SEED = 2**64 - 1
"""The largest seed that ``torch.manual_seed`` takes."""

_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 3.4e38
"""Loss scales outside of these make nothing but zeros or infinities of any loss in FP32, where scaling is done."""

Check = Callable[[Any], Any]


class Unfit(Exception):
    """A value that a check refused: ``expected`` says what it should have been, ``got`` what it was."""

    def __init__(self, expected: str, got: Any) -> None:
        super().__init__(f"expected {expected}, got {describe(got)}")
        self.expected = expected
        self.got = got


def describe(value: Any) -> str:
    """Return a value as a user would recognise it in a message: kind and, where short, content."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > _LARGEST_SEED.bit_length() * 2:
        return f"a number of about {int((value.bit_length() - 1) * math.log10(2)) + 1:,} digits"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 60 else value[:57] + '...'}'"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return f"a {type(value).__name__}"


def boolean(value: Any) -> bool:
    """Check for true or false; the words yes, no, on and off count where a boolean is wanted."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    raise Unfit("true or false", value)


def any_int(value: Any) -> int:
    """Check for an integer, which true and false are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Unfit("an integer", value)


def seed(value: Any) -> int:
    """Check for a seed: an integer from 0 to 2**64 - 1."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_SEED:
        return value
    raise Unfit("an integer from 0 to 2**64 - 1", value)


def positive_number(value: Any) -> float:
    """Check for a finite number above zero."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number > 0:
            return number
    raise Unfit("a finite number above 0", value)


def loss_scale(value: Any) -> float:
    """Check for a number that a loss in FP32 can be multiplied and divided by."""
    number = positive_number(value)
    if _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        return number
    raise Unfit(f"a number from {_SMALLEST_SCALE:g} to {_LARGEST_SCALE:g}", value)


def path(value: Any) -> Path:
    """Check for a path that a file can have."""
    found = value if isinstance(value, Path) else Path(text(value))
    try:
        os.fsencode(found)
    except UnicodeEncodeError:
        raise Unfit("a path without lone surrogates", str(found)) from None
    if "\0" in str(found):
        raise Unfit("a path without a NUL character", str(found))
    return found


def text(value: Any) -> str:
    """Check for text that is not empty, without NUL and other characters that no name holds."""
    if isinstance(value, str) and "\0" in value:
        raise Unfit("text without a NUL character", value)
    if isinstance(value, str):
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise Unfit("text without lone surrogates", value) from None
    if isinstance(value, str) and value.strip():
        return value
    raise Unfit("text that is not empty" if isinstance(value, str) else "text", value)


def texts(value: Any) -> tuple[str, ...]:
    """Check for a list of texts; one text alone is a list of one."""
    if isinstance(value, str):
        return (text(value),)
    if isinstance(value, Sequence):
        for item in value:
            text(item)
        return tuple(value)
    raise Unfit("a list of texts", value)


def keyword_arguments(value: Any) -> dict[str, Any]:
    """Check for a mapping of names to values."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    raise Unfit("a mapping of names to values", value)


def device(value: Any) -> str:
    """Check for the name of a device: cpu, cuda or cuda:N."""
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return value
    raise Unfit("cpu, cuda or cuda:N", value)


def one_of(*legal: str) -> Check:
    """Return a check for one of the legal words; its message names the nearest one."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in legal:
            return value
        close = nearest(value, legal) if isinstance(value, str) else None
        hint = f" (did you mean `{close}`?)" if close else ""
        raise Unfit(" or ".join(legal) + hint, value)

    return check


def optional(check: Check) -> Check:
    """Return a check that lets None pass and asks ``check`` about everything else."""

    def checked(value: Any) -> Any:
        return None if value is None else check(value)

    return checked
