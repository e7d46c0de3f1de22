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


def gradient_underflow(lane: LaneTrace) -> Finding | None:
    """Return the finding that a share of all gradient elements is zero where the reference's is not."""
    elements = sum(lane.gradient_elements.values())
    flushed = sum(gradient.flushed for gradient in lane.gradients.values())
    share = flushed / elements if elements else 0.0
    if share <= FLUSHED_SHARE or not _is_narrow(lane.precision):
        return None
    worst = max(lane.gradients.items(), key=lambda item: item[1].flushed)[0]
    return Finding(
        rule="gradient-underflow",
        severity="warning",
        message=(
            f"{flushed:,} gradient elements that FP32 has are zero at loss scale {lane.loss_scale:g} "
            f"({share:.1%} of the gradient elements); most in {worst}"
        ),
        precision=lane.precision,
        phase="backward",
        module=worst.rpartition(".")[0],
        mechanism="gradient-underflow",
        evidence={"flushed": flushed, "share": share, "parameter": worst, "loss_scale": lane.loss_scale},
    )
