"""Reading forward through a window: numbers and strings of a binary header, every length checked before it is used."""

from __future__ import annotations

import struct

from nanprobe.checkpoints.window import Window

__all__ = ["Cursor"]

_BLOCK = 1 << 18


class Cursor:
    """A position in a window; ``at`` is the next byte, ``end`` one past the last that may be read."""

    def __init__(self, window: Window, at: int = 0, end: int | None = None) -> None:
        self.window = window
        self.at = at
        self.end = window.size if end is None else end
        self._data = b""
        self._base = at

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return self.end - self.at

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes; Damage when fewer are left."""
        if length < 0 or length > self.left:
            raise self.window.damage(
                "truncated-file",
                f"its header claims {length:,} bytes at offset {self.at:,}, where {max(self.left, 0):,} are left",
            )
        start = self.at - self._base
        if start < 0 or start + length > len(self._data):
            self._data = self.window.read(self.at, min(max(length, _BLOCK), self.left))
            self._base, start = self.at, 0
        self.at += length
        return self._data[start : start + length]

    def skip(self, length: int) -> None:
        """Pass over ``length`` bytes; Damage when fewer are left."""
        if length < 0 or length > self.left:
            self.take(length)
        self.at += length

    def number(self, form: str) -> int:
        """Return one integer of a struct format."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def real(self, form: str) -> float:
        """Return one floating-point number of a struct format."""
        value: float = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def varint(self) -> int:
        """Return one integer of protobuf's variable length; Damage when it does not end."""
        start = self.at - self._base
        if 0 <= start < len(self._data) and self.at < self.end and self._data[start] < 128:
            self.at += 1
            return self._data[start]
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1
        raise self.window.damage("corrupt-file", f"a number of its header does not end, at offset {self.at:,}")
