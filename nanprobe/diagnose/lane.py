"""The diagnosis of one low precision: its origins, its divergence, and how far they reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.formats import NumberFormat, by_dtype, by_name
from nanprobe.lanes.trace import BackwardOrigin, BadDetail, LaneTrace, Place, Trace, VisitFact
from nanprobe.records import Divergence, FirstBad, Remedy

__all__ = ["LaneDiagnosis", "diagnose_lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDiagnosis:
    """What is wrong in one lane.

    ``origins`` are all independent origins of non-finite values, the first one first; ``fatal`` says whether they reach
    the loss, a gradient or the output. ``divergence`` is the first visit beyond its tolerance; ``after_flip`` says that
    a discrete choice had already differed. ``states`` holds the state of every place.
    """

    origins: tuple[FirstBad, ...]
    fatal: bool
    divergence: Divergence | None
    after_flip: bool
    states: Mapping[Place, str]


def diagnose_lane(trace: Trace, lane: LaneTrace, tolerances: Tolerances) -> LaneDiagnosis:
    """Find the origins and the divergence of ``lane`` against the trace's reference."""
    facts = lane.visits
    hard = find_origins(facts, lambda f: f.inputs.hard, lambda f: f.outputs.hard)
    if not hard and lane.loss is not None and not math.isfinite(lane.loss):
        hard = find_origins(
            facts, lambda f: _any(f.inputs.hard, f.inputs.soft), lambda f: _any(f.outputs.hard, f.outputs.soft)
        )[:1]
    origins = [_first_bad(trace, lane, origin) for origin in hard]
    loss_is_bad = lane.loss is not None and not math.isfinite(lane.loss)
    if not origins and loss_is_bad:
        origins.append(_in_loss(trace, lane))
    if not any(fatal_forward(lane) for _ in origins) and not loss_is_bad:
        backward = _in_backward(trace, lane)
        if backward is not None:
            origins.append(backward)
    divergence, after_flip = _divergence(lane, tolerances, hard)
    states = _states(lane, tolerances, hard)
    return LaneDiagnosis(
        origins=tuple(origins),
        fatal=_is_fatal(lane, tolerances),
        divergence=divergence,
        after_flip=after_flip,
        states=states,
    )


def _any(*flags: bool) -> bool:
    return any(flags)


def fatal_forward(lane: LaneTrace) -> bool:
    """Whether the forward pass ends in a non-finite loss, or, without a loss, in a non-finite output."""
    if lane.loss is not None:
        return not math.isfinite(lane.loss)
    root = next((f for f in lane.visits if f.module == "" and f.visit == 0), None)
    return root is not None and root.outputs.hard


def _is_fatal(lane: LaneTrace, tolerances: Tolerances) -> bool:
    if fatal_forward(lane) or any(g.nan or g.posinf or g.neginf for g in lane.gradients.values()):
        return True
    last = len(lane.visits)
    beyond = lane.output_rel_error is not None and lane.output_rel_error > tolerances.at("forward", "", last)
    error = lane.gradient_rel_error
    return beyond or (error is not None and error > tolerances.at("backward", "", last))


# -- non-finite values -------------------------------------------------------------------------------------------------


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
    import dataclasses

    remedies: list[Remedy] = []
    modules = (first.module,) if first.module is not None else ()
    name = first.module or "the model"
    if first.precision_related and first.mechanism == "overflow":
        remedies.append(
            Remedy(kind="keep-fp32", modules=modules, text=f'Keep {name} in FP32 (keep_fp32: ["{first.module}"]).')
        )
        if first.precision == "fp16":
            remedies.append(Remedy(kind="use-bf16", text="Train in bf16, whose range is FP32's."))
    elif first.precision_related and first.module is not None:
        remedies.append(
            Remedy(kind="keep-fp32", modules=modules, text=f'Keep {name} in FP32 (keep_fp32: ["{first.module}"]).')
        )
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


# -- divergence --------------------------------------------------------------------------------------------------------


def _positions(lane: LaneTrace) -> dict[tuple[str, int], int]:
    ordered = sorted((f for f in lane.visits if f.left >= 0), key=lambda f: f.left)
    return {(f.module, f.visit): position for position, f in enumerate(ordered)}


def _subnormal_only(lane: LaneTrace, trace_place: Place) -> bool:
    """Whether the error at a place is no more than the format's spacing near zero explains."""
    measure = lane.measures[trace_place]
    fmt = by_dtype(measure.dtype)
    if fmt is None or measure.rel_error is None or measure.elements == 0:
        return False
    size = measure.absmax or 0.0
    return size < fmt.smallest_normal


def _divergence(lane: LaneTrace, tolerances: Tolerances, hard: Iterable[Origin]) -> tuple[Divergence | None, bool]:
    """Return the first visit beyond its tolerance before anything went non-finite, and whether a choice had flipped."""
    position = _positions(lane)
    total = len(position)

    def limit(fact: VisitFact) -> float:
        return tolerances.at("forward", fact.module, position.get((fact.module, fact.visit), total))

    def bad_in(fact: VisitFact) -> bool:
        return fact.input_error is not None and fact.input_error > limit(fact)

    def bad_out(fact: VisitFact) -> bool:
        place: Place = ("forward", fact.module, fact.visit)
        beyond = fact.output_error is not None and fact.output_error > limit(fact)
        return beyond and not _subnormal_only(lane, place)

    stop = min((origin.time for origin in hard), default=None)
    considered = [f for f in lane.visits if stop is None or f.entered < stop]
    found = find_origins(considered, bad_in, bad_out)
    flip_at = min((flip.order for flip in lane.flips), default=None)
    for origin in found:
        if origin.fact is None or (stop is not None and origin.time >= stop):
            continue
        fact = origin.fact
        shown = origin.seen or fact
        measure = lane.measures.get(("forward", fact.module, fact.visit))
        divergence = Divergence(
            precision=lane.precision,
            phase="forward",
            module=fact.module,
            visit=fact.visit,
            class_=fact.class_,
            mechanism="divergence",
            rel_error=fact.output_error if origin.seen is None else shown.input_error,
            local_error=measure.local_error if measure is not None and not origin.own_code else None,
            tolerance=limit(shown),
            between=origin.between,
            explanation=_explain_divergence(origin, lane.precision),
        )
        return divergence, flip_at is not None and flip_at <= origin.time
    return _backward_divergence(lane, tolerances, total), flip_at is not None


def _explain_divergence(origin: Origin, precision: str) -> str:
    fact = origin.fact
    assert fact is not None
    if not origin.own_code:
        return f"Its inputs agree with FP32, its {precision} output does not."
    before, after = origin.between or (None, None)
    span = " and ".join(x for x in (f"after {before}" if before else "", f"before {after}" if after else "") if x)
    return f"The children of {fact.module or 'the model'} agree with FP32; its own code{' ' + span if span else ''} does not."


def _backward_divergence(lane: LaneTrace, tolerances: Tolerances, total: int) -> Divergence | None:
    """Return the first gradient beyond its tolerance that later gradients do not recover from.

    A gradient that is tiny beside those around it (softmax over a single key, a bias before a normalisation) is mostly
    rounding error in every precision; it counts only when what follows diverges as well.
    """
    rows = sorted((p for p in lane.measures if p[0] == "backward"), key=lambda p: lane.order[p])
    beyond: list[Place] = []
    for place in rows:
        measure = lane.measures[place]
        if measure.nan or measure.posinf or measure.neginf:
            return None
        limit = tolerances.at("backward", place[1], total)
        if measure.rel_error is not None and measure.rel_error > limit and not _flushed(lane, place):
            beyond.append(place)
    error = lane.gradient_rel_error
    if not beyond or error is None or error <= tolerances.at("backward", "", total):
        return None
    place = beyond[0]
    measure = lane.measures[place]
    fact = next((f for f in lane.visits if (f.module, f.visit) == place[1:]), None)
    return Divergence(
        precision=lane.precision,
        phase="backward",
        module=place[1],
        visit=place[2],
        class_=fact.class_ if fact is not None else None,
        mechanism="divergence",
        rel_error=measure.rel_error,
        tolerance=tolerances.at("backward", place[1], total),
        explanation="The gradient that arrives at this module's output is the first that disagrees with FP32's.",
    )


def _flushed(lane: LaneTrace, place: Place) -> bool:
    measure = lane.measures[place]
    fmt = by_dtype(measure.dtype)
    return fmt is not None and (measure.absmax or 0.0) * lane.loss_scale < fmt.smallest_normal


def _states(lane: LaneTrace, tolerances: Tolerances, hard: tuple[Origin, ...]) -> dict[Place, str]:
    position = _positions(lane)
    culprits = {(o.fact.module, o.fact.visit) for o in hard if o.fact is not None}
    facts = {(f.module, f.visit): f for f in lane.visits}
    states: dict[Place, str] = {}
    for place, measure in lane.measures.items():
        phase, module, visit = place
        state = "clean"
        fact = facts.get((module, visit))
        if phase == "forward" and fact is not None:
            if (module, visit) in culprits:
                state = "origin"
            elif fact.outputs.hard:
                state = "propagated"
            elif fact.inputs.hard:
                state = "absorbed"
        elif measure.nan or measure.posinf or measure.neginf:
            state = "propagated"
        if state == "clean" and measure.rel_error is not None:
            limit = tolerances.at(phase, module, position.get((module, visit), len(position)))
            tiny = _flushed(lane, place) if phase == "backward" else _subnormal_only(lane, place)
            if measure.rel_error > limit and not tiny:
                state = "diverged"
        states[place] = state
    return states
