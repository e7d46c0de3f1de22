"""Small questions that every part of a page asks of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanprobe.formats import FORMATS
from nanprobe.records import Divergence, Finding, FirstBad, Measure, PrecisionResult, ReplayReport, VisitRow
from nanprobe.render import numbers

__all__ = [
    "STORED",
    "BadCounts",
    "bad_counts",
    "beyond",
    "candidates",
    "divergence_of",
    "is_bad",
    "is_culprit",
    "leaving",
    "path_of",
    "row_of",
    "saturates",
    "spoken",
    "visits",
    "worst_at_fault",
]


STORED = ("input", "parameter", "buffer")
"""The phases before the first operation: what is bad there was so in every precision, or became so by a cast."""


_SATURATING = tuple(fmt.max for fmt in FORMATS if fmt.bits == 8)
"""Limits of the formats whose conversions saturate."""


def spoken(report: ReplayReport, precision: str) -> str:
    """Return a precision's name as prose writes it: the reference in capitals ("FP32"), others as they are typed."""
    return precision.upper() if precision == report.reference else precision


def candidates(report: ReplayReport) -> list[str]:
    """Return the precisions that were compared with the reference, in the order asked for."""
    return [name for name in report.precisions if name != report.reference]


def is_bad(measure: Measure) -> bool:
    """Whether a visit holds values that are non-finite."""
    return bool(measure.nan or measure.posinf or measure.neginf)


def row_of(report: ReplayReport, place: FirstBad | Divergence) -> VisitRow | None:
    """Return the row of the visit that a culprit names, None when it lies outside the visits."""
    phase = "backward" if place.phase == "backward" else "forward"
    if place.module is None or place.phase not in ("forward", "backward"):
        return None
    for row in report.modules:
        if row.module == place.module and row.phase == phase and row.visit == (place.visit or 0):
            return row
    return None


def divergence_of(result: PrecisionResult) -> Divergence | None:
    """Return the divergence that a precision's verdict rests on: its first, when nothing went bad before it."""
    return result.first_divergence if result.first_bad is None else None


def beyond(drift: Divergence) -> float:
    """Return how many times its tolerance a precision drifts; an error that cannot be told counts as most."""
    error = math.inf if drift.rel_error is None or math.isnan(drift.rel_error) else drift.rel_error
    return error / drift.tolerance if drift.tolerance else error


def worst_at_fault(report: ReplayReport) -> str | None:
    """Return the precision that the headline names first, None when none is at fault."""
    bad = report.first_bad
    if bad is not None and report.verdict == "precision":
        return bad.precision
    fault = [name for name, result in report.precisions.items() if result.verdict == "precision"]
    drifts = {name: drift for name in fault if (drift := report.precisions[name].first_divergence) is not None}
    return max(drifts, key=lambda name: beyond(drifts[name])) if drifts else next(iter(fault), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCounts:
    """How many NaN, Inf and -Inf an origin holds; all zero when the report does not tell them apart."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.nan + self.posinf + self.neginf

    def words(self, conjunction: str) -> str:
        """Return the kinds without counts, "Inf" for both signs; "non-finite" when they are not told apart."""
        infinite = "Inf" if self.posinf else "-Inf" if self.neginf else ""
        return f" {conjunction} ".join(filter(None, ["NaN" if self.nan else "", infinite])) or "non-finite"

    @property
    def only_inf(self) -> bool:
        """Whether there are infinities and no NaN."""
        return self.total > 0 and not self.nan


def saturates(bad: FirstBad) -> bool:
    """Whether ``bad`` is of finite values that an 8-bit format cut off; its limit is then that format's."""
    return bad.mechanism == "overflow" and bad.limit in _SATURATING


def bad_counts(report: ReplayReport, bad: FirstBad) -> BadCounts:
    """Return the kinds behind ``bad.count``: from the finding that describes it, the row it names, or its mechanism.

    Only numbers that add up to ``bad.count`` are used: a row sums all of a visit's tensors, the origin may be one.
    """
    if saturates(bad):
        return BadCounts()
    row = row_of(report, bad)
    measured = leaving(report, bad) or (row.precisions.get(bad.precision) if row else None)
    sources: list[Mapping[str, Any]] = [
        finding.evidence for finding in report.findings if is_culprit(report, finding, only=bad)
    ]
    if measured is not None:
        sources.append({"nan": measured.nan, "posinf": measured.posinf, "neginf": measured.neginf})
    for source in sources:
        values = [source.get(key, 0) for key in ("nan", "posinf", "neginf")]
        if all(isinstance(value, int) for value in values):
            counts = BadCounts(nan=values[0], posinf=values[1], neginf=values[2])
            if counts.total and counts.total == bad.count:
                return counts
    # Only the sign stays open then: an overflow makes nothing but infinities.
    if bad.mechanism == "overflow":
        return BadCounts(posinf=bad.count)
    # Zero arrives and the local derivative is infinite: their product is NaN.
    return BadCounts(nan=bad.count) if bad.mechanism == "masked-gradient" else BadCounts()


def leaving(report: ReplayReport, bad: FirstBad) -> Measure | None:
    """Return the gradient that leaves a module whose backward is to blame: the next bad one in execution order."""
    row = row_of(report, bad)
    if row is None or bad.phase != "backward":
        return None
    later = (other.precisions.get(bad.precision) for other in report.modules[report.modules.index(row) + 1 :])
    return next((measure for measure in later if measure is not None and is_bad(measure)), None)


def is_culprit(report: ReplayReport, finding: Finding, *, only: FirstBad | None = None) -> bool:
    """Whether a finding says what the verdict already says: same place and precision, severity error."""
    if finding.severity != "error" or finding.ignored:
        return False
    for result in report.precisions.values():
        for place in (result.first_bad, divergence_of(result)):
            if place is None or (only is not None and not _same_origin(place, only)):
                continue
            stored = place.phase in STORED and finding.precision is None
            same_place = (finding.phase, finding.module) == (place.phase, place.module)
            if (
                same_place
                and (stored or finding.precision == place.precision)
                and place.mechanism in (None, finding.mechanism, finding.rule)
            ):
                return True
    return False


def _same_origin(place: FirstBad | Divergence, other: FirstBad) -> bool:
    """Whether two culprits are the same one; what was there before anything ran is the same in every precision."""
    if place.phase in STORED and isinstance(place, FirstBad):
        return (place.phase, place.parameter, place.count) == (other.phase, other.parameter, other.count)
    return place == other


def visits(rows: list[VisitRow] | tuple[VisitRow, ...]) -> str:
    """Return how many rows there are, in words: "41 visits", "41 visits and 12 gradients"."""
    backward = sum(row.phase == "backward" for row in rows)
    parts = []
    if len(rows) - backward or not rows:
        parts.append(numbers.plural(len(rows) - backward, "visit"))
    if backward:
        parts.append(numbers.plural(backward, "gradient"))
    return " and ".join(parts)


def path_of(report: ReplayReport, what: str) -> str | None:
    """Return the path of the config, checkpoint or batch as it was given, None when there was none."""
    given = report.subject.get(what)
    if isinstance(given, Mapping):
        given = given.get("path")
    return given if isinstance(given, str) else None
