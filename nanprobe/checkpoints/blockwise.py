"""Tensors cut into blocks: whether the blocks fill the tensor, each element once."""

from __future__ import annotations

import math

__all__ = ["layout_fault"]

_MAX_SWEPT = 4096
"""Blocks of one tensor up to which each pair is compared; beyond, only their total volume and their starts are."""


def layout_fault(
    shape: tuple[int, ...], blocks: list[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]
) -> str | None:
    """Return how the blocks fail to fill ``shape`` exactly once, None when they do."""
    volume = 0
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, extent in blocks:
        if start is None or extent is None or not len(start) == len(extent) == len(shape):
            return "a block of it is described without a place"
        end = tuple(a + b for a, b in zip(start, extent, strict=True))
        if any(a > b for a, b in zip(end, shape, strict=True)):
            return f"its block at {list(start)} of {list(extent)} reaches outside its shape {list(shape)}"
        volume += math.prod(extent)
        if 0 not in extent:
            boxes.append((start, end))
    if _overlap(boxes):
        return "its blocks overlap"
    total = math.prod(shape)
    if volume != total:
        return f"its blocks hold {volume:,} of its {total:,} elements"
    return None


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether two of the boxes (start, end) share an element."""
    if len({start for start, _ in boxes}) < len(boxes):
        return True
    if len(boxes) > _MAX_SWEPT:
        return False
    boxes.sort()
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, end in boxes:
        active = [box for box in active if not start or box[1][0] > start[0]]
        for other in active:
            if all(a < d and c < b for a, b, c, d in zip(start, end, *other, strict=True)):
                return True
        active.append((start, end))
    return False
