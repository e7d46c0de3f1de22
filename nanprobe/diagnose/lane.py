"""The diagnosis of one low precision: its origins, its divergence, and how far they reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanprobe.diagnose.divergence import first_divergence, positions, too_small_to_judge
from nanprobe.diagnose.nonfinite import ends_badly, forward_origins, nonfinite_origins
from nanprobe.diagnose.search import Origin
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.lanes.trace import LaneTrace, Place, Trace
from nanprobe.records import Divergence, FirstBad

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
    forward = forward_origins(lane)
    divergence, after_flip = first_divergence(lane, tolerances, forward)
    return LaneDiagnosis(
        origins=nonfinite_origins(trace, lane, forward),
        fatal=_is_fatal(lane, tolerances),
        divergence=divergence,
        after_flip=after_flip,
        states=_states(lane, tolerances, forward),
    )


def _is_fatal(lane: LaneTrace, tolerances: Tolerances) -> bool:
    if ends_badly(lane) or any(g.nan or g.posinf or g.neginf for g in lane.gradients.values()):
        return True
    last = len(lane.visits)
    beyond = lane.output_rel_error is not None and lane.output_rel_error > tolerances.at("forward", "", last)
    error = lane.gradient_rel_error
    return beyond or (error is not None and error > tolerances.at("backward", "", last))


def _states(lane: LaneTrace, tolerances: Tolerances, hard: tuple[Origin, ...]) -> dict[Place, str]:
    position = positions(lane)
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
            if measure.rel_error > limit and not too_small_to_judge(lane, place):
                state = "diverged"
        states[place] = state
    return states
