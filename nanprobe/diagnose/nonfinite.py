"""Where non-finite values arise in a lane, and whether the precision is to blame."""

from __future__ import annotations

import dataclasses
import math

from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.formats import NumberFormat, by_dtype, by_name
from nanprobe.lanes.trace import BackwardOrigin, BadDetail, LaneTrace, Place, Trace, VisitFact
from nanprobe.records import FirstBad, Remedy

__all__ = ["ends_badly", "forward_origins", "nonfinite_origins"]


def forward_origins(lane: LaneTrace) -> tuple[Origin, ...]:
    """Return the origins of NaN and Inf in forward; those of -Inf only when nothing else explains a bad loss."""
    hard = find_origins(lane.visits, lambda f: f.inputs.hard, lambda f: f.outputs.hard)
    if hard or lane.loss is None or math.isfinite(lane.loss):
        return hard
    return find_origins(
        lane.visits, lambda f: f.inputs.hard or f.inputs.soft, lambda f: f.outputs.hard or f.outputs.soft
    )[:1]


def nonfinite_origins(trace: Trace, lane: LaneTrace, forward: tuple[Origin, ...]) -> tuple[FirstBad, ...]:
    """Return every independent origin in execution order: forward, else the loss, and backward if forward ends well."""
    origins = [_first_bad(trace, lane, origin) for origin in forward]
    loss_is_bad = lane.loss is not None and not math.isfinite(lane.loss)
    if not origins and loss_is_bad:
        origins.append(_in_loss(trace, lane))
    if not loss_is_bad and not (origins and ends_badly(lane)):
        backward = _in_backward(trace, lane)
        if backward is not None:
            origins.append(backward)
    return tuple(origins)


def ends_badly(lane: LaneTrace) -> bool:
    """Whether the forward pass ends in a non-finite loss, or, without a loss, in a non-finite output."""
    if lane.loss is not None:
        return not math.isfinite(lane.loss)
    root = next((f for f in lane.visits if f.module == "" and f.visit == 0), None)
    return root is not None and root.outputs.hard


def _reference_fact(trace: Trace, fact: VisitFact) -> VisitFact | None:
    return next((f for f in trace.reference.visits if (f.module, f.visit) == (fact.module, fact.visit)), None)


def _reference_failed_by(trace: Trace, fact: VisitFact, *, at_entry_of: VisitFact | None) -> bool:
    """Whether the reference holds non-finite values at or before the place where this lane went bad."""
    where = _reference_fact(trace, at_entry_of or fact)
    if where is None:
        return False
    limit = where.entered if at_entry_of is not None else where.left
    for other in find_origins(trace.reference.visits, lambda f: f.inputs.hard, lambda f: f.outputs.hard):
        if other.time <= limit:
            return True
    soft_here = where.inputs.soft if at_entry_of is not None else where.outputs.soft
    return soft_here and not fact.outputs.hard


def _first_bad(trace: Trace, lane: LaneTrace, origin: Origin) -> FirstBad:
    fact = origin.fact
    if fact is None:
        seen = origin.seen
        detail = seen.bad_input if seen is not None else None
        return FirstBad(
            precision=lane.precision,
            phase="input",
            module=None,
            visit=None,
            class_=None,
            precision_related=not trace.reference.visits[-1].inputs.hard if trace.reference.visits else None,
            parameter=detail.path if detail is not None else None,
            count=detail.count if detail is not None else 0,
            elements=detail.elements if detail is not None else 0,
            index=detail.index if detail is not None else None,
            samples=detail.samples if detail is not None else None,
            explanation="Bad values came into the model with its arguments.",
        )
    detail = fact.bad_output if origin.seen is None else origin.seen.bad_input
    fails_too = _reference_failed_by(trace, fact, at_entry_of=origin.seen)
    fmt = by_dtype(detail.dtype) if detail is not None else by_name(lane.precision)
    mechanism = _mechanism(detail, fmt, fails_too)
    first = FirstBad(
        precision=lane.precision,
        phase="forward",
        module=fact.module,
        visit=fact.visit,
        class_=fact.class_,
        mechanism=mechanism,
        precision_related=not fails_too,
        count=detail.count if detail is not None else 0,
        elements=detail.elements if detail is not None else 0,
        index=detail.index if detail is not None else None,
        samples=detail.samples if detail is not None else None,
        input_absmax=detail.input_absmax if detail is not None and origin.seen is None else None,
        reference_absmax=detail.reference_absmax if detail is not None else None,
        limit=fmt.max if fmt is not None else None,
        absorbed_by=_absorbed_by(lane, origin),
        between=origin.between,
        explanation=_explain(origin, detail, fmt, mechanism, fails_too),
    )
    return _with_remedies(first)


def _mechanism(detail: BadDetail | None, fmt: NumberFormat | None, fails_too: bool) -> str | None:
    """Return "overflow" where the reference's finite value is beyond the format, None where only operations can tell."""
    if detail is None or fmt is None or fails_too or detail.reference_absmax is None:
        return None
    return "overflow" if detail.reference_absmax >= fmt.overflow_threshold else None


def _explain(
    origin: Origin, detail: BadDetail | None, fmt: NumberFormat | None, mechanism: str | None, fails_too: bool
) -> str:
    fact = origin.fact
    assert fact is not None
    if origin.own_code:
        before, after = origin.between or (None, None)
        where = f"in the own code of {fact.module or 'the model'} ({fact.class_})"
        where += f", after {before}" if before else ""
        where += f", before {after}" if after else ""
    else:
        where = f"inside {fact.module or 'the model'} ({fact.class_})"
    if mechanism == "overflow" and detail is not None and fmt is not None:
        return (
            f"The values are finite up to this point. The exact result {where} reaches "
            f"{detail.reference_absmax:.4g}, beyond {fmt.name}'s largest value {fmt.max:.5g}."
        )
    if fails_too:
        return f"FP32 is non-finite here as well, so the precision is not to blame. It arises {where}."
    return f"The values are finite up to this point and not after it. It arises {where}."


def _with_remedies(first: FirstBad) -> FirstBad:
    """Offer what usually helps; nothing where FP32 fails as well."""
    remedies: list[Remedy] = []
    if first.precision_related and first.module is not None:
        text = f'Keep {first.module or "the model"} in FP32 (keep_fp32: ["{first.module}"])'
        remedies.append(Remedy(kind="keep-fp32", modules=(first.module,), text=text))
    if first.precision_related and first.mechanism == "overflow" and first.precision == "fp16":
        remedies.append(Remedy(kind="use-bf16", text="Train in bf16, whose range is FP32's"))
    return dataclasses.replace(first, remedies=tuple(remedies))


def _absorbed_by(lane: LaneTrace, origin: Origin) -> str | None:
    """Name the first visit after the origin that received bad values and gave out good ones."""
    later = sorted((f for f in lane.visits if f.left > origin.time), key=lambda f: f.left)
    for fact in later:
        if fact.inputs.hard and not fact.outputs.hard and fact.left >= 0 and fact.entered >= origin.time:
            return fact.module
    return None


def _in_loss(trace: Trace, lane: LaneTrace) -> FirstBad:
    reference = trace.reference.loss
    fails_too = reference is not None and not math.isfinite(reference)
    return FirstBad(
        precision=lane.precision,
        phase="loss",
        module=None,
        visit=None,
        class_=None,
        precision_related=not fails_too,
        count=1,
        elements=1,
        index=(),
        reference_absmax=abs(reference) if reference is not None and not fails_too else None,
        explanation="The model's output is finite; the loss computed from it is not.",
    )


def _in_backward(trace: Trace, lane: LaneTrace) -> FirstBad | None:
    bad = any(g.nan or g.posinf or g.neginf for g in lane.gradients.values())
    origin = lane.backward_origin
    if origin is None or not (bad or any(_row_is_bad(lane, p) for p in lane.measures)):
        return None
    fails_too = trace.reference.backward_origin is not None
    mechanism = _backward_mechanism(origin, lane, fails_too)
    where = (
        f"the backward of {origin.module or 'the model'}" if origin.module is not None else "the backward of the loss"
    )
    text = f"Forward and loss are finite. The gradient turns bad in {where} ({origin.node})."
    if mechanism == "loss-scale-overflow":
        text += f" With loss scale {lane.loss_scale:g} it leaves the format's range; unscaled it may fit."
    detail = origin.detail
    return FirstBad(
        precision=lane.precision,
        phase="backward",
        module=origin.module,
        visit=origin.visit,
        class_=origin.class_,
        mechanism=mechanism,
        precision_related=not fails_too,
        count=detail.count if detail is not None else 0,
        elements=detail.elements if detail is not None else 0,
        index=detail.index if detail is not None else None,
        samples=detail.samples if detail is not None else None,
        limit=by_name(lane.precision).max,
        explanation=text,
        remedies=(Remedy(kind="lower-loss-scale", text="Lower the loss scale, or let dynamic loss scaling find it."),)
        if mechanism == "loss-scale-overflow"
        else (),
    )


def _row_is_bad(lane: LaneTrace, place: Place) -> bool:
    measure = lane.measures[place]
    return place[0] == "backward" and bool(measure.nan or measure.posinf or measure.neginf)


def _backward_mechanism(origin: BackwardOrigin, lane: LaneTrace, fails_too: bool) -> str | None:
    """Tell a gradient that only the loss scale pushed over the limit: Inf without NaN, and finite in the reference."""
    only_inf = origin.health.nan == 0 and (origin.health.posinf or origin.health.neginf)
    if fails_too or not only_inf:
        return None
    return "loss-scale-overflow" if lane.loss_scale > 1 else "overflow"
