"""Exact statistics of stored elements of any type, fed chunk by chunk, without torch.

A :class:`Counter` is fed bytes and ends as a :class:`Tally`. What a cast to another format would do is counted by the
thresholds of :mod:`nanprobe.formats`, never by casting. Large arrays go through compiled loops; where all of a
checkpoint is small, NumPy alone gives the same figures sooner than the compiler's library can be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from nanprobe.formats import NumberFormat
from nanprobe.numerics.native import Kernels
from nanprobe.numerics.stored_tables import pattern_values, smallest_normal, unpack

__all__ = ["COUNTABLE", "PACKED", "Counter", "Tally", "combined", "decoded", "is_floating", "negated"]

PACKED = ("float4_e2m1", "float6_e2m3", "float6_e3m2", "float4_e2m1fn_x2")
"""Types with more than one element in a byte, or with elements across bytes."""

_INTEGERS: dict[str, str] = {
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint64": "<u8", "uint32": "<u4", "uint16": "<u2",
    "uint8": "u1", "bool": "u1", "qint32": "<i4", "qint8": "i1", "quint8": "u1", "quint4x2": "u1", "quint2x4": "u1",
    "bits8": "u1", "bits16": "<u2", "bits1x8": "u1", "bits2x4": "u1", "bits4x2": "u1",
}  # fmt: skip
_FLOATS: dict[str, str] = {
    "float64": "<f8", "float32": "<f4", "float16": "<u2", "bfloat16": "<u2", "float8_e4m3fn": "u1",
    "float8_e4m3fnuz": "u1", "float8_e5m2": "u1", "float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1", "float4_e2m1": "u1",
    "float4_e2m1fn_x2": "u1", "float6_e2m3": "u1", "float6_e3m2": "u1",
}  # fmt: skip
_COMPLEX: dict[str, str] = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}

COUNTABLE = frozenset((*_INTEGERS, *_FLOATS, *_COMPLEX))
"""Element types whose values can be counted."""

_LEAST = math.nextafter(0.0, 1.0)
"""Smallest positive FP64 number: below it there is zero only."""

_INFINITE = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Pattern of Inf in the 16-bit types."""

_SHORT = 64
"""Elements of at most 16 bits below which NumPy is as fast as a compiled loop."""


def is_floating(dtype: str) -> bool:
    """Return whether ``dtype`` can hold NaN or fractions: floating-point and complex types."""
    return dtype in _FLOATS or dtype in _COMPLEX


def decoded(raw: Any, dtype: str, byteorder: str = "little") -> Any:
    """Return the elements in ``raw`` (a contiguous uint8 array) in a type that NumPy computes with.

    FP32 for itself and the 16-bit types, FP64 for every other floating-point type, integers and complex numbers as they
    are.
    """
    if dtype == "bfloat16":
        return (raw.view(_ordered("<u2", byteorder)).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        with np.errstate(invalid="ignore"):  # a signalling NaN is still a NaN
            return raw.view(_ordered("<f2", byteorder)).astype(np.float32)
    if dtype in _FLOATS and dtype not in ("float64", "float32"):
        return pattern_values(_table_name(dtype))[_patterns(raw, dtype, byteorder)]
    code = _FLOATS.get(dtype) or _INTEGERS.get(dtype) or _COMPLEX[dtype]
    values = raw.view(_ordered(code, byteorder))
    if dtype in _COMPLEX:
        parts = values.reshape(-1, 2).astype(np.float64)
        return parts[:, 0] + 1j * parts[:, 1]
    return values


def _ordered(code: str, byteorder: str) -> str:
    return code.replace("<", ">") if byteorder == "big" else code


def _table_name(dtype: str) -> str:
    return "float4_e2m1" if dtype == "float4_e2m1fn_x2" else dtype


def _patterns(raw: Any, dtype: str, byteorder: str) -> Any:
    if dtype in PACKED:
        return unpack(raw, _table_name(dtype))
    return raw.view(_ordered(_FLOATS[dtype], byteorder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts, extremes and sums of a tensor's elements.

    ``low`` and ``high`` are over finite elements, None without any (and for complex types, whose ``absmax`` is the
    largest modulus). ``total`` and ``squares`` are sums over finite elements in FP64. ``overflow`` and ``underflow``
    count, by the name of a format, the finite elements that a cast to it would turn infinite, and the non-zero ones
    that it would turn to zero.
    """

    elements: int
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    low: float | None = None
    high: float | None = None
    absmax: float | None = None
    total: float = 0.0
    squares: float = 0.0
    overflow: dict[str, int] = field(default_factory=dict)
    underflow: dict[str, int] = field(default_factory=dict)

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN, Inf or -Inf."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Elements that are numbers."""
        return self.elements - self.nonfinite

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements; None without any, or for complex types."""
        return self.total / self.finite if self.finite and self.low is not None else None

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements, None without any."""
        return math.sqrt(self.squares / self.finite) if self.finite else None


def combined(parts: Sequence[tuple[Tally, int]]) -> Tally:
    """Return the tally of a tensor made of parts, each of which occurs so many times."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    lows = [tally.low for tally, _ in parts if tally.low is not None]
    highs = [tally.high for tally, _ in parts if tally.high is not None]
    largest = [tally.absmax for tally, _ in parts if tally.absmax is not None]
    names = parts[0][0].overflow if parts else {}
    return Tally(
        elements=sum(tally.elements * times for tally, times in parts),
        nan=sum(tally.nan * times for tally, times in parts),
        posinf=sum(tally.posinf * times for tally, times in parts),
        neginf=sum(tally.neginf * times for tally, times in parts),
        zero=sum(tally.zero * times for tally, times in parts),
        subnormal=sum(tally.subnormal * times for tally, times in parts),
        low=min(lows, default=None),
        high=max(highs, default=None),
        absmax=max(largest, default=None),
        total=math.fsum(tally.total * times for tally, times in parts),
        squares=math.fsum(tally.squares * times for tally, times in parts),
        overflow={name: sum(tally.overflow[name] * times for tally, times in parts) for name in names},
        underflow={name: sum(tally.underflow[name] * times for tally, times in parts) for name in names},
    )


def negated(tally: Tally) -> Tally:
    """Return the tally of the negatives of the elements."""
    return replace(
        tally,
        posinf=tally.neginf,
        neginf=tally.posinf,
        low=None if tally.high is None else -tally.high,
        high=None if tally.low is None else -tally.low,
        total=-tally.total,
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The magnitudes that elements of one type are counted below, in ascending order, and where each stands.

    ``casts`` are the name of each format, the first magnitude that overflows in it and the first that is not flushed.
    ``bits`` are the same as patterns of the type, rounded up, where a compiled loop compares patterns.
    """

    limits: Any
    place: dict[float, int]
    tiny: float
    casts: tuple[tuple[str, float, float], ...]
    bits: Any
    limits_address: int
    bits_address: int


@cache
def _bounds(dtype: str, casts: tuple[NumberFormat, ...]) -> _Bounds:
    tiny = smallest_normal(dtype)
    thresholds = tuple(
        (cast.name, cast.overflow_threshold, math.nextafter(cast.flush_threshold, math.inf)) for cast in casts
    )
    wanted = {_LEAST, tiny or _LEAST, *(limit for _, over, under in thresholds for limit in (over, under))}
    limits = np.array(sorted(wanted))
    if dtype == "float32":
        bits = _as_bits32(limits)
    elif dtype in _INFINITE:
        bits = np.searchsorted(pattern_values(dtype)[: _INFINITE[dtype] + 1], limits).astype(np.int16)
    else:
        bits = limits.view(np.int64)
    place = {limit: at for at, limit in enumerate(limits.tolist())}
    return _Bounds(limits, place, tiny, thresholds, bits, limits.ctypes.data, bits.ctypes.data)


class Counter:
    """Counts elements of one type; feed it the bytes in any order, in pieces that hold whole elements."""

    def __init__(self, dtype: str, casts: Sequence[NumberFormat] = (), byteorder: str = "little") -> None:
        """``dtype`` is one of :data:`COUNTABLE`; ``casts`` are the formats whose overflow and underflow are counted."""
        self.dtype = dtype
        self._order = byteorder
        self._casts = tuple(casts) if dtype in _FLOATS else ()
        self._bounds = _bounds(dtype, self._casts)
        self._limits = self._bounds.limits
        self._below = np.zeros(len(self._limits), np.int64)
        self._kinds = np.zeros(3, np.int64)
        self._sums = np.array([math.inf, -math.inf, 0.0, 0.0])
        self._elements = 0
        self._bins: Any = None
        self._whole: tuple[int, int] | None = None
        self._modulus = -math.inf

    def feed(self, raw: Any, kernels: Kernels | None = None) -> None:
        """Count the elements in ``raw``, a contiguous uint8 array; with ``kernels`` by the compiled loops."""
        if self.dtype in _COMPLEX:
            self._feed_complex(decoded(raw, self.dtype, self._order))
        elif self.dtype in _INTEGERS:
            self._feed_integers(decoded(raw, self.dtype, self._order))
        elif self.dtype in ("float32", "float64"):
            self._feed_wide(decoded(raw, self.dtype, self._order), kernels)
        else:
            self._feed_patterns(_patterns(raw, self.dtype, self._order), kernels)

    def merge(self, other: Counter) -> None:
        """Add what another counter of the same type and casts has seen."""
        self._elements += other._elements
        self._below += other._below
        self._kinds += other._kinds
        self._add_sums(*other._sums)
        self._modulus = max(self._modulus, other._modulus)
        if other._whole is not None:
            self._widen(*other._whole)
        if other._bins is not None:
            if self._bins is None:
                self._bins = other._bins
            else:
                self._bins += other._bins

    def finish(self) -> Tally:
        """Return what was counted."""
        self._settle_bins()
        nan, posinf, neginf = (int(kind) for kind in self._kinds)
        finite = self._elements - nan - posinf - neginf
        low: float | None = float(self._sums[0]) if finite else None
        high: float | None = float(self._sums[1]) if finite else None
        if self._whole is not None:
            low, high = self._whole
        absmax = None if low is None or high is None else max(abs(low), abs(high))
        if self.dtype in _COMPLEX:
            low = high = None
            absmax = self._modulus if finite else None
        zero = self._count_below(_LEAST)
        return Tally(
            elements=self._elements,
            nan=nan,
            posinf=posinf,
            neginf=neginf,
            zero=zero,
            subnormal=self._count_below(self._bounds.tiny) - zero if self._bounds.tiny else 0,
            low=low,
            high=high,
            absmax=absmax,
            total=float(self._sums[2]),
            squares=float(self._sums[3]),
            overflow={name: finite - self._count_below(over) for name, over, _ in self._bounds.casts},
            underflow={name: self._count_below(under) - zero for name, _, under in self._bounds.casts},
        )

    def _count_below(self, limit: float) -> int:
        return int(self._below[self._bounds.place[limit]])

    def _add_sums(self, low: float, high: float, total: float, squares: float) -> None:
        sums = self._sums
        sums[0], sums[1] = min(sums[0], low), max(sums[1], high)
        # A sum beyond FP64 is Inf, or NaN where two such cancel, and no reason to warn.
        with np.errstate(over="ignore", invalid="ignore"):
            sums[2] += total
            sums[3] += squares

    def _widen(self, low: int, high: int) -> None:
        self._whole = (low, high) if self._whole is None else (min(self._whole[0], low), max(self._whole[1], high))

    def _feed_complex(self, values: Any) -> None:
        self._elements += values.size
        with np.errstate(over="ignore", invalid="ignore"):
            modulus = np.abs(values)
        nan = np.isnan(values.real) | np.isnan(values.imag)
        infinite = np.isinf(modulus) & ~nan
        self._kinds += (int(nan.sum()), int(infinite.sum()), 0)
        good = modulus[~(nan | infinite)]
        self._add_weighted(good, None)
        if good.size:
            self._modulus = max(self._modulus, float(good.max()))

    def _feed_integers(self, values: Any) -> None:
        self._elements += values.size
        if not values.size:
            return
        self._below += values.size - int(np.count_nonzero(values))
        self._widen(int(values.min()), int(values.max()))
        for start in range(0, values.size, 1 << 18):
            part = values[start : start + (1 << 18)].astype(np.float64)
            with np.errstate(over="ignore"):
                self._sums[2] += float(part.sum())
                self._sums[3] += float(np.dot(part, part))

    def _feed_wide(self, values: Any, kernels: Kernels | None) -> None:
        self._elements += values.size
        if kernels is None:
            for start in range(0, values.size, 1 << 18):
                with np.errstate(invalid="ignore"):  # a signalling NaN is still a NaN
                    part = values[start : start + (1 << 18)].astype(np.float64)
                self._add_weighted(part, None)
            return
        values = _native(values)
        address, count = values.ctypes.data, values.size
        wide = self.dtype == "float64"
        kernels("pass64" if wide else "pass32", address, count, self._bounds.bits_address, *self._into())

    def _feed_patterns(self, patterns: Any, kernels: Kernels | None) -> None:
        self._elements += patterns.size
        table = pattern_values(_table_name(self.dtype))
        if kernels is None or patterns.size < _SHORT:
            if patterns.size < len(table):
                self._add_weighted(table[patterns], None)
            else:
                self._add_bins(np.bincount(patterns, minlength=len(table)))
            return
        patterns = _native(patterns)
        if self.dtype in ("float16", "bfloat16"):
            half = self.dtype == "float16"
            infinite = _INFINITE[self.dtype]
            kernels(
                "pass16", patterns.ctypes.data, patterns.size, int(half), infinite, table.ctypes.data,
                self._bounds.bits_address, *self._into(),
            )  # fmt: skip
            return
        whole = patterns.size // 8 * 8
        counters = np.zeros((4, 256), np.uint32)
        kernels(
            "tally8", patterns.ctypes.data, whole // 8, table.ctypes.data, len(table), counters.ctypes.data,
            *self._into(),
        )  # fmt: skip
        if whole < patterns.size:
            self._add_weighted(table[patterns[whole:]], None)

    def _into(self) -> tuple[int, int, int, int, int]:
        """Return the arguments that every kernel ends with: limits, how many there are, and where results go."""
        return (
            self._bounds.limits_address, len(self._limits), self._below.ctypes.data, self._kinds.ctypes.data,
            self._sums.ctypes.data,
        )  # fmt: skip

    def _add_bins(self, bins: Any) -> None:
        if self._bins is None:
            self._bins = np.zeros(len(bins), np.int64)
        self._bins += bins

    def _settle_bins(self) -> None:
        """Turn the histogram into counts and sums."""
        if self._bins is None:
            return
        present = np.flatnonzero(self._bins)
        self._add_weighted(pattern_values(_table_name(self.dtype))[present], self._bins[present])
        self._bins = None

    def _add_weighted(self, values: Any, weights: Any) -> None:
        """Add FP64 ``values``, each as often as ``weights`` says (once where that is None)."""

        def times(mask: Any) -> int:
            return int(np.count_nonzero(mask)) if weights is None else int(weights[mask].sum())

        magnitudes = np.abs(values)
        self._below += [times(magnitudes < limit) for limit in self._limits]
        good = magnitudes < math.inf
        if not good.all():
            self._kinds += (times(np.isnan(values)), times(values == math.inf), times(values == -math.inf))
            values = values[good]
            weights = None if weights is None else weights[good]
        if values.size:
            weighted = values if weights is None else values * weights
            with np.errstate(over="ignore", invalid="ignore"):
                self._add_sums(
                    float(values.min()), float(values.max()), float(weighted.sum()), float(np.dot(weighted, values))
                )


def _as_bits32(limits: Any) -> Any:
    """Return FP64 magnitudes as int32 patterns of FP32, rounded up: x < limit holds for the same FP32 numbers x."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = limits.astype(np.float32)
    bits = rounded.view(np.int32).copy()
    bits[rounded.astype(np.float64) < limits] += 1
    return bits


def _native(array: Any) -> Any:
    """Return the array in this machine's byte order, contiguous and aligned."""
    if array.dtype.isnative and array.flags.carray:
        return array
    return np.require(array.astype(array.dtype.newbyteorder("="), copy=False), requirements=("C", "A"))
