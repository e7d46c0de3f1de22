"""GGUF files (llama.cpp): keys and values, a table of tensors, then the aligned data.

The header is read here, with every count checked, and so needs no package; values in block formats are decoded by the
``gguf`` package, which is an optional extra. Format: docs/gguf.md of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from nanprobe.checkpoints.blocks import BLOCKS, MISSING_EXTRA, can_decode
from nanprobe.checkpoints.cursor import Cursor
from nanprobe.checkpoints.describe import limit_problems
from nanprobe.checkpoints.dtypes import nbytes
from nanprobe.checkpoints.records import Extent, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.strides import contiguous_strides, impossible
from nanprobe.checkpoints.window import Window

__all__ = ["index_gguf"]

_PLAIN = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16"}
_BLOCK_CODES = {
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    9: "q8_1",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
    41: "q1_0",
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9

_MAX_TENSORS = 250_000
_MAX_KEYS = 100_000
_MAX_ITEMS = 5_000_000
_MAX_TEXT = 1 << 16
_MAX_DIMENSIONS = 8


@dataclass(slots=True)
class _Header:
    """What stands before the data: byte order ("<" or ">"), keys and values, alignment, where the data begins."""

    order: str
    values: dict[str, Any]
    alignment: int = 32
    items: int = 0


def index_gguf(window: Window) -> FileIndex:
    """Return what the file holds; Damage when its header cannot be read."""
    cursor = Cursor(window)
    cursor.take(4)
    version = cursor.number("<I")
    order = "<" if version & 0xFFFF else ">"
    if order == ">":
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise window.damage("not-scanned", f"it is GGUF of version {version}, and versions 2 and 3 are read", "warning")
    header = _Header(order, {})
    tensors, keys = cursor.number(order + "Q"), cursor.number(order + "Q")
    if tensors > _MAX_TENSORS or keys > _MAX_KEYS or tensors * 24 > window.size or keys * 12 > window.size:
        raise window.damage("corrupt-file", f"its header claims {tensors:,} tensors and {keys:,} keys")
    for _ in range(keys):
        key = _string(cursor, header)
        header.values[key] = _value(cursor, header, cursor.number(order + "I"), 0)
    alignment = header.values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise window.damage("corrupt-file", f"its alignment is {str(alignment)[:40]}, which is no power of two")
    header.alignment = alignment
    table = [_row(cursor, header) for _ in range(tensors)]
    start = -(-cursor.at // alignment) * alignment
    return _index(window, header, table, start)


def _string(cursor: Cursor, header: _Header) -> str:
    length = cursor.number(header.order + "Q")
    if length > _MAX_TEXT:
        raise cursor.window.damage(
            "corrupt-file" if length <= cursor.left else "truncated-file",
            f"a name in its header claims {length:,} bytes",
        )
    return cursor.take(length).decode("utf-8", "replace")


def _value(cursor: Cursor, header: _Header, kind: int, depth: int) -> Any:
    """Return a value; long texts and arrays are passed over."""
    if kind in _SCALARS:
        form = header.order + _SCALARS[kind]
        return cursor.real(form) if kind in (6, 12) else cursor.number(form)
    if kind == _STRING:
        length = cursor.number(header.order + "Q")
        if length > 4096:
            cursor.skip(length)
            return None
        return cursor.take(length).decode("utf-8", "replace")
    if kind == _ARRAY and depth < 4:
        inner, count = cursor.number(header.order + "I"), cursor.number(header.order + "Q")
        if inner in _WIDTHS:
            cursor.skip(count * _WIDTHS[inner])
            return None
        header.items += count
        if header.items > _MAX_ITEMS or count * 8 > cursor.left:
            raise cursor.window.damage("corrupt-file", f"an array of its header claims {count:,} items")
        for _ in range(count):
            if inner == _STRING:
                cursor.skip(cursor.number(header.order + "Q"))
            else:
                _value(cursor, header, inner, depth + 1)
        return None
    raise cursor.window.damage("corrupt-file", f"a value of its header has the unknown type {kind}")


def _row(cursor: Cursor, header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type code and offset of one tensor."""
    name = _string(cursor, header)
    count = cursor.number(header.order + "I")
    if count > _MAX_DIMENSIONS:
        raise cursor.window.damage("corrupt-file", f"its tensor {name[:200]!r} claims {count:,} dimensions")
    shape = tuple(cursor.number(header.order + "Q") for _ in range(count))
    return name, shape[::-1], cursor.number(header.order + "I"), cursor.number(header.order + "Q")


def _index(
    window: Window, header: _Header, table: list[tuple[str, tuple[int, ...], int, int]], start: int
) -> FileIndex:
    tensors: list[TensorEntry] = []
    storages: dict[str, Storage] = {}
    problems: list[Problem] = []
    spans: list[tuple[int, int, str]] = []
    seen: set[str] = set()
    undecoded = 0
    for name, shape, code, offset in table:
        dtype = _PLAIN.get(code) or _BLOCK_CODES.get(code)
        entry = TensorEntry(
            name=name,
            path=(name,),
            file=window.path,
            dtype=dtype or f"ggml type {code}",
            shape=shape,
            layout="blocks" if dtype in BLOCKS else "strided",
        )
        fault, size = _fault(window, header, entry, offset, start)
        if name in seen:
            fault = fault or ("corrupt-file", "error", "the table of tensors names it twice")
        seen.add(name)
        if fault is not None:
            rule, severity, message = fault
            if message == MISSING_EXTRA:
                undecoded += 1
            else:
                problems.append(Problem(rule=rule, severity=severity, message=message, file=window.path, tensor=name))
            entry = replace(entry, unreadable=message)
            if size:
                spans.append((offset, offset + size, name))
        else:
            spans.append((offset, offset + size, name))
            at = window.base + start + offset
            extents = (Extent(file=window.path, offset=at, length=size, size=size),) if size else ()
            identity = f"{window.path}@{at}:{name}"
            storages[identity] = Storage(
                id=identity,
                dtype=entry.dtype,
                size=size,
                extents=extents,
                byteorder="little" if header.order == "<" else "big",
            )
            piece = Piece(storage=identity, shape=shape, strides=contiguous_strides(shape), start=(0,) * len(shape))
            entry = replace(entry, pieces=(piece,))
        tensors.append(entry)
    if undecoded:
        message = f"{undecoded:,} tensors are not scanned: {MISSING_EXTRA}"
        problems.append(Problem(rule="not-scanned", severity="warning", message=message, file=window.path))
    problems.extend(_overlaps(window, spans))
    return FileIndex(
        kind="gguf",
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        tree={key: value for key, value in header.values.items() if value is not None},
        metadata={key: value for key, value in header.values.items() if isinstance(value, str)},
        problems=limit_problems(problems),
    )


def _fault(
    window: Window, header: _Header, entry: TensorEntry, offset: int, start: int
) -> tuple[tuple[str, str, str] | None, int]:
    """Return (rule, severity, message) of what is wrong with a tensor, None when it is good; and its bytes."""
    elements = math.prod(entry.shape)
    if impossible(entry.shape):
        return ("corrupt-file", "error", f"its shape {list(entry.shape)} is impossible"), 0
    if entry.layout == "blocks":
        per, size = BLOCKS[entry.dtype]
        if not entry.shape or entry.shape[-1] % per:
            row = entry.shape[-1] if entry.shape else 0
            return ("corrupt-file", "error", f"its rows of {row:,} elements are no whole blocks of {per}"), 0
        length = elements // per * size
    elif entry.dtype.startswith("ggml"):
        return ("not-scanned", "warning", f"its element type ({entry.dtype}) is not known"), 0
    else:
        length = nbytes(elements, entry.dtype)
    if offset % header.alignment:
        return ("corrupt-file", "error", f"its data at offset {offset:,} is not aligned to {header.alignment}"), length
    if start + offset + length > window.size:
        short = start + offset + length - window.size
        return ("truncated-file", "error", f"its data ends {short:,} bytes after the end of the file"), length
    if entry.layout == "blocks":
        if header.order == ">":
            return ("not-scanned", "warning", "its blocks are big-endian, which are not decoded"), length
        if not can_decode(entry.dtype):
            return ("not-scanned", "warning", MISSING_EXTRA), length
    return None, length


def _overlaps(window: Window, spans: list[tuple[int, int, str]]) -> list[Problem]:
    problems: list[Problem] = []
    position, last = 0, ""
    for begin, end, name in sorted(spans):
        if begin < position and end > begin:
            message = f"the data of {name[:200]!r} overlaps that of {last[:200]!r}"
            problems.append(
                Problem(rule="corrupt-file", severity="error", message=message, file=window.path, tensor=name)
            )
        if end > position:
            position, last = end, name
    return problems
