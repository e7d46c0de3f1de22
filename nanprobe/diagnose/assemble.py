"""Putting a replay's trace and its diagnoses together into the parts of a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from nanprobe.config import IgnoreRule
from nanprobe.diagnose.before import StoredFault
from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.lanes.trace import LaneTrace, Place, Trace
from nanprobe.records import (
    VERDICTS,
    Coverage,
    Divergence,
    Finding,
    FirstBad,
    Gradient,
    GradientRow,
    Measure,
    PrecisionResult,
    VisitRow,
)

__all__ = [
    "apply_ignores",
    "coverage",
    "findings",
    "gradient_rows",
    "precision_results",
    "visit_rows",
    "worst_first_bad",
    "worst_verdict",
]


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
            diagnosis = diagnoses.get(lane.precision)
            state = diagnosis.states.get(place, "clean") if diagnosis is not None else _reference_state(measure)
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


def _reference_state(measure: Measure) -> str:
    return "propagated" if measure.nan or measure.posinf else "clean"


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
        precisions: dict[str, Gradient] = {
            lane.precision: lane.gradients[name] for lane in lanes if name in lane.gradients
        }
        if precisions:
            rows.append(
                GradientRow(parameter=name, module=owner, shape=shape, elements=math.prod(shape), precisions=precisions)
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


def findings(
    trace: Trace, diagnoses: Mapping[str, LaneDiagnosis], stored: Sequence[StoredFault]
) -> tuple[Finding, ...]:
    """Return every finding: stored faults, then precision by precision what went wrong, worst first."""
    found = [_stored_finding(trace, diagnoses, fault) for fault in stored]
    origin_known = {fault.precision for fault in stored if not fault.mechanism.startswith("unrepresentable")}
    for name, lane in trace.lanes.items():
        diagnosis = diagnoses[name]
        if lane.raised is not None:
            found.append(_raised(lane))
        for origin in diagnosis.origins:
            if origin.phase == "input" and (None in origin_known or name in origin_known):
                continue
            found.append(_origin_finding(origin, fatal=diagnosis.fatal))
        if diagnosis.divergence is not None and not (diagnosis.origins and diagnosis.fatal):
            found.append(_divergence_finding(diagnosis.divergence, attributed=diagnosis.after_flip))
        found.extend(_flips(lane))
        found.extend(_quiet_warnings(lane))
    return tuple(found)


def _stored_finding(trace: Trace, diagnoses: Mapping[str, LaneDiagnosis], fault: StoredFault) -> Finding:
    lanes = [name for name in trace.lanes if fault.precision in (None, name)]
    severity = "error" if any(diagnoses[name].fatal for name in lanes) else "warning"
    if fault.tensor.kind != "input" and fault.precision is None:
        severity = "error"
    first = fault.first_bad(fault.precision or "")
    return Finding(
        rule=fault.mechanism,
        severity=severity,
        message=fault.message
        + ("" if severity == "error" else "; it does not reach the loss, a gradient or the output"),
        precision=fault.precision,
        phase=fault.tensor.kind,
        module=fault.tensor.owner,
        mechanism=fault.mechanism,
        evidence={
            "parameter": fault.tensor.name,
            "count": fault.count,
            "elements": fault.tensor.stats.elements,
            "index": list(fault.index) if fault.index is not None else None,
            "samples": list(first.samples) if first.samples is not None else None,
            "absmax": fault.tensor.stats.absmax,
        },
        remedies=first.remedies,
    )


def _raised(lane: LaneTrace) -> Finding:
    raised = lane.raised
    assert raised is not None
    where = f" in {raised.module or 'the model itself'} ({raised.class_})" if raised.module is not None else ""
    return Finding(
        rule="raised",
        severity="error",
        message=f"the {lane.precision} lane raised{where}: {raised.text}",
        precision=lane.precision,
        phase=raised.phase,
        module=raised.module,
        evidence={"error": raised.text},
    )


def _origin_finding(origin: FirstBad, *, fatal: bool) -> Finding:
    place = origin.module if origin.module is not None else "outside the model"
    counted = f"{origin.count:,} of {origin.elements:,} elements non-finite"
    tail = "" if fatal else "; it is absorbed before it reaches the loss, a gradient or the output"
    return Finding(
        rule=origin.mechanism or "nonfinite",
        severity="error" if fatal else "warning",
        message=f"{origin.phase} of {place or 'the model itself'}: {counted}{tail}",
        precision=origin.precision,
        phase=origin.phase,
        module=origin.module,
        op=origin.op,
        mechanism=origin.mechanism,
        evidence={
            "visit": origin.visit,
            "count": origin.count,
            "elements": origin.elements,
            "index": list(origin.index) if origin.index is not None else None,
            "samples": list(origin.samples) if origin.samples is not None else None,
            "input_absmax": origin.input_absmax,
            "reference_absmax": origin.reference_absmax,
            "limit": origin.limit,
            "absorbed_by": origin.absorbed_by,
            "between": list(origin.between) if origin.between is not None else None,
            "precision_related": origin.precision_related,
        },
        remedies=origin.remedies,
    )


def _divergence_finding(divergence: Divergence, *, attributed: bool) -> Finding:
    place = divergence.module if divergence.module is not None else "outside the model"
    tail = "; a discrete choice had already differed before it" if attributed else ""
    return Finding(
        rule="divergence",
        severity="warning" if attributed else "error",
        message=(
            f"{divergence.phase} of {place or 'the model itself'}: relative error {divergence.rel_error:.3g}, "
            f"tolerance {divergence.tolerance:.3g}{tail}"
        ),
        precision=divergence.precision,
        phase=divergence.phase,
        module=divergence.module,
        mechanism="routing-flip" if attributed else divergence.mechanism,
        evidence={
            "visit": divergence.visit,
            "rel_error": divergence.rel_error,
            "local_error": divergence.local_error,
            "tolerance": divergence.tolerance,
            "between": list(divergence.between) if divergence.between is not None else None,
        },
    )


def _flips(lane: LaneTrace) -> list[Finding]:
    if not lane.flips:
        return []
    first = lane.flips[0]
    place = "outside the model" if first.module is None else first.module or "the model itself"
    more = f"; {len(lane.flips) - 1} further differences follow" if len(lane.flips) > 1 else ""
    return [
        Finding(
            rule="routing-flip",
            severity="warning",
            message=f"a discrete choice differs from the reference's in {place}: {first.text}{more}",
            precision=lane.precision,
            phase="forward",
            module=first.module,
            op=first.op,
            mechanism="routing-flip",
            evidence={"changed": first.changed, "total": first.total, "visit": first.visit, "flips": len(lane.flips)},
        )
    ]


def _quiet_warnings(lane: LaneTrace) -> list[Finding]:
    found: list[Finding] = []
    for name in lane.poisoned_buffers:
        owner = name.rpartition(".")[0]
        found.append(
            Finding(
                rule="nonfinite-buffer",
                severity="warning",
                message=f"the step leaves buffer {name} non-finite: every later batch is spoiled until it is reset",
                precision=lane.precision,
                phase="buffer",
                module=owner,
                mechanism="nonfinite-buffer",
                evidence={"parameter": name},
            )
        )
    if lane.dropout_differs:
        found.append(
            Finding(
                rule="random-draws-differ",
                severity="warning",
                message=(
                    f"dropout masks differ from the reference's in {', '.join(lane.dropout_differs)}; "
                    "errors after them mean little"
                ),
                precision=lane.precision,
                phase="forward",
                module=lane.dropout_differs[0],
                evidence={"modules": list(lane.dropout_differs)},
            )
        )
    flushed = sum(g.flushed for g in lane.gradients.values())
    if flushed:
        worst = max(lane.gradients.items(), key=lambda item: item[1].flushed)
        total = sum(g.flushed for g in lane.gradients.values())
        owner = worst[0].rpartition(".")[0]
        share = _flushed_share(lane)
        if share > FLUSHED_SHARE:
            found.append(
                Finding(
                    rule="gradient-underflow",
                    severity="warning",
                    message=(
                        f"{total:,} gradient elements that FP32 has are zero at loss scale {lane.loss_scale:g} "
                        f"({share:.1%} of the gradient elements); most in {worst[0]}"
                    ),
                    precision=lane.precision,
                    phase="backward",
                    module=owner,
                    mechanism="gradient-underflow",
                    evidence={"flushed": total, "share": share, "parameter": worst[0], "loss_scale": lane.loss_scale},
                )
            )
    return found


FLUSHED_SHARE = 0.05
"""Share of all gradient elements flushed to zero above which ``gradient-underflow`` is reported."""


def _flushed_share(lane: LaneTrace) -> float:
    elements = sum(lane.gradient_elements.values())
    return sum(g.flushed for g in lane.gradients.values()) / elements if elements else 0.0


def precision_results(
    trace: Trace,
    diagnoses: Mapping[str, LaneDiagnosis],
    stored: Sequence[StoredFault],
    found: Sequence[Finding],
) -> dict[str, PrecisionResult]:
    """Return how each lane ended, the reference first."""
    reference = trace.reference
    results = {
        reference.precision: PrecisionResult(
            completed=True, verdict="clean", loss=reference.loss, gradient_norm=reference.gradient_norm, loss_scale=1.0
        )
    }
    for name, lane in trace.lanes.items():
        diagnosis = diagnoses[name]
        first = _first_of(name, diagnosis, stored)
        results[name] = PrecisionResult(
            completed=lane.completed,
            verdict=_verdict(name, lane, first, found),
            error=lane.raised.text if lane.raised is not None else None,
            loss=lane.loss,
            loss_error=_loss_error(lane.loss, reference.loss),
            loss_scale=lane.loss_scale,
            gradient_norm=lane.gradient_norm,
            first_bad=first,
            first_divergence=diagnosis.divergence,
        )
    return results


def _first_of(name: str, diagnosis: LaneDiagnosis, stored: Sequence[StoredFault]) -> FirstBad | None:
    for fault in stored:
        if fault.precision in (None, name) and fault.mechanism != "unrepresentable-constant":
            return fault.first_bad(name)
    return diagnosis.origins[0] if diagnosis.origins else None


def _loss_error(loss: float | None, reference: float | None) -> float | None:
    if loss is None or reference is None or not (math.isfinite(loss) and math.isfinite(reference)):
        return None
    if loss == reference:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference else math.inf


def _verdict(name: str, lane: LaneTrace, first: FirstBad | None, found: Sequence[Finding]) -> str:
    if not lane.completed:
        return "inconclusive"
    errors = [
        f
        for f in found
        if f.precision in (None, name) and f.severity == "error" and not f.ignored and f.rule != "raised"
    ]
    if not errors:
        return "clean"
    if first is not None and first.precision_related is False:
        return "not-precision"
    return "precision"


def worst_verdict(results: Mapping[str, PrecisionResult], reference: str) -> str:
    """Return the worst verdict of the low precisions."""
    verdicts = [result.verdict for name, result in results.items() if name != reference]
    return min(verdicts, key=VERDICTS.index) if verdicts else "inconclusive"


def worst_first_bad(results: Mapping[str, PrecisionResult], reference: str) -> FirstBad | None:
    """Return the first_bad of the precision with the worst verdict that has one."""
    candidates = [r for name, r in results.items() if name != reference and r.first_bad is not None]
    if not candidates:
        return None
    return min(candidates, key=lambda r: VERDICTS.index(r.verdict)).first_bad


def apply_ignores(found: Sequence[Finding], rules: Sequence[IgnoreRule]) -> tuple[Finding, ...]:
    """Mark the findings that a rule of the user's calls harmless; they stay in the report."""

    def marked(finding: Finding) -> Finding:
        for rule in rules:
            place = finding.module if finding.module is not None else ""
            if fnmatchcase(place, rule.module) and fnmatchcase(finding.mechanism or finding.rule, rule.mechanism):
                return dataclasses.replace(finding, ignored=True, ignored_why=rule.why)
        return finding

    return tuple(marked(finding) for finding in found)
