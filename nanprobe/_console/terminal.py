"""Facts about the terminal, gathered once: width, colour, whether anybody watches stderr; and speaking on stderr."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TextIO

from nanprobe.errors import UsageError
from nanprobe.nearest import suggestion

__all__ = ["COLORS", "Terminal", "discard_stdout", "one_line", "read_terminal", "say", "write_stdout"]

COLORS: tuple[str, ...] = ("auto", "always", "never")

_DEFAULT_WIDTH = 100
"""Characters per line of a table that is not printed to a terminal."""

_MOST_DIGITS = 5
"""Digits of a width that is taken for one."""

_LONGEST_WORD = 400
"""Characters of a name or a value that a message shows: enough for any path that is one."""

_LONGEST_LINE = 2000
"""Characters of a whole message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """``width`` of a line in characters, whether stdout may carry ``color``, whether ``stderr`` is a terminal."""

    width: int = _DEFAULT_WIDTH
    color: bool = False
    stderr: bool = False


def read_terminal(color: str) -> Terminal:
    """Return the facts; ``color`` is "auto", "always" or "never".

    "auto" means a terminal that can show colour, with NO_COLOR unset; FORCE_COLOR overrules what stdout is.
    """
    if color not in COLORS:
        raise UsageError(f"--color: no such choice '{color}'; {suggestion(color, COLORS)}")
    on_terminal = _is_terminal(sys.stdout)
    width = shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns if on_terminal else _columns()
    allowed = on_terminal and os.environ.get("TERM") != "dumb"
    if os.environ.get("FORCE_COLOR"):
        allowed = True
    if os.environ.get("NO_COLOR"):
        allowed = False
    return Terminal(
        width=width,
        color={"always": True, "never": False}.get(color, allowed),
        stderr=_is_terminal(sys.stderr),
    )


def _columns() -> int:
    """Return the width that the environment asks for where stdout is no terminal."""
    text = os.environ.get("COLUMNS", "")
    # Python counts superscripts as digits, and reads no more than some thousands of them.
    fits = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return (int(text) if fits else 0) or _DEFAULT_WIDTH


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def one_line(text: str) -> str:
    """Return text on one line, with control characters (terminal escapes among them) made visible.

    Words beyond 400 characters and lines beyond 2,000 lose their middle.
    """
    flat = _cut(" ".join(_cut(word, _LONGEST_WORD) for word in text.split()), _LONGEST_LINE)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in flat)


def _cut(text: str, limit: int) -> str:
    """Return ``text`` without its middle where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"


def say(text: str) -> None:
    """Print one line on stderr; a stderr that is gone is nobody's error."""
    if sys.stderr is None:
        return
    try:
        _lenient(sys.stderr)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # There is no third place to complain in.
        return


def write_stdout(text: str) -> None:
    """Print a report on stdout and flush it; BrokenPipeError when the reader is gone, OSError when the disk is full."""
    if sys.stdout is None:
        return
    _lenient(sys.stdout)
    sys.stdout.write(text)
    sys.stdout.flush()


def discard_stdout() -> None:
    """Point stdout to nowhere, so that the interpreter's last flush does not complain about a reader that is gone."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):
        # Stdout has no file behind it (a test's buffer), so nothing is flushed at the end.
        return


def _lenient(stream: TextIO) -> None:
    """Let a stream escape what its encoding cannot show, rather than fail in the middle of a report."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and getattr(stream, "errors", None) == "strict":
        reconfigure(errors="backslashreplace")
