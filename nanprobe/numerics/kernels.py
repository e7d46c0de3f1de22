"""Compiled loops over plain arrays: every count and sum of a tensor in one pass, without torch.

Floating-point values are looked at as integers where that is exact and faster: the magnitude of an IEEE 754 number grows
with its bits, so zero, subnormal, infinite and NaN are ranges of integers, and flipping the bits of negative numbers
gives integers in the order of the values. Loops are kept as simple as the vectoriser needs; blocks of them stay in the
first-level cache. Sums are taken in FP64, whose range holds every square of an FP32 number.

Compiled code is kept on disk beside this file, or in the user's cache where that is not writable; without either it is
compiled anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import float64, int32, int64, njit

__all__ = ["Distance", "Summary", "compare", "summarise"]

_BLOCK = 8192
# Sums may be taken in any order, and a product may be fused with a sum; NaN and Inf keep their meaning.
_REORDER = {"reassoc", "contract", "nsz"}
_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(function: _F) -> _F:
    options = {"nogil": True, "fastmath": _REORDER, "error_model": "numpy"}
    try:
        return cast(_F, njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to keep compiled code in
        return cast(_F, njit(**options)(function))


class Summary(NamedTuple):
    """Counts and extremes of an array; ``low`` and ``high`` are over finite elements, and (inf, -inf) without any."""

    nan: int
    posinf: int
    neginf: int
    zero: int
    subnormal: int
    low: float
    high: float
    total: float
    squares: float


class Distance(NamedTuple):
    """Squared 2-norms of the difference and of the reference; NaN or Inf when a non-finite element took part."""

    error_squares: float
    reference_squares: float


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


@_compiled
def _extremes64(bits: Any) -> Any:
    low, high = int64(9223372036854775807), int64(-9223372036854775808)
    for i in range(bits.shape[0]):
        b = bits[i]
        key = b ^ ((b >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF))
        low = min(low, key)
        high = max(high, key)
    return low, high


@_compiled
def _below64(bits: Any, limit: Any) -> Any:
    count = int64(0)
    for i in range(bits.shape[0]):
        count += int64((bits[i] & int64(0x7FFFFFFFFFFFFFFF)) < limit)
    return count


@_compiled
def _sums(values: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(values.shape[0]):
        v = float64(values[i])
        total += v
        squares += v * v
    return total, squares


@_compiled
def _special(values: Any) -> Any:
    """Count and sum a block that holds NaN or Inf; slow, and rarely needed."""
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
def _summary32(values: Any, bits: Any, tiny: Any) -> Any:
    nan = posinf = neginf = zero = subnormal = 0
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    for start in range(0, values.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last = _extremes32(block)
        small = _below32(block, tiny)
        if small:
            zeros = _below32(block, int32(1))
            zero += zeros
            subnormal += small - zeros
        numbers = values[start : start + _BLOCK]
        if last >= int32(0x7F800000) or first <= int32(-2139095041):
            n, p, m, lowest, highest, t, q = _special(numbers)
            nan += n
            posinf += p
            neginf += m
        else:
            t, q = _sums(numbers)
            lowest, highest = _decode32(first), _decode32(last)
        low, high = min(low, lowest), max(high, highest)
        total += t
        squares += q
    return nan, posinf, neginf, zero, subnormal, low, high, total, squares


@_compiled
def _decode32(key: Any) -> Any:
    one = np.empty(1, np.int32)
    one[0] = int32(key ^ int32(int32(key >> int32(31)) & int32(0x7FFFFFFF)))
    return float64(one.view(np.float32)[0])


@_compiled
def _summary64(values: Any, bits: Any, tiny: Any) -> Any:
    nan = posinf = neginf = zero = subnormal = 0
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    for start in range(0, values.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last = _extremes64(block)
        small = _below64(block, tiny)
        if small:
            zeros = _below64(block, int64(1))
            zero += zeros
            subnormal += small - zeros
        numbers = values[start : start + _BLOCK]
        if last >= int64(0x7FF0000000000000) or first <= int64(-9218868437227405313):
            n, p, m, lowest, highest, t, q = _special(numbers)
            nan += n
            posinf += p
            neginf += m
        else:
            t, q = _sums(numbers)
            lowest, highest = _decode64(first), _decode64(last)
        low, high = min(low, lowest), max(high, highest)
        total += t
        squares += q
    return nan, posinf, neginf, zero, subnormal, low, high, total, squares


@_compiled
def _decode64(key: Any) -> Any:
    one = np.empty(1, np.int64)
    one[0] = key ^ ((key >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF))
    return one.view(np.float64)[0]


@_compiled
def _distance(values: Any, reference: Any, factor: float) -> Any:
    error, size = 0.0, 0.0
    for i in range(values.shape[0]):
        r = float64(reference[i])
        d = float64(values[i]) * factor - r
        error += d * d
        size += r * r
    return error, size


def summarise(values: Any, tiny: float) -> Summary:
    """Count and sum the elements of a contiguous one-dimensional float32 or float64 array.

    ``tiny`` is the smallest normal value of the format the values came from: non-zero magnitudes below it are subnormal.
    """
    if values.dtype == np.float32:
        limit = np.float32(tiny).view(np.int32)
        return Summary(*_summary32(values, values.view(np.int32), limit))
    limit = np.float64(tiny).view(np.int64)
    return Summary(*_summary64(values, values.view(np.int64), limit))


def compare(values: Any, reference: Any, factor: float = 1.0) -> Distance:
    """Compare ``values * factor`` with ``reference``: contiguous one-dimensional arrays of float32 or float64."""
    return Distance(*_distance(values, reference, factor))
