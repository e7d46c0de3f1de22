"""Names that come from models, files and exceptions, made safe to print and short enough for a column.

A module path, a dictionary key or an exception's text may hold line breaks, terminal escapes, or characters that turn
the reading direction; none of them may act on the reader's terminal.
"""

from __future__ import annotations

__all__ = ["ROOT", "neutral", "one_line", "shortened_class", "shortened_path", "visit_name"]

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


def shortened_path(path: str, width: int) -> str:
    """Return a module path in at most ``width`` characters (at least 5), cut in the middle ("tr..40.mlp.up_proj").

    Little of the start is left, because the tail tells layers and parts apart; the word "grad" before it stays whole.
    """
    if len(path) <= width:
        return path
    word, space, _ = path.partition(" ")
    start = f"{word}{space}" if space and len(word) + len(_GAP) + 12 <= width else ""
    head = len(start) + max((width - len(start)) // 8, 1)
    tail = path[len(path) - max(width - head - len(_GAP), 1) :]
    # A dot beside the two that stand for what is missing would read as a third.
    return path[:head] + _GAP + (tail[1:] if tail.startswith(".") and len(tail) > len(_GAP) + 1 else tail)


def shortened_class(name: str, width: int) -> str:
    """Return a class's name in at most ``width`` characters (at least 5), cut at its end ("QuantizableLi..")."""
    return name if len(name) <= width else name[: width - len(_GAP)] + _GAP
