"""The name that somebody probably meant: the closest of the legal ones, for messages about a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "suggestion"]

_LIKENESS = 0.6
"""Smallest difflib ratio that counts as a likely misspelling; the default of the standard library."""


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """Return the legal name most like ``name``, letter case aside; None when none is like it."""
    by_lower: dict[str, str] = {}
    for candidate in legal:
        by_lower.setdefault(candidate.lower(), candidate)
    # Letters that changed places are the likeliest slip, and difflib rates them below a letter too many.
    same_letters = [candidate for candidate in by_lower if sorted(candidate) == sorted(name.lower())]
    close = same_letters or difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=_LIKENESS)
    return by_lower[close[0]] if close else None


def suggestion(name: str, legal: Iterable[str], *, limit: int = 12) -> str:
    """Return the tail of a message about the unknown ``name``: the nearest legal name, else up to ``limit`` of them."""
    names = list(legal)
    close = nearest(name, names)
    if close is not None:
        return f"did you mean `{close}`?"
    if not names:
        return "there are none"
    shown = ", ".join(f"`{n}`" for n in names[:limit])
    more = len(names) - limit
    return f"there are {shown}" + (f" and {more} more" if more > 0 else "")
