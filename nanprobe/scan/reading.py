"""Bytes of a storage by position, into buffers that are used again, so that memory does not grow with the file.

Files are read and not mapped: a file that becomes shorter while it is scanned is then an error to report and not a
signal that ends the process, and the memory shown for the process is what it really needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanprobe.checkpoints.records import Damage, Extent, Problem, Storage
from nanprobe.checkpoints.stream import CHUNK, stream_extent
from nanprobe.numerics.crc import crc32
from nanprobe.numerics.native import Kernels

__all__ = ["Files", "is_random_access", "read_range", "stream_whole"]

_OPEN = 64
"""Files that one worker keeps open."""


class Files:
    """Open files of one worker, by path; the least recently opened is closed when there are too many."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}

    def handle(self, path: str) -> int:
        """Return a file descriptor for reading; OSError when the file cannot be opened."""
        found = self._handles.get(path)
        if found is None:
            if len(self._handles) >= _OPEN:
                oldest = next(iter(self._handles))
                os.close(self._handles.pop(oldest))
            found = self._handles[path] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return found

    def close(self) -> None:
        """Close them all."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def is_random_access(storage: Storage) -> bool:
    """Return whether any byte of the storage can be read without reading those before it."""
    return all(extent.encoding == "stored" and extent.data is None for extent in storage.extents)


def read_range(files: Files, storage: Storage, start: int, into: Any) -> None:
    """Fill ``into`` (a contiguous uint8 array) with bytes of a random-access storage from ``start`` on.

    Damage when they are not there, OSError when the file cannot be read.
    """
    filled = 0
    position = 0
    for extent in storage.extents:
        begin = max(start + filled - position, 0)
        if begin < extent.size and filled < into.size:
            length = min(extent.size - begin, into.size - filled)
            _read(files, extent, begin, into[filled : filled + length])
            filled += length
        position += extent.size
    if filled < into.size:
        raise _damage(
            storage.extents[0].file if storage.extents else "?", "truncated-file", "its data is not all there"
        )


def _read(files: Files, extent: Extent, begin: int, into: Any) -> None:
    handle = files.handle(extent.file)
    done = 0
    while done < into.size:
        read = _pread(handle, into[done:], extent.offset + begin + done)
        if read == 0:
            raise _damage(
                extent.file, "truncated-file", f"its data at offset {extent.offset:,} ends before it should: the file "
                "is shorter than it was, or was cut short",
            )  # fmt: skip
        done += read


def _pread(handle: int, into: Any, position: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(handle, [into], position)
    os.lseek(handle, position, os.SEEK_SET)  # only where there is no positioned read; each worker has its own handles
    data = os.read(handle, into.size)
    into[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def stream_whole(
    files: Files, storage: Storage, buffer: Any, *, check: bool, kernels: Kernels | None = None
) -> Iterator[Any]:
    """Yield all bytes of a storage in order as uint8 arrays that are valid until the next one is asked for.

    ``check`` compares CRCs where there are any. Damage when the bytes are not there or not right.
    """
    for extent in storage.extents:
        if extent.encoding != "stored" or extent.data is not None:
            for part in stream_extent(extent, min(CHUNK, buffer.size), check=check):
                yield np.frombuffer(part, np.uint8)
            continue
        crc = 0
        for begin in range(0, extent.size, buffer.size):
            into = buffer[: min(buffer.size, extent.size - begin)]
            _read(files, extent, begin, into)
            if check and extent.crc32 is not None:
                crc = crc32(into, crc, kernels)
            yield into
        if check and extent.crc32 is not None and crc != extent.crc32:
            raise _damage(
                extent.file,
                "corrupt-file",
                f"its data at offset {extent.offset:,} does not match its CRC: bytes changed after it was saved",
            )


def _damage(file: str, rule: str, message: str) -> Damage:
    return Damage(Problem(rule=rule, severity="error", message=message, file=file))
