"""Keeping the streams to ourselves while code that is not ours runs: stdout is for the report alone.

Redirecting ``sys.stdout`` is not enough: a compiled library, a child process or ``sys.__stdout__`` write to file
descriptor 1. So the descriptor itself leads to stderr meanwhile, and back again for the report.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

__all__ = ["user_code"]

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def user_code(*, silent: bool = False) -> Iterator[None]:
    """Let the body's output, also that of its child processes, go to stderr; with ``silent`` nowhere.

    Afterwards streams and descriptors are as before, whatever the body closed or replaced, and so is the working
    directory. A process that the body forked and that comes out here too ends at once: it has no report to write.
    """
    process = os.getpid()
    here = _here()
    out, err = sys.stdout, sys.stderr
    _flush(out, sys.__stdout__, err)
    saved = {number: _copy(number) for number in (_STDOUT, _STDERR)}
    null = os.open(os.devnull, os.O_WRONLY)
    target = null if silent or saved[_STDERR] is None else _STDERR
    for number in (_STDOUT, _STDERR):
        if saved[number] is not None and number != target:
            os.dup2(target, number)
    nowhere = open(os.devnull, "w", encoding="utf-8") if silent else None  # noqa: SIM115  # closed at the end below
    sys.stdout = err if nowhere is None else nowhere
    if nowhere is not None:
        sys.stderr = nowhere
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
        _flush(sys.stdout, sys.stderr, sys.__stdout__, err)
        for number, copy in saved.items():
            if copy is not None:
                os.dup2(copy, number)
                os.close(copy)
        with contextlib.suppress(OSError):
            os.close(null)
        if nowhere is not None:
            nowhere.close()
        sys.stdout, sys.stderr = _usable(out, _STDOUT), _usable(err, _STDERR)
        if here is not None:
            with contextlib.suppress(OSError):
                os.chdir(here)


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _copy(number: int) -> int | None:
    """Return another descriptor for the same file, None where the process was started without it."""
    try:
        return os.dup(number)
    except OSError:
        return None


def _flush(*streams: TextIO | None) -> None:
    for stream in streams:
        # A stream may be missing, closed, full, or an object of the user's own that cannot flush.
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()


def _usable(stream: TextIO | None, number: int) -> TextIO | None:
    """Return the stream, or a new one for the same descriptor where the user's code closed it."""
    if stream is None or not getattr(stream, "closed", False):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(number, "w", closefd=False)), encoding="utf-8", errors="backslashreplace"
    )
