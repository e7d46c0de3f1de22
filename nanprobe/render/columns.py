"""The columns of the side-by-side table, and which of them fit.

A layout says how much detail stands in a row. Layouts are tried from the richest to the plainest until the module
paths have room, so a wide terminal shows everything and 80 columns still show one line per visit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanprobe.formats import by_name, carrier_of
from nanprobe.records import Measure, ReplayReport, VisitRow
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import candidates, is_bad
from nanprobe.render.names import neutral, shortened_class, visit_name

__all__ = ["LAYOUTS", "RICHEST", "Columns", "Layout", "has_local", "module_cell"]

_TIGHT_HEADROOM_BITS = 64.0
"""Headroom above this says nothing; formats with FP32's range hardly ever have less, so their column can go first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a row shows besides the module.

    The type is cut to ``type_width`` characters (0: no column); ``denominators`` gives counts of bad elements theirs;
    ``headroom`` is "all", "tight" (only formats that come near their limit) or "none"; ``local`` adds the error given
    the reference's inputs; ``compact`` adds up kinds of bad values; ``absmax`` says in the reference's title what the
    numbers are; ``merged`` puts a precision's error in the place of its absmax.
    """

    type_width: int
    denominators: bool = False
    headroom: str = "all"
    local: bool = False
    compact: bool = False
    absmax: bool = True
    merged: bool = False


RICHEST = Layout(type_width=40, denominators=True, local=True)

LAYOUTS: tuple[Layout, ...] = (
    Layout(type_width=24, denominators=True, local=True),
    Layout(type_width=24, denominators=True),
    Layout(type_width=18),
    Layout(type_width=14),
    Layout(type_width=12, headroom="tight"),
    Layout(type_width=12, headroom="tight", compact=True),
    Layout(type_width=12, headroom="tight", compact=True, absmax=False),
    Layout(type_width=0, headroom="tight", compact=True),
    Layout(type_width=0, headroom="tight", compact=True, absmax=False),
    Layout(type_width=0, headroom="none", compact=True),
    Layout(type_width=0, headroom="none", compact=True, absmax=False),
    Layout(type_width=0, headroom="none", compact=True, absmax=False, merged=True),
)
"""From the richest to the plainest."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A layout applied to one report: the titles, and each row's cells below them."""

    report: ReplayReport
    layout: Layout
    headroom: frozenset[str]

    @classmethod
    def of(cls, report: ReplayReport, layout: Layout) -> Columns:
        """Return the columns of ``report`` in ``layout``; which precisions get a headroom is decided here, once."""
        shown = frozenset(name for name in candidates(report) if _has_headroom(report, name, layout))
        return cls(report, layout, shown)

    def titles(self) -> list[str]:
        """Return the column titles, from the module on."""
        titles = ["module"] + (["type"] if self.layout.type_width else [])
        titles.append(neutral(self.report.reference) + (" absmax" if self.layout.absmax else ""))
        for name in candidates(self.report):
            titles.append(neutral(name))
            if not self.layout.merged:
                titles.append("rel.err")
            if self.layout.local:
                titles.append("local")
            if name in self.headroom:
                titles.append("bits")
        return titles

    def cells(self, row: VisitRow, ink: Ink) -> list[str]:
        """Return one row's cells, from the type on (the module's cell is :func:`module_cell`)."""
        layout = self.layout
        texts = [ink.name(shortened_class(row.class_, layout.type_width))] if layout.type_width else []
        texts.append(_value(row.precisions.get(self.report.reference), layout))
        for name in candidates(self.report):
            measure = row.precisions.get(name)
            value = _value(measure, layout)
            clean = measure is not None and (measure.state == "clean" or not is_bad(measure))
            relative = numbers.error(measure.rel_error) if measure is not None and clean else numbers.ABSENT
            if layout.merged:
                finite = clean and relative != numbers.ABSENT
                ends = measure is not None and measure.state == "absorbed"
                texts.append("(absorbed)" if finite and ends else f"err {relative}" if finite else value)
            else:
                texts += [value, relative]
            if layout.local:
                texts.append(numbers.error(measure.local_error) if measure is not None and clean else numbers.ABSENT)
            if name in self.headroom:
                texts.append(numbers.bits(measure.headroom_bits) if measure is not None and clean else numbers.ABSENT)
        return texts


def has_local(rows: Iterable[VisitRow]) -> bool:
    """Whether the error given the reference's inputs was measured in any of the rows."""
    return any(measure.local_error is not None for row in rows for measure in row.precisions.values())


def module_cell(row: VisitRow) -> str:
    """Return the module's path and visit; a gradient that arrived there is marked by the word "grad"."""
    name = visit_name(row.module, row.visit)
    return f"grad {name}" if row.phase == "backward" else name


def _value(measure: Measure | None, layout: Layout) -> str:
    """Return what a precision holds at a visit: its absmax, what went wrong, or why there is neither."""
    if measure is None:
        return "not visited"
    if is_bad(measure):
        total = measure.nan + measure.posinf + measure.neginf
        kinds = numbers.kinds(measure.nan, measure.posinf, measure.neginf)
        if measure.state == "clean":
            return f"{kinds} (intended)"
        one_kind = ", " not in kinds
        if total == measure.elements and one_kind:
            return f"all {kinds.rpartition(' ')[2]}"
        if layout.denominators:
            return f"{kinds} of {measure.elements:,}"
        if one_kind or not layout.compact:
            return kinds
        return f"{total:,} NaN+Inf" if measure.nan else f"{total:,} +-Inf"
    if measure.absmax is None:
        return "empty" if measure.elements == 0 and measure.note is None else numbers.ABSENT
    absorbed = " (absorbed)" if measure.state == "absorbed" else ""
    return f"{numbers.magnitude(measure.absmax)}{absorbed}"


def _has_headroom(report: ReplayReport, name: str, layout: Layout) -> bool:
    if layout.headroom == "none":
        return False
    if layout.headroom == "all":
        return True
    try:
        wide_range = carrier_of(name).exponent_bits >= by_name("fp32").exponent_bits
    except KeyError:
        return True
    rooms = [
        measure.headroom_bits
        for row in report.modules
        if (measure := row.precisions.get(name)) is not None and measure.headroom_bits is not None
    ]
    return not wide_range or min(rooms, default=_TIGHT_HEADROOM_BITS) < _TIGHT_HEADROOM_BITS
