"""Names that come from models, files and exceptions, made safe to print and short enough for a column.

A module path, a dictionary key or an exception's text may hold line breaks, terminal escapes, or characters that turn
the reading direction; none of them may act on the reader's terminal.
"""

from __future__ import annotations

__all__ = ["ROOT", "neutral", "one_line", "shortened", "shortened_path", "visit_name"]

ROOT = "(root)"
"""How the root module, whose path is empty, is written."""

_GAP = ".."


def neutral(text: str) -> str:
    """Return ``text`` with every character that is not printable (controls, escapes, direction marks) spelled out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def one_line(text: str) -> str:
    """Return prose on one line: white space runs become one space, everything else that is not printable is spelled."""
    return neutral(" ".join(text.split()))


def visit_name(module: str | None, visit: int | None = 0) -> str:
    """Return a module path, with "#n" when it is visit n > 0 of a module that is called more than once."""
    path = "(outside the model)" if module is None else module or ROOT
    return f"{path}#{visit}" if visit else path


def shortened(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` characters (at least 5), cut in the middle; most of the tail stays."""
    if len(text) <= width:
        return text
    tail = max((width - len(_GAP)) * 2 // 3, 1)
    head = max(width - len(_GAP) - tail, 0)
    return text[:head] + _GAP + text[len(text) - tail :]


def shortened_path(path: str, width: int) -> str:
    """Return a module path in at most ``width`` characters (at least 5).

    Words are cut to their first letter from the left ("t.d.b.40.f.output_projection"), so that the numbers, which tell
    layers apart, and the last word stay as long as they can; after that it is cut in the middle.
    """
    start, space, rest = path.rpartition(" ")
    parts = rest.split(".")
    for at, part in enumerate(parts[:-1]):
        if len(start) + len(space) + len(".".join(parts)) <= width:
            break
        if not part.isdigit():
            parts[at] = part[:1]
    return shortened(start + space + ".".join(parts), width)
