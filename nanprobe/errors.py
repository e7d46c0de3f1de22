"""What can go wrong on the user's side or ours, and the exit code each kind ends with.

Every error carries one finished sentence: what happened, where (path, key, line), and what to do. The command line
prints that sentence and nothing else; the Python interface raises the exception itself.
"""

from __future__ import annotations

__all__ = ["IncompleteError", "Interrupted", "NanprobeError", "UsageError", "text_of"]


def text_of(error: BaseException) -> str:
    """Return what an error says, "" where it cannot say it: the message of a user's error may itself raise."""
    try:
        return str(error)
    except BaseException as second:
        if isinstance(second, KeyboardInterrupt):
            raise
        return ""


class NanprobeError(Exception):
    """Base of every error that nanprobe raises on purpose; ``exit_code`` is what the command line ends with."""

    exit_code: int = 3


class UsageError(NanprobeError):
    """The input cannot be used: a bad flag or config, an unreadable file, a batch that does not fit the model."""

    exit_code = 2


class IncompleteError(NanprobeError):
    """The work could not be completed: the reference raised, memory ran out, nothing could be observed."""

    exit_code = 3


class Interrupted(NanprobeError):
    """The user pressed Ctrl-C; everything was put back before this was raised."""

    exit_code = 130
