"""The rows of a report: visits in execution order, gradients in the model's order, and what was covered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.diagnose.underflow import without_cancellation
from nanprobe.lanes.trace import LaneTrace, Place, Trace
from nanprobe.records import Coverage, GradientRow, Measure, VisitRow

__all__ = ["coverage", "gradient_rows", "visit_rows"]


def visit_rows(trace: Trace, diagnoses: Mapping[str, LaneDiagnosis]) -> tuple[VisitRow, ...]:
    """Return one row per place in execution order: the reference's, with the others' own visits put in between."""
    lanes = (trace.reference, *trace.lanes.values())
    order = _merged_order(lanes)
    facts = {(f.module, f.visit): f for lane in reversed(lanes) for f in lane.visits}
    rows: list[VisitRow] = []
    for number, place in enumerate(order):
        phase, module, visit = place
        fact = facts.get((module, visit))
        precisions: dict[str, Measure] = {}
        for lane in lanes:
            measure = lane.measures.get(place)
            if measure is None:
                continue
            diagnosis = diagnoses[lane.precision]
            state = diagnosis.states.get(place, "clean")
            precisions[lane.precision] = (
                measure if state == measure.state else dataclasses.replace(measure, state=state)
            )
        rows.append(
            VisitRow(
                module=module,
                visit=visit,
                class_=trace.modules.get(module, fact.class_ if fact is not None else ""),
                phase=phase,
                order=number,
                depth=fact.depth if fact is not None else 0,
                leaf=fact.leaf if fact is not None else True,
                precisions=precisions,
            )
        )
    return tuple(rows)


def _merged_order(lanes: Sequence[LaneTrace]) -> list[Place]:
    """Merge the lanes' own orders: a place that the reference lacks comes right after its predecessor in its lane."""
    merged = [place for place, _ in sorted(lanes[0].order.items(), key=lambda item: item[1])]
    known = set(merged)
    for lane in lanes[1:]:
        previous: Place | None = None
        for place, _ in sorted(lane.order.items(), key=lambda item: item[1]):
            if place not in known:
                merged.insert(merged.index(previous) + 1 if previous is not None else 0, place)
                known.add(place)
            previous = place
    return merged


def gradient_rows(trace: Trace) -> tuple[GradientRow, ...]:
    """Return one row per parameter that has a gradient in some lane, in the model's order."""
    lanes = (trace.reference, *trace.lanes.values())
    rows: list[GradientRow] = []
    for name, (owner, shape) in trace.parameters.items():
        elements = math.prod(shape)
        precisions = {
            lane.precision: without_cancellation(lane.gradients[name], elements, lane.precision)
            for lane in lanes
            if name in lane.gradients
        }
        if precisions:
            rows.append(
                GradientRow(parameter=name, module=owner, shape=shape, elements=elements, precisions=precisions)
            )
    return tuple(rows)


def coverage(trace: Trace) -> Coverage:
    """Count what was observed in any lane."""
    lanes = (trace.reference, *trace.lanes.values())
    visited = {f.module for lane in lanes for f in lane.visits}
    hidden = dict.fromkeys(name for lane in lanes for name in lane.uninspected)
    return Coverage(
        modules=len(trace.modules),
        visited=sum(1 for path in trace.modules if path in visited),
        never_visited=tuple(path for path in trace.modules if path not in visited),
        not_callable=tuple(path for path in trace.not_callable if path not in visited),
        outputs_not_inspected=tuple(hidden),
        ops_outside_modules=trace.reference.ops_outside_modules,
    )
