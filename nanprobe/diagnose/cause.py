"""Why an operation failed on operands that look good: what, before it, made one of them wrong.

A logarithm of zero, or a root of a negative number, is the end of a story where the operand is neither exactly. The
FP64 shadow tells: it is finite in the very place. Two ways lead back from there.

A constant that the format rounds is judged by experiment: the shadow is given what the lane has for the operands of
its operation, once with the constant as it is rounded and once as it was written. If the shadow then fails in the same
place with the one and not with the other, the constant is the cause.

Otherwise the walk goes back over results that are wrong altogether, off by no less than what they should be, to the
first operation that has many more of them than its operands. If that is where they flushed to zero it is an underflow;
if it is a difference, whose own rounding is none, the digits of its operands cancelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanprobe.lanes.trace import OperationFact, OperationRecord, Operations

__all__ = ["Cause", "constants_before", "made_wrong_by", "still_fails"]

_DIFFERENCES = ("add", "sub", "rsub", "sum", "mean", "addcmul", "lerp", "mm", "bmm", "addmm", "baddbmm", "cumsum")

_MOST_CONSTANTS = 6
"""Operations with rounded constants that are tried; the nearest come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What made an operand wrong: the operation ``record`` and the mechanism."""

    record: OperationRecord
    mechanism: str


def _failed(operations: Operations, fact: OperationFact) -> OperationRecord | None:
    """Return the record of an operation that fails here and not in its shadow, None when there is none."""
    if fact.record is None or fact.exact_absmax is not None or not fact.exact_known or fact.operand_inf:
        return None
    record = operations.records[fact.record]
    return record if record.error is not None and math.isinf(record.error) else None


def constants_before(operations: Operations, fact: OperationFact) -> tuple[int, ...]:
    """Return the numbers of the records with rounded constants that a failed operation depends on, nearest first."""
    record = _failed(operations, fact)
    if record is None:
        return ()
    seen, todo = set[int](), list(record.operands)
    while todo:
        number = todo.pop()
        if number not in seen:
            seen.add(number)
            todo.extend(operations.records[number].operands)
    rounded = [n for n in seen if operations.records[n].rounded]
    return tuple(sorted(rounded, reverse=True)[:_MOST_CONSTANTS])


def still_fails(operations: Operations, held: Operations, fact: OperationFact) -> bool:
    """Whether the shadow of a failed operation fails as well in ``held``, where some operands are the lane's own."""
    record = _failed(operations, fact)
    if record is None or record.order >= len(held.records):
        return False
    again = held.records[record.order]
    same = (again.op, again.module, again.bad) == (record.op, record.module, record.bad)
    return same and again.error is not None and math.isfinite(again.error)


def made_wrong_by(operations: Operations, fact: OperationFact) -> Cause | None:
    """Return what made an operand of a failed operation wrong, None where that cannot be told."""
    record = _failed(operations, fact)
    if record is None:
        return None
    records = operations.records
    todo = [records[n] for n in record.operands if records[n].wrong]
    if len(todo) != 1:
        return None  # which of two wrong operands is to blame is not told
    here = todo[0]
    while True:
        before = [records[n] for n in here.operands if 2 * records[n].wrong >= here.wrong]
        if not before:
            break
        if len(before) > 1:
            return None
        here = before[0]
    if 2 * here.underflowed >= here.wrong:
        return Cause(record=here, mechanism="underflow")
    base = (here.backward_op or here.op).removeprefix("aten.").rstrip("_")
    if base in _DIFFERENCES and not here.underflowed and here.operands:
        return Cause(record=here, mechanism="cancellation")
    return None
