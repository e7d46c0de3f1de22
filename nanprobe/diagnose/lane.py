"""The diagnosis of one lane: its origins, its divergence, and how far they reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanprobe.diagnose.before import StoredFault
from nanprobe.diagnose.divergence import first_divergence, loss_is_beyond, positions, too_small_to_judge
from nanprobe.diagnose.flips import attributed
from nanprobe.diagnose.independent import forward_origins
from nanprobe.diagnose.nonfinite import bad_parameters, ends_badly, nonfinite_origins
from nanprobe.diagnose.saturation import saturations
from nanprobe.diagnose.search import Origin
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.lanes.trace import LaneTrace, Place, Trace
from nanprobe.records import Divergence, FirstBad

__all__ = ["LaneDiagnosis", "Traced", "diagnose_lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One fault of a lane: its place and numbers, and whether it reaches the loss, a gradient or the output.

    ``stored`` is the fault that was there before anything ran, None when it arose in the replay.
    """

    first_bad: FirstBad
    fatal: bool
    stored: StoredFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDiagnosis:
    """What is wrong in one lane.

    ``faults`` are all independent faults that make NaN or Inf, or that a cast makes, in the order in which they arise.
    ``fatal`` says whether the lane ends with a bad loss, gradient or output. ``divergence`` is the first visit beyond
    its tolerance; ``after_flip`` says that a discrete choice had already differed. ``states`` holds the state of every
    place. ``evidence`` are figures that tell where the divergence comes from,
    ``notes`` say which operations could not be looked into.
    """

    faults: tuple[Traced, ...]
    fatal: bool
    divergence: Divergence | None
    after_flip: bool
    states: Mapping[Place, str]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def first_bad(self) -> FirstBad | None:
        """The first fault that has consequences, else the first one; None when there is none."""
        bad = [fault for fault in self.faults if fault.stored is None or fault.stored.is_bad]
        first = next((fault for fault in bad if fault.fatal), bad[0] if bad else None)
        return first.first_bad if first is not None else None


def diagnose_lane(
    trace: Trace, lane: LaneTrace, tolerances: Tolerances, stored: Sequence[StoredFault] = ()
) -> LaneDiagnosis:
    """Find the faults and the divergence of ``lane``, which may be the trace's reference itself."""
    forward = forward_origins(trace, lane)
    is_reference = lane is trace.reference
    divergence, after_flip = (None, False) if is_reference else first_divergence(trace, lane, tolerances, forward)
    mine = [fault for fault in stored if fault.precision in (None, lane.precision)]
    rounded = next((fault for fault in mine if not fault.is_bad), None)
    if divergence is not None and rounded is not None and divergence.phase == "forward":
        divergence = dataclasses.replace(rounded.divergence(lane.precision), rel_error=divergence.rel_error)
        after_flip = False
    if divergence is not None and after_flip:
        divergence = attributed(divergence, lane)
    fatal = _is_fatal(trace, lane, tolerances)
    return LaneDiagnosis(
        faults=_faults(trace, lane, forward, mine, fatal=fatal),
        fatal=fatal,
        divergence=divergence,
        after_flip=after_flip,
        states=_states(trace, lane, tolerances, forward),
    )


def _faults(
    trace: Trace, lane: LaneTrace, forward: Sequence[Origin], stored: Sequence[StoredFault], *, fatal: bool
) -> tuple[Traced, ...]:
    """Put stored faults and origins together, without the origins that a stored fault explains."""
    origins = nonfinite_origins(trace, lane, forward)
    explains: dict[int, list[FirstBad]] = {number: [] for number in range(len(stored))}
    own: list[FirstBad] = []
    early, late = _saturated(lane, forward, fatal=fatal)
    given = [origin.given_inf for origin in forward] + [False] * (len(origins) - len(forward))
    for origin, given_inf in zip(origins, given, strict=True):
        number = next((n for n, fault in enumerate(stored) if fault.explains(origin, given_inf=given_inf)), None)
        if number is None:
            own.append(origin)
        else:
            explains[number].append(origin)
    reference_fatal = _is_fatal(trace, trace.reference)
    lives = [origin.absorbed_by is None for origin in own]
    # What every precision holds does harm only if it does in the reference, unless there is nothing else to blame.
    alive = [
        any(origin.absorbed_by is None for origin in explains[number])
        and (fault.precision is not None or reference_fatal)
        for number, fault in enumerate(stored)
    ]
    somewhere = any(lives) or any(alive)
    found = [
        Traced(first_bad=fault.first_bad(lane.precision), fatal=fatal and (lives_on or not somewhere), stored=fault)
        for fault, lives_on in zip(stored, alive, strict=True)
    ]
    elsewhere = any(lives) or any(fault.fatal for fault in found)
    found += [
        Traced(first_bad=origin, fatal=fatal and (alive or not elsewhere))
        for origin, alive in zip(own, lives, strict=True)
    ]
    return (*early, *found, *(dataclasses.replace(f, fatal=f.fatal and not somewhere) for f in late))


def _saturated(lane: LaneTrace, forward: Sequence[Origin], *, fatal: bool) -> tuple[list[Traced], list[Traced]]:
    """Return the faults of saturation that come before the first origin in forward, and those that come after."""
    before: list[Traced] = []
    after: list[Traced] = []
    found = saturations(lane)
    for number, (bad, time) in enumerate(found, start=1):
        is_early = bad.phase != "backward" and all(time <= origin.time for origin in forward)
        (before if is_early else after).append(Traced(first_bad=bad, fatal=fatal and number == len(found)))
    return before, after


def _is_fatal(trace: Trace, lane: LaneTrace, tolerances: Tolerances | None = None) -> bool:
    """Whether a lane ends with a bad loss, gradient or output; without ``tolerances``, with a non-finite one."""
    if ends_badly(lane) or bad_parameters(lane):
        return True
    if tolerances is None or lane is trace.reference:
        return False
    last = len(lane.visits)
    beyond = lane.output_rel_error is not None and lane.output_rel_error > tolerances.at("forward", "", last)
    error = lane.gradient_rel_error
    return (
        beyond
        or (error is not None and error > tolerances.at("backward", "", last))
        or loss_is_beyond(trace, lane, tolerances)
    )


def _states(trace: Trace, lane: LaneTrace, tolerances: Tolerances, hard: Sequence[Origin]) -> dict[Place, str]:
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
            if measure.rel_error > limit and not too_small_to_judge(trace, lane, place):
                state = "diverged"
        states[place] = state
    return states
