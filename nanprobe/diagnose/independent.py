"""Origins of non-finite values in one lane, those included that hide behind an earlier fault of another sample.

A batch may hold two faults. Where the second module already receives NaN that belongs to another sample, a search over
whole tensors calls it propagated; so the search is repeated for each group of samples that went bad in the same places.
Some modules mix samples (a batch normalisation), and spread one sample's NaN to all others: an origin that only one
group sees counts only if the values are shown to leave the format's range there, while the reference's stay finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from nanprobe.diagnose.search import Origin, find_origins
from nanprobe.formats import by_dtype
from nanprobe.lanes.trace import BadDetail, Health, LaneTrace, Trace, VisitFact

__all__ = ["forward_origins", "of_samples"]

_Pattern = frozenset[tuple[int, bool]]
"""The visits at which a sample is bad: (number of the visit, whether in its outputs)."""


def forward_origins(trace: Trace, lane: LaneTrace) -> tuple[Origin, ...]:
    """Return the origins of NaN and Inf in forward, and those of -Inf that something failed on.

    -Inf is a fault only for what it leads to, because masks are full of it: a bad value, or a bad loss. Where FP32
    holds the same -Inf and the loss is NaN, it is the loss that failed on it; operations tell whether it was meant.
    """
    hard = find_origins(lane.visits, lambda f: f.inputs.hard, lambda f: f.outputs.hard)
    if hard:
        led = (_led_to(trace, lane, origin) for origin in _with_hidden(lane, hard))
        return tuple(sorted({_identity(origin): origin for origin in led}.values(), key=lambda origin: origin.time))
    if lane.loss is None or math.isfinite(lane.loss):
        return ()
    return tuple(origin for origin in _soft_origins(lane.visits)[:1] if not _held_by_reference(trace, lane, origin))


def _held_by_reference(trace: Trace, lane: LaneTrace, origin: Origin) -> bool:
    """Whether FP32 holds every -Inf of an origin as well and the loss made NaN of it, so that it is asked first."""
    detail = origin.fact.bad_output if origin.fact is not None and origin.seen is None else None
    reference = trace.reference.loss
    failed = lane.loss is not None and math.isnan(lane.loss) and reference is not None and math.isnan(reference)
    if detail is None or not failed:
        return False
    return lane is trace.reference or detail.only_masked or detail.reference_bad == detail.count


def _soft_origins(facts: Iterable[VisitFact]) -> tuple[Origin, ...]:
    return find_origins(facts, lambda f: f.inputs.hard or f.inputs.soft, lambda f: f.outputs.hard or f.outputs.soft)


def _led_to(trace: Trace, lane: LaneTrace, origin: Origin) -> Origin:
    """Return the last origin of -Inf before ``origin``, if a leaf was given it and failed on it; else ``origin``.

    Where the reference holds the same -Inf, it can be to blame only if the reference fails on it as well.
    """
    fact = origin.fact
    if fact is None or origin.own_code or not fact.inputs.soft or fact.bad_output is None:
        return origin
    if lane is not trace.reference and not fact.bad_output.reference_bad:
        return origin
    earlier = _soft_origins(f for f in lane.visits if f.entered < origin.time)
    before = [o for o in earlier if o.time < origin.time]
    if not before:
        return origin
    last = before[-1]
    if last.fact is None:
        return dataclasses.replace(origin, given_inf=True)
    return last if last.seen is None else origin


def of_samples(detail: BadDetail, samples: Sequence[int] | None) -> BadDetail:
    """Return what ``detail`` says of some samples only."""
    parts = [part for part in detail.by_sample if samples is not None and part.sample in samples]
    if not parts:
        return detail
    largest = [part.reference_absmax for part in parts if part.reference_absmax is not None]
    return dataclasses.replace(
        detail,
        count=sum(part.count for part in parts),
        index=parts[0].index,
        samples=tuple(part.sample for part in parts),
        reference_absmax=max(largest, default=None),
        reference_bad=sum(part.reference_bad for part in parts),
        by_sample=tuple(parts),
    )


def _with_hidden(lane: LaneTrace, whole: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """Return ``whole`` and the origins that only a group of samples sees, in execution order."""
    known = {_identity(origin) for origin in whole}
    hidden: list[Origin] = []
    for pattern, samples in _groups(lane.visits).items():
        numbers = {(fact.module, fact.visit): number for number, fact in enumerate(lane.visits)}

        def is_bad(
            fact: VisitFact, out: bool, pattern: _Pattern = pattern, numbers: dict[tuple[str, int], int] = numbers
        ) -> bool:
            return (numbers[fact.module, fact.visit], out) in pattern

        for origin in find_origins(lane.visits, lambda f: is_bad(f, False), lambda f: is_bad(f, True)):
            if _identity(origin) in known or not _leaves_range(origin, samples):
                continue
            hidden.append(dataclasses.replace(origin, samples=samples))
    merged: dict[tuple[object, ...], Origin] = {}
    for origin in hidden:
        same = merged.get(_identity(origin))
        samples = tuple(sorted({*(same.samples or () if same else ()), *(origin.samples or ())}))
        merged[_identity(origin)] = dataclasses.replace(origin, samples=samples)
    return tuple(sorted((*whole, *merged.values()), key=lambda origin: origin.time))


def _identity(origin: Origin) -> tuple[object, ...]:
    fact, seen = origin.fact, origin.seen
    return (
        (fact.module, fact.visit) if fact is not None else None,
        (seen.module, seen.visit) if seen is not None else None,
    )


def _groups(visits: Sequence[VisitFact]) -> dict[_Pattern, tuple[int, ...]]:
    """Return the samples that are bad somewhere, grouped by the places where they are; {} when there is one group.

    Where the samples of bad values are not known, all are taken to be bad.
    """
    places: dict[int, set[tuple[int, bool]]] = {}
    everywhere: set[tuple[int, bool]] = set()
    for number, fact in enumerate(visits):
        sides: tuple[tuple[Health, BadDetail | None, bool], ...] = (
            (fact.inputs, fact.bad_input, False),
            (fact.outputs, fact.bad_output, True),
        )
        for health, detail, out in sides:
            if not health.hard:
                continue
            if detail is None or not detail.by_sample:
                everywhere.add((number, out))
                continue
            for part in detail.by_sample:
                places.setdefault(part.sample, set()).add((number, out))
    groups: dict[_Pattern, list[int]] = {}
    for sample, found in places.items():
        groups.setdefault(frozenset(found | everywhere), []).append(sample)
    return {pattern: tuple(sorted(samples)) for pattern, samples in groups.items()} if len(groups) > 1 else {}


def _leaves_range(origin: Origin, samples: tuple[int, ...]) -> bool:
    """Whether the reference's finite values, where these samples are bad, are too large for the format."""
    if origin.fact is None:
        return False
    detail = origin.seen.bad_input if origin.seen is not None else origin.fact.bad_output
    fmt = by_dtype(detail.dtype) if detail is not None else None
    if detail is None or fmt is None:
        return False
    mine = of_samples(detail, samples)
    reached = mine.reference_absmax
    return mine.reference_bad == 0 and reached is not None and reached >= fmt.overflow_threshold
