"""What an origin of non-finite values was: its numbers, its mechanism, and whether the precision is to blame."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from nanprobe.diagnose.absorption import absorbing_visit
from nanprobe.diagnose.accumulation import bad_parameters, in_accumulation
from nanprobe.diagnose.explain import explain_backward, explain_forward, shown
from nanprobe.diagnose.independent import of_samples
from nanprobe.diagnose.keeping import keep_in_fp32
from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.formats import NumberFormat, by_dtype, carrier_of
from nanprobe.lanes.trace import BackwardOrigin, BadDetail, LaneTrace, Place, Trace, VisitFact
from nanprobe.records import FirstBad, Remedy

__all__ = ["bad_parameters", "ends_badly", "nonfinite_origins"]


def nonfinite_origins(trace: Trace, lane: LaneTrace, forward: Sequence[Origin]) -> tuple[FirstBad, ...]:
    """Return every independent origin in execution order: forward, else the loss, and backward if forward ends well.

    A gradient that goes bad in a visit that bad values went through in forward is no origin of its own: they were saved
    for the derivative.
    """
    origins = [_first_bad(trace, lane, origin, forward) for origin in forward]
    loss_is_bad = lane.loss is not None and not math.isfinite(lane.loss)
    if loss_is_bad and not _reaches_the_end(lane, forward):
        origins.append(_in_loss(trace, lane))
    if not loss_is_bad and not (origins and ends_badly(lane)):
        backward = _in_backward(trace, lane)
        if backward is not None and not (origins and _held_bad_values(lane, backward)):
            origins.append(backward)
    return tuple(origins)


def _held_bad_values(lane: LaneTrace, backward: FirstBad) -> bool:
    """Whether the visit that a gradient went bad in was given, or gave out, bad values in forward."""
    return any(
        (f.module, f.visit) == (backward.module, backward.visit) and (f.inputs.hard or f.outputs.hard)
        for f in lane.visits
    )


def ends_badly(lane: LaneTrace) -> bool:
    """Whether the forward pass ends in a non-finite loss, or, without a loss, in an output that is bad where it counts.

    Positions that a mask of the batch excludes do not count.
    """
    if lane.loss is not None:
        return not math.isfinite(lane.loss)
    root = _root(lane)
    return root is not None and root.outputs.hard and not lane.bad_only_where_masked


def _root(lane: LaneTrace) -> VisitFact | None:
    return next((f for f in lane.visits if f.module == "" and f.visit == 0), None)


def _reaches_the_end(lane: LaneTrace, forward: Sequence[Origin]) -> bool:
    """Whether the model's output is what makes the loss bad; else the loss function itself is to blame."""
    root = _root(lane)
    return bool(forward) and (root is None or root.outputs.hard or root.outputs.soft)


def _reference_fact(trace: Trace, fact: VisitFact) -> VisitFact | None:
    return next((f for f in trace.reference.visits if (f.module, f.visit) == (fact.module, fact.visit)), None)


def _reference_fails_too(trace: Trace, fact: VisitFact, seen: VisitFact | None, detail: BadDetail | None) -> bool:
    """Whether the reference is non-finite where this lane went bad; by time where no element can be compared."""
    if detail is not None and not detail.only_masked and (detail.reference_bad or detail.reference_absmax is not None):
        return detail.reference_bad > 0
    where = _reference_fact(trace, seen or fact)
    if where is None:
        return False
    limit = where.entered if seen is not None else where.left
    for other in find_origins(trace.reference.visits, lambda f: f.inputs.hard, lambda f: f.outputs.hard):
        if other.time <= limit:
            return True
    soft_here = where.inputs.soft if seen is not None else where.outputs.soft
    return soft_here and not fact.outputs.hard


def _from_outside(trace: Trace, lane: LaneTrace, detail: BadDetail | None) -> FirstBad:
    root = _root(trace.reference)
    return FirstBad(
        precision=lane.precision,
        phase="input",
        module=None,
        visit=None,
        class_=None,
        precision_related=not root.inputs.hard if root is not None else None,
        parameter=detail.path if detail is not None else None,
        count=detail.count if detail is not None else 0,
        elements=detail.elements if detail is not None else 0,
        index=detail.index if detail is not None else None,
        samples=detail.samples if detail is not None else None,
        explanation="Bad values came into the model with its arguments.",
    )


def _first_bad(trace: Trace, lane: LaneTrace, origin: Origin, forward: Sequence[Origin]) -> FirstBad:
    fact, seen = origin.fact, origin.seen
    if fact is None:
        return _from_outside(trace, lane, seen.bad_input if seen is not None else None)
    # What changes its input in place leaves only its output to look at.
    whole = fact.bad_output if seen is None else seen.bad_input or seen.bad_output
    detail = of_samples(whole, origin.samples) if whole is not None else None
    is_reference = lane.precision == trace.reference.precision
    fails_too = is_reference or _reference_fails_too(trace, fact, seen, detail)
    fmt = by_dtype(detail.dtype) if detail is not None else carrier_of(lane.precision)
    largest = detail.input_absmax if detail is not None and not origin.own_code else _largest_before(lane, origin)
    mechanism = _mechanism(detail, fmt, largest, fails_too=fails_too)
    absorber = absorbing_visit(lane, origin, forward)
    absorbed_by = absorber.module if absorber is not None else None
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
        input_absmax=largest,
        reference_absmax=detail.reference_absmax if detail is not None else None,
        limit=fmt.max if fmt is not None else None,
        absorbed_by=absorbed_by,
        between=origin.between,
    )
    text = explain_forward(first, fmt, trace.reference.precision)
    bad = bad_parameters(lane)
    if absorbed_by is not None and bad and not ends_badly(lane):
        text += f" In backward it comes back: the gradient of {bad[0]} is non-finite"
        text += f", and {len(bad) - 1:,} more." if len(bad) > 1 else "."
    return _with_remedies(dataclasses.replace(first, explanation=text))


def _largest_before(lane: LaneTrace, origin: Origin) -> float | None:
    """Return the largest finite value that the children of a visit had given out before its own code went bad."""
    fact = origin.fact
    assert fact is not None
    found = [
        lane.measures["forward", f.module, f.visit].absmax
        for f in lane.visits
        if f.parent == (fact.module, fact.visit) and 0 <= f.left <= origin.time and not f.outputs.hard
    ]
    return max((value for value in found if value is not None), default=None)


def _mechanism(
    detail: BadDetail | None, fmt: NumberFormat | None, largest: float | None, *, fails_too: bool
) -> str | None:
    """Return "overflow" where the reference's value or an operand is beyond the format, None where operations tell."""
    if detail is None or fmt is None or fails_too:
        return None
    reached = (detail.reference_absmax, largest)
    return "overflow" if any(r is not None and r >= fmt.overflow_threshold for r in reached) else None


def _with_remedies(first: FirstBad) -> FirstBad:
    """Offer what usually helps; nothing where FP32 fails as well."""
    remedies: list[Remedy] = []
    if first.precision_related and first.module is not None:
        remedies.append(keep_in_fp32([first.module]))
    if first.precision_related and first.mechanism == "overflow" and first.precision == "fp16":
        remedies.append(Remedy(kind="use-bf16", text="Train in bf16, whose range is FP32's"))
    return dataclasses.replace(first, remedies=tuple(remedies))


def _in_loss(trace: Trace, lane: LaneTrace) -> FirstBad:
    reference = trace.reference.loss
    fails_too = reference is not None and not math.isfinite(reference)
    fmt = carrier_of(lane.precision)
    root = lane.measures.get(("forward", "", 0))
    largest = root.absmax if root is not None else None
    beyond = reference is not None and not fails_too and abs(reference) >= fmt.overflow_threshold
    given_inf = fails_too and (handed := _root(lane)) is not None and handed.outputs.soft
    text = "The model's output is finite; the loss computed from it is not."
    if given_inf:
        text = f"The model hands out -Inf, as {trace.reference.precision.upper()} does; the loss fails on it."
    elif largest is not None:
        text = f"The model's output is finite, at most {shown(largest)} in magnitude; the loss computed from it is not."
    name = trace.reference.precision.upper()
    if fails_too:
        text += f" {name}'s loss is non-finite as well." if lane is not trace.reference else ""
    elif reference is not None:
        text += f" {name}'s loss is {shown(reference)}."
    return FirstBad(
        precision=lane.precision,
        phase="loss",
        module=None,
        visit=None,
        class_=None,
        mechanism="overflow" if beyond else "invalid-operation" if given_inf else None,
        precision_related=not fails_too,
        count=1,
        elements=1,
        index=(),
        input_absmax=largest,
        reference_absmax=abs(reference) if reference is not None and not fails_too else None,
        limit=fmt.max,
        explanation=text,
    )


def _in_backward(trace: Trace, lane: LaneTrace) -> FirstBad | None:
    origin = lane.backward_origin
    if origin is None:
        return in_accumulation(trace, lane)
    if not (bad_parameters(lane) or any(_row_is_bad(lane, p) for p in lane.measures)):
        return None
    reference = trace.reference
    fails_too = reference.backward_origin is not None or bool(bad_parameters(reference))
    mechanism = _backward_mechanism(origin, lane, fails_too=fails_too)
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
        limit=carrier_of(lane.precision).max,
        explanation=explain_backward(trace, lane, origin, mechanism, fails_too=fails_too),
        remedies=(Remedy(kind="lower-loss-scale", text="Lower the loss scale, or let dynamic loss scaling find it."),)
        if mechanism == "loss-scale-overflow"
        else (),
    )


def _row_is_bad(lane: LaneTrace, place: Place) -> bool:
    measure = lane.measures[place]
    return place[0] == "backward" and bool(measure.nan or measure.posinf or measure.neginf)


def _backward_mechanism(origin: BackwardOrigin, lane: LaneTrace, *, fails_too: bool) -> str | None:
    """Tell what the gradients alone can tell.

    A gradient of zero that becomes NaN is 0 x Inf in a branch that forward masked out. One that is finite at loss scale
    1 overflows because of the scale. Inf without NaN at scale 1, where the reference is finite, is an overflow.
    """
    if origin.masked and origin.health.nan:
        return "masked-gradient"
    if fails_too:
        return None
    if origin.fits_unscaled:
        return "loss-scale-overflow"
    return "overflow" if origin.health.nan == 0 and lane.loss_scale == 1.0 else None
