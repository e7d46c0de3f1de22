"""Two tensors side by side, box by box: how far one moved from the other, and where most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanprobe.checkpoints.records import TensorEntry
from nanprobe.numerics.native import Kernels
from nanprobe.scan.look import Looker, boxes

__all__ = ["Compared", "compare_tensors"]


@dataclass(slots=True)
class Compared:
    """Sums over the elements that are finite in both, and counts of those that are not; see ``Change``."""

    changed: int = 0
    newly_nonfinite: int = 0
    repaired: int = 0
    difference: float = 0.0
    before: float = 0.0
    after: float = 0.0
    product: float = 0.0
    max_abs: float = 0.0
    index: tuple[int, ...] | None = None
    first_index: tuple[int, ...] | None = None
    read: int = 0

    @property
    def rel_error(self) -> float:
        """||B - A|| / ||A||; infinite when a finite element became non-finite."""
        if self.newly_nonfinite:
            return math.inf
        if not self.difference:
            return 0.0
        return math.sqrt(self.difference / self.before) if self.before else math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None when one of them is zero."""
        size = math.sqrt(self.before) * math.sqrt(self.after)
        return max(-1.0, min(1.0, self.product / size)) if size and math.isfinite(size) else None


def compare_tensors(
    looks_a: Looker, a: TensorEntry, looks_b: Looker, b: TensorEntry, kernels: Kernels | None = None
) -> Compared:
    """Compare two tensors of one shape; Damage when the bytes of one are not there."""
    result = Compared()
    with np.errstate(all="ignore"):
        for box in boxes(a.shape):
            one, other = np.asarray(looks_a.read(a, box)), np.asarray(looks_b.read(b, box))
            result.read += one.nbytes + other.nbytes
            if kernels is not None and one.dtype.kind == other.dtype.kind == "f":
                _add_compiled(result, one, other, *box, kernels)
            else:
                _add(result, one, other, *box)
    return result


def _add_compiled(
    result: Compared, one: Any, other: Any, start: tuple[int, ...], size: tuple[int, ...], kernels: Kernels
) -> None:
    one, other = np.ascontiguousarray(one, np.float64), np.ascontiguousarray(other, np.float64)
    counts, sums, places = np.zeros(3, np.int64), np.zeros(5), np.full(2, -1, np.int64)
    kernels(
        "compare64", one.ctypes.data, other.ctypes.data, one.size, counts.ctypes.data, sums.ctypes.data,
        places.ctypes.data,
    )  # fmt: skip
    changed, lost, repaired = (int(count) for count in counts)
    result.changed += changed
    result.newly_nonfinite += lost
    result.repaired += repaired
    result.difference += float(sums[0])
    result.before += float(sums[1])
    result.after += float(sums[2])
    result.product += float(sums[3])
    if sums[4] > result.max_abs:
        result.max_abs = float(sums[4])
        result.index = _at(int(places[0]), start, size)
    if lost and result.first_index is None:
        result.first_index = _at(int(places[1]), start, size)


def _add(result: Compared, one: Any, other: Any, start: tuple[int, ...], size: tuple[int, ...]) -> None:
    same = one == other
    one, other = _wide(one), _wide(other)
    good_a, good_b = np.isfinite(one), np.isfinite(other)
    both = good_a & good_b
    result.changed += int(np.count_nonzero(~same & ~(~good_a & ~good_b & _same_kind(one, other))))
    lost = good_a & ~good_b
    bad = int(np.count_nonzero(lost))
    if bad and result.first_index is None:
        result.first_index = _at(int(lost.reshape(-1).argmax()), start, size)
    result.newly_nonfinite += bad
    result.repaired += int(np.count_nonzero(good_b & ~good_a))
    if not both.all():
        one, other = np.where(both, one, 0), np.where(both, other, 0)
    gap = np.abs(other - one)
    largest = float(gap.max()) if gap.size else 0.0
    if largest > result.max_abs:
        result.max_abs = largest
        result.index = _at(int(gap.reshape(-1).argmax()), start, size)
    result.difference += _square(gap)
    result.before += _square(one)
    result.after += _square(other)
    result.product += float(np.vdot(one.reshape(-1), other.reshape(-1)).real)


def _wide(values: Any) -> Any:
    return values if values.dtype.kind == "c" else values.astype(np.float64)


def _same_kind(one: Any, other: Any) -> Any:
    """Whether two non-finite elements are the same: both NaN, or the same infinity."""
    return (np.isnan(one) & np.isnan(other)) | (one == other)


def _square(values: Any) -> float:
    flat = _wide(values).reshape(-1)
    return float(np.vdot(flat, flat).real)


def _at(flat: int, start: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    inside = np.unravel_index(flat, size) if size else ()
    return tuple(int(a) + int(b) for a, b in zip(start, inside, strict=True))
