"""Compiled loops over plain arrays: every count and sum of a tensor, and its distance from another, without torch.

Floating-point values are looked at as integers where that is exact and faster: the magnitude of an IEEE 754 number
grows with its bits, so zero, subnormal, infinite and NaN are ranges of integers, and flipping the bits of negative
numbers gives integers in the order of the values. Work goes block by block, so that a block stays in the first-level
cache while several simple loops, each one that the compiler can vectorise, go over it. Sums are taken in FP64, whose
range holds every square of an FP32 number. One core reads as fast as memory delivers, so nothing is split over threads.

Compiled code is kept on disk beside this file, or in the user's cache where that is not writable; without either it is
compiled anew in each process.
"""

from __future__ import annotations

import functools
import math
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
    compiler: Any = njit
    options = {"nogil": True, "fastmath": _REORDER, "error_model": "numpy"}
    try:
        return cast(_F, compiler(cache=True, **options)(function))
    except RuntimeError:  # no folder to keep compiled code in
        return cast(_F, compiler(**options)(function))


class Summary(NamedTuple):
    """Counts and extremes of an array; ``low`` and ``high`` are over finite elements, (inf, -inf) without any."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    squares: float = 0.0

    def __or__(self, other: Summary) -> Summary:
        """Return the summary of both arrays taken as one."""
        return Summary(
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            self.zero + other.zero,
            self.subnormal + other.subnormal,
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
            self.squares + other.squares,
        )


class Distance(NamedTuple):
    """Squared 2-norms of the difference and of the reference; NaN or Inf when a non-finite element took part.

    ``flushed`` counts elements that are zero where the reference is not, ``wrong`` those that are off by no less than
    the reference itself, which is not zero; both are counted along with a summary only.
    """

    error_squares: float = 0.0
    reference_squares: float = 0.0
    flushed: int = 0
    wrong: int = 0


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
def _decode32(key: Any) -> Any:
    one = np.empty(1, np.int32)
    one[0] = int32(key ^ int32(int32(key >> int32(31)) & int32(0x7FFFFFFF)))
    return float64(one.view(np.float32)[0])


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
def _decode64(key: Any) -> Any:
    one = np.empty(1, np.int64)
    one[0] = key ^ ((key >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF))
    return one.view(np.float64)[0]


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
def _apart(values: Any, reference: Any, factor: Any) -> Any:
    error, size = 0.0, 0.0
    for i in range(values.shape[0]):
        r = float64(reference[i])
        d = float64(values[i]) * factor - r
        error += d * d
        size += r * r
    return error, size


@_compiled
def _apart_and_wrong(values: Any, reference: Any, factor: Any) -> Any:
    error, size, wrong = 0.0, 0.0, int64(0)
    for i in range(values.shape[0]):
        r = float64(reference[i])
        d = float64(values[i]) * factor - r
        error += d * d
        size += r * r
        wrong += int64(abs(d) >= abs(r)) & int64(r != 0.0)
    return error, size, wrong


@_compiled
def _flushed(values: Any, reference: Any) -> Any:
    count = int64(0)
    for i in range(values.shape[0]):
        count += int64(values[i] == 0.0 and reference[i] != 0.0)
    return count


@_compiled
def _block32(bits: Any, values: Any, tiny: Any) -> Any:
    nan = posinf = neginf = zeros = subnormal = 0
    first, last = _extremes32(bits)
    small = _below32(bits, tiny)
    if small:
        zeros = int64(_below32(bits, int32(1)))
        subnormal = small - zeros
    if last >= int32(0x7F800000) or first <= int32(-2139095041):
        nan, posinf, neginf, low, high, total, squares = _special(values)
    else:
        total, squares = _sums(values)
        low, high = _decode32(first), _decode32(last)
    return nan, posinf, neginf, zeros, subnormal, low, high, total, squares


@_compiled
def _block64(bits: Any, values: Any, tiny: Any) -> Any:
    nan = posinf = neginf = zeros = subnormal = 0
    first, last = _extremes64(bits)
    small = _below64(bits, tiny)
    if small:
        zeros = int64(_below64(bits, int64(1)))
        subnormal = small - zeros
    if last >= int64(0x7FF0000000000000) or first <= int64(-9218868437227405313):
        nan, posinf, neginf, low, high, total, squares = _special(values)
    else:
        total, squares = _sums(values)
        low, high = _decode64(first), _decode64(last)
    return nan, posinf, neginf, zeros, subnormal, low, high, total, squares


@_compiled
def _float32(values: Any, bits: Any, tiny: Any, reference: Any, factor: Any, counting: Any) -> Any:
    nan = posinf = neginf = zero = subnormal = 0
    low, high, total, squares, error, size, flushed = np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0, 0
    wrong = 0
    for start in range(0, values.shape[0], _BLOCK):
        numbers = values[start : start + _BLOCK]
        if counting:
            n, p, m, z, s, lowest, highest, t, q = _block32(bits[start : start + _BLOCK], numbers, tiny)
            nan, posinf, neginf, zero, subnormal = nan + n, posinf + p, neginf + m, zero + z, subnormal + s
            low, high = min(low, lowest), max(high, highest)
            total, squares = total + t, squares + q
            if z and reference.shape[0]:
                flushed += _flushed(numbers, reference[start : start + _BLOCK])
        if counting and reference.shape[0]:
            e, r, w = _apart_and_wrong(numbers, reference[start : start + _BLOCK], factor)
            error, size, wrong = error + e, size + r, wrong + w
        elif reference.shape[0]:
            e, r = _apart(numbers, reference[start : start + _BLOCK], factor)
            error, size = error + e, size + r
    return nan, posinf, neginf, zero, subnormal, low, high, total, squares, error, size, flushed, wrong


@_compiled
def _float64(values: Any, bits: Any, tiny: Any, reference: Any, factor: Any, counting: Any) -> Any:
    nan = posinf = neginf = zero = subnormal = 0
    low, high, total, squares, error, size, flushed = np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0, 0
    wrong = 0
    for start in range(0, values.shape[0], _BLOCK):
        numbers = values[start : start + _BLOCK]
        if counting:
            n, p, m, z, s, lowest, highest, t, q = _block64(bits[start : start + _BLOCK], numbers, tiny)
            nan, posinf, neginf, zero, subnormal = nan + n, posinf + p, neginf + m, zero + z, subnormal + s
            low, high = min(low, lowest), max(high, highest)
            total, squares = total + t, squares + q
            if z and reference.shape[0]:
                flushed += _flushed(numbers, reference[start : start + _BLOCK])
        if counting and reference.shape[0]:
            e, r, w = _apart_and_wrong(numbers, reference[start : start + _BLOCK], factor)
            error, size, wrong = error + e, size + r, wrong + w
        elif reference.shape[0]:
            e, r = _apart(numbers, reference[start : start + _BLOCK], factor)
            error, size = error + e, size + r
    return nan, posinf, neginf, zero, subnormal, low, high, total, squares, error, size, flushed, wrong


@functools.cache
def _limits(tiny: float) -> tuple[Any, Any]:
    """Return the bits of a magnitude as FP32 and as FP64."""
    return np.float32(tiny).view(np.int32), np.float64(tiny).view(np.int64)


def _run(values: Any, tiny: float, reference: Any, factor: float, counting: bool) -> tuple[Summary, Distance]:
    limit32, limit64 = _limits(tiny)
    if values.itemsize == 4:
        result = _float32(values, values.view(np.int32), limit32, reference, factor, counting)
    else:
        result = _float64(values, values.view(np.int64), limit64, reference, factor, counting)
    return Summary(*result[:9]), Distance(*result[9:])


_NOTHING = np.empty(0, np.float32)


def summarise(values: Any, tiny: float, *, reference: Any = None, factor: float = 1.0) -> tuple[Summary, Distance]:
    """Count and sum the elements of a contiguous one-dimensional array, and compare it with ``reference`` if given.

    Both are float32 or float64 and of the same length; compared is ``values * factor``. ``tiny`` is the smallest normal
    value of the format that the values come from: non-zero magnitudes below it are subnormal.
    """
    return _run(values, tiny, _NOTHING if reference is None else reference, factor, True)


def compare(values: Any, reference: Any, *, factor: float = 1.0) -> Distance:
    """Compare ``values * factor`` with ``reference`` as :func:`summarise` does, without counting anything."""
    return _run(values, 1.0, reference, factor, False)[1]
