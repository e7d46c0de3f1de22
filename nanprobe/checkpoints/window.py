"""A range of bytes of one file, read by position; every reader gets one, so formats nest inside each other."""

from __future__ import annotations

import io
import os
from types import TracebackType
from typing import BinaryIO, Self

from nanprobe.checkpoints.records import Damage, Problem

__all__ = ["BytesWindow", "Window"]


class Window:
    """``size`` bytes of the file ``path`` from ``base`` on; positions count from the window's first byte."""

    def __init__(self, path: str, base: int = 0, size: int | None = None, file: BinaryIO | None = None) -> None:
        """Open the file, or use ``file``; OSError when that fails. ``size`` None means up to the end of the file."""
        self.path = path
        self.base = base
        self._owned = file is None
        self._kept: list[tuple[int, bytes]] = []
        opened = open(path, "rb", buffering=0) if file is None else file  # noqa: SIM115  # close() is the context's end
        self._file: BinaryIO = opened
        rest = max(_length(self._file) - base, 0)
        self.size = rest if size is None else min(size, rest)

    def read(self, position: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``position``; Damage when the file ends before."""
        if position < 0 or length < 0 or position + length > self.size:
            raise self.damage(
                "truncated-file",
                f"{length:,} bytes are wanted at offset {max(position, 0):,}, but only {self.size:,} bytes are there",
            )
        for start, kept in self._kept:
            if start <= position and position + length <= start + len(kept):
                return kept[position - start : position - start + length]
        parts: list[bytes] = []
        self._file.seek(self.base + position)
        while length:
            part = self._file.read(length)
            if not part:
                raise self.damage("truncated-file", "the file became shorter while it was read")
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def part(self, position: int, size: int) -> Window:
        """Return a window of ``size`` bytes from ``position`` on the same open file; Damage when it ends before."""
        if position < 0 or size < 0 or position + size > self.size:
            raise self.damage(
                "truncated-file",
                f"{size:,} bytes are wanted at offset {max(position, 0):,}, but only {self.size:,} bytes are there",
            )
        return Window(self.path, self.base + position, size, self._file)

    def prefetch(self, length: int) -> None:
        """Keep the first and the last ``length`` bytes, so that many small reads there cost one or two."""
        if self.size <= 2 * length:
            self._kept = [(0, self.read(0, self.size))]
        else:
            self._kept = [(0, self.read(0, length)), (self.size - length, self.read(self.size - length, length))]

    def head(self, length: int) -> bytes:
        """Return the first ``length`` bytes, or all of a shorter window."""
        return self.read(0, min(length, self.size))

    def damage(self, rule: str, message: str, severity: str = "error") -> Damage:
        """Return (not raise) the exception that ends reading this file with a blocking problem."""
        return Damage(Problem(rule=rule, severity=severity, message=message, file=self.path))

    def close(self) -> None:
        """Close the file, unless another window opened it."""
        if self._owned:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _length(file: BinaryIO) -> int:
    return len(file.getbuffer()) if isinstance(file, io.BytesIO) else os.fstat(file.fileno()).st_size


class BytesWindow(Window):
    """A window of bytes in memory; ``path`` is the file that they came from. Positions are those in the bytes."""

    def __init__(self, path: str, data: bytes) -> None:
        """Take the bytes as they are."""
        super().__init__(path, 0, len(data), io.BytesIO(data))
