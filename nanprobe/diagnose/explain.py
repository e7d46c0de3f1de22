"""Sentences that say what a headline has no room for: what went in, how far over the limit, what the reference does."""

from __future__ import annotations

import math

from nanprobe.diagnose.search import Origin
from nanprobe.formats import NumberFormat
from nanprobe.lanes.trace import BackwardOrigin, LaneTrace, Trace
from nanprobe.records import FirstBad

__all__ = ["explain_backward", "explain_divergence", "explain_forward", "shown"]


def shown(value: float) -> str:
    """Return a magnitude as it is read most easily: "262", "65,504", "1.2e+08"."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def explain_forward(first: FirstBad, fmt: NumberFormat | None, reference: str) -> str:
    """Return what led to an origin in forward and what is around it, in one to three sentences."""
    name = reference.upper()
    sentences = [_went_in(first)]
    if first.precision == reference:
        pass
    elif first.precision_related is False:
        sentences.append(f"{name} is non-finite in the same place, so another precision does not help.")
    elif first.mechanism == "overflow" and fmt is not None:
        sentences.append(_over(first, fmt, name))
    elif first.reference_absmax is not None and fmt is not None:
        sentences.append(
            f"{name} holds at most {shown(first.reference_absmax)} there, well within {fmt.name}'s range: something on "
            "the way to it overflows or leaves its domain."
        )
    if first.absorbed_by is not None:
        sentences.append(f"{first.absorbed_by or 'The model itself'} turns it back into finite values.")
    return " ".join(sentence for sentence in sentences if sentence)


def _went_in(first: FirstBad) -> str:
    """Return what the module, or its own code, had to work with."""
    if first.input_absmax is None:
        return "Everything before it is finite."
    if first.between is not None:
        who = f"of {first.module}" if first.module else "of the model"
        return (
            f"The children {who} gave out finite values up to then, at most {shown(first.input_absmax)} in magnitude."
        )
    return f"Its inputs are finite, at most {shown(first.input_absmax)} in magnitude."


def _over(first: FirstBad, fmt: NumberFormat, name: str) -> str:
    reached = first.reference_absmax
    if first.input_absmax is not None and first.input_absmax >= fmt.overflow_threshold:
        return (
            f"That is beyond {fmt.name}'s largest value {shown(fmt.max)} already, so the cast of an operand overflows."
        )
    if reached is None:
        return ""
    bits = math.log2(reached / fmt.max)
    far = f"{bits:.1f} bits" if bits >= 0.05 else "a hair"
    return f"{name}'s result is {far} beyond what {fmt.name} can hold."


def explain_backward(
    trace: Trace, lane: LaneTrace, origin: BackwardOrigin, mechanism: str | None, *, fails_too: bool
) -> str:
    """Return where a gradient turned bad, and why as far as gradients can tell."""
    where = f"of {origin.module or 'the model itself'}" if origin.module is not None else "of code outside the model"
    text = f"Forward and loss are finite. The gradient turns bad in the backward {where} ({origin.node})."
    name = trace.reference.precision.upper()
    if mechanism == "masked-gradient":
        text += " What arrives there is zero, because forward masked or multiplied it away, and 0 x Inf is NaN."
    elif mechanism == "loss-scale-overflow":
        text += f" Without the loss scale of {lane.loss_scale:g} every gradient fits into {lane.precision}."
    elif origin.fits_unscaled is False:
        text += f" It does so without the loss scale of {lane.loss_scale:g} as well: no scale helps."
    if fails_too and lane is not trace.reference:
        text += f" {name}'s gradient is bad as well."
    return text


def explain_divergence(origin: Origin, lane: LaneTrace, trace: Trace) -> str:
    """Return what agrees before a divergence, and whether values collapsed to zero."""
    fact = origin.fact
    assert fact is not None
    name = trace.reference.precision.upper()
    here = lane.measures.get(("forward", fact.module, fact.visit))
    local = here.local_error if here is not None else None
    if not origin.own_code and local is not None and fact.output_error and local <= 0.25 * fact.output_error:
        text = (
            f"Given {name}'s own inputs it agrees (error {local:.2g}): what it amplifies is the rounding of its inputs"
        )
        text += f" (error {fact.input_error:.2g})." if fact.input_error is not None else "."
    elif not origin.own_code:
        text = f"Its inputs agree with {name}'s, its {lane.precision} output does not."
    else:
        before, after = origin.between or (None, None)
        span = " and ".join(x for x in (f"after {before}" if before else "", f"before {after}" if after else "") if x)
        place = fact.module or "the model"
        text = f"The children of {place} agree with {name}; its own code{' ' + span if span else ''} does not."
    if origin.seen is not None:
        return text
    there = trace.reference.measures.get(("forward", fact.module, fact.visit))
    if here is not None and there is not None and here.elements and here.zero - there.zero >= here.elements / 10:
        text += f" {here.zero:,} of its {here.elements:,} values are zero; in {name} {there.zero:,} are."
    return text
