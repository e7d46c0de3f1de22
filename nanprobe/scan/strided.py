"""Elements of a view whose rows do not lie one after the other in memory, in logical order and in bounded pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nanprobe.checkpoints.dtypes import BITS
from nanprobe.checkpoints.records import Damage, Problem, Storage
from nanprobe.checkpoints.stream import CHUNK, read_storage
from nanprobe.scan.plan import Block
from nanprobe.scan.reading import Files, is_random_access, read_range

__all__ = ["strided_chunks"]

_MAX_DECODED = 1 << 27
"""Bytes of a compressed storage up to which it is decoded into memory to read a strided view of it."""


def strided_chunks(files: Files, storage: Storage, block: Block, *, check: bool = True) -> Iterator[Any]:
    """Yield the elements of ``block`` in logical order, as contiguous one-dimensional arrays of raw unsigned elements.

    Damage when the bytes are not there, or when the storage is compressed and too large to decode.
    """
    width = BITS[block.dtype] // 8
    element = np.dtype(f"V{width}") if width not in (1, 2, 4, 8) else np.dtype(f"u{width}")
    held: Any = None
    if not is_random_access(storage):
        if storage.size > _MAX_DECODED:
            file = storage.extents[0].file if storage.extents else "?"
            message = f"a strided view of {storage.size:,} compressed bytes is not read; the limit is {_MAX_DECODED:,}"
            raise Damage(Problem(rule="not-scanned", severity="warning", message=message, file=file))
        held = np.frombuffer(read_storage(storage, check=check), np.uint8)
    for offset, shape in _bounded(block.offset, block.shape, block.strides, width):
        strides = block.strides[len(block.strides) - len(shape) :]
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if held is not None:
            raw = held[offset * width : (offset + span) * width]
        else:
            raw = np.empty(span * width, np.uint8)
            read_range(files, storage, offset * width, raw)
        view = np.lib.stride_tricks.as_strided(
            raw.view(element), shape, [stride * width for stride in strides], writeable=False
        )
        yield np.ascontiguousarray(view).reshape(-1)


def _bounded(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (offset, shape) of sub-views, in logical order, whose bytes and span fit into one chunk.

    The leading dimensions are cut; a sub-view has the trailing dimensions of the view.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if max(span, math.prod(shape)) * width <= CHUNK or not shape:
        yield offset, shape
        return
    inner_span = 1 + sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    inner = max(inner_span, math.prod(shape[1:])) * width
    if inner > CHUNK:
        for at in range(shape[0]):
            yield from _bounded(offset + at * strides[0], shape[1:], strides[1:], width)
        return
    # As many rows at once as fit, by the span that they reach over and by the elements that they hold.
    rows = max(1, min((CHUNK - inner) // (strides[0] * width) + 1, CHUNK // (math.prod(shape[1:]) * width)))
    for at in range(0, shape[0], rows):
        yield offset + at * strides[0], (min(rows, shape[0] - at), *shape[1:])
