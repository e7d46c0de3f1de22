"""The directory of a zip file, read from its end and checked before anything is believed.

Python's zipfile would do for good files; here every number is checked against the window, a zip inside another file
works, and a short or inconsistent file is told apart from a foreign one. Format: PKWARE APPNOTE 6.3, sections 4.3 and
4.4, with the zip64 records.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from nanprobe.checkpoints.records import Extent
from nanprobe.checkpoints.window import Window

__all__ = ["Member", "read_directory", "read_member", "resolve"]

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY = 1 << 28
_MAX_RATIO = 1032
"""DEFLATE's own limit: a match of 258 bytes takes two bits (RFC 1951)."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member: ``header`` is where its local header begins, ``stored`` its bytes in the file, ``size`` decoded."""

    name: str
    method: int
    crc32: int
    stored: int
    size: int
    header: int
    encrypted: bool
    raw_name: bytes


def read_directory(window: Window) -> dict[str, Member]:
    """Return the members by name; Damage when the directory is missing, short or inconsistent."""
    tail_length = min(window.size, _END.size + _LOCATOR.size)
    tail = window.read(window.size - tail_length, tail_length)
    at = tail_length - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        # A comment follows, which is rare: the directory's end is somewhere before it.
        tail_length = min(window.size, 65_535 + _END.size + _LOCATOR.size)
        tail = window.read(window.size - tail_length, tail_length)
        at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise window.damage(
            "truncated-file",
            f"the file begins like a zip but ends after {window.size:,} bytes without its directory: "
            "the copy or the save did not finish; copy or save it again",
        )
    _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    end = window.size - tail_length + at
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\6\7":
        _, _, end64, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if end64 + _END64.size > window.size:
            raise window.damage("corrupt-file", "its zip directory points outside the file")
        fields = _END64.unpack(window.read(end64, _END64.size))
        if fields[0] != b"PK\6\6":
            raise window.damage("corrupt-file", "its zip directory is damaged")
        count, size, start, end = fields[7], fields[8], fields[9], end64
    if start + size > end or size > _MAX_DIRECTORY or count * _CENTRAL.size > size:
        raise window.damage("corrupt-file", "its zip directory does not fit into the file")
    return _parse(window, window.read(start, size), count, start)


def _parse(window: Window, data: bytes, count: int, limit: int) -> dict[str, Member]:
    members: dict[str, Member] = {}
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(data) or data[position : position + 4] != b"PK\1\2":
            raise window.damage("corrupt-file", f"its zip directory is damaged after {len(members):,} entries")
        fields = _CENTRAL.unpack_from(data, position)
        flags, method, crc = fields[3], fields[4], fields[7]
        stored, size, name_length, extra_length, comment_length = fields[8:13]
        header = fields[16]
        position += _CENTRAL.size
        raw_name = data[position : position + name_length]
        name = raw_name.decode("utf-8" if flags & 0x800 else "cp437", "replace")
        extra = data[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment_length
        if 0xFFFFFFFF in (stored, size, header):
            stored, size, header = _wide(extra, stored, size, header)
        if header + _LOCAL.size + stored > limit:
            raise window.damage("corrupt-file", f"its member {name[:200]!r} reaches beyond the zip directory")
        if name in members:
            raise window.damage("corrupt-file", f"its zip directory lists {name[:200]!r} twice")
        members[name] = Member(name, method, crc, stored, size, header, bool(flags & 1), raw_name)
    _refuse_overlap(window, members)
    return members


def _wide(extra: bytes, stored: int, size: int, header: int) -> tuple[int, int, int]:
    """Return the sizes and the position with the 64-bit fields of the zip64 record put in, in their fixed order."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            body = extra[position + 4 : position + 4 + length]
            values = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            size = next(values, size) if size == 0xFFFFFFFF else size
            stored = next(values, stored) if stored == 0xFFFFFFFF else stored
            header = next(values, header) if header == 0xFFFFFFFF else header
            break
        position += 4 + length
    return stored, size, header


def _refuse_overlap(window: Window, members: dict[str, Member]) -> None:
    end = 0
    last = ""
    for member in sorted(members.values(), key=lambda member: member.header):
        if member.header < end:
            raise window.damage("corrupt-file", f"its members {last[:200]!r} and {member.name[:200]!r} overlap")
        end = member.header + _LOCAL.size + member.stored
        last = member.name


def resolve(window: Window, member: Member) -> Extent:
    """Return where the member's bytes lie, after a look at its local header; Damage when that contradicts."""
    if member.encrypted:
        raise window.damage("not-scanned", f"its member {member.name[:200]!r} is encrypted", "warning")
    if member.method not in (0, 8):
        raise window.damage(
            "not-scanned",
            f"its member {member.name[:200]!r} is compressed by method {member.method}; only DEFLATE is read",
            "warning",
        )
    length = min(_LOCAL.size + len(member.raw_name), window.size - member.header)
    header = window.read(member.header, length)
    if len(header) < _LOCAL.size:
        raise window.damage("truncated-file", f"its member {member.name[:200]!r} reaches beyond the end of the file")
    fields = _LOCAL.unpack_from(header)
    if fields[0] != b"PK\3\4" or fields[3] != member.method:
        raise window.damage("corrupt-file", f"the local header of its member {member.name[:200]!r} is damaged")
    if fields[9] != len(member.raw_name) or header[_LOCAL.size :] != member.raw_name:
        raise window.damage(
            "corrupt-file", f"the zip directory calls a member {member.name[:200]!r}, the member calls itself otherwise"
        )
    offset = member.header + _LOCAL.size + fields[9] + fields[10]
    if offset + member.stored > window.size:
        raise window.damage("truncated-file", f"its member {member.name[:200]!r} reaches beyond the end of the file")
    if member.method == 0 and member.stored != member.size:
        raise window.damage("corrupt-file", f"its member {member.name[:200]!r} has two different sizes")
    if member.method == 8 and member.size > member.stored * _MAX_RATIO + 64:
        raise window.damage(
            "corrupt-file",
            f"its member {member.name[:200]!r} claims {member.size:,} bytes, which {member.stored:,} compressed ones "
            "cannot make",
        )
    return Extent(
        file=window.path,
        offset=window.base + offset,
        length=member.stored,
        size=member.size,
        encoding="deflated" if member.method == 8 else "stored",
        crc32=member.crc32,
    )


def read_member(window: Window, member: Member, limit: int, *, check: bool) -> bytes:
    """Return a whole member of at most ``limit`` decoded bytes; ``check`` compares the CRC. Damage otherwise."""
    extent = resolve(window, member)
    if member.size > limit:
        raise window.damage(
            "not-scanned",
            f"its member {member.name[:200]!r} has {member.size:,} bytes; the limit is {limit:,}",
            "warning",
        )
    data = window.read(extent.offset - window.base, extent.length)
    if extent.encoding == "deflated":
        try:
            data = zlib.decompressobj(-15).decompress(data, member.size + 1)
        except zlib.error:
            raise window.damage("corrupt-file", f"its member {member.name[:200]!r} does not decompress") from None
    if len(data) != member.size:
        raise window.damage("corrupt-file", f"its member {member.name[:200]!r} decompresses to another size")
    if check and zlib.crc32(data) != member.crc32:
        raise window.damage(
            "corrupt-file", f"its member {member.name[:200]!r} does not match its CRC: bytes changed after it was saved"
        )
    return data
