"""Whether bad values turned finite again on their way, and where: in a clamp, a maximum, a softmax, a mask.

A visit that receives bad values and gives out good ones absorbs them, and so does a visit around the origin whose own
code lets nothing bad out. It counts only if nothing bad is left afterwards that no later origin accounts for.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanprobe.diagnose.search import Origin
from nanprobe.lanes.trace import LaneTrace, VisitFact

__all__ = ["absorbing_visit"]


def absorbing_visit(lane: LaneTrace, origin: Origin, origins: Sequence[Origin]) -> VisitFact | None:
    """Return the first visit after which nothing of ``origin`` is left, None when it lives on.

    ``origins`` are all origins of the lane; a bad value that comes after another one of them is taken to be that one's.
    """
    if origin.samples is not None:
        return None
    around = _around(lane, origin)
    later = sorted((f for f in lane.visits if f.left >= origin.time), key=lambda f: f.left)
    for fact in later:
        took_in = fact.entered >= origin.time and fact.inputs.hard
        if not fact.outputs.hard and (took_in or (fact.module, fact.visit) in around):
            return None if _lives_on(later, origin, origins, fact.left) else fact
    return None


def _around(lane: LaneTrace, origin: Origin) -> set[tuple[str, int]]:
    """Return the visits that enclose an origin, the one to blame included when it was that visit's own code."""
    facts = {(f.module, f.visit): f for f in lane.visits}
    fact = origin.fact
    if fact is None:
        return set()
    found = {(fact.module, fact.visit)} if origin.own_code else set()
    while fact is not None and fact.parent is not None:
        found.add(fact.parent)
        fact = facts.get(fact.parent)
    return found


def _lives_on(later: Sequence[VisitFact], origin: Origin, origins: Sequence[Origin], absorbed: int) -> bool:
    others = [o.time for o in origins if o.time > origin.time]
    for fact in later:
        accounted = any(origin.time < time <= fact.left for time in others)
        if fact.left > absorbed and fact.outputs.hard and not accounted:
            return True
    return False
