"""Gradients that became zero because the format has no smaller numbers, told from those that happen to cancel.

A sum that cancels exactly gives a zero here and there in any precision, and so does a softmax that saturates. Only
where the format's range is narrower than the reference's, and a share of a gradient is gone, did the format lose it.
"""

from __future__ import annotations

import dataclasses

from nanprobe.formats import by_name, carrier_of
from nanprobe.lanes.trace import LaneTrace, Place, Trace
from nanprobe.records import Finding, Gradient

__all__ = ["FLUSHED_SHARE", "gradient_underflow", "is_lost", "without_cancellation"]

FLUSHED_SHARE = 0.05
"""Share of gradient elements flushed to zero above which it is reported."""


def _is_narrow(precision: str) -> bool:
    """Whether a format has a narrower range than FP32, so that it can lose what FP32 keeps."""
    return carrier_of(precision).exponent_bits < by_name("fp32").exponent_bits


def without_cancellation(gradient: Gradient, elements: int, precision: str) -> Gradient:
    """Return a parameter's gradient with ``flushed`` counted only if the format lost a share of the ``elements``."""
    few = gradient.flushed < 2 or gradient.flushed <= FLUSHED_SHARE * elements
    cancelled = gradient.flushed and (few or not _is_narrow(precision))
    return dataclasses.replace(gradient, flushed=0) if cancelled else gradient


def is_lost(trace: Trace, lane: LaneTrace, place: Place) -> bool:
    """Whether half of a gradient's elements lie below the format's normal range: zero there only, or subnormal."""
    here, there = lane.measures[place], trace.reference.measures.get(place)
    if there is None or not _is_narrow(lane.precision):
        return False
    return 2 * (max(here.zero - there.zero, 0) + here.subnormal) >= here.elements > 0


def gradient_underflow(trace: Trace, lane: LaneTrace) -> Finding | None:
    """Return the finding that a share of all gradient elements is zero where the reference's is not.

    It names the parameter that backward reaches first among those that lost a share of their own, and in its evidence
    the share of every parameter and module.
    """
    elements = sum(lane.gradient_elements.values())
    flushed = sum(gradient.flushed for gradient in lane.gradients.values())
    share = flushed / elements if elements else 0.0
    if share <= FLUSHED_SHARE or not _is_narrow(lane.precision):
        return None
    shares = {
        name: gradient.flushed / lane.gradient_elements[name]
        for name, gradient in lane.gradients.items()
        if gradient.flushed > FLUSHED_SHARE * lane.gradient_elements[name]
    }
    owners = {name: trace.parameters.get(name, (name.rpartition(".")[0], ()))[0] for name in shares}
    last = {fact.module: fact.entered for fact in lane.visits}
    first = max(shares, key=lambda name: last.get(owners[name], -1))
    modules: dict[str, list[int]] = {}
    for name, owner in owners.items():
        counted = modules.setdefault(owner, [0, 0])
        counted[0] += lane.gradients[name].flushed
        counted[1] += lane.gradient_elements[name]
    return Finding(
        rule="gradient-underflow",
        severity="warning",
        message=(
            f"{flushed:,} gradient elements that FP32 has are zero at loss scale {lane.loss_scale:g} "
            f"({share:.1%} of the gradient elements); on the way back first in {first}"
        ),
        precision=lane.precision,
        phase="backward",
        module=owners[first],
        mechanism="gradient-underflow",
        evidence={
            "flushed": flushed,
            "share": share,
            "parameter": first,
            "loss_scale": lane.loss_scale,
            "parameters": shares,
            "modules": {owner: lost / whole for owner, (lost, whole) in modules.items()},
        },
    )
