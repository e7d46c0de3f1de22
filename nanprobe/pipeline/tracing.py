"""From modules down to operations: which lane to trace, all of it or a stretch, and what that tells.

A model that is small enough is shadowed whole. Of a large one only a stretch is: the visit in which the error shows,
and as much before it as it takes. What enters a stretch counts as exact, so a drift that came in from before it is
missing there; the stretch is then begun earlier, until it holds at least half of the error that the lanes were apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nanprobe.diagnose.cause import constants_before, still_fails
from nanprobe.diagnose.drift import Drift, drift_of
from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.diagnose.operation import places_to_trace, with_drift, with_operations, without_drift
from nanprobe.lanes.operation_trace import Stretch
from nanprobe.lanes.run import trace_operations
from nanprobe.lanes.spec import ReplaySpec
from nanprobe.lanes.trace import IN_LOSS, LaneTrace, OperationFact, Operations
from nanprobe.records import Divergence

__all__ = ["WHOLE_UP_TO", "to_operations"]

WHOLE_UP_TO = 150_000_000
"""Elements of parameters and of all visits' outputs together up to which a lane is shadowed whole: its shadows take
8 bytes for each that backward keeps."""

_EARLIER = (0, 8, 64)
"""Visits before the one in which an error shows at which a stretch begins, one try after the other."""


def to_operations(spec: ReplaySpec, lane: LaneTrace, diagnosis: LaneDiagnosis) -> LaneDiagnosis:
    """Go down from the visits that a diagnosis names to the operations in them, by running the lane again alone."""
    name = lane.precision
    divergence = None if diagnosis.after_flip else diagnosis.divergence
    place = next(iter(places_to_trace(diagnosis)), None)
    if divergence is None and place is None:
        return with_operations(diagnosis, Operations(), backward=lane.backward_origin)
    spec = replace(spec, backward=divergence is not None and divergence.phase == "backward")
    tolerance = divergence.tolerance if divergence is not None else None
    size = sum(p.numel() for p in spec.model.parameters()) + sum(m.elements for m in lane.measures.values())
    seen, drift = Operations(), None
    stretch: Stretch | None = None
    for stretch in [None] if size <= WHOLE_UP_TO else _stretches(lane, divergence, place):
        seen = trace_operations(spec, name, stretch=stretch)
        if divergence is None or tolerance is None:
            break
        drift = drift_of(seen, divergence.phase, _place_of(divergence), tolerance)
        if stretch is None or _accounts_for(drift, divergence):
            break
    seen = _with_constants(spec, name, stretch, seen, diagnosis)
    named = with_operations(diagnosis, seen, backward=lane.backward_origin, drift=drift)
    if drift is not None:
        named = with_drift(named, drift)
    elif divergence is not None and divergence.phase == "forward" and seen.whole and seen.records and not seen.notes:
        named = without_drift(named)
    return replace(named, notes=tuple(f"operations of {name}: {note}" for note in seen.notes))


def _with_constants(
    spec: ReplaySpec, name: str, stretch: Stretch | None, seen: Operations, diagnosis: LaneDiagnosis
) -> Operations:
    """Return what was seen with the constants that failures come from; each is tried by tracing the lane again."""
    found: dict[int, int] = {}
    for place in places_to_trace(diagnosis):
        fact = seen.first_in(place)
        suspects = constants_before(seen, fact) if fact is not None else ()
        if fact is None or fact.record is None or fact.record in found or not suspects:
            continue

        def fails(number: int, rounded: bool, fact: OperationFact = fact) -> bool:
            again = trace_operations(spec, name, stretch=stretch, held={number: rounded})
            return still_fails(seen, again, fact)

        guilty = next((n for n in suspects if fails(n, True) and not fails(n, False)), None)
        if guilty is not None:
            found[fact.record] = guilty
    return replace(seen, constants=found)


def _place_of(divergence: Divergence) -> tuple[str, int] | None:
    if divergence.module is None or divergence.visit is None:
        return None
    return divergence.module, divergence.visit


def _stretches(
    lane: LaneTrace, divergence: Divergence | None, place: tuple[str, int] | None
) -> Iterator[Stretch | None]:
    """Yield the stretches to try, short ones first, and in the end None: all of the lane."""
    visits = [(f.module, f.visit) for f in sorted(lane.visits, key=lambda f: f.entered)]
    shown = _place_of(divergence) if divergence is not None else place
    if shown not in visits:
        shown = None
    position = visits.index(shown) if shown is not None else len(visits) - 1
    forward = divergence is None or divergence.phase == "forward"
    stop = shown if shown is not None and forward else IN_LOSS
    for earlier in _EARLIER:
        if earlier <= position:
            yield visits[position - earlier], stop
    yield None


def _accounts_for(drift: Drift | None, divergence: Divergence) -> bool:
    """Whether a drift seen in a stretch is at least half of the error that the lanes were apart."""
    if drift is None:
        return False
    errors = [r.rel_error for r in drift.path if r.rel_error is not None]
    return divergence.rel_error is None or max(errors, default=0.0) >= divergence.rel_error / 2
