"""Recognising what is no file of bytes: pipes, devices and sockets, of which reading one may wait, or never end."""

from __future__ import annotations

import os
import stat

__all__ = ["special_file"]

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def special_file(path: str | os.PathLike[str]) -> str | None:
    """Return "a pipe", "a device" or "a socket" where ``path`` leads to one; None for anything else, or nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return next((name for matches, name in _KINDS if matches(mode)), None)
