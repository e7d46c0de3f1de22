"""Tar archives with checkpoints inside: NeMo's ``.nemo``, plain or compressed with gzip.

Nothing is unpacked to its name: a member of a plain archive is a window of the archive's bytes, and a compressed one
is decompressed into a temporary file first, up to a limit. Format: POSIX.1-1988 ustar with the long names of GNU and
pax.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanprobe.checkpoints.describe import limit_problems
from nanprobe.checkpoints.records import Damage, FileIndex, NoCheckpoint, Problem, Storage, TensorEntry
from nanprobe.checkpoints.sniff import Sniffed, sniff
from nanprobe.checkpoints.window import Window

__all__ = ["index_gzip", "index_tar"]

_RECORD = 512
_MAX_MEMBERS = 100_000
_MAX_LONG_NAME = 1 << 16
_CHUNK = 1 << 20
_LIMIT = 16 << 30
_RATIO = 50
"""A compressed archive is decompressed up to this many bytes, and up to this many times its own size."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    offset: int
    size: int


def index_tar(window: Window, read: Callable[[Window, Sniffed], FileIndex | None]) -> FileIndex:
    """Return what the checkpoints inside the archive hold; ``read`` reads one of them by its kind."""
    members, problems = _members(window)
    names = {member.name for member in members}
    if {"storages", "tensors", "pickle"} <= names:
        raise window.damage(
            "not-scanned",
            "it is a torch.save file of before PyTorch 0.2, which is not read; load and save it again with PyTorch 1",
            "warning",
        )
    tensors: list[TensorEntry] = []
    storages: dict[str, Storage] = {}
    foreign: dict[str, None] = {}
    trees: dict[str, object] = {}
    found = 0
    nemo = any(name.rpartition("/")[2] == "model_config.yaml" for name in names)
    for member in members:
        if member.name.rpartition("/")[2] == ".metadata":
            problems.append(
                _problem(window, "not-scanned", "it holds a distributed checkpoint: unpack it and scan the folder")
            )
        inner = window.part(member.offset, member.size)
        kind = sniff(inner.head(4096), inner.size, os.path.splitext(member.name)[1].lower())
        try:
            index = read(inner, kind)
        except NoCheckpoint:
            continue
        except Damage as damage:
            found += 1
            problems.append(replace(damage.problem, message=f"{member.name[:200]}: {damage.problem.message}"))
            continue
        if index is None:
            continue
        found += 1
        lone = sum(name.endswith((".ckpt", ".pt", ".pth", ".bin", ".safetensors")) for name in names) == 1
        for entry in index.tensors:
            tensors.append(entry if lone else replace(entry, path=(member.name, *entry.path)))
        storages.update(index.storages)
        foreign.update(dict.fromkeys(index.foreign))
        problems.extend(index.problems)
        if index.tree is not None:
            trees[member.name] = index.tree
    if not found and problems:
        raise Damage(problems[0])
    if not found:
        raise NoCheckpoint(window.damage("corrupt-file", "it is a tar archive without a checkpoint inside").problem)
    return FileIndex(
        kind="nemo" if nemo else "tar",
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        tree=next(iter(trees.values())) if len(trees) == 1 else trees or None,
        foreign=tuple(foreign),
        problems=limit_problems(problems),
    )


def _problem(window: Window, rule: str, message: str) -> Problem:
    severity = "warning" if rule == "not-scanned" else "error"
    return Problem(rule=rule, severity=severity, message=message, file=window.path, blocking=False)


def _members(window: Window) -> tuple[list[_Member], list[Problem]]:
    """Return the regular files of the archive, and what is wrong with it."""
    members: list[_Member] = []
    problems: list[Problem] = []
    at, long_name = 0, ""
    while at + _RECORD <= window.size and len(members) < _MAX_MEMBERS:
        head = window.read(at, _RECORD)
        if not head.strip(b"\0"):
            return members, problems
        if not _checked(head):
            problems.append(_problem(window, "corrupt-file", f"its directory is damaged at offset {at:,}"))
            return members, problems
        size = _number(head[124:136])
        if size < 0 or at + _RECORD + size > window.size:
            problems.append(
                _problem(
                    window,
                    "truncated-file",
                    f"its member {_text(head[:100])[:200]!r} needs {max(size, 0):,} bytes at offset {at + _RECORD:,}, "
                    f"where {window.size - at - _RECORD:,} are left: the copy or the save did not finish",
                )
            )
            return members, problems
        kind = head[156:157]
        if kind in (b"L", b"x"):
            data = window.read(at + _RECORD, min(size, _MAX_LONG_NAME))
            long_name = _pax_path(data) if kind == b"x" else _text(data)
        else:
            name = long_name or "/".join(part for part in (_text(head[345:500]), _text(head[:100])) if part)
            name = name.removeprefix("./")
            if name.startswith("/") or ".." in name.split("/"):
                problems.append(
                    _problem(
                        window, "corrupt-file", f"its member {name[:200]!r} leads out of the folder of the archive"
                    )
                )
            elif kind in (b"0", b"\0", b"7"):
                members.append(_Member(name, at + _RECORD, size))
            long_name = ""
        at += _RECORD + -(-size // _RECORD) * _RECORD
    if at + _RECORD > window.size:
        problems.append(_problem(window, "truncated-file", "it ends without the mark of its end"))
    return members, problems


def _checked(head: bytes) -> bool:
    """Return whether the checksum of a record is right."""
    return _number(head[148:156]) == sum(head[:148]) + 8 * 32 + sum(head[156:])


def _number(part: bytes) -> int:
    if part[:1] == b"\x80":
        return int.from_bytes(part[1:], "big")
    text = part.strip(b"\0 ")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        return -1


def _text(part: bytes) -> str:
    return part.split(b"\0", 1)[0].decode("utf-8", "replace")


def _pax_path(data: bytes) -> str:
    for line in data.split(b"\n"):
        _, _, pair = line.partition(b" ")
        key, _, value = pair.partition(b"=")
        if key == b"path":
            return value.decode("utf-8", "replace")
    return ""


class _TemporaryPath(str):
    """The path of a temporary file; the file goes when nothing refers to this very object any more.

    Extents name the file that they lie in, so the file lives as long as the records that need it.
    """

    def keep(self, folder: str) -> None:
        """Remove ``folder`` with this object."""
        weakref.finalize(self, shutil.rmtree, folder, True)


def index_gzip(window: Window, read: Callable[[Window], FileIndex]) -> FileIndex:
    """Return what the decompressed file holds; Damage when it is damaged or beyond the limit."""
    folder = tempfile.mkdtemp(prefix="nanprobe-")
    path = _TemporaryPath(os.path.join(folder, "decompressed"))
    path.keep(folder)
    try:
        _decompress(window, path)
        with Window(path) as inner:
            index = read(inner)
    except Damage as damage:
        raise type(damage)(replace(damage.problem, file=window.path)) from None
    except OSError as error:
        raise window.damage(
            "not-scanned", f"it cannot be decompressed into {folder}: {error.strerror or error}", "warning"
        ) from None
    return replace(
        index,
        file=window.path,
        size=window.size,
        tensors=tuple(replace(entry, file=window.path) for entry in index.tensors),
        problems=tuple(replace(problem, file=window.path) for problem in index.problems),
    )


def _decompress(window: Window, path: str) -> None:
    """Write what the gzip file holds to ``path``; Damage when it is damaged or too much."""
    limit = min(_LIMIT, window.size * _RATIO + (1 << 20), shutil.disk_usage(os.path.dirname(path)).free // 2)
    machine = zlib.decompressobj(31)
    written = position = 0
    try:
        with open(path, "wb") as target:
            while position < window.size and not machine.eof:
                data = window.read(position, min(_CHUNK, window.size - position))
                position += len(data)
                while data and not machine.eof:
                    part = machine.decompress(data, _CHUNK)
                    data = machine.unconsumed_tail
                    written += len(part)
                    if written > limit:
                        raise window.damage(
                            "not-scanned",
                            f"it decompresses to more than {limit:,} bytes, which is the limit: unpack it first",
                            "warning",
                        )
                    target.write(part)
    except zlib.error:
        raise window.damage("corrupt-file", "it does not decompress: bytes changed after it was saved") from None
    if not machine.eof:
        raise window.damage("truncated-file", "it ends in the middle of its compressed data")
