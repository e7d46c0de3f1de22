"""The bytes of a pickle, handed to the machine in blocks, so that a pickle of any size needs a bounded buffer."""

from __future__ import annotations

from nanprobe.checkpoints.window import Window

__all__ = ["BLOCK", "PickleSource"]

BLOCK = 1 << 20
"""Bytes read at a time from a file."""


class PickleSource:
    """Bytes ``start`` to ``end`` of a window, or a byte string that was decompressed before.

    ``data`` is the block in memory and ``base`` the position of its first byte; ``end`` is one past the last byte.
    """

    def __init__(self, window: Window | None, data: bytes = b"", start: int = 0, end: int | None = None) -> None:
        self._window = window
        self.data = data
        self.base = start
        self.end = start + len(data) if end is None else end

    def advance(self, position: int, need: int) -> None:
        """Make ``data`` begin at ``position`` and hold ``need`` bytes, or all that is left when that is less."""
        if self._window is None:
            return
        length = min(max(need, BLOCK), max(self.end - position, 0))
        self.data = self._window.read(position, length)
        self.base = position
