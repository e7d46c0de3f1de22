"""Memory that nothing wrote, and that reaches the loss or the output: an origin of its own in every precision."""

from __future__ import annotations

import dataclasses

from nanprobe.diagnose.lane import LaneDiagnosis, Traced
from nanprobe.lanes.trace import LaneTrace, UnwrittenFact
from nanprobe.records import Finding, FirstBad

__all__ = ["may_be_unwritten", "unwritten_finding", "with_unwritten"]


def may_be_unwritten(diagnosis: LaneDiagnosis) -> bool:
    """Whether something is wrong in a lane that unwritten memory could bring about."""
    arose = any(fault.stored is None and fault.first_bad.phase in ("forward", "loss") for fault in diagnosis.faults)
    return arose or diagnosis.divergence is not None


def with_unwritten(lane: LaneTrace, diagnosis: LaneDiagnosis, fact: UnwrittenFact) -> LaneDiagnosis:
    """Return the diagnosis with the operation that reads unwritten memory in place of what comes of it.

    A lane that diverges before that operation is left as it is.
    """
    divergence = diagnosis.divergence
    if divergence is not None and not diagnosis.faults and _before(lane, divergence.module, divergence.visit, fact):
        return diagnosis
    kept = tuple(fault for fault in diagnosis.faults if fault.stored is not None)
    bad = FirstBad(
        precision=lane.precision,
        phase=fact.phase,
        module=fact.module,
        visit=fact.visit,
        class_=fact.class_,
        op=fact.op,
        mechanism="uninitialized",
        precision_related=False,
        count=fact.count,
        elements=fact.elements,
        explanation=_sentence(fact),
    )
    return dataclasses.replace(
        diagnosis, faults=(*kept, Traced(first_bad=bad, fatal=True)), divergence=None, after_flip=False, fatal=True
    )


def unwritten_finding(fact: UnwrittenFact) -> Finding:
    """Return the warning for a replay in which unwritten memory happened to do no harm."""
    return Finding(
        rule="uninitialized",
        severity="warning",
        phase=fact.phase,
        module=fact.module,
        op=fact.op,
        mechanism="uninitialized",
        message=f"{_sentence(fact)} This time it held nothing that showed.",
        evidence={"count": fact.count, "elements": fact.elements},
    )


def _sentence(fact: UnwrittenFact) -> str:
    where = fact.module or ("the model itself" if fact.module is not None else "code outside the model")
    return (
        f"{fact.op} in {where} reads memory that nothing wrote, and what it makes of it reaches the result: filled "
        "with NaN the run ends non-finite, filled with zeros it does not. What it holds depends on what ran before."
    )


def _before(lane: LaneTrace, module: str | None, visit: int | None, fact: UnwrittenFact) -> bool:
    """Whether a visit ended before the one that reads the memory began."""
    facts = {(f.module, f.visit): f for f in lane.visits}
    shown = facts.get((module, visit)) if module is not None and visit is not None else None
    reads = facts.get((fact.module, fact.visit)) if fact.module is not None and fact.visit is not None else None
    return shown is not None and reads is not None and 0 <= shown.left < reads.entered
