"""Strides of row-major tensors, and which shapes no memory can hold."""

from __future__ import annotations

import math

__all__ = ["contiguous_strides", "impossible"]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def impossible(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of ``shape`` has strides that no 64-bit program can hold, empty or not."""
    return math.prod(max(size, 1) for size in shape) >= 1 << 60
