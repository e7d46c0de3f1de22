"""Verdicts: how each precision ended, and what that comes to for the whole replay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.diagnose.step import step_of_lane
from nanprobe.lanes.trace import LaneTrace, Trace
from nanprobe.records import VERDICTS, Finding, FirstBad, PrecisionResult

__all__ = ["precision_results", "worst_first_bad", "worst_verdict"]


def precision_results(
    trace: Trace, diagnoses: Mapping[str, LaneDiagnosis], found: Sequence[Finding]
) -> dict[str, PrecisionResult]:
    """Return how each lane ended, the reference first. ``diagnoses`` holds the reference's own as well."""
    reference = trace.reference
    own = diagnoses[reference.precision]
    results = {
        reference.precision: PrecisionResult(
            completed=True,
            verdict="not-precision" if own.fatal else "clean",
            loss=reference.loss,
            gradient_norm=reference.gradient_norm,
            loss_scale=1.0,
            first_bad=own.first_bad if own.fatal else None,
            step=step_of_lane(reference),
        )
    }
    for name, lane in trace.lanes.items():
        diagnosis = diagnoses[name]
        results[name] = PrecisionResult(
            completed=lane.completed,
            verdict=_verdict(name, lane, diagnosis, found),
            error=lane.raised.text if lane.raised is not None else None,
            loss=lane.loss,
            loss_error=_loss_error(lane.loss, reference.loss),
            loss_scale=lane.loss_scale,
            gradient_norm=lane.gradient_norm,
            first_bad=diagnosis.first_bad,
            first_divergence=diagnosis.divergence,
            step=step_of_lane(lane),
        )
    return results


def _loss_error(loss: float | None, reference: float | None) -> float | None:
    if loss is None or reference is None or not (math.isfinite(loss) and math.isfinite(reference)):
        return None
    if loss == reference:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference else math.inf


def _verdict(name: str, lane: LaneTrace, diagnosis: LaneDiagnosis, found: Sequence[Finding]) -> str:
    """Return "precision" when an error of this lane is the precision's, "not-precision" when none of them is."""
    if not lane.completed:
        return "inconclusive"
    errors = [
        f
        for f in found
        if f.precision in (None, name) and f.severity == "error" and not f.ignored and f.rule != "raised"
    ]
    if not errors:
        return "inconclusive" if lane.step is not None and lane.step.error is not None else "clean"
    first = diagnosis.first_bad
    return "not-precision" if first is not None and first.precision_related is False else "precision"


def worst_verdict(results: Mapping[str, PrecisionResult], reference: str) -> str:
    """Return the worst verdict of the low precisions."""
    verdicts = [result.verdict for name, result in results.items() if name != reference]
    return min(verdicts, key=VERDICTS.index) if verdicts else "inconclusive"


def worst_first_bad(results: Mapping[str, PrecisionResult], reference: str) -> FirstBad | None:
    """Return the first_bad of the low precision with the worst verdict that has one."""
    candidates = [r for name, r in results.items() if name != reference and r.first_bad is not None]
    if not candidates:
        return None
    return min(candidates, key=lambda r: VERDICTS.index(r.verdict)).first_bad
