"""Which rows of the side-by-side table are worth a line: the culprits, what lies around them, and counted folds.

A deep model has hundreds of visits and one of them matters. Everything that is not shown is counted in a fold, so that
no row is ever missing without a word.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nanprobe.records import Divergence, FirstBad, ReplayReport, VisitRow
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import bad_counts, candidates, divergence_of, is_bad, leaving, row_of, visits
from nanprobe.render.names import visit_name
from nanprobe.render.sentences import between_words, joined

__all__ = ["ALSO", "CULPRIT", "Fold", "Item", "Note", "Shown", "fold_words", "select"]

CULPRIT = ">>"
"""Marks the first bad (or first diverging) place of a precision; a word, so that colour is never the only signal."""

ALSO = "!"
"""Marks further rows that are bad on their own, and where bad values were turned back into finite ones."""

_CONTEXT = 2
_SHORTEST_FOLD = 3
_WHOLE_TABLE = 12
_MOST_ALSO = 6


@dataclass(frozen=True, slots=True)
class Shown:
    """One visit that gets a line, with its mark ("" for context)."""

    row: VisitRow
    mark: str


@dataclass(frozen=True, slots=True)
class Fold:
    """A run of visits that share one counted line."""

    rows: tuple[VisitRow, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A culprit that is no visit: the parent's own code between two children, the loss, the batch."""

    text: str
    mark: str = CULPRIT


Item = Shown | Fold | Note


def select(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[Item]:
    """Return the table's lines in execution order; with ``verbose`` every visit is shown."""
    rows = report.modules
    marks: dict[int, str] = {}
    notes: dict[int, dict[tuple[str, str], list[str]]] = {}
    centres: set[int] = set()
    for place in _culprits(report):
        at = _position(report, place)
        centres.add(at)
        mark = ALSO if report.precisions[place.precision].verdict == "clean" else CULPRIT
        if _is_own_row(report, place):
            marks[at] = mark if marks.get(at) != CULPRIT else CULPRIT
        else:
            centres.add(at - 1)
            notes.setdefault(at, {}).setdefault((_note(report, place, ink), mark), []).append(place.precision)
    for at in _also(report, marks):
        marks[at] = ALSO
        centres.add(at)
    context = _CONTEXT
    if not centres:
        centres, context = _largest_errors(report), 0
    everything = verbose or len(rows) <= _WHOLE_TABLE
    kept = {at for at in range(len(rows)) if everything or any(abs(at - centre) <= context for centre in centres)}
    return list(_lines(rows, kept, marks, notes))


def fold_words(report: ReplayReport, rows: tuple[VisitRow, ...]) -> str:
    """Return the line that stands for a run of visits: how many, in what state, and their worst error."""
    states: dict[str, Counter[str]] = {}
    for name in report.precisions:
        states[name] = Counter(
            measure.state if (measure := row.precisions.get(name)) else "not visited" for row in rows
        )
    if all(set(counter) == {"clean"} for counter in states.values()):
        text = f"{visits(rows)} clean in every precision"
    else:
        alike: dict[str, list[str]] = {}
        for name, counter in states.items():
            if set(counter) != {"clean"}:
                words = ", ".join(f"{_share(number, len(rows))} {state}" for state, number in counter.items())
                alike.setdefault(words, []).append(name)
        clean = [name for name in candidates(report) if set(states[name]) == {"clean"}]
        parts = [f"{joined(names)} {words}" for words, names in alike.items()]
        parts += [f"{joined(clean)} clean"] if clean else []
        text = f"{visits(rows)}: " + "; ".join(parts)
    return text + _worst_error(report, rows)


def _lines(
    rows: tuple[VisitRow, ...],
    kept: set[int],
    marks: dict[int, str],
    notes: dict[int, dict[tuple[str, str], list[str]]],
) -> Iterator[Item]:
    folded: list[VisitRow] = []
    for at, row in enumerate(rows):
        if at in kept:
            yield from _folded(folded)
            folded = []
            yield from _notes(notes.get(at, {}))
            yield Shown(row, marks.get(at, ""))
        else:
            folded.append(row)
    yield from _folded(folded)
    yield from _notes(notes.get(len(rows), {}))


def _notes(texts: dict[tuple[str, str], list[str]]) -> Iterator[Item]:
    yield from (Note(f"{text} ({', '.join(precisions)})", mark) for (text, mark), precisions in texts.items())


def _folded(rows: list[VisitRow]) -> Iterator[Item]:
    if len(rows) >= _SHORTEST_FOLD:
        yield Fold(tuple(rows))
    else:
        yield from (Shown(row, "") for row in rows)


def _culprits(report: ReplayReport) -> list[FirstBad | Divergence]:
    places: list[FirstBad | Divergence] = []
    for result in report.precisions.values():
        places += [place for place in (result.first_bad, divergence_of(result)) if place is not None]
    return places


def _is_own_row(report: ReplayReport, place: FirstBad | Divergence) -> bool:
    """Whether the culprit's line is the visit's own row, and not a place between rows."""
    row = row_of(report, place)
    if row is None:
        return False
    if isinstance(place, FirstBad) and place.phase == "backward":
        # Its row is the gradient that arrives, and that one is good; what leaves it is not.
        measure = row.precisions.get(place.precision)
        return measure is None or is_bad(measure)
    return place.between is None or all(_child_at(report, place, name) is None for name in place.between)


def _position(report: ReplayReport, place: FirstBad | Divergence) -> int:
    """Return the index of the row that the culprit is, or stands before; len(rows) is the end of the table."""
    rows = report.modules
    row = row_of(report, place)
    if row is not None:
        if place.between is not None:
            before, after = (_child_at(report, place, name) for name in place.between)
            if after is not None:
                return after
            if before is not None:
                return before + 1
        return rows.index(row) + (0 if _is_own_row(report, place) else 1)
    if place.phase in ("input", "parameter", "buffer"):
        return 0
    if place.phase in ("forward", "loss"):
        return next((at for at, other in enumerate(rows) if other.phase == "backward"), len(rows))
    return len(rows)


def _child_at(report: ReplayReport, place: FirstBad | Divergence, name: str | None) -> int | None:
    """Return the index of the child's visit inside the parent's visit: its last one before the parent's row."""
    row = row_of(report, place)
    if name is None or row is None:
        return None
    end = report.modules.index(row)
    found = [at for at, other in enumerate(report.modules) if other.module == name and other.phase == row.phase]
    inside = [at for at in found if at < end]
    return inside[-1] if inside else found[0] if found else None


def _note(report: ReplayReport, place: FirstBad | Divergence, ink: Ink) -> str:
    amount = ""
    if isinstance(place, FirstBad) and place.phase == "backward" and place.module is not None:
        return _backward_note(report, place, ink)
    if isinstance(place, FirstBad) and place.elements:
        counts = bad_counts(report, place)
        kinds = numbers.kinds(counts.nan, counts.posinf, counts.neginf) or f"{place.count:,} NaN or Inf"
        amount = f": {kinds} of {numbers.plural(place.elements, 'element')}"
        if place.reference_absmax is not None and place.precision != report.reference:
            amount += f", {report.reference.upper()} reaches {numbers.magnitude(place.reference_absmax)}"
    elif isinstance(place, Divergence):
        lost = place.mechanism == "update-underflow" and place.rel_error is not None
        amount = (
            f": {place.rel_error:.0%} of the updates lost" if lost else f": rel. error {numbers.error(place.rel_error)}"
        )
    parameter = place.parameter if isinstance(place, FirstBad) or place.phase == "optimizer" else None
    if place.phase == "input":
        where = f"the batch, field {ink.name(parameter)}" if parameter else "the batch"
    elif place.phase in ("parameter", "buffer"):
        where = f"{place.phase} {ink.name(parameter)}" if parameter else f"a {place.phase}"
    elif place.phase == "optimizer":
        norm = "total norm of the gradients" if isinstance(place, FirstBad) else "optimizer step"
        where = f"optimizer step of {ink.name(parameter)}" if parameter else norm
    elif place.phase == "loss" and place.module is None:
        where = "loss function"
    elif place.module is None:
        where = "code outside the model"
    else:
        where = f"own code of {ink.name(visit_name(place.module, place.visit))}"
        if words := between_words(place, ink):
            where += f", {words}"
    return where + amount


def _backward_note(report: ReplayReport, place: FirstBad, ink: Ink) -> str:
    """Return what leaves a module whose backward is to blame: "backward of mag: 1 NaN of 64 elements leave it"."""
    text = f"backward of {ink.name(visit_name(place.module, place.visit))}"
    counts = bad_counts(report, place)
    kinds = numbers.kinds(counts.nan, counts.posinf, counts.neginf)
    if place.parameter:
        many = f"{kinds or f'{place.count:,} NaN or Inf'} of {numbers.plural(place.elements, 'element')}"
        return f"{text}: {many} of the gradient of {ink.name(place.parameter)}"
    if place.count and place.elements:
        # What an operation inside makes is not yet what leaves the module; both are told apart where both are known.
        inside = f" in {ink.name(place.op)}" if place.op else ""
        text += f": {kinds or f'{place.count:,} NaN or Inf'} of {numbers.plural(place.elements, 'element')}"
        after = leaving(report, place)
        if not inside or after is None:
            return f"{text} leave it"
        gone = numbers.kinds(after.nan, after.posinf, after.neginf)
        same = (after.nan + after.posinf + after.neginf, after.elements) == (place.count, place.elements)
        return f"{text} leave it" if same else f"{text}{inside}, {gone} of {after.elements:,} leave it"
    return f"{text}: bad values leave it"


def _also(report: ReplayReport, marks: dict[int, str]) -> list[int]:
    """Return the rows, besides the culprits, where something of its own happens: other origins and absorptions."""
    found = [
        at
        for at, row in enumerate(report.modules)
        if at not in marks
        and not _holds_culprit(report, row)
        and any(measure.state in ("origin", "absorbed") for measure in row.precisions.values())
    ]
    return found[:_MOST_ALSO]


def _holds_culprit(report: ReplayReport, row: VisitRow) -> bool:
    """Whether a row is the parent whose own code is already shown as a note between its children."""
    return any(row_of(report, place) is row for place in _culprits(report))


def _largest_errors(report: ReplayReport) -> set[int]:
    """Return, for a report without a culprit, each precision's visit and gradient with the largest error."""
    centres: set[int] = set()
    for name in candidates(report):
        for phase in ("forward", "backward"):
            errors = [
                (error, at)
                for at, row in enumerate(report.modules)
                if row.phase == phase
                and (measure := row.precisions.get(name)) is not None
                and (error := measure.rel_error) is not None
            ]
            if errors:
                centres.add(max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))[1])
    return centres


def _share(part: int, whole: int) -> str:
    return "all" if part == whole else f"{part:,}"


def _worst_error(report: ReplayReport, rows: tuple[VisitRow, ...]) -> str:
    errors = [
        (measure.rel_error, name)
        for row in rows
        for name, measure in row.precisions.items()
        if name != report.reference and measure.rel_error is not None and not is_bad(measure)
    ]
    if not errors:
        return ""
    value, name = max(errors, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return f", worst rel. error {numbers.error(value)} ({name})"
