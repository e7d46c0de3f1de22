"""Compiled loops over stored elements: what a scan counts in a whole checkpoint, at the pace of its bytes.

A 16-bit format has 65,536 values, so one histogram of the bit patterns answers every question exactly. Four tables take
turns, since two increments of the same counter in a row would wait for each other. FP32 goes block by block through
loops that vectorise; FP64 and short arrays through one plain loop. All of them release the interpreter's lock.

Measured on one core of a Xeon with the weights' usual spread: bf16 6, fp16 3, float32 8 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import float64, int32, int64, njit, uint32, uint64

__all__ = ["any_nonzero", "histogram8", "histogram16", "pass32", "tally64", "tally_patterns", "tally_tables"]

_BLOCK = 8192
_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(function: _F) -> _F:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(_F, njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to keep compiled code in
        return cast(_F, njit(**options)(function))


def _compiled_sum(function: _F) -> _F:
    """Compile a loop whose sums may be taken in any order; NaN and Inf keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return cast(_F, njit(cache=True, **options)(function))
    except RuntimeError:
        return cast(_F, njit(**options)(function))


@_compiled
def histogram16(words: Any, tables: Any) -> None:
    """Count 16-bit patterns: ``words`` are uint64 of four patterns each, ``tables`` uint32[4, 65536]."""
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    mask = uint64(0xFFFF)
    for i in range(words.shape[0]):
        w = words[i]
        a[w & mask] += uint32(1)
        b[(w >> uint64(16)) & mask] += uint32(1)
        c[(w >> uint64(32)) & mask] += uint32(1)
        d[w >> uint64(48)] += uint32(1)


@_compiled
def histogram8(words: Any, tables: Any) -> None:
    """Count bytes: ``words`` are uint64 of eight bytes each, ``tables`` uint32[4, 256]."""
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    mask = uint64(0xFF)
    for i in range(words.shape[0]):
        w = words[i]
        a[w & mask] += uint32(1)
        b[(w >> uint64(8)) & mask] += uint32(1)
        c[(w >> uint64(16)) & mask] += uint32(1)
        d[(w >> uint64(24)) & mask] += uint32(1)
        a[(w >> uint64(32)) & mask] += uint32(1)
        b[(w >> uint64(40)) & mask] += uint32(1)
        c[(w >> uint64(48)) & mask] += uint32(1)
        d[w >> uint64(56)] += uint32(1)


@_compiled
def tally_tables(tables: Any, table: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    """Look at the elements that four histograms counted, and clear these; as :func:`tally64`.

    ``table`` holds the FP64 value of each pattern.
    """
    for i in range(table.shape[0]):
        times = int64(tables[0, i]) + int64(tables[1, i]) + int64(tables[2, i]) + int64(tables[3, i])
        if times == 0:
            continue
        v = table[i]
        if v != v:
            counts[0] += times
            continue
        m = abs(v)
        for k in range(limits.shape[0] - 1, -1, -1):
            if m >= limits[k]:
                break
            below[k] += times
        if m == np.inf:
            counts[1 if v > 0 else 2] += times
            continue
        sums[0] = min(sums[0], v)
        sums[1] = max(sums[1], v)
        sums[2] += v * times
        sums[3] += v * v * times
    tables[:, : table.shape[0]] = uint32(0)


@_compiled
def _extremes32(bits: Any) -> Any:
    low, high = int32(2147483647), int32(-2147483648)
    for i in range(bits.shape[0]):
        b = bits[i]
        key = int32(b ^ int32(int32(b >> int32(31)) & int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    return low, high


@_compiled
def _below32(bits: Any, limit: Any) -> Any:
    count = int32(0)
    for i in range(bits.shape[0]):
        count = int32(count + int32(int32(bits[i] & int32(0x7FFFFFFF)) < limit))
    return count


@_compiled_sum
def _sums32(values: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(values.shape[0]):
        v = float64(values[i])
        total += v
        squares += v * v
    return total, squares


@_compiled
def _special32(values: Any) -> Any:
    nan = posinf = neginf = 0
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    for i in range(values.shape[0]):
        v = float64(values[i])
        if v != v:
            nan += 1
        elif v == np.inf:
            posinf += 1
        elif v == -np.inf:
            neginf += 1
        else:
            low = min(low, v)
            high = max(high, v)
            total += v
            squares += v * v
    return nan, posinf, neginf, low, high, total, squares


@_compiled
def _decode32(key: Any) -> Any:
    one = np.empty(1, np.int32)
    one[0] = int32(key ^ int32(int32(key >> int32(31)) & int32(0x7FFFFFFF)))
    return float64(one.view(np.float32)[0])


@_compiled
def pass32(values: Any, bits: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    """Look at float32 ``values`` (``bits`` is their int32 view) once.

    ``limits`` are magnitudes as int32 bit patterns in ascending order; ``below`` gains, for each, the elements whose
    magnitude is less. ``counts`` gains NaN, Inf and -Inf; ``sums`` holds lowest, highest, total and total of squares
    over finite elements.
    """
    for start in range(0, values.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last = _extremes32(block)
        largest = max(last, int32(first ^ int32(0x7FFFFFFF)) & int32(0x7FFFFFFF) if first < 0 else first)
        for k in range(limits.shape[0] - 1, -1, -1):
            if limits[k] > largest:
                below[k] += block.shape[0]
                continue
            found = _below32(block, limits[k])
            if found == 0:
                break
            below[k] += found
        numbers = values[start : start + _BLOCK]
        if largest >= int32(0x7F800000):
            n, p, m, low, high, t, q = _special32(numbers)
            counts[0] += n
            counts[1] += p
            counts[2] += m
        else:
            t, q = _sums32(numbers)
            low, high = _decode32(first), _decode32(last)
        sums[0] = min(sums[0], low)
        sums[1] = max(sums[1], high)
        sums[2] += t
        sums[3] += q


@_compiled
def tally64(values: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    """Look at float64 ``values`` once; as :func:`pass32`, with ``limits`` as float64 magnitudes in ascending order."""
    for i in range(values.shape[0]):
        v = values[i]
        if v != v:
            counts[0] += 1
            continue
        m = abs(v)
        for k in range(limits.shape[0] - 1, -1, -1):
            if m >= limits[k]:
                break
            below[k] += 1
        if m == np.inf:
            counts[1 if v > 0 else 2] += 1
            continue
        sums[0] = min(sums[0], v)
        sums[1] = max(sums[1], v)
        sums[2] += v
        sums[3] += v * v


@_compiled
def tally_patterns(patterns: Any, table: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    """Look at the elements that ``patterns`` stand for in ``table`` (float64); as :func:`tally64`."""
    for i in range(patterns.shape[0]):
        v = table[patterns[i]]
        if v != v:
            counts[0] += 1
            continue
        m = abs(v)
        for k in range(limits.shape[0] - 1, -1, -1):
            if m >= limits[k]:
                break
            below[k] += 1
        if m == np.inf:
            counts[1 if v > 0 else 2] += 1
            continue
        sums[0] = min(sums[0], v)
        sums[1] = max(sums[1], v)
        sums[2] += v
        sums[3] += v * v


@_compiled
def any_nonzero(cells: Any, mask: Any, rows: Any, columns: Any) -> None:
    """Mark the rows and columns of the integer matrix ``cells`` that hold a bit of ``mask``."""
    for i in range(cells.shape[0]):
        found = False
        for j in range(cells.shape[1]):
            if cells[i, j] & mask:
                found = True
                columns[j] = True
        if found:
            rows[i] = True
