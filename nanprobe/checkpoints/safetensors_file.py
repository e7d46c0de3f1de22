"""safetensors files: the length of a JSON header (8 bytes, little-endian), the header, then the data without gaps.

The header is read here and not by the safetensors package, since a damaged file should be told what is damaged: cut
short by so many bytes, zeroed, overlapping, of an unknown type. Format: the README of huggingface/safetensors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.describe import limit_problems
from nanprobe.checkpoints.dtypes import SAFETENSORS, nbytes
from nanprobe.checkpoints.json_text import DuplicateKey, TooLarge, parse_json
from nanprobe.checkpoints.records import Extent, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.strides import contiguous_strides, impossible
from nanprobe.checkpoints.window import Window

__all__ = ["MAX_HEADER", "index_safetensors"]

MAX_TENSORS = 250_000
"""Tensors in one file beyond which it is no model's; the largest mixtures of experts have some 50,000."""

MAX_HEADER = 100_000_000
"""Largest header in bytes, the format's own limit."""


def index_safetensors(window: Window) -> FileIndex:
    """Return what the file holds; Damage when its header cannot be read."""
    header, start = _header(window)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        metadata = {}
    tensors: list[TensorEntry] = []
    storages: dict[str, Storage] = {}
    problems: list[Problem] = []
    ranges: list[tuple[int, int, str]] = []
    available = window.size - start
    for name, item in header.items():
        entry, storage, problem, span = _tensor(window, name, item, start, available)
        tensors.append(entry)
        if storage is not None:
            storages[storage.id] = storage
        if problem is not None:
            problems.append(problem)
        if span is not None:
            ranges.append((*span, name))
    problems.extend(_coverage(window, ranges, available))
    return FileIndex(
        kind="safetensors",
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        metadata={str(key): value for key, value in metadata.items() if isinstance(value, str)},
        problems=limit_problems(problems),
    )


def _header(window: Window) -> tuple[dict[str, Any], int]:
    if window.size < 8:
        raise window.damage("truncated-file", f"a safetensors file needs at least 8 bytes, it has {window.size}")
    length = int.from_bytes(window.read(0, 8), "little")
    if length == 0:
        raise window.damage("corrupt-file", "its first 8 bytes are zero: its header was overwritten or never written")
    if length > MAX_HEADER:
        raise window.damage("corrupt-file", f"its header claims {length:,} bytes, more than the format allows")
    if 8 + length > window.size:
        raise window.damage(
            "truncated-file", f"its header claims {length:,} bytes, but the file has {window.size:,}: it was cut short"
        )
    text = window.read(8, length)
    # Each tensor has one brace, and so the number is known before the text is taken apart.
    if text.count(b"{") > MAX_TENSORS + 2:
        raise window.damage("not-scanned", f"its header names more than {MAX_TENSORS:,} tensors", "warning")
    try:
        header = parse_json(text, strict=True)
    except (DuplicateKey, TooLarge) as error:
        raise window.damage("corrupt-file", f"its header is damaged: {error}") from None
    except ValueError:
        raise window.damage("corrupt-file", "its header is no JSON text: the file was overwritten or damaged") from None
    if not isinstance(header, dict):
        raise window.damage("corrupt-file", "its header is no JSON object")
    return header, 8 + length


def _tensor(
    window: Window, name: str, item: Any, start: int, available: int
) -> tuple[TensorEntry, Storage | None, Problem | None, tuple[int, int] | None]:
    """Return the entry, its storage when readable, what is wrong with it, and the byte range it claims."""
    code, shape, span = _fields(item)
    dtype = SAFETENSORS.get(code or "")
    entry = TensorEntry(name=name, path=(name,), file=window.path, dtype=dtype or code or "?", shape=shape or ())
    fault = _fault(code, shape, span, available)
    if fault is not None or dtype is None or shape is None or span is None:
        rule, severity, message = fault or ("corrupt-file", "error", "its entry in the header is damaged")
        problem = Problem(rule=rule, severity=severity, message=message, file=window.path, tensor=name)
        return replace(entry, unreadable=message), None, problem, span
    begin, end = span
    identity = f"{window.path}@{window.base}:{begin}-{end}"
    size = end - begin
    extents = (Extent(file=window.path, offset=window.base + start + begin, length=size, size=size),) if size else ()
    storage = Storage(id=identity, dtype=dtype, size=size, extents=extents)
    piece = Piece(storage=identity, shape=shape, strides=contiguous_strides(shape), start=(0,) * len(shape))
    return replace(entry, pieces=(piece,)), storage, None, span


def _fault(
    code: str | None, shape: tuple[int, ...] | None, span: tuple[int, int] | None, available: int
) -> tuple[str, str, str] | None:
    """Return rule, severity and message of what is wrong with one entry of the header, None when it is good."""
    if code is None or shape is None or span is None:
        return "corrupt-file", "error", "its entry in the header is damaged"
    if code not in SAFETENSORS:
        return "not-scanned", "warning", f"its element type {code[:40]!r} is not known"
    expected = nbytes(math.prod(shape), SAFETENSORS[code])
    claimed = span[1] - span[0]
    if claimed != expected:
        message = f"its shape {list(shape)} in {code} takes {expected:,} bytes, but the header gives it {claimed:,}"
        return "corrupt-file", "error", message
    if impossible(shape):
        return "corrupt-file", "error", f"its shape {list(shape)} is impossible"
    if span[1] > available:
        return "truncated-file", "error", f"its data ends {span[1] - available:,} bytes after the end of the file"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _fields(item: Any) -> tuple[str | None, tuple[int, ...] | None, tuple[int, int] | None]:
    if not isinstance(item, dict):
        return None, None, None
    code, shape, span = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(code, str):
        code = None
    if not isinstance(shape, list) or len(shape) > 64 or not all(_is_count(size) for size in shape):
        return code, None, None
    if not isinstance(span, list) or len(span) != 2 or not all(_is_count(at) for at in span) or span[0] > span[1]:
        return code, tuple(shape), None
    return code, tuple(shape), (span[0], span[1])


def _coverage(window: Window, ranges: list[tuple[int, int, str]], available: int) -> list[Problem]:
    """Return what is wrong with how the tensors share the data: overlaps, gaps, missing and surplus bytes."""
    problems: list[Problem] = []
    position = 0
    last = ""

    def add(rule: str, severity: str, message: str, *, blocking: bool) -> None:
        problems.append(Problem(rule=rule, severity=severity, message=message, file=window.path, blocking=blocking))

    for begin, end, name in sorted(ranges):
        if begin < position and end > begin:
            add("corrupt-file", "error", f"the data of {name[:200]!r} overlaps that of {last[:200]!r}", blocking=True)
        elif begin > position:
            add(
                "corrupt-file",
                "error",
                f"{begin - position:,} bytes before {name[:200]!r} belong to no tensor",
                blocking=False,
            )
        if end > position:
            position, last = end, name
    if position > available:
        lost = position - available
        add(
            "truncated-file",
            "error",
            f"it is {lost:,} bytes short: the copy or the save did not finish; copy or save it again",
            blocking=True,
        )
    elif position < available:
        add("corrupt-file", "error", f"{available - position:,} bytes at its end belong to no tensor", blocking=False)
    return problems
