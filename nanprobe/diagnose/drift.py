"""Which operation a finite drift comes from: a walk back from where it shows to where the digits were lost.

The walk starts at an operation whose accumulated error is beyond the tolerance. As long as most of an operation's error
came with its operands, it goes on to the one that brought most of it: by absolute error where operands are added or put
side by side, by relative error where they are multiplied or taken through a function. It ends where the error is the
operation's own.

Other things can be on the way. An *amplifier* is an operation whose result is relatively much worse than its operands:
a difference of nearly equal values, a cosine of a large angle. Errors may also just add up, operation after operation,
until together they are beyond the tolerance; then no single operation is to blame, and none is named, unless they met
an amplifier. A running sum whose terms are lost one after the other adds up as well, and each of its terms shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanprobe.formats import by_dtype
from nanprobe.lanes.trace import IN_LOSS, OperationRecord, Operations

__all__ = ["Drift", "drift_of"]

OWN_SHARE = 0.25
"""Share of a result's error that must be the operation's own for the walk to end there.

Four roundings of one size add up to two of them, so that one of four still counts. Of several operations that rounded
alike the last is named: better operands alone would not help it."""

AMPLIFIED = 4.0
"""Ratio of a result's relative error to its operand's from which an operation counts as an amplifier."""

ADDED_UP = 4.0
"""Growth of the relative error along the walk, amplifiers aside, from which it counts as having added up."""

LOST_SHARE = 0.25
"""Share of the smaller operand that a sum must lack for it to count as absorbed: a tie loses half, and rounding of a
healthy sum a hundredth."""

_ADDING = (
    *("add", "sub", "rsub", "cat", "stack", "where", "copy", "index_put", "scatter", "masked_fill", "sum", "mean"),
    *("slice_backward", "select_backward", "embedding", "index", "gather", "cumsum", "clamp", "maximum", "minimum"),
)
"""Operations that hand on the absolute error of their operands; the others multiply or bend it."""

_DIFFERENCES = ("add", "sub", "rsub", "sum", "mean")

_BOUNDS = ("clamp", "clamp_min", "clamp_max", "hardtanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Where a drift comes from: ``origin`` lost the digits (None where they were lost little by little).

    ``seen`` is where the error is beyond the tolerance first, ``amplifier`` what made it so much worse, ``path`` the
    walk from where it shows back to the origin. ``inherited`` says that the walk left the traced stretch.
    """

    seen: OperationRecord
    origin: OperationRecord | None
    amplifier: OperationRecord | None
    path: tuple[OperationRecord, ...]
    inherited: bool

    @property
    def mechanism(self) -> str | None:
        """The mechanism that the origin and the amplifier tell, None where it is a drift like any other."""
        return _mechanism(self)

    @property
    def evidence(self) -> dict[str, Any]:
        """The figures that show it, for the report."""
        found: dict[str, Any] = {"seen_in": _name(self.seen), "operations": len(self.path)}
        if self.amplifier is not None:
            found["amplified_by"] = _name(self.amplifier)
        if self.origin is None:
            return found
        origin = self.origin
        found |= {"operation": _name(origin), "operation_error": origin.local_error, "flushed": origin.flushed}
        if origin.absorbed is not None:
            found["absorbed"] = origin.absorbed
        if origin.rounded:
            found["constants"] = [{"given": given, "held": held} for given, held in origin.rounded]
        return found


def drift_of(operations: Operations, phase: str, place: tuple[str, int] | None, tolerance: float) -> Drift | None:
    """Return where the drift that shows in ``place`` (a visit; None for the loss) comes from.

    None where no operation there is further from its FP64 shadow than ``tolerance`` (a ratio of 2-norms): the lane then
    does what FP64 would on the same way, and it is the way that differs from the reference's.
    """
    records = operations.records
    beyond = [r for r in records if _is_there(r, phase, place) and r.rel_error is not None and r.rel_error > tolerance]
    if not beyond:
        return None
    start = beyond[0] if phase == "backward" else beyond[-1]
    path, amplifiers, inherited = _walk(records, start)
    seen = [r for r in path if r.rel_error is not None and r.rel_error > tolerance][-1]
    origin: OperationRecord | None = path[-1]
    amplifier = max(amplifiers, key=lambda pair: pair[1])[0] if amplifiers else None
    lossy = _stalling(path)
    if _adds_up(path, amplifiers):
        origin = lossy or amplifier
        amplifier = None if origin is amplifier else amplifier
    elif amplifier is not None and origin is not None and origin.phase != phase and amplifier.phase == phase:
        origin, amplifier = amplifier, None
    return Drift(
        seen=seen,
        origin=origin,
        amplifier=amplifier,
        path=tuple(path),
        inherited=inherited and not operations.whole,
    )


def _is_there(record: OperationRecord, phase: str, place: tuple[str, int] | None) -> bool:
    if record.phase != phase or not record.elements:
        return False
    return place in record.inside if place is not None else IN_LOSS in record.inside or phase != "loss"


def _walk(
    records: Sequence[OperationRecord], start: OperationRecord
) -> tuple[list[OperationRecord], list[tuple[OperationRecord, float]], bool]:
    """Return the walk from ``start``, the amplifiers on it with their ratios, and whether its end is not known."""
    path = [start]
    amplifiers: list[tuple[OperationRecord, float]] = []
    while True:
        here = path[-1]
        error, local = here.error, here.local
        if error is None or local is None:
            return path, amplifiers, True
        own = local == math.inf if math.isinf(error) else local >= OWN_SHARE * error
        given = [records[n] for n in here.operands if records[n].error]
        if own or not given:
            return path, amplifiers, not own
        adds = _base(here) in _ADDING or math.isinf(error)
        before = max(given, key=lambda r: (r.error if adds else r.rel_error) or 0.0)
        ratio = _over(here.rel_error, before.rel_error)
        if ratio > AMPLIFIED:
            amplifiers.append((here, ratio))
        path.append(before)


def _over(one: float | None, other: float | None) -> float:
    return one / other if one is not None and other and math.isfinite(other) else 1.0


def _adds_up(path: Sequence[OperationRecord], amplifiers: Sequence[tuple[OperationRecord, float]]) -> bool:
    """Whether the error grew step by step along the walk, more than amplifiers account for."""
    growth = _over(path[0].rel_error, path[-1].rel_error)
    for _, ratio in amplifiers:
        growth /= ratio
    return math.isfinite(growth) and growth > ADDED_UP


def _stalling(path: Sequence[OperationRecord]) -> OperationRecord | None:
    """Return the first of the sums on the walk that lost their smaller operand, if most of them did."""
    sums = [r for r in path if _base(r) in ("add", "sub")]
    lossy = [r for r in sums if r.absorbed is not None and r.absorbed >= LOST_SHARE]
    return lossy[-1] if lossy and 2 * len(lossy) >= len(sums) else None


def _mechanism(drift: Drift) -> str | None:
    origin = drift.origin
    if origin is None:
        return None
    if math.isinf(origin.error or 0.0):
        return "overflow"
    changed = any(_changes(given, held) for given, held in origin.rounded)
    if origin.of_integers or (origin.rounded and (changed or _base(origin) in _BOUNDS)):
        return "unrepresentable-constant"
    fmt = by_dtype(origin.dtype)
    local = origin.local_error
    if origin.flushed and local is not None and fmt is not None and local > _LARGE * fmt.unit_roundoff:
        return "underflow"
    brought_out = drift.amplifier is not None and _base(drift.amplifier) in _DIFFERENCES
    if origin.absorbed is not None and origin.absorbed >= (_ALL if brought_out else LOST_SHARE):
        return "absorption"
    if brought_out or (drift.amplifier is None and origin.op and _cancels(origin, drift)):
        return "cancellation"
    return None


_LARGE = 8.0
"""Multiples of the unit roundoff beyond which an operation's own error is more than rounding."""

_ALL = 0.9
"""Share of an operand that a sum must lack for it to count as lost, where a later difference brings that out."""


def _changes(given: float, held: float) -> bool:
    """Whether rounding takes a constant to zero, to one, or to infinity."""
    return held in (0.0, 1.0, -1.0) or math.isinf(held)


def _cancels(origin: OperationRecord, drift: Drift) -> bool:
    """Whether the blamed operation is itself the difference that made the error of its operands so large."""
    return _base(origin) in _DIFFERENCES and origin is not drift.path[-1]


def _base(record: OperationRecord) -> str:
    return (record.backward_op or record.op).removeprefix("aten.").rstrip("_")


def _name(record: OperationRecord) -> str:
    """Return an operation with its module: "aten.mul in layers.3.mlp"."""
    if record.parameter is not None or not record.op:
        return f"{record.phase} {record.parameter}".strip()
    if record.module is None:
        return f"{record.op} outside the model" if record.phase != "loss" else f"{record.op} in the loss"
    return f"{record.op} in {record.module or 'the model itself'}"
