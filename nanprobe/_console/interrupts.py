"""Ctrl-C at any moment: one line and exit code 130, also while libraries are still being imported.

The first one raises KeyboardInterrupt as usual, so that everything is put back. Code may swallow that, or turn it into
an error of its own, which is why it is remembered. A second one ends the process on the spot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

__all__ = ["begin", "finish", "install", "interrupted"]

_CODE = 130
_LINE = b"nanprobe: interrupted\n"


class _State:
    """Whether the command line has begun, so that somebody catches the exception, and whether Ctrl-C was pressed."""

    begun = False
    pressed = False


def install() -> None:
    """Take over SIGINT, unless this process was told to ignore it; needs nothing that is slow to import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def begin() -> None:
    """Say that from now on a KeyboardInterrupt is caught."""
    _State.begun = True


def interrupted() -> bool:
    """Tell whether Ctrl-C was pressed."""
    return _State.pressed


def finish() -> None:
    """Ignore Ctrl-C from here on: the last line has been said, and only the exit code is left."""
    if signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.begun and not _State.pressed:
        _State.pressed = True
        raise KeyboardInterrupt
    # Nothing is flushed: this may be in the middle of anything.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            os.write(2, _LINE)
    os._exit(_CODE)
