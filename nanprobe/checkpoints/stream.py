"""The bytes of a storage, in bounded chunks, from wherever they lie; checked where they are read whole."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator

from nanprobe.checkpoints.records import Damage, Extent, Problem, Storage
from nanprobe.checkpoints.window import Window

__all__ = ["CHUNK", "read_storage", "stream_extent"]

CHUNK = 8 << 20
"""Bytes per chunk: large enough that the cost of a read does not matter, small enough to stay in the cache."""


def stream_extent(extent: Extent, chunk: int = CHUNK, *, check: bool = True) -> Iterator[bytes]:
    """Yield the decoded bytes of ``extent`` in pieces of at most ``chunk``.

    ``check`` compares the CRC at the end where there is one. Damage when the bytes are not there or not right.
    """
    crc = 0
    check = check and extent.crc32 is not None
    if extent.data is not None:
        for position in range(0, len(extent.data), chunk):
            yield extent.data[position : position + chunk]
        return
    with Window(extent.file, extent.offset, extent.length) as window:
        parts = _DECODERS[extent.encoding](window, extent, chunk)
        for part in parts:
            if check:
                crc = zlib.crc32(part, crc)
            yield part
    if check and crc != extent.crc32:
        raise _damage(extent, "corrupt-file", "it does not match its CRC: bytes changed after it was saved")


def read_storage(storage: Storage, *, check: bool = True) -> bytearray:
    """Return all bytes of ``storage`` as one buffer of its own; Damage when they are not there or not right."""
    # A compressed extent may claim any size, so that its bytes are counted only as they come.
    known = all(extent.encoding == "stored" for extent in storage.extents)
    buffer = bytearray(storage.size) if known else bytearray()
    position = 0
    for extent in storage.extents:
        for part in stream_extent(extent, check=check):
            buffer[position : position + len(part)] = part
            position += len(part)
    return buffer


def _stored(window: Window, extent: Extent, chunk: int) -> Iterator[bytes]:
    for position in range(0, extent.length, chunk):
        yield window.read(position, min(chunk, extent.length - position))


def _inflated(window: Window, extent: Extent, chunk: int) -> Iterator[bytes]:
    machine = zlib.decompressobj(-15)
    left = extent.size
    position = 0
    pending = b""
    while left:
        if not pending:
            length = min(chunk, extent.length - position)
            pending = window.read(position, length) if length else b""
            position += length
        try:
            part = machine.decompress(pending, min(chunk, left))
        except zlib.error:
            raise _damage(extent, "corrupt-file", "it does not decompress") from None
        starved = not pending and not part
        pending = machine.unconsumed_tail
        if starved or (machine.eof and not part):
            raise _damage(extent, "corrupt-file", f"it decompresses to {left:,} bytes less than declared")
        left -= len(part)
        if part:
            yield part


def _latin1(window: Window, extent: Extent, chunk: int) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    left = extent.size
    try:
        for position in range(0, extent.length, chunk):
            length = min(chunk, extent.length - position)
            last = position + length == extent.length
            part = decoder.decode(window.read(position, length), final=last).encode("latin-1")[:left]
            left -= len(part)
            if part:
                yield part
    except UnicodeError:
        raise _damage(extent, "corrupt-file", "it is no text of single-byte characters") from None
    if left:
        raise _damage(extent, "corrupt-file", f"it decodes to {left:,} bytes less than declared")


_DECODERS: dict[str, Callable[[Window, Extent, int], Iterator[bytes]]] = {
    "stored": _stored,
    "deflated": _inflated,
    "latin1": _latin1,
}


def _damage(extent: Extent, rule: str, message: str) -> Damage:
    place = f"its data at offset {extent.offset:,} cannot be used: {message}"
    return Damage(Problem(rule=rule, severity="error", message=place, file=extent.file))
