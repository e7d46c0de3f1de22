"""The verdict on the step: gradients that clipping clears, updates that are lost, an optimizer that makes NaN."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from nanprobe.diagnose.explain import shown
from nanprobe.diagnose.lane import LaneDiagnosis, Traced
from nanprobe.formats import by_dtype
from nanprobe.lanes.step_facts import ParameterStep, ScaleWindow, StepFact
from nanprobe.lanes.trace import LaneTrace, Trace
from nanprobe.records import Divergence, Finding, FirstBad, Remedy, Step

__all__ = ["LOST_SHARE", "WARNED_SHARE", "step_findings", "step_of_lane", "with_step", "with_window"]

LOST_SHARE = 0.5
"""Share of a lane's weights that should move and do not from which the step counts as lost.

A BF16 model that learns at 1e-3 loses the updates of weights above about 0.5 only: its norms' scales, a few percent.
"""

WARNED_SHARE = 0.1
"""Share from which it is worth a warning."""

_MASTER = Remedy(
    kind="change-optimizer",
    text="Keep FP32 master weights (FP32 parameters under autocast), or round the update stochastically",
)


def with_step(trace: Trace, lane: LaneTrace, diagnosis: LaneDiagnosis) -> LaneDiagnosis:
    """Return the diagnosis with what went wrong between the gradients and the changed parameters."""
    fault = _fault(trace, lane)
    faults = diagnosis.faults
    if fault is not None:
        faults = (*faults, Traced(first_bad=fault, fatal=True))
    divergence = diagnosis.divergence
    if divergence is None and lane is not trace.reference:
        divergence = _lost(trace, lane)
    return dataclasses.replace(
        diagnosis, faults=faults, divergence=divergence, fatal=diagnosis.fatal or fault is not None
    )


def _fault(trace: Trace, lane: LaneTrace) -> FirstBad | None:
    """Return the origin of non-finite values in clipping or in the step, None when there is none."""
    step = lane.step
    if step is None or not step.finite:
        return None
    if step.norm_origin is not None:
        return _norm_fault(trace, lane, step)
    bad = next((p for p in step.parameters if p.bad), None)
    return _step_fault(trace, lane, step, bad) if bad is not None else None


def _norm_fault(trace: Trace, lane: LaneTrace, step: StepFact) -> FirstBad:
    origin = step.norm_origin
    assert origin is not None
    there = trace.reference.step
    exact = there.total_norm if there is not None and lane is not trace.reference else lane.gradient_norm
    fails_too = exact is None or not math.isfinite(exact)
    fmt = by_dtype(origin.dtype)
    effect = (
        "clipping then multiplies every gradient by zero, and the step changes nothing"
        if step.cleared
        else "clipping then makes NaN of them"
    )
    return FirstBad(
        precision=lane.precision,
        phase="optimizer",
        module=None,
        visit=None,
        class_=None,
        op=origin.op,
        call="clip_grad_norm_",
        mechanism="overflow",
        precision_related=not fails_too,
        count=origin.count,
        elements=origin.elements,
        index=origin.index,
        input_absmax=origin.input_absmax,
        reference_absmax=exact if not fails_too else None,
        limit=fmt.max if fmt is not None else None,
        explanation=(
            f"Every gradient is finite, and their total norm, kept in "
            f"{origin.dtype}, is {step.total_norm:g}"
            + ("" if fails_too or exact is None else f" where FP32 has {shown(exact)}")
            + f"; {effect}."
        ),
        remedies=(
            Remedy(kind="rewrite", text="Compute the total norm in FP32, from gradients cast to FP32"),
            Remedy(kind="use-bf16", text="Run in bf16, whose range is that of FP32"),
        ),
    )


def _step_fault(trace: Trace, lane: LaneTrace, step: StepFact, bad: ParameterStep) -> FirstBad:
    there = trace.reference.step
    others = {p.parameter: p for p in there.parameters} if there is not None else {}
    twin = others.get(bad.parameter)
    fails_too = lane is trace.reference or (twin is not None and twin.bad > 0)
    origin = step.origin
    owner = trace.parameters.get(bad.parameter, (bad.parameter.rpartition(".")[0], ()))[0]
    text = f"Every gradient is finite, and {bad.parameter} is not after the step."
    if origin is not None:
        values = ", ".join(f"{value:.3g}" for value in origin.operands)
        text += f" {origin.op} made it of {values} at {list(origin.index)}." if values else f" {origin.op} made it."
        if 0.0 in origin.operands[1:] and _is_division(origin.op):
            text += (
                f" What it divides by is zero in {origin.dtype}: the squared gradient and the optimizer's eps are both "
                "below what the format holds."
            )
    return FirstBad(
        precision=lane.precision,
        phase="optimizer",
        module=owner,
        visit=None,
        class_=trace.modules.get(owner),
        op=origin.op if origin is not None else None,
        call="step",
        mechanism="optimizer-error",
        precision_related=not fails_too,
        count=bad.bad,
        elements=bad.elements,
        index=bad.index,
        input_absmax=origin.input_absmax if origin is not None else None,
        reference_absmax=twin.weight_absmax if twin is not None and not fails_too else None,
        parameter=bad.parameter,
        explanation=text,
        remedies=(
            Remedy(kind="change-optimizer", text="Keep FP32 parameters under autocast, so that the step runs in FP32"),
            Remedy(kind="raise-eps", text="As a stop-gap raise the optimizer's eps until the format holds it, 1e-4"),
        ),
    )


def _is_division(op: str) -> bool:
    return op.removeprefix("aten.").rstrip("_") in ("addcdiv", "div", "reciprocal", "rsqrt")


def _lost(trace: Trace, lane: LaneTrace) -> Divergence | None:
    """Return the lost updates as a divergence, at the first parameter that stands still; None when most arrive."""
    share = _lost_share(trace, lane)
    if lane.step is None or share is None or share < LOST_SHARE:
        return None
    still = [p for p in lane.step.parameters if p.moved and p.lost >= LOST_SHARE * p.moved]
    worst = still[0] if still else max(lane.step.parameters, key=lambda p: p.lost)
    owner = trace.parameters.get(worst.parameter, (worst.parameter.rpartition(".")[0], ()))[0]
    return Divergence(
        precision=lane.precision,
        phase="optimizer",
        module=owner,
        visit=None,
        class_=trace.modules.get(owner),
        op=worst.op,
        mechanism="update-underflow",
        rel_error=share,
        tolerance=LOST_SHARE,
        parameter=worst.parameter,
        explanation=_lost_words(lane.step, share, worst),
    )


def _lost_share(trace: Trace, lane: LaneTrace) -> float | None:
    """Return the share of the elements that should move and do not, None when none should or it cannot be told."""
    step, there = lane.step, trace.reference.step
    if step is None or any(p.bad for p in step.parameters):
        return None
    if there is not None and not all(p.by_itself for p in there.parameters):
        return None
    moved = sum(p.moved for p in step.parameters)
    return sum(p.lost for p in step.parameters) / moved if moved else None


def _lost_words(step: StepFact, share: float, worst: ParameterStep) -> str:
    lost, moved = sum(p.lost for p in step.parameters), sum(p.moved for p in step.parameters)
    fmt = by_dtype(worst.dtype)
    text = f"{lost:,} of the {moved:,} elements that the step moves in FP32 ({share:.1%}) are the same afterwards."
    if worst.update_absmax is not None and worst.weight_absmax and fmt is not None:
        spacing = 2.0 ** (math.floor(math.log2(worst.weight_absmax)) + 1) * fmt.unit_roundoff
        text += (
            f" In {worst.parameter} updates are at most {worst.update_absmax:.3g}, and {worst.dtype} weights of "
            f"{worst.weight_absmax:.3g} are {spacing:.3g} apart."
        )
    return text


def step_findings(trace: Trace) -> tuple[Finding, ...]:
    """Return the findings about lost updates, FP16 parameters that a scaler refuses, and steps that raised."""
    found: list[Finding] = []
    for lane in (trace.reference, *trace.lanes.values()):
        step = lane.step
        if step is None:
            continue
        if step.error is not None and (lane is trace.reference or trace.reference.step is None
                                       or trace.reference.step.error is None):  # fmt: skip
            found.append(
                Finding(
                    rule="raised",
                    severity="error",
                    message=f"the {lane.precision} lane: {step.error}",
                    precision=lane.precision if lane is not trace.reference else None,
                    phase="optimizer",
                    evidence={"error": step.error},
                )
            )
        if step.refused:
            found.append(_refused(lane, step))
        share = _lost_share(trace, lane)
        if share is not None and share >= WARNED_SHARE and lane is not trace.reference:
            found.append(_update_underflow(lane, step, share))
    return tuple(found)


def _refused(lane: LaneTrace, step: StepFact) -> Finding:
    total = len(step.refused)
    few = ", ".join(step.refused[:3]) + (f" and {total - 3:,} more" if total > 3 else "")
    return Finding(
        rule="optimizer-error",
        severity="warning",
        message=(
            "a gradient scaler refuses to unscale FP16 gradients, and "
            f"{total:,} trainable parameters are float16: {few}"
        ),
        precision=lane.precision,
        phase="optimizer",
        mechanism="optimizer-error",
        evidence={"parameters": list(step.refused[:100]), "count": total, "loss_scale": lane.loss_scale},
        remedies=(_MASTER,),
    )


def _update_underflow(lane: LaneTrace, step: StepFact, share: float) -> Finding:
    worst = max(step.parameters, key=lambda p: p.lost)
    return Finding(
        rule="update-underflow",
        severity="error" if share >= LOST_SHARE else "warning",
        message=_lost_words(step, share, worst).rstrip("."),
        precision=lane.precision,
        phase="optimizer",
        module=worst.parameter.rpartition(".")[0],
        op=worst.op,
        mechanism="update-underflow",
        evidence={
            "lost": sum(p.lost for p in step.parameters),
            "moved": sum(p.moved for p in step.parameters),
            "share": share,
            "parameter": worst.parameter,
            "update_absmax": worst.update_absmax,
            "weight_absmax": worst.weight_absmax,
            "parameters": {p.parameter: p.lost / p.moved for p in step.parameters if p.lost},
        },
        remedies=(_MASTER,),
    )


def with_window(found: Sequence[Finding], lanes: Mapping[str, LaneTrace]) -> tuple[Finding, ...]:
    """Return the findings with the loss scales that would serve, where one is about the loss scale."""

    def widened(finding: Finding) -> Finding:
        lane = lanes.get(finding.precision or "")
        window = lane.scale_window if lane is not None else None
        if lane is None or window is None or finding.mechanism not in ("loss-scale-overflow", "gradient-underflow"):
            return finding
        evidence = {
            **finding.evidence,
            "largest_scale": window.largest,
            "scale_window": list(_bounds(window)),
            "window_share": window.share,
        }
        return dataclasses.replace(
            finding,
            evidence=evidence,
            message=f"{finding.message}; {_window_words(window)}",
            remedies=_for_window(window, lane.loss_scale, finding),
        )

    return tuple(widened(finding) for finding in found)


def _for_window(window: ScaleWindow, scale: float, finding: Finding) -> tuple[Remedy, ...]:
    """Return what to do about the loss scale: the first scale that serves, or FP32 and BF16 where none does."""
    if not window.is_open or window.largest is None:
        return (Remedy(kind="use-bf16", text="Run in bf16, which needs no loss scale"), *finding.remedies)
    if window.largest < scale:
        return (Remedy(kind="lower-loss-scale", text=f"Lower the loss scale to {window.largest:,.0f}"),)
    if scale == 1.0:
        text = f"Scale the loss, as a gradient scaler does; {_window_words(window)}"
        return (Remedy(kind="enable-loss-scaling", text=text),)
    return (Remedy(kind="raise-loss-scale", text=f"Raise the loss scale to {window.largest:,.0f}"),)


def _bounds(window: ScaleWindow) -> tuple[float, ...]:
    if not window.is_open or window.smallest is None or window.largest is None:
        return ()
    return (window.smallest, window.largest)


def _window_words(window: ScaleWindow) -> str:
    if window.largest is None:
        return "no loss scale down to 1 keeps the gradients finite"
    if not window.is_open:
        return (
            f"no loss scale serves: the largest that fits, {window.largest:,.0f}, "
            f"loses more than {window.share:.0%} of the elements"
        )
    if window.smallest == window.largest:
        return f"only the loss scale {window.largest:,.0f} serves"
    return f"loss scales from {window.smallest:,.0f} to {window.largest:,.0f} serve"


def step_of_lane(lane: LaneTrace) -> Step | None:
    """Return a lane's step as the report has it, None when nothing was done with its gradients."""
    window, step = lane.scale_window, lane.step
    if step is None:
        return None
    return Step(
        gradient_norm=step.gradient_norm,
        total_norm=step.total_norm,
        clip_coefficient=step.clip_coefficient,
        zero_share=step.zero_share,
        taken=step.stepped,
        skipped=step.skipped,
        elements=sum(p.elements for p in step.parameters),
        changed=sum(p.changed for p in step.parameters),
        moved=sum(p.moved for p in step.parameters),
        lost=sum(p.lost for p in step.parameters),
        loss_scale=step.loss_scale,
        next_scale=step.next_scale,
        scale_window=_bounds(window) if window is not None else None,
        window_share=window.share if window is not None else None,
        error=step.error,
    )
