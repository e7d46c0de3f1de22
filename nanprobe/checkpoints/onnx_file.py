"""ONNX models: the tensors of a protobuf message, where they lie in the file or in a file beside it.

The message is walked field by field and only lengths, names and shapes are taken, so that a model of two gigabytes
costs no memory. Data outside the message is a range of a file that must lie in the model's folder. Format: onnx.proto
of ONNX 1.17 (fields of ModelProto, GraphProto, NodeProto, AttributeProto, TensorProto).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from nanprobe.checkpoints.cursor import Cursor
from nanprobe.checkpoints.describe import limit_problems
from nanprobe.checkpoints.dtypes import nbytes
from nanprobe.checkpoints.paths import inside
from nanprobe.checkpoints.records import Extent, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.strides import contiguous_strides, impossible
from nanprobe.checkpoints.window import Window

__all__ = ["external_files", "index_onnx", "looks_like_onnx"]

_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    23: "float4_e2m1",
    24: "float8_e8m0fnu",
}
"""Element types by TensorProto.DataType; strings and 2 and 4 bit integers are not scanned."""

_PACKED = {"float32": 4, "complex64": 4, "float64": 10, "complex128": 10}
"""The field that holds elements as a packed run of little-endian numbers, by type."""

_MAX_DEPTH = 16
_MAX_TENSORS = 250_000
_MAX_FIELDS = 5_000_000
_MAX_NAME = 1 << 16
_MAX_VARINTS = 1 << 22
_Result = tuple[TensorEntry, Storage | None, Problem | None]
_MODEL_TAGS = frozenset(b"\x12\x1a\x22\x2a\x32\x3a\x42")


def looks_like_onnx(head: bytes) -> bool:
    """Return whether a file begins like an ONNX model: a small format version, then another field of the model."""
    return len(head) > 3 and head[0] == 8 and 0 < head[1] < 32 and head[2] in _MODEL_TAGS


@dataclass(slots=True)
class _Tensor:
    """One TensorProto: what it says of itself and where its elements lie."""

    name: str = ""
    dims: list[int] = field(default_factory=list)
    code: int = 0
    runs: dict[int, tuple[int, int]] = field(default_factory=dict)
    external: dict[str, str] = field(default_factory=dict)
    outside: bool = False


@dataclass(slots=True)
class _Walk:
    """What a walk has found and how much it has looked at."""

    window: Window
    tensors: list[_Tensor] = field(default_factory=list)
    fields: int = 0

    def fields_of(self, cursor: Cursor) -> Iterator[tuple[int, int, int]]:
        """Yield (number, wire type, value) of each field; of a run of bytes the value is its length, at ``cursor``.

        The caller may read the run or leave it; the next field is found either way.
        """
        while cursor.left > 0:
            self.fields += 1
            if self.fields > _MAX_FIELDS:
                raise self.window.damage("corrupt-file", "its message has too many fields")
            tag = cursor.varint()
            number, wire = tag >> 3, tag & 7
            if number == 0:
                raise self.window.damage("corrupt-file", f"its message is damaged at offset {cursor.at:,}")
            if wire == 0:
                yield number, wire, cursor.varint()
            elif wire == 1:
                yield number, wire, cursor.number("<Q")
            elif wire == 5:
                yield number, wire, cursor.number("<I")
            elif wire == 2:
                length = cursor.varint()
                if length > cursor.left:
                    cursor.take(length)
                end = cursor.at + length
                yield number, wire, length
                cursor.at = end
            else:
                raise self.window.damage("corrupt-file", f"its message is damaged at offset {cursor.at:,}")

    def part(self, cursor: Cursor, length: int) -> Cursor:
        """Return a cursor over the run of bytes that begins where ``cursor`` stands."""
        return Cursor(self.window, cursor.at, cursor.at + length)

    def text(self, cursor: Cursor, length: int) -> str:
        """Return a run of bytes as text."""
        if length > _MAX_NAME:
            raise self.window.damage("corrupt-file", f"a name in its message claims {length:,} bytes")
        return cursor.take(length).decode("utf-8", "replace")

    def model(self, cursor: Cursor) -> bool:
        """Go through a ModelProto; return whether it holds a graph."""
        found = False
        for number, wire, length in self.fields_of(cursor):
            if wire == 2 and number == 7:
                found = True
                self.graph(self.part(cursor, length), 0)
            elif wire == 2 and number == 25:
                self.function(self.part(cursor, length), 0)
        return found

    def graph(self, cursor: Cursor, depth: int) -> None:
        """Go through a GraphProto: initializers, sparse ones, and the constants of its nodes."""
        if depth > _MAX_DEPTH:
            raise self.window.damage("corrupt-file", f"its graphs are nested deeper than {_MAX_DEPTH} levels")
        for number, wire, length in self.fields_of(cursor):
            if wire != 2:
                continue
            if number == 1:
                self.node(self.part(cursor, length), depth)
            elif number == 5:
                self.tensor(self.part(cursor, length), "")
            elif number == 15:
                for inner, kind, size in self.fields_of(sparse := self.part(cursor, length)):
                    if kind == 2 and inner == 1:
                        self.tensor(self.part(sparse, size), "")

    def function(self, cursor: Cursor, depth: int) -> None:
        """Go through the nodes of a FunctionProto."""
        for number, wire, length in self.fields_of(cursor):
            if wire == 2 and number == 7:
                self.node(self.part(cursor, length), depth)

    def node(self, cursor: Cursor, depth: int) -> None:
        """Go through a NodeProto: its attributes may be tensors or graphs."""
        output = ""
        for number, wire, length in self.fields_of(cursor):
            if wire == 2 and number == 2 and not output:
                output = self.text(cursor, length)
            elif wire == 2 and number == 5:
                for inner, kind, size in self.fields_of(attribute := self.part(cursor, length)):
                    if kind == 2 and inner in (5, 10):
                        self.tensor(self.part(attribute, size), output)
                    elif kind == 2 and inner in (6, 11):
                        self.graph(self.part(attribute, size), depth + 1)

    def tensor(self, cursor: Cursor, fallback: str) -> None:
        """Take a TensorProto; one without a name is called after the node's output."""
        found = _Tensor(name=fallback)
        for number, wire, value in self.fields_of(cursor):
            if number == 1 and wire == 0:
                found.dims.append(value)
            elif number == 1 and wire == 2:
                dims = self.part(cursor, value)
                while dims.left > 0 and len(found.dims) < 65:
                    found.dims.append(dims.varint())
            elif number == 2 and wire == 0:
                found.code = value
            elif number == 8 and wire == 2:
                found.name = self.text(cursor, value) or fallback
            elif number == 13 and wire == 2:
                self.external(self.part(cursor, value), found)
            elif number == 14 and wire == 0:
                found.outside = value == 1
            elif wire == 2 and number in (4, 5, 6, 7, 9, 10, 11):
                found.runs[number] = (cursor.at, value)
        if len(self.tensors) >= _MAX_TENSORS:
            raise self.window.damage("corrupt-file", f"its message holds more than {_MAX_TENSORS:,} tensors")
        self.tensors.append(found)

    def external(self, cursor: Cursor, found: _Tensor) -> None:
        """Take one key and value that say where data outside the message lies."""
        key = value = ""
        for number, wire, length in self.fields_of(cursor):
            if wire == 2 and number == 1:
                key = self.text(cursor, length)
            elif wire == 2 and number == 2:
                value = self.text(cursor, length)
        if len(found.external) < 32:
            found.external[key] = value


def index_onnx(window: Window) -> FileIndex:
    """Return what the model holds; Damage when it is no ONNX model."""
    walk = _Walk(window)
    if not walk.model(Cursor(window)):
        raise window.damage("corrupt-file", "it holds no graph: it is no ONNX model, or it was cut short")
    tensors: list[TensorEntry] = []
    storages: dict[str, Storage] = {}
    problems: list[Problem] = []
    folder = os.path.dirname(window.path)
    sizes: dict[str, int | None] = {}
    for number, found in enumerate(walk.tensors):
        entry, storage, problem = _entry(window, number, found, folder, sizes)
        tensors.append(entry)
        if storage is not None:
            storages[storage.id] = storage
        if problem is not None:
            problems.append(problem)
    problems.extend(_absent(folder, walk.tensors, sizes))
    return FileIndex(
        kind="onnx",
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        problems=limit_problems(problems),
    )


def external_files(index: FileIndex) -> tuple[str, ...]:
    """Return the files beside the model that its tensors lie in."""
    found = dict.fromkeys(
        extent.file for storage in index.storages.values() for extent in storage.extents if extent.file != index.file
    )
    return tuple(found)


def _absent(folder: str, tensors: list[_Tensor], sizes: dict[str, int | None]) -> list[Problem]:
    """Return a problem for each file that tensors lie in and that is not there."""
    problems: list[Problem] = []
    counts = Counter(tensor.external.get("location", "").removeprefix("./") for tensor in tensors if tensor.outside)
    for name in [name for name, size in sizes.items() if size is None]:
        wanted = counts[name]
        problems.append(
            Problem(
                rule="missing-shard",
                severity="error",
                message=f"the file {name[:200]} with the data of {wanted:,} tensors is missing",
                file=os.path.join(folder, name),
                evidence={"count": wanted},
            )
        )
    return problems


def _entry(
    window: Window, number: int, found: _Tensor, folder: str, sizes: dict[str, int | None]
) -> tuple[TensorEntry, Storage | None, Problem | None]:
    """Return the entry of one tensor, its storage when it can be read, and what is wrong with it."""
    name = found.name or f"tensor {number}"
    dtype = _DTYPES.get(found.code)
    shape = tuple(found.dims)
    entry = TensorEntry(
        name=name, path=(name,), file=window.path, dtype=dtype or f"onnx type {found.code}", shape=shape
    )

    def bad(rule: str, message: str) -> _Result:
        severity = "warning" if rule == "not-scanned" else "error"
        problem = Problem(rule=rule, severity=severity, message=message, file=window.path, tensor=name)
        return replace(entry, unreadable=message), None, None if rule == "missing-shard" else problem

    if dtype is None:
        what = {8: "strings", 21: "4-bit integers", 22: "4-bit integers"}.get(found.code, "of an unknown type")
        return replace(entry, unreadable=f"its elements are {what}, which are not scanned"), None, None
    if len(shape) > 64 or impossible(shape):
        return bad("corrupt-file", "its shape is impossible")
    size = nbytes(math.prod(shape), dtype)
    if found.outside:
        return _outside(entry, found, folder, sizes, size, bad)
    run = found.runs.get(9)
    if run is None and dtype in _PACKED:
        run = found.runs.get(_PACKED[dtype])
    if run is None:
        return _varints(window, entry, found, size, bad)
    if run[1] != size:
        return bad("corrupt-file", f"its shape {list(shape)} in {dtype} takes {size:,} bytes, but it holds {run[1]:,}")
    extent = Extent(file=window.path, offset=window.base + run[0], length=size, size=size)
    return _whole(entry, f"{window.path}@{run[0]}:{number}", extent, size)


def _whole(entry: TensorEntry, identity: str, extent: Extent, size: int) -> tuple[TensorEntry, Storage, None]:
    storage = Storage(id=identity, dtype=entry.dtype, size=size, extents=(extent,) if size else ())
    piece = Piece(
        storage=identity,
        shape=entry.shape,
        strides=contiguous_strides(entry.shape),
        start=(0,) * len(entry.shape),
    )
    return replace(entry, pieces=(piece,)), storage, None


def _outside(
    entry: TensorEntry,
    found: _Tensor,
    folder: str,
    sizes: dict[str, int | None],
    size: int,
    bad: Callable[[str, str], _Result],
) -> _Result:
    """Return the entry of a tensor whose data lies in a file beside the model."""
    location = found.external.get("location", "")
    if not inside(location.removeprefix("./")):
        return bad("corrupt-file", f"its data is placed in {location[:200]!r}, outside the model's folder; not read")
    location = location.removeprefix("./")
    offset, length = _count(found.external.get("offset", "0")), _count(found.external.get("length", str(size)))
    if offset is None or length is None:
        return bad("corrupt-file", "the place of its data is no number")
    path = os.path.join(folder, location)
    if location not in sizes:
        sizes[location] = os.path.getsize(path) if os.path.isfile(path) else None
    there = sizes[location]
    if there is None:
        return bad("missing-shard", f"its data lies in {location[:200]}, which is missing")
    if length != size:
        return bad("corrupt-file", f"its shape takes {size:,} bytes, but its data is declared with {length:,}")
    if offset + length > there:
        over = offset + length - there
        return bad("truncated-file", f"its data ends {over:,} bytes after the end of {location[:200]}")
    extent = Extent(file=path, offset=offset, length=length, size=length)
    return _whole(entry, f"{path}@{offset}:{entry.name}", extent, size)


_VARINT_FIELDS = {
    "float16": 5,
    "bfloat16": 5,
    "float8_e4m3fn": 5,
    "float8_e4m3fnuz": 5,
    "float8_e5m2": 5,
    "float8_e5m2fnuz": 5,
    "int8": 5,
    "int16": 5,
    "int32": 5,
    "uint8": 5,
    "uint16": 5,
    "bool": 5,
    "int64": 7,
    "uint32": 11,
    "uint64": 11,
}
"""The field that holds elements as numbers of variable length, by type."""


def _varints(
    window: Window, entry: TensorEntry, found: _Tensor, size: int, bad: Callable[[str, str], _Result]
) -> _Result:
    """Return the entry of a tensor whose elements are numbers of variable length, decoded into memory."""
    elements = entry.elements
    if elements == 0:
        return _whole(entry, f"{window.path}:{entry.name}", Extent(file=window.path, offset=0, length=0, size=0), 0)
    run = found.runs.get(_VARINT_FIELDS.get(entry.dtype, -1))
    if run is None:
        return bad("corrupt-file", "its data is missing")
    if elements > _MAX_VARINTS or elements > run[1]:
        rule = "corrupt-file" if elements > run[1] else "not-scanned"
        return bad(rule, f"its {elements:,} elements are stored as {run[1]:,} bytes of numbers of variable length")
    cursor = Cursor(window, run[0], run[0] + run[1])
    width = size // elements
    mask = (1 << 8 * width) - 1
    data = b"".join((cursor.varint() & mask).to_bytes(width, "little") for _ in range(elements))
    extent = Extent(file=window.path, offset=window.base + run[0], length=size, size=size, encoding="inline", data=data)
    return _whole(entry, f"{window.path}@{run[0]}:{entry.name}", extent, size)


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
