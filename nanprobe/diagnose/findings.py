"""Findings: one entry for each independent thing that is wrong or worth knowing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from nanprobe.config import IgnoreRule
from nanprobe.diagnose.keeping import keep_in_fp32
from nanprobe.diagnose.lane import LaneDiagnosis, Traced
from nanprobe.diagnose.saturation import is_saturation
from nanprobe.diagnose.underflow import gradient_underflow
from nanprobe.lanes.trace import LaneTrace, Trace
from nanprobe.records import Divergence, Finding, FirstBad, Remedy

__all__ = ["apply_ignores", "findings"]

_CONTAINED = "; it does not reach the loss, a gradient or the output outside masked positions"


def findings(trace: Trace, diagnoses: Mapping[str, LaneDiagnosis]) -> tuple[Finding, ...]:
    """Return every finding: what was there before anything ran, then precision by precision what went wrong.

    ``diagnoses`` holds the reference's own as well. A fault of the reference is a finding of its own where no low
    precision has it in the same place.
    """
    reference = trace.reference.precision
    found = [*_in_every_precision(diagnoses[reference])]
    for name, lane in trace.lanes.items():
        diagnosis = diagnoses[name]
        if lane.raised is not None:
            found.append(_raised(lane))
        for fault in diagnosis.faults:
            if fault.stored is None:
                found.append(_origin_finding(fault))
            elif fault.stored.precision is not None:
                found.append(_stored_finding(fault))
        explained = any(fault.fatal for fault in diagnosis.faults)
        underflow = gradient_underflow(trace, lane)
        divergence = diagnosis.divergence
        told = divergence is not None and divergence.mechanism == "gradient-underflow" and underflow is not None
        told = told or (divergence is not None and divergence.phase == "optimizer")
        if divergence is not None and not explained and not told and not diagnosis.after_flip:
            found.append(_divergence_finding(divergence, diagnosis.evidence))
        found.extend(_flips(lane, divergence if diagnosis.after_flip and not explained else None))
        found.extend(_quiet_warnings(lane))
        if underflow is not None:
            found.append(underflow)
    named = {_place(f.first_bad) for n in trace.lanes for f in diagnoses[n].faults if not f.first_bad.precision_related}
    for fault in diagnoses[reference].faults:
        if fault.stored is None and _place(fault.first_bad) not in named:
            found.append(_origin_finding(fault))
    return tuple(found)


def _place(first: FirstBad) -> tuple[str, str | None, int | None]:
    return first.phase, first.module, first.visit


def _in_every_precision(diagnosis: LaneDiagnosis) -> list[Finding]:
    """Return the findings about stored values that no precision can be blamed for."""
    return [_stored_finding(f) for f in diagnosis.faults if f.stored is not None and f.stored.precision is None]


def _stored_finding(fault: Traced) -> Finding:
    stored, first = fault.stored, fault.first_bad
    assert stored is not None
    of_the_batch = first.phase == "input" or stored.precision is not None
    severity = "error" if fault.fatal or not of_the_batch else "warning"
    stats = stored.tensor.stats
    evidence: dict[str, Any] = {
        "parameter": first.parameter,
        "count": first.count,
        "elements": first.elements,
        "index": _listed(first.index),
        "samples": _listed(first.samples),
        "absmax": stats.absmax,
    }
    if stored.precision is None:
        evidence |= {"nan": stats.nan, "posinf": stats.posinf, "neginf": stats.neginf}
    else:
        evidence |= {"limit": first.limit}
    return Finding(
        rule=stored.mechanism,
        severity=severity,
        message=stored.message + ("" if fault.fatal else _CONTAINED),
        precision=stored.precision,
        phase=first.phase,
        module=first.module,
        mechanism=stored.mechanism,
        evidence=evidence,
        remedies=first.remedies,
    )


def _listed(numbers: Sequence[int] | None) -> list[int] | None:
    return list(numbers) if numbers is not None else None


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


def _origin_finding(fault: Traced) -> Finding:
    origin = fault.first_bad
    place = origin.module if origin.module is not None else "outside the model"
    if origin.phase == "optimizer" and origin.module is None:
        place = "the total norm of the gradients"
    what = f"beyond {origin.limit:g}, where they saturate" if is_saturation(origin) else "non-finite"
    counted = f"{origin.count:,} of {origin.elements:,} elements {what}"
    tail = "" if fault.fatal else "; it is absorbed before it reaches the loss, a gradient or the output"
    return Finding(
        rule=origin.mechanism or "nonfinite",
        severity="error" if fault.fatal else "warning",
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
            "index": _listed(origin.index),
            "samples": _listed(origin.samples),
            "input_absmax": origin.input_absmax,
            "reference_absmax": origin.reference_absmax,
            "limit": origin.limit,
            "absorbed_by": origin.absorbed_by,
            "absorbed_op": origin.absorbed_op,
            "backward_op": origin.backward_op,
            "between": list(origin.between) if origin.between is not None else None,
            "precision_related": origin.precision_related,
        },
        remedies=origin.remedies,
    )


def _divergence_finding(divergence: Divergence, evidence: Mapping[str, Any]) -> Finding:
    """Return the finding of a divergence that no flipped choice explains; gradients that underflow only warn."""
    place = divergence.module if divergence.module is not None else "outside the model"
    mechanism = divergence.mechanism
    tolerated = f", tolerance {divergence.tolerance:.3g}" if divergence.tolerance is not None else ""
    return Finding(
        rule="gradient-underflow" if mechanism == "gradient-underflow" else "divergence",
        severity="warning" if mechanism == "gradient-underflow" else "error",
        message=(
            f"{divergence.phase} of {place or 'the model itself'}: relative error {divergence.rel_error:.3g}{tolerated}"
        ),
        precision=divergence.precision,
        phase=divergence.phase,
        module=divergence.module,
        op=divergence.op,
        mechanism=mechanism,
        evidence={
            "visit": divergence.visit,
            "rel_error": divergence.rel_error,
            "local_error": divergence.local_error,
            "tolerance": divergence.tolerance,
            "between": list(divergence.between) if divergence.between is not None else None,
            "parameter": divergence.parameter,
            **evidence,
        },
        remedies=_for_divergence(divergence) if mechanism != "gradient-underflow" else (),
    )


_ADVICE: Mapping[str, tuple[str, str]] = {
    "absorption": ("rewrite", "Sum in FP32, and convert the total afterwards"),
    "cancellation": ("rewrite", "Take the difference before rounding: in FP32, or in a form that does not subtract"),
    "underflow": ("rewrite", "Scale the operands up before the product, or compute it in FP32"),
    "unrepresentable-constant": ("rewrite", "Keep the number in FP32, or choose one that the format holds"),
}
"""What usually helps against a silent mechanism: the kind of remedy and its text."""


def _for_divergence(divergence: Divergence) -> tuple[Remedy, ...]:
    if divergence.module is None or divergence.phase != "forward":
        return ()
    advice = _ADVICE.get(divergence.mechanism or "")
    offered = [Remedy(kind=advice[0], text=advice[1])] if advice is not None and divergence.op is not None else []
    modules = [divergence.module] if divergence.seen_in is None else [divergence.module, divergence.seen_in]
    keep = keep_in_fp32(modules, between=divergence.seen_in is not None)
    return (keep, *(other for other in offered if other.kind != keep.kind))


def _flips(lane: LaneTrace, caused: Divergence | None) -> list[Finding]:
    """Return the finding of the first choice that flipped; ``caused`` is the divergence that follows from it."""
    if not lane.flips:
        return []
    first = lane.flips[0]
    place = "outside the model" if first.module is None else first.module or "the model itself"
    more = f"; {len(lane.flips) - 1} further differences follow" if len(lane.flips) > 1 else ""
    error = caused.rel_error if caused is not None else None
    if error is not None:
        more += f"; what follows differs by a relative error of {error:.3g}"
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
            evidence={
                "changed": first.changed,
                "total": first.total,
                "visit": first.visit,
                "flips": len(lane.flips),
                "rel_error": error,
                "tolerance": caused.tolerance if caused is not None else None,
            },
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
    return found


def apply_ignores(found: Sequence[Finding], rules: Sequence[IgnoreRule]) -> tuple[Finding, ...]:
    """Mark the findings that a rule of the user's calls harmless; they stay in the report."""

    def marked(finding: Finding) -> Finding:
        for rule in rules:
            place = finding.module if finding.module is not None else ""
            if fnmatchcase(place, rule.module) and fnmatchcase(finding.mechanism or finding.rule, rule.mechanism):
                return dataclasses.replace(finding, ignored=True, ignored_why=rule.why)
        return finding

    return tuple(marked(finding) for finding in found)
