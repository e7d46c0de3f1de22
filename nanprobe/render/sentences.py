"""The verdict in words: one sentence for a tired reader, then one line for each precision.

Each sentence names the precision, the place and the numbers, in that order, and claims nothing that the report does not
hold: what was not told apart is called "non-finite", what was not measured is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanprobe.records import Divergence, FirstBad, PrecisionResult, ReplayReport
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import STORED, BadCounts, bad_counts, beyond, candidates, row_of, saturates, spoken, visits
from nanprobe.render.names import visit_name

__all__ = ["PrecisionLine", "between_words", "headline", "joined", "precision_lines", "reasons"]

_WHERE_STORED = {"input": "the batch", "parameter": "the weights", "buffer": "the buffers"}


def headline(report: ReplayReport, ink: Ink) -> str:
    """Return the verdict in one sentence (two where the second says what did not happen)."""
    if report.verdict == "clean":
        return _clean(report, ink)
    if report.verdict == "inconclusive":
        return _inconclusive(report, ink)
    bad = report.first_bad
    if report.verdict == "not-precision":
        if bad is None:
            return f"{report.reference.upper()} fails too: precision is not to blame."
        return _not_precision(report, bad, ink)
    if bad is not None:
        return _sentence(f"{spoken(report, bad.precision)} {_deed(report, bad, ink)}") + _others(report, bad, ink)
    drifts = [
        result.first_divergence
        for result in report.precisions.values()
        if result.verdict == "precision" and result.first_divergence is not None
    ]
    if drifts:
        worst = max(drifts, key=beyond)
        nothing_bad = all(other.first_bad is None for other in report.precisions.values())
        tail = " Nothing is NaN or Inf." if nothing_bad else ""
        return _sentence(f"{worst.precision} {_drift(report, worst, ink)}") + _others(report, worst, ink) + tail
    names = [name for name, result in report.precisions.items() if result.verdict == "precision"]
    return f"{joined(names)} went wrong beyond tolerance; the findings below say where."


def _others(report: ReplayReport, told: FirstBad | Divergence, ink: Ink) -> str:
    """Return a sentence for each further precision at fault: " So does bf16, in the same place."."""
    text = ""
    for name, result in report.precisions.items():
        place = result.first_bad or result.first_divergence
        if name == told.precision or result.verdict != "precision" or place is None:
            continue
        alike = type(place) is type(told) and all(
            getattr(place, key) == getattr(told, key) for key in ("phase", "module", "visit", "between")
        )
        if isinstance(place, FirstBad):
            words = "goes wrong in the same place" if alike else _deed(report, place, ink, brief=True)
        else:
            drifts = "drifts in the same place" if alike else _drift(report, place, ink, brief=True)
            words = drifts if place.rel_error is None else f"{drifts}: relative error {numbers.error(place.rel_error)}"
            if place.rel_error is not None and place.tolerance is not None:
                words += f" where {numbers.error(place.tolerance)} is tolerated"
        text += " " + _sentence(f"{spoken(report, name)} {words}")
    return text


def reasons(report: ReplayReport, ink: Ink) -> list[str]:
    """Return the explanations of the culprits, one paragraph each, identical ones once.

    Of what was there before anything ran the headline has said all.
    """
    paragraphs: list[str] = []
    for name, result in report.precisions.items():
        place = result.first_bad or result.first_divergence
        if place is None or not place.explanation or (place.phase in STORED and report.verdict == "not-precision"):
            continue
        text = ink.prose(place.explanation)
        if text not in (paragraph.partition(": ")[2] for paragraph in paragraphs):
            paragraphs.append(f"{spoken(report, name)}: {text}")
    return paragraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionLine:
    """One precision's outcome: its name, a word or two of verdict, the details, and the tone it is painted in."""

    precision: str
    verdict: str
    details: str
    tone: str


def precision_lines(report: ReplayReport, ink: Ink) -> list[PrecisionLine]:
    """Return one line for each precision, the reference first."""
    return [_precision_line(report, name, result, ink) for name, result in report.precisions.items()]


def joined(words: list[str], conjunction: str = "and") -> str:
    """Return a list in words: "a", "a and b", "a, b and c"."""
    return f" {conjunction} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def between_words(place: FirstBad | Divergence, ink: Ink) -> str:
    """Return between which children the parent's own code lies: "between a and b", "before a", "after b", or ""."""
    if place.between is None:
        return ""
    before, after = (None if name is None else ink.name(_below(place.module, name)) for name in place.between)
    if before is not None and after is not None:
        return f"between {before} and {after}"
    if after is not None:
        return f"before {after}"
    return f"after {before}" if before is not None else ""


def _precision_line(report: ReplayReport, name: str, result: PrecisionResult, ink: Ink) -> PrecisionLine:
    parts: list[str] = []
    reference = name == report.reference
    verdict, tone = {
        "clean": ("reference" if reference else "clean", "" if reference else "good"),
        "precision": ("goes wrong", "bad"),
        "not-precision": ("fails" if reference else f"fails as {report.reference.upper()} does", "bad"),
        "inconclusive": ("no verdict", "unsure"),
    }.get(result.verdict, (ink.prose(result.verdict), "unsure"))
    if not result.completed:
        verdict, tone = "did not finish", "unsure"
        parts.append(f"raised {ink.prose(result.error)}" if result.error else "it ended early and left no reason")
    fine = result.completed and result.verdict == "clean"
    if not reference and (fine or (result.completed and result.first_bad is None and result.first_divergence is None)):
        worst = _worst(report, name, ink)
        if worst:
            parts.append(worst)
    if result.first_bad is not None:
        bad = result.first_bad
        parts.append(_absorbed(report, bad, ink) if fine else _deed(report, bad, ink, brief=True))
    if result.first_divergence is not None:
        drift = result.first_divergence
        why = "" if not fine else "ignored by the config: " if _ignored(report, drift) else "only a warning: "
        parts.append(why + _drift(report, drift, ink, brief=True))
    if result.loss is not None:
        comparable = result.loss_error is not None and math.isfinite(result.loss) and not reference
        beside = f" (rel. error {numbers.error(result.loss_error)})" if comparable else ""
        parts.append(f"loss {numbers.loss(result.loss)}{beside}")
    if result.gradient_norm is not None:
        parts.append(f"gradient norm {numbers.magnitude(result.gradient_norm)}")
    return PrecisionLine(precision=name, verdict=verdict, details="; ".join(parts), tone=tone)


def _worst(report: ReplayReport, name: str, ink: Ink) -> str:
    """Return the largest relative error of a clean precision and where it is; "" when none was measured."""
    errors = [
        (measure.rel_error, row)
        for row in report.modules
        if (measure := row.precisions.get(name)) is not None and measure.rel_error is not None
    ]
    if not errors:
        return ""
    value, row = max(errors, key=lambda pair: (pair[0] != pair[0], pair[0]))
    gradient = "the gradient at " if row.phase == "backward" else ""
    return f"rel. error at most {numbers.error(value)}, in {gradient}{ink.name(visit_name(row.module, row.visit))}"


def _absorbed(report: ReplayReport, bad: FirstBad, ink: Ink) -> str:
    """Return what a clean precision made and got rid of: "37 NaN in pool (Pool) are absorbed"."""
    return f"{_kinds_of(report, bad)} in {_source(report, bad, ink)} {_are(bad.count)} {_fate(report, bad)}"


def _fate(report: ReplayReport, bad: FirstBad) -> str:
    """Return why bad values of a clean precision do not count."""
    if _ignored(report, bad):
        return "ignored by the config"
    return "harmless" if bad.phase in STORED else "absorbed"


def _ignored(report: ReplayReport, place: FirstBad | Divergence) -> bool:
    """Whether the config has the finding about a place ignored."""
    return any(
        finding.ignored
        and finding.precision in (None, place.precision)
        and (finding.phase, finding.module) == (place.phase, place.module)
        for finding in report.findings
    )


def _source(report: ReplayReport, bad: FirstBad, ink: Ink) -> str:
    return _WHERE_STORED[bad.phase] if bad.phase in STORED else _place(report, bad, ink)


def _kinds_of(report: ReplayReport, bad: FirstBad) -> str:
    """Return how many bad elements of which kind an origin holds: "37 NaN", "37 NaN or Inf"."""
    if saturates(bad):
        return f"{bad.count:,} values beyond {numbers.magnitude(bad.limit)}"
    counts = bad_counts(report, bad)
    return numbers.kinds(counts.nan, counts.posinf, counts.neginf) or (
        f"{bad.count:,} NaN or Inf" if bad.count else "NaN or Inf"
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _clean_with_absorbed(report: ReplayReport, origins: list[FirstBad], ink: Ink) -> str:
    """Return the verdict where bad values arise that do not count."""
    lanes = candidates(report)
    alike: dict[tuple[str, str, str], list[FirstBad]] = {}
    for bad in origins:
        key = (_kinds_of(report, bad), _source(report, bad, ink), _fate(report, bad))
        alike.setdefault(key, []).append(bad)
    sentences = []
    for (what, source, fate), group in alike.items():
        everywhere = len(group) >= len(lanes) and any(bad.precision_related is False for bad in group)
        where = "every precision" if everywhere else joined([spoken(report, bad.precision) for bad in group])
        verb, are = ("appears", "is") if group[0].count == 1 else ("appear", "are")
        comma = "," if ", " in source else ""
        sentences.append(f"{what} {verb} in {source}{comma} in {where} and {are} {fate}")
    measured = [
        gradient for row in report.gradients for name in lanes if (gradient := row.precisions.get(name)) is not None
    ]
    unharmed = measured and not any(gradient.nan or gradient.posinf or gradient.neginf for gradient in measured)
    tail = "; no parameter gradient is affected" if unharmed else ""
    tried = joined(lanes or [report.reference.upper()], "or")
    return (
        f"Nothing that counts goes wrong in {tried}: {'; '.join(sentences)}{tail}. "
        "A failure of this batch did not reproduce here."
    )


def _clean(report: ReplayReport, ink: Ink) -> str:
    lanes = candidates(report)
    reference = report.reference.upper()
    if not report.modules:
        return "Nothing went wrong, but nothing was observed either: no module ran."
    origins = [result.first_bad for result in report.precisions.values() if result.first_bad is not None]
    if origins:
        return _clean_with_absorbed(report, origins, ink)
    unlike = [
        row
        for row in report.modules
        if any(measure.state != "clean" for measure in row.precisions.values())
        or any(name not in row.precisions for name in report.precisions)
    ]
    if unlike:
        where = f"{len(unlike):,} of {visits(report.modules)} differ, but not by a fault of a precision's own"
    elif lanes:
        where = f"all {visits(report.modules)} agree with {reference} within tolerance"
    else:
        where = f"all {visits(report.modules)} are clean"
    tried = joined(lanes or [reference], "or")
    if any(finding.rule == "gradient-underflow" and not finding.ignored for finding in report.findings):
        return (
            f"Nothing is NaN or Inf in {tried}, but gradients that {reference} has are zero, and what is zero is not "
            "learned: see below."
        )
    kept = report.conditions.get("keep_fp32")
    if kept:
        modules = "the whole model" if "" in kept else joined([ink.name(name) for name in kept[:4]])
        more = f" and {len(kept) - 4:,} more" if len(kept) > 4 else ""
        return f"Nothing goes wrong in {tried} with {modules}{more} kept in FP32: {where}."
    return f"Nothing goes wrong in {tried}: {where}. A failure of this batch did not reproduce here."


def _inconclusive(report: ReplayReport, ink: Ink) -> str:
    sentences = []
    for name, result in report.precisions.items():
        if result.verdict != "inconclusive" and result.completed:
            continue
        if result.error:
            sentences.append(_sentence(f"No verdict for {spoken(report, name)}: it raised {ink.prose(result.error)}"))
        else:
            sentences.append(f"No verdict for {spoken(report, name)}.")
    fine = [name for name in candidates(report) if report.precisions[name].verdict == "clean"]
    if fine:
        sentences.append(f"{joined(fine)} {'is' if len(fine) == 1 else 'are'} clean.")
    return " ".join(sentences) or "No verdict: too little could be observed."


def _not_precision(report: ReplayReport, bad: FirstBad, ink: Ink) -> str:
    reference = report.reference.upper()
    counts = bad_counts(report, bad)
    if bad.phase in STORED:
        return _sentence(f"{_stored(bad, counts, ink)}. No precision is to blame")
    return _sentence(f"{reference} fails too, so precision is not to blame: it {_deed(report, bad, ink)}")


def _stored(bad: FirstBad, counts: BadCounts, ink: Ink) -> str:
    """Return what was wrong before the first operation, as a clause."""
    what = counts.words("and") if counts.total else "NaN or Inf"
    field = {"input": "field", "parameter": "parameter", "buffer": "buffer"}[bad.phase]
    name = f" {field} {ink.name(bad.parameter)}:" if bad.parameter else ""
    found = f"{numbers.of(bad.count, bad.elements)}{_position(bad)}"
    return f"{what} was already in {_WHERE_STORED[bad.phase]} before anything ran:{name} {found}"


def _deed(report: ReplayReport, bad: FirstBad, ink: Ink, *, brief: bool = False) -> str:
    """Return what a precision does wrong and where, as a clause without its subject; ``brief`` is without numbers."""
    counts = bad_counts(report, bad)
    limit = f"; {bad.precision}'s largest is {numbers.magnitude(bad.limit)}" if bad.limit is not None else ""
    if bad.phase in STORED:
        if bad.mechanism == "overflow":
            field = f" {ink.name(bad.parameter)}" if bad.parameter else ""
            largest = numbers.magnitude(bad.reference_absmax)
            reach = "" if bad.reference_absmax is None else f" (largest {largest}{limit})"
            whole = numbers.of(bad.count, bad.elements)
            return f"cannot hold {_WHERE_STORED[bad.phase]}:{field} {whole} overflow in the cast{reach}"
        if bad.mechanism == "unrepresentable-constant":
            field = f" {ink.name(bad.parameter)}" if bad.parameter else ""
            return f"rounds {_WHERE_STORED[bad.phase]}:{field} {numbers.of(bad.count, bad.elements)} change in the cast"
        what = counts.words("and") if counts.total else "NaN or Inf"
        place = f"{bad.phase} {ink.name(bad.parameter)}" if bad.parameter else f"its {bad.phase}"
        return f"is given {what} in {place}"
    amount = "" if brief else _amount(report, bad, counts)
    return f"{_verb(bad, counts)} {_place(report, bad, ink)}{amount}"


def _verb(bad: FirstBad, counts: BadCounts) -> str:
    if bad.mechanism == "loss-scale-overflow":
        return "overflows because of the loss scale in"
    if bad.mechanism == "optimizer-error":
        return "makes NaN or Inf in"
    unexplained = bad.mechanism is None and bad.precision_related is not False
    if bad.mechanism == "overflow" or (counts.only_inf and unexplained):
        return "overflows in"
    return f"makes {counts.words('and')} in" if counts.total else "goes bad in"


def _place(report: ReplayReport, place: FirstBad | Divergence, ink: Ink) -> str:
    parameter = place.parameter if isinstance(place, FirstBad) else None
    if place.phase == "loss" and place.module is None:
        where = "the loss function"
    elif place.module is None:
        where = "code outside the model"
    else:
        type_name = f" ({ink.prose(place.class_)})" if place.class_ else ""
        where = f"{ink.name(visit_name(place.module, place.visit))}{type_name}"
        if place.between is not None:
            where = f"the own code of {where}"
            if words := between_words(place, ink):
                where += f", {words}"
    if place.op:
        called = f" ({place.call})" if isinstance(place, FirstBad) and place.call else ""
        where += f", operation {ink.name(place.op)}{called}"
    if place.phase == "backward":
        where = f"the backward pass of {where}"
        if parameter:
            where += f", gradient of {ink.name(parameter)}"
    elif place.phase == "optimizer":
        where = f"the optimizer step of {ink.name(parameter)}" if parameter else "the total norm of the gradients"
        where += f", operation {ink.name(place.op)}" if place.op else ""
    return where


def _amount(report: ReplayReport, bad: FirstBad, counts: BadCounts) -> str:
    """Return how much is bad, beside what the reference has there: ": 97 of 49,152 elements are Inf where ..."."""
    if not bad.elements:
        return ""
    if bad.phase == "loss" and bad.elements == 1:
        text = f": the loss is {counts.words('or')}"
    else:
        are = "is" if bad.count == 1 else "are"
        kind = counts.words("or") if counts.total else "beyond it" if saturates(bad) else "NaN or Inf"
        text = f": {numbers.of(bad.count, bad.elements)} {are} {kind}"
    notes = []
    if bad.reference_absmax is not None and bad.precision != report.reference:
        text += f" where {report.reference.upper()} reaches {numbers.magnitude(bad.reference_absmax)}"
    made_of_nan = counts.total and not (counts.posinf or counts.neginf)
    about_range = bad.precision_related is not False and (bad.mechanism is None or "overflow" in bad.mechanism)
    if bad.limit is not None and not made_of_nan and about_range:
        notes.append(f"{bad.precision}'s largest is {numbers.magnitude(bad.limit)}")
    return text + (f" ({'; '.join(notes)})" if notes else "") + _position(bad)


def _position(bad: FirstBad) -> str:
    parts = []
    if bad.index is not None and bad.elements > 1:
        parts.append(f", first at {numbers.index(bad.index)}")
    if bad.samples:
        shown = ", ".join(str(sample) for sample in bad.samples[:8])
        more = f" and {len(bad.samples) - 8:,} more" if len(bad.samples) > 8 else ""
        parts.append(f", in sample{'s' if len(bad.samples) > 1 else ''} {shown}{more}")
    return "".join(parts)


def _drift(report: ReplayReport, drift: Divergence, ink: Ink, *, brief: bool = False) -> str:
    """Return where a precision leaves the reference, as a clause without its subject; ``brief`` is without numbers."""
    if drift.mechanism == "update-underflow":
        return _stands_still(drift, ink, brief=brief)
    text = f"drifts from {report.reference.upper()} in {_place(report, drift, ink)}"
    if brief:
        return text
    if drift.rel_error is not None:
        text += f": relative error {numbers.error(drift.rel_error)}"
        if drift.tolerance is not None:
            text += f", more than the {numbers.error(drift.tolerance)} that is tolerated"
    row = row_of(report, drift)
    if drift.local_error is not None and row is not None and row.leaf:
        text += f" (given {report.reference.upper()}'s inputs: {numbers.error(drift.local_error)})"
    return text


def _stands_still(drift: Divergence, ink: Ink, *, brief: bool) -> str:
    where = f", first in {ink.name(drift.parameter)}" if drift.parameter else ""
    if brief or drift.rel_error is None:
        return f"loses the optimizer's updates to rounding{where}"
    return f"loses {drift.rel_error:.0%} of the optimizer's updates to rounding{where}"


def _below(parent: str | None, name: str) -> str:
    """Return a child's path without its parent's, which the sentence has already named."""
    prefix = f"{parent}." if parent else ""
    return name.removeprefix(prefix) or name


def _sentence(text: str) -> str:
    """Return ``text`` with one full stop at its end."""
    return text if text.endswith((".", "!", "?")) else text + "."
