"""Counting tensors in block formats (GGUF): every block is decoded, and bad blocks are counted beside bad elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nanprobe.formats import NumberFormat
from nanprobe.numerics.native import Kernels
from nanprobe.numerics.stored import Counter

__all__ = ["count_blocks"]


def count_blocks(
    pieces: Iterable[Any], dtype: str, casts: Sequence[NumberFormat], kernels: Kernels | None
) -> tuple[Counter, int]:
    """Return the counts over the decoded elements, and how many blocks hold one that is not finite."""
    from nanprobe.checkpoints.blocks import block_layout, decode_blocks

    elements, size = block_layout(dtype)
    counter = Counter("float32", casts)
    bad = 0
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        held = np.concatenate((rest, piece)) if rest.size else piece
        # Decoding makes four bytes of less than one, so it goes in smaller steps.
        step = max((1 << 20) // size, 1) * size
        whole = held.size // size * size
        for start in range(0, whole, step):
            values = np.ascontiguousarray(decode_blocks(held[start : min(start + step, whole)], dtype), np.float32)
            values = values.reshape(-1, elements)
            bad += int(np.count_nonzero(~np.isfinite(values).all(axis=1)))
            counter.feed(values.reshape(-1).view(np.uint8), kernels)
        rest = held[whole:].copy()
    return counter, bad
