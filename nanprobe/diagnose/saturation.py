"""Overflow that makes no Inf: operands of 8-bit products beyond the format's largest value, which saturate there."""

from __future__ import annotations

from nanprobe.diagnose.explain import shown
from nanprobe.diagnose.keeping import keep_in_fp32
from nanprobe.formats import by_name
from nanprobe.lanes.trace import LaneTrace, SaturationFact
from nanprobe.records import FirstBad, Remedy

__all__ = ["is_saturation", "saturations"]

_NAMED = 3
"""Further places that an explanation names; the others are counted."""


def is_saturation(bad: FirstBad) -> bool:
    """Whether a fault is of values that saturated: its limit is then that of an 8-bit format."""
    return bad.mechanism == "overflow" and bad.limit in (by_name("fp8-e4m3").max, by_name("fp8-e5m2").max)


def saturations(lane: LaneTrace) -> list[tuple[FirstBad, int]]:
    """Return the faults of a lane's saturation, each with the lane's clock then; empty when nothing saturated.

    Saturation that cuts off less than one rounding changes does no harm by itself. So the fault that counts is the
    first one that cuts off more, or the first of all when none does; it stands last, and a milder one that comes before
    it stands first. What saturates later is named in the explanation.
    """
    if not lane.saturated:
        return []
    severe = next((f for f in lane.saturated if f.lost > by_name(f.format).unit_roundoff), None)
    first = lane.saturated[0]
    named = [first] if severe is None or severe is first else [first, severe]
    return [(_fault(lane, fact, last=fact is named[-1]), fact.time) for fact in named]


def _fault(lane: LaneTrace, first: SaturationFact, *, last: bool) -> FirstBad:
    fmt = by_name(first.format)
    text = (
        f"The product's {first.operand} reaches {shown(first.absmax)} and is quantised to {fmt.name} without a scale: "
        f"{first.count:,} of {first.elements:,} elements saturate at {fmt.max:g}, which cuts off "
        f"{first.lost:.2g} of its norm; nothing becomes Inf."
    )
    later = lane.saturated[lane.saturated.index(first) + 1 :]
    others = list(dict.fromkeys(_where(fact) for fact in later if _where(fact) != _where(first)))
    if others and last:
        more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
        text += f" So do operands in {', '.join(others[:_NAMED])}{more}."
    remedies = [Remedy(kind="rewrite", text="Scale each tensor to the format's range (--fp8-scaling tensor)")]
    if first.module is not None:
        remedies.append(keep_in_fp32([first.module]))
    return FirstBad(
        precision=lane.precision,
        phase=first.phase,
        module=first.module,
        visit=first.visit,
        class_=first.class_,
        op=first.op,
        backward_op=first.op if first.phase == "backward" else None,
        mechanism="overflow",
        precision_related=True,
        count=first.count,
        elements=first.elements,
        index=first.index,
        samples=first.samples,
        input_absmax=first.absmax,
        reference_absmax=first.absmax,
        limit=fmt.max,
        explanation=text,
        remedies=tuple(remedies),
    )


def _where(fact: SaturationFact) -> str:
    place = "code outside the model" if fact.module is None else fact.module or "the model itself"
    return place if fact.phase == "forward" else f"{place} ({fact.phase})"
