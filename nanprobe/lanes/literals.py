"""Large numbers of the code's own, a mask's fill above all, followed to where a narrower format cannot hold them.

A fill of -1e9 or of FP32's lowest value is exact where it is put, and becomes -Inf when the mask is converted later.
That is then no result that grew too large: it is a number that was written down. Only magnitudes that FP16 cannot hold
are followed, through what moves values, and through sums and products, which leave them as they are where the other
operand is zero or one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nanprobe.formats import by_name
from nanprobe.lanes.exact import floating
from nanprobe.lanes.mirrors import weakly
from nanprobe.lanes.plans import Plan

__all__ = ["Literals"]

_SMALLEST = by_name("fp16").overflow_threshold

_KEEPING = ("add", "sub", "rsub", "mul", "maximum", "minimum", "clamp", "neg")
"""Operations that leave a value of one operand as it is, but for its sign, for some values of the other."""


class Literals:
    """Which storages hold large numbers that the code gave to an operation, with these numbers' magnitudes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, frozenset[float]]] = {}

    def note(self, plan: Plan, given: tuple[tuple[Any, ...], dict[str, Any]], outputs: list[torch.Tensor]) -> None:
        """Remember what large numbers the outputs of an operation may hold; ``given`` are its arguments before."""
        numbers = {abs(float(n)) for n in (*given[0], *given[1].values()) if _is_large(n)}
        base = plan.name.rpartition(".")[2].rstrip("_")
        if self._known and (plan.moves or base in _KEEPING):
            numbers |= self._of(floating(given))
        if not numbers:
            return
        if not (plan.moves or plan.has_bounds or base in _KEEPING):
            return
        for output in outputs:
            if output.layout is torch.strided and not output.is_nested:
                self._known[_key(output)] = (weakly(output), frozenset(numbers))

    def equal(self, value: float | None, operands: list[torch.Tensor]) -> float | None:
        """Return the number, by magnitude, that ``operands`` hold and that ``value`` is, None when there is none."""
        if value is None:
            return None
        return next((n for n in self._of(operands) if math.isclose(n, value, rel_tol=_SAME)), None)

    def _of(self, tensors: list[torch.Tensor]) -> set[float]:
        found: set[float] = set()
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_nested:
                found |= self._known.get(_key(tensor), (None, frozenset()))[1]
        return found


_SAME = 1e-6
"""Relative distance within which a value in FP32 is the number that was given."""


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) >= _SMALLEST
    )
