"""``.npy`` files and ``.npz`` archives: a text header that names type and shape, then the elements.

The header is a Python literal, read as such and never evaluated. Arrays of objects are pickles inside: their names are
looked at, nothing else. Format: numpy/lib/_format_impl.py (versions 1 to 3).
"""

from __future__ import annotations

import ast
import math
import zlib
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.describe import limit_problems, unsafe_problems
from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.numpy_values import dtype_of
from nanprobe.checkpoints.pickle_machine import PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.records import Damage, Extent, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.stream import stream_extent
from nanprobe.checkpoints.strides import contiguous_strides, impossible
from nanprobe.checkpoints.trees import sizes
from nanprobe.checkpoints.window import Window
from nanprobe.checkpoints.zip_directory import Member, resolve

__all__ = ["MAGIC", "index_npy", "index_npz"]

MAGIC = b"\x93NUMPY"

_MAX_HEADER = 1 << 16
_MAX_OBJECTS = 1 << 24


def index_npy(window: Window) -> FileIndex:
    """Return the one array of a ``.npy`` file; Damage when its header cannot be read."""
    extent = Extent(file=window.path, offset=window.base, length=window.size, size=window.size)
    head = window.head(_MAX_HEADER + 12)
    entry, storage, problems, foreign = _array(window, "array", head, extent)
    return FileIndex(
        kind="npy",
        file=window.path,
        size=window.size,
        tensors=(entry,),
        storages={storage.id: storage} if storage is not None else {},
        foreign=foreign,
        problems=tuple(problems),
    )


def index_npz(window: Window, members: dict[str, Member]) -> FileIndex:
    """Return the arrays of the archive whose members are given; a damaged one is a problem of its own."""
    tensors: list[TensorEntry] = []
    storages: dict[str, Storage] = {}
    problems: list[Problem] = []
    foreign: dict[str, None] = {}
    checked = any(member.crc32 for member in members.values() if member.size)
    for name, member in members.items():
        tensor = name.removesuffix(".npy")
        if not name.endswith(".npy"):
            problems.append(_problem(window, "not-scanned", f"its member {name[:200]!r} is no array", None))
            continue
        try:
            extent = resolve(window, member)
            if not checked:
                extent = replace(extent, crc32=None)
            entry, storage, found, names = _array(window, tensor, _member_head(window, extent), extent)
        except Damage as damage:
            problems.append(replace(damage.problem, tensor=tensor))
            tensors.append(_bare(window, tensor, damage.problem.message))
            continue
        tensors.append(entry)
        problems.extend(found)
        foreign.update(dict.fromkeys(names))
        if storage is not None:
            storages[storage.id] = storage
    return FileIndex(
        kind="npz",
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        foreign=tuple(foreign),
        problems=limit_problems(problems),
    )


def _member_head(window: Window, extent: Extent) -> bytes:
    data = window.read(extent.offset - window.base, min(extent.length, _MAX_HEADER + 12))
    if extent.encoding == "deflated":
        try:
            return zlib.decompressobj(-15).decompress(data, _MAX_HEADER + 12)
        except zlib.error:
            raise window.damage("corrupt-file", "it does not decompress") from None
    return data


def _bare(window: Window, name: str, reason: str) -> TensorEntry:
    return TensorEntry(name=name, path=(name,), file=window.path, dtype="?", shape=(), unreadable=reason)


def _problem(window: Window, rule: str, message: str, tensor: str | None) -> Problem:
    severity = "warning" if rule == "not-scanned" else "error"
    return Problem(rule=rule, severity=severity, message=message, file=window.path, tensor=tensor)


def _array(
    window: Window, name: str, head: bytes, extent: Extent
) -> tuple[TensorEntry, Storage | None, list[Problem], tuple[str, ...]]:
    """Return the array that begins with ``head`` and fills ``extent``: entry, storage, problems, names of classes."""
    start, header = _header(window, head)
    code, shape = header.get("descr"), sizes(header.get("shape"))
    if shape is None or impossible(shape) or type(header.get("fortran_order")) is not bool:
        raise window.damage("corrupt-file", "its header has no shape")
    entry = TensorEntry(name=name, path=(name,), file=window.path, dtype=str(code)[:40], shape=shape)
    if isinstance(code, str) and code.lstrip("<>|=") == "O":
        message = "it is an array of Python objects, which is a pickle; its values are not scanned"
        problem = _problem(window, "not-scanned", message, name)
        names = _object_names(window, extent, start)
        return replace(entry, unreadable=message), None, [problem, *unsafe_problems(window.path, names)], names
    known = dtype_of(code) if isinstance(code, str) else None
    if known is None:
        message = f"its element type {str(code)[:60]!r} is no plain number"
        return replace(entry, unreadable=message), None, [_problem(window, "not-scanned", message, name)], ()
    dtype, order = known
    entry = replace(entry, dtype=dtype)
    needed = nbytes(math.prod(shape), dtype)
    held = extent.size - start
    problems: list[Problem] = []
    if needed > held:
        message = f"its shape {list(shape)} takes {needed:,} bytes, but {max(held, 0):,} are there: it was cut short"
        return replace(entry, unreadable=message), None, [_problem(window, "truncated-file", message, name)], ()
    if needed < held:
        message = f"{held - needed:,} bytes at its end belong to no array"
        problems.append(replace(_problem(window, "corrupt-file", message, name), blocking=False))
    strides = contiguous_strides(shape[::-1])[::-1] if header["fortran_order"] else contiguous_strides(shape)
    width = BITS[dtype] // 8
    offset = 0
    if extent.encoding == "stored" and extent.crc32 is None:
        extent = replace(extent, offset=extent.offset + start, length=needed, size=needed)
    elif start % width:
        message = "its elements are not aligned to their size"
        return replace(entry, unreadable=message), None, [_problem(window, "not-scanned", message, name)], ()
    else:
        offset = start // width
    identity = f"{window.path}@{window.base}:{name}"
    storage = Storage(id=identity, dtype=dtype, size=extent.size, extents=(extent,), byteorder=order)
    piece = Piece(storage=identity, shape=shape, strides=strides, offset=offset, start=(0,) * len(shape))
    return replace(entry, pieces=(piece,)), storage, problems, ()


def _header(window: Window, head: bytes) -> tuple[int, dict[Any, Any]]:
    """Return where the elements begin, and the header as a dictionary."""
    if not head.startswith(MAGIC) or len(head) < 10:
        raise window.damage("corrupt-file", "it does not begin like a numpy array")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > _MAX_HEADER:
        raise window.damage("corrupt-file", f"its header claims {length:,} bytes")
    if len(head) < 8 + width + length:
        raise window.damage("truncated-file", "it ends in its header")
    try:
        text = head[8 + width : 8 + width + length].decode("utf-8" if head[6] > 2 else "latin-1")
        if text.count("(") + text.count("[") + text.count("{") > 200:
            raise ValueError
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise window.damage("corrupt-file", "its header is damaged") from None
    if not isinstance(header, dict):
        raise window.damage("corrupt-file", "its header is damaged")
    return 8 + width + length, header


def _object_names(window: Window, extent: Extent, start: int) -> tuple[str, ...]:
    """Return the classes and functions that the pickle of an object array names."""
    try:
        if extent.encoding == "stored":
            begin = extent.offset - window.base
            source = PickleSource(window, start=begin + start, end=begin + extent.length)
        else:
            data = b""
            for part in stream_extent(extent, check=False):
                data += part
                if len(data) > _MAX_OBJECTS:
                    break
            source = PickleSource(None, data[start:])
        return tuple(load_pickle(source).foreign)
    except (PickleDamage, Damage):
        return ()
