"""Where finite values leave the reference further behind than the tolerance allows."""

from __future__ import annotations

from collections.abc import Iterable

from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.formats import by_dtype
from nanprobe.lanes.trace import LaneTrace, Place, VisitFact
from nanprobe.records import Divergence

__all__ = ["first_divergence", "positions", "too_small_to_judge"]


def positions(lane: LaneTrace) -> dict[tuple[str, int], int]:
    """Return how many visits had ended in the lane before each (module, visit) did."""
    ordered = sorted((f for f in lane.visits if f.left >= 0), key=lambda f: f.left)
    return {(f.module, f.visit): position for position, f in enumerate(ordered)}


def too_small_to_judge(lane: LaneTrace, place: Place) -> bool:
    """Whether all values at a place are subnormal in the lane's format, so that few of their digits are right."""
    measure = lane.measures[place]
    fmt = by_dtype(measure.dtype)
    scale = lane.loss_scale if place[0] == "backward" else 1.0
    return fmt is not None and (measure.absmax or 0.0) * scale < fmt.smallest_normal


def first_divergence(lane: LaneTrace, tolerances: Tolerances, hard: Iterable[Origin]) -> tuple[Divergence | None, bool]:
    """Return the first visit beyond its tolerance before anything went non-finite, and whether a choice had flipped."""
    position = positions(lane)
    total = len(position)

    def limit(fact: VisitFact) -> float:
        return tolerances.at("forward", fact.module, position.get((fact.module, fact.visit), total))

    def bad_in(fact: VisitFact) -> bool:
        return fact.input_error is not None and fact.input_error > limit(fact)

    def bad_out(fact: VisitFact) -> bool:
        place: Place = ("forward", fact.module, fact.visit)
        beyond = fact.output_error is not None and fact.output_error > limit(fact)
        return beyond and not too_small_to_judge(lane, place)

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
    place = fact.module or "the model"
    return f"The children of {place} agree with FP32; its own code{' ' + span if span else ''} does not."


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
        if measure.rel_error is not None and measure.rel_error > limit and not too_small_to_judge(lane, place):
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
