"""Gradients that no derivative made bad: the contributions of several uses are finite, and their sum is not.

A weight that is used more than once (a shared layer, a recurrence, a tied embedding) gets the sum of what each use
contributes, in the dtype of the weight. Every kernel of backward is then good, and only the finished gradient tells.
"""

from __future__ import annotations

import math

from nanprobe.diagnose.explain import shown
from nanprobe.formats import by_name
from nanprobe.lanes.trace import LaneTrace, Trace
from nanprobe.records import FirstBad, Remedy

__all__ = ["bad_parameters", "in_accumulation"]


def bad_parameters(lane: LaneTrace) -> list[str]:
    """Return the parameters whose gradient holds NaN or Inf, in the model's order."""
    return [name for name, g in lane.gradients.items() if g.nan or g.posinf or g.neginf]


def in_accumulation(trace: Trace, lane: LaneTrace) -> FirstBad | None:
    """Return the fault of a gradient that is bad although no derivative went bad; None when all gradients are good.

    Of several, the one whose owner ran last in forward, which backward reaches first. The mechanism is an overflow only
    where the reference's finite gradient shows that the sum leaves the format: by itself, or by the loss scale alone.
    """
    bad = bad_parameters(lane)
    if not bad:
        return None
    owners = {name: trace.parameters[name][0] for name in bad if name in trace.parameters}
    last = {fact.module: fact.entered for fact in lane.visits}
    name = max(bad, key=lambda parameter: last.get(owners.get(parameter, ""), -math.inf))
    gradient, there = lane.gradients[name], trace.reference.gradients.get(name)
    fails_too = lane is trace.reference or (there is not None and bool(there.nan or there.posinf or there.neginf))
    exact = there.absmax if there is not None and not fails_too else None
    fmt = by_name(lane.precision)
    mechanism = None
    if exact is not None and not gradient.nan and exact * lane.loss_scale >= fmt.overflow_threshold:
        mechanism = "overflow" if exact >= fmt.overflow_threshold else "loss-scale-overflow"
    owner = owners.get(name)
    visits = [fact for fact in lane.visits if fact.module == owner]
    text = f"Every derivative is finite, and the gradient of {name} that they add up to is not."
    if len(visits) > 1:
        text += f" {owner or 'The model'} ran {len(visits):,} times, and each use contributes."
    if exact is not None:
        scaled = f", times a loss scale of {lane.loss_scale:g}" if lane.loss_scale != 1.0 else ""
        text += f" {trace.reference.precision.upper()} has up to {shown(exact)}{scaled}; {lane.precision} ends at"
        text += f" {shown(fmt.max)}."
    remedy = Remedy(kind="lower-loss-scale", text="Lower the loss scale, or let dynamic loss scaling find it.")
    return FirstBad(
        precision=lane.precision,
        phase="backward",
        module=owner,
        visit=visits[-1].visit if visits else None,
        class_=trace.modules.get(owner) if owner is not None else None,
        mechanism=mechanism,
        precision_related=not fails_too,
        count=gradient.nan + gradient.posinf + gradient.neginf,
        elements=lane.gradient_elements.get(name, 0),
        reference_absmax=exact,
        limit=fmt.max,
        parameter=name,
        explanation=text,
        remedies=(remedy,) if mechanism == "loss-scale-overflow" else (),
    )
