"""From tensors to the ranges of bytes that have to be counted, so that bytes which several tensors share count once.

A piece of a tensor that lies in one run of memory is a *range*; the same range under two names is one job. A piece that
does not (a transposed or sliced view) is a *block*, which is read through its strides. A dimension of stride zero
repeats what it holds, so its elements are counted once and multiplied.

A hostile file can describe a million overlapping views of the same bytes; the bytes that may be asked of one storage
are therefore bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.records import Piece, Storage, TensorEntry
from nanprobe.numerics.stored import COUNTABLE

__all__ = ["Block", "Part", "Plan", "Range", "blocks_dtype", "memory_order", "plan", "simplified"]

_OVERLAP = 4
"""Times that the bytes of a storage may be read for different views of it."""

_SLACK = 1 << 26
"""Bytes that may always be read for views of a storage."""


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes of a storage from ``start`` on, as elements of ``dtype``."""

    storage: str
    dtype: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """A strided view of a storage: ``shape`` and ``strides`` in elements, from element ``offset`` on."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Job = Range | Block


@dataclass(frozen=True, slots=True)
class Part:
    """One job of a tensor, and how many times each of its elements occurs in the tensor."""

    job: Job
    times: int


@dataclass(slots=True)
class Plan:
    """The jobs in the order of the files, the parts of each tensor, and why a tensor cannot be counted."""

    jobs: list[Job] = field(default_factory=list)
    parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


def blocks_dtype(entry: TensorEntry) -> bool:
    """Return whether a tensor is stored in a block format of GGUF, which is decoded before it is counted."""
    return entry.layout == "blocks"


def plan(tensors: Sequence[TensorEntry], storages: Mapping[str, Storage]) -> Plan:
    """Return what has to be read for ``tensors``; they are keyed by their position in the sequence."""
    made = Plan()
    known: set[Job] = set()
    asked: dict[str, int] = {}
    for at, entry in enumerate(tensors):
        if entry.unreadable is not None:
            made.refused[at] = entry.unreadable
            continue
        if not blocks_dtype(entry) and entry.dtype not in COUNTABLE:
            made.refused[at] = f"the values of element type {entry.dtype} are not known to this version of nanprobe"
            continue
        parts: list[Part] = []
        for piece in entry.pieces:
            part = _part(entry, piece, storages)
            if part is None:
                continue
            if part.job not in known:
                storage = storages[piece.storage]
                spent = asked.get(piece.storage, 0) + _cost(part.job)
                if spent > _OVERLAP * storage.size + _SLACK:
                    made.refused[at] = "too many overlapping views of its storage"
                    break
                asked[piece.storage] = spent
                known.add(part.job)
                made.jobs.append(part.job)
            parts.append(part)
        if at not in made.refused:
            made.parts[at] = tuple(parts)
    return made


def _cost(job: Job) -> int:
    if isinstance(job, Range):
        return job.length
    return nbytes(math.prod(job.shape), job.dtype)


def _part(entry: TensorEntry, piece: Piece, storages: Mapping[str, Storage]) -> Part | None:
    if 0 in piece.shape:
        return None
    if blocks_dtype(entry):
        return Part(Range(piece.storage, entry.dtype, 0, storages[piece.storage].size), 1)
    # Counting needs no order, so a transposed view is read as its elements lie in memory.
    axes = memory_order(piece.strides)
    shape, strides, times = simplified([piece.shape[at] for at in axes], [piece.strides[at] for at in axes])
    bits = BITS[entry.dtype]
    if _is_contiguous(shape, strides):
        start = piece.offset * bits // 8
        return Part(Range(piece.storage, entry.dtype, start, nbytes(math.prod(shape), entry.dtype)), times)
    return Part(Block(piece.storage, entry.dtype, piece.offset, shape, strides), times)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions from the largest stride to the smallest, those of equal stride as they come."""
    return sorted(range(len(strides)), key=lambda at: -strides[at])


def simplified(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape and strides without dimensions of one element or of stride zero, and how often those repeat."""
    times = 1
    kept: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if stride == 0:
            times *= size
        elif kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept), times


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != step:
            return False
        step *= size
    return True
