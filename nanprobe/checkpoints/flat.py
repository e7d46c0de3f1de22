"""Parameters inside flat buffers: a range of a row-major tensor's elements, as blocks of that tensor.

A trainer that shards its optimizer cuts one long buffer at positions that respect no row. A range of elements is then
the tail of one row, some whole rows and the head of another; in more dimensions, at most two blocks for each.
"""

from __future__ import annotations

import math

from nanprobe.checkpoints.records import Piece, TensorEntry
from nanprobe.checkpoints.strides import contiguous_strides

__all__ = ["carve", "flat_blocks", "is_flat"]


def flat_blocks(shape: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return (start, extent, position) of the blocks that elements ``begin`` to ``end`` of ``shape`` fill.

    ``position`` counts elements from ``begin``. Blocks come in the order of the elements.
    """
    blocks: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    steps = contiguous_strides(shape)
    at = begin
    while at < end:
        index: list[int] = []
        rest = at
        for step in steps:
            index.append(rest // step)
            rest %= step
        level = len(shape) - 1
        while level > 0 and index[level] == 0 and steps[level - 1] <= end - at:
            level -= 1
        if not shape:
            blocks.append(((), (), at - begin))
            at += 1
            continue
        count = min((end - at) // steps[level], shape[level] - index[level])
        extent = (1,) * level + (count,) + shape[level + 1 :]
        blocks.append((tuple(index), extent, at - begin))
        at += count * steps[level]
    return blocks


def is_flat(entry: TensorEntry) -> bool:
    """Return whether the tensor is one readable run of elements."""
    return (
        entry.unreadable is None
        and len(entry.shape) == 1
        and len(entry.pieces) == 1
        and entry.pieces[0].strides == (1,)
    )


def carve(buffer: TensorEntry, position: int, count: int, shape: tuple[int, ...], begin: int) -> list[Piece]:
    """Return the pieces that ``count`` elements of ``buffer`` from ``position`` are of a tensor of ``shape``.

    They are its elements from ``begin`` on. ValueError when the buffer or the tensor is shorter.
    """
    if position < 0 or begin < 0 or position + count > buffer.shape[0] or begin + count > math.prod(shape):
        raise ValueError("a range outside its buffer")
    base = buffer.pieces[0]
    return [
        Piece(
            storage=base.storage,
            shape=extent,
            strides=contiguous_strides(extent),
            offset=base.offset + position + at,
            start=start,
        )
        for start, extent, at in flat_blocks(shape, begin, begin + count)
    ]
