"""Where finite values leave the reference further behind than the tolerance allows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nanprobe.diagnose.explain import explain_divergence
from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.diagnose.underflow import is_lost
from nanprobe.formats import by_dtype, by_name
from nanprobe.lanes.trace import LaneTrace, Place, Trace, VisitFact
from nanprobe.records import Divergence, Measure

__all__ = ["first_divergence", "loss_is_beyond", "positions", "too_small_to_judge"]


def positions(lane: LaneTrace) -> dict[tuple[str, int], int]:
    """Return how many visits had ended in the lane before each (module, visit) did."""
    ordered = sorted((f for f in lane.visits if f.left >= 0), key=lambda f: f.left)
    return {(f.module, f.visit): position for position, f in enumerate(ordered)}


def too_small_to_judge(trace: Trace, lane: LaneTrace, place: Place) -> bool:
    """Whether all values at a place, and the reference's, are subnormal in the lane's format: few digits are right."""
    here, there = lane.measures[place], trace.reference.measures.get(place)
    fmt = by_dtype(here.dtype)
    scale = lane.loss_scale if place[0] == "backward" else 1.0
    size = max(here.absmax or 0.0, (there.absmax or 0.0) if there is not None else 0.0)
    return fmt is not None and size * scale < fmt.smallest_normal


def first_divergence(
    trace: Trace, lane: LaneTrace, tolerances: Tolerances, hard: Iterable[Origin]
) -> tuple[Divergence | None, bool]:
    """Return the first visit beyond its tolerance before anything went non-finite, and whether a choice had flipped.

    A leaf that is beyond its tolerance on the reference's own inputs is at fault itself, whatever flipped before.
    """
    position = positions(lane)
    total = len(position)

    def limit(fact: VisitFact) -> float:
        return tolerances.at("forward", fact.module, position.get((fact.module, fact.visit), total))

    def bad_in(fact: VisitFact) -> bool:
        return fact.input_error is not None and fact.input_error > limit(fact)

    def bad_out(fact: VisitFact) -> bool:
        if fact.output_error is None or fact.output_error <= limit(fact):
            return False
        return not too_small_to_judge(trace, lane, _place(fact)) and not _small_beside_what_it_sums(
            trace, lane, fact, limit(fact)
        )

    stop = min((origin.time for origin in hard), default=None)
    considered = [f for f in lane.visits if stop is None or f.entered < stop]
    flip_at = min((flip.order for flip in lane.flips), default=None)
    for origin in find_origins(considered, bad_in, bad_out):
        if origin.fact is None or (stop is not None and origin.time >= stop):
            continue
        fact = origin.fact
        shown = origin.seen or fact
        measure = lane.measures.get(_place(fact))
        local = measure.local_error if measure is not None and not origin.own_code else None
        divergence = Divergence(
            precision=lane.precision,
            phase="forward",
            module=fact.module,
            visit=fact.visit,
            class_=fact.class_,
            mechanism="divergence",
            rel_error=fact.output_error if origin.seen is None else shown.input_error,
            local_error=local,
            tolerance=limit(shown),
            between=origin.between,
            explanation=explain_divergence(origin, lane, trace),
        )
        own = local is not None and local > limit(fact)
        return divergence, flip_at is not None and flip_at <= origin.time and not own
    in_loss = _loss_divergence(trace, lane, tolerances, total) if stop is None else None
    return in_loss or _backward_divergence(trace, lane, tolerances, total), flip_at is not None


def _place(fact: VisitFact) -> Place:
    return ("forward", fact.module, fact.visit)


def _norm(measure: Measure | None) -> float | None:
    """Return the 2-norm of what was measured, None when nothing was."""
    return None if measure is None or measure.rms is None else measure.rms * math.sqrt(measure.elements)


def _small_beside_what_it_sums(trace: Trace, lane: LaneTrace, fact: VisitFact, limit: float) -> bool:
    """Whether a single number (a loss, a score) is off by no more than the rounding of what it was computed from.

    One number close to zero is often a difference of larger ones, and its relative error then says nothing.
    """
    there = trace.reference.measures.get(_place(fact))
    if there is None or there.elements != 1 or fact.output_error is None:
        return False
    size = _norm(there) or 0.0
    if not math.isfinite(fact.output_error):
        here = lane.measures[_place(fact)]
        return (here.absmax or 0.0) <= limit * _size_around(trace, fact)
    return fact.output_error * size <= limit * (size + _size_around(trace, fact))


def _size_around(trace: Trace, fact: VisitFact) -> float:
    """Return the largest magnitude that the reference had in the children of a visit and in its siblings before it."""
    own = (fact.module, fact.visit)
    near = [
        trace.reference.measures.get(_place(other))
        for other in trace.reference.visits
        if other.parent == own or (other.parent == fact.parent and 0 <= other.left < fact.entered)
    ]
    return max((m.absmax for m in near if m is not None and m.absmax is not None), default=0.0)


def loss_is_beyond(trace: Trace, lane: LaneTrace, tolerances: Tolerances) -> bool:
    """Whether a finite loss is further from the reference's than the model's output explains."""
    here, there = lane.loss, trace.reference.loss
    if here is None or there is None or not (math.isfinite(here) and math.isfinite(there)):
        return False
    return abs(here - there) > _loss_allowance(trace, lane, tolerances, there)


def _loss_allowance(trace: Trace, lane: LaneTrace, tolerances: Tolerances, loss: float) -> float:
    """Return how far a loss may be from the reference's.

    To first order a loss moves by its gradient times the error of the output; on top of that it is granted the
    tolerance of a visit, and one rounding of the output's size, because a loss near zero is a difference of outputs.
    Without a gradient with respect to the output, the tolerance is taken of the output's size.
    """
    limit = tolerances.at("forward", "", len(lane.visits))
    unit = by_name(lane.precision).unit_roundoff
    root: Place = ("forward", "", 0)
    there, here = trace.reference.measures.get(root), lane.measures.get(root)
    if there is None or here is None:
        return limit * abs(loss) + limit
    holds_loss = there.elements == 1 or any(output.path.endswith("loss") for output in there.outputs)
    fact = next((f for f in trace.reference.visits if (f.module, f.visit) == ("", 0)), None)
    size = there.absmax or 0.0
    if holds_loss and fact is not None:
        size = max(size, _size_around(trace, fact))
    gradient = _norm(trace.reference.measures.get(("backward", "", 0)))
    moved = _norm(there)
    if holds_loss or gradient is None or moved is None or here.rel_error is None:
        return limit * (abs(loss) + size)
    return limit * abs(loss) + 4.0 * gradient * here.rel_error * moved + unit * size


def _loss_divergence(trace: Trace, lane: LaneTrace, tolerances: Tolerances, total: int) -> Divergence | None:
    if not loss_is_beyond(trace, lane, tolerances):
        return None
    here, there = lane.loss, trace.reference.loss
    assert here is not None
    assert there is not None
    name = trace.reference.precision.upper()
    return Divergence(
        precision=lane.precision,
        phase="loss",
        module=None,
        visit=None,
        class_=None,
        mechanism="divergence",
        rel_error=abs(here - there) / abs(there) if there else math.inf,
        tolerance=_loss_allowance(trace, lane, tolerances, there) / abs(there) if there else 0.0,
        explanation=f"The model's output agrees with {name}'s; the loss is {here:.6g} where {name} has {there:.6g}.",
    )


def _backward_divergence(trace: Trace, lane: LaneTrace, tolerances: Tolerances, total: int) -> Divergence | None:
    """Return the first gradient beyond its tolerance that later gradients do not recover from.

    A gradient that is tiny beside those around it (softmax over a single key, a bias before a normalisation) is mostly
    rounding error in every precision; it counts only when what follows diverges as well. Neither does a gradient count
    that a loss makes of an output which is rounding error itself, the reference's included, nor what follows from it.
    """
    rows = sorted((p for p in lane.measures if p[0] == "backward"), key=lambda p: lane.order[p])
    beyond: list[Place] = []
    for place in rows:
        measure = lane.measures[place]
        if measure.nan or measure.posinf or measure.neginf:
            return None
        limit = tolerances.at("backward", place[1], total)
        if measure.rel_error is not None and measure.rel_error > limit and not too_small_to_judge(trace, lane, place):
            beyond.append(place)
    error = lane.gradient_rel_error
    if not beyond or error is None or error <= tolerances.at("backward", "", total):
        return None
    place = beyond[0]
    if _output_is_noise(lane, place, tolerances, total):
        return None
    lost = is_lost(trace, lane, place)
    text = "The gradient that arrives at this module's output is the first that disagrees with the reference's."
    if lost:
        text += f" Most of it is below {lane.precision}'s normal range at loss scale {lane.loss_scale:g}."
    measure = lane.measures[place]
    fact = next((f for f in lane.visits if (f.module, f.visit) == place[1:]), None)
    return Divergence(
        precision=lane.precision,
        phase="backward",
        module=place[1],
        visit=place[2],
        class_=fact.class_ if fact is not None else None,
        mechanism="gradient-underflow" if lost else "divergence",
        rel_error=measure.rel_error,
        tolerance=tolerances.at("backward", place[1], total),
        explanation=text,
    )


def _output_is_noise(lane: LaneTrace, place: Place, tolerances: Tolerances, total: int) -> bool:
    """Whether the output that a gradient belongs to is beyond the forward tolerance, and was excused for its size."""
    fact = next((f for f in lane.visits if (f.module, f.visit) == place[1:]), None)
    return (
        fact is not None
        and fact.output_error is not None
        and fact.output_error > tolerances.at("forward", place[1], total)
    )
