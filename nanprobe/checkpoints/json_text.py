"""JSON texts of checkpoints, refused before they are parsed when they would take far more memory than they should."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["DuplicateKey", "TooLarge", "parse_json"]

MAX_VALUES = 4_000_000
"""Values in one text: a header of 400,000 tensors has about that many. Each takes up to some 100 bytes."""


class TooLarge(ValueError):
    """The text holds more values than any checkpoint's does."""


class DuplicateKey(ValueError):
    """A JSON object names a key twice."""


def _strict_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object and refuse one that names a key twice (for ``object_pairs_hook``)."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"it names {key[:200]!r} twice")
            seen.add(key)
    return made


def parse_json(data: bytes, *, strict: bool = False) -> Any:
    """Return what the text says; ``strict`` refuses a key that is named twice.

    ValueError, with a phrase where one helps, when it is no JSON text or beyond the limit.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise TooLarge(f"it holds more than {MAX_VALUES:,} values")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_strict_pairs if strict else None)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
