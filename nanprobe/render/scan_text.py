"""A scan in sentences: the headline, findings in groups, what was looked at; the same for every format of text.

A checkpoint has thousands of tensors and a fault often is in many of them. Findings of one rule (and format) therefore
stand together, worst first, the first few by name and the rest counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from nanprobe.records import SEVERITIES
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.scan_records import DiffReport, ScanFinding, ScanReport

__all__ = ["Group", "diff_headline", "facts", "groups", "scan_headline", "size_words"]

FEW = 5
"""Findings of a group that are shown by name without --verbose."""


@dataclass(frozen=True, slots=True)
class Group:
    """Findings of one rule: ``title`` names rule and count, ``lines`` the tensors, ``remedy`` what to try."""

    severity: str
    title: str
    lines: tuple[str, ...]
    remedy: str | None


def scan_headline(report: ScanReport, ink: Ink) -> str:
    """Return what the scan found, in a sentence."""
    paths = report.subject.get("paths")
    named = [ink.name(str(path)) for path in paths] if isinstance(paths, list | tuple) else []
    where = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    counts = severity_words(report.findings)
    summary = report.summary
    looked = f"{numbers.plural(summary.scanned, 'tensor')} of {size_words(summary.bytes)}"
    if any(finding.severity != "note" and not finding.known for finding in report.findings):
        return f"{counts} in {where}: {looked} scanned."
    known = " but what the baseline knows" if any(finding.known for finding in report.findings) else ""
    if summary.unreadable:
        return f"Nothing found in what could be read of {where}{known}: {looked} scanned."
    return f"Nothing found in {where}{known}: {looked} scanned."


def diff_headline(report: DiffReport, ink: Ink) -> str:
    """Return how two checkpoints differ, in a sentence."""
    summary = report.summary
    parts = [f"{summary.changed:,} of {numbers.plural(summary.tensors, 'tensor')} changed"]
    if summary.nonfinite:
        parts.insert(0, f"{summary.nonfinite:,} became non-finite")
    parts += [
        f"{count:,} {word}"
        for count, word in (
            (summary.unchanged, "unchanged"), (summary.added, "added"), (summary.removed, "removed"),
            (summary.reshaped, "reshaped"), (summary.unreadable, "unreadable"),
        )
        if count
    ]  # fmt: skip
    a, b = (ink.name(str(report.subject.get(key))) for key in ("a", "b"))
    return f"From {a} to {b}: {', '.join(parts)}."


def severity_words(findings: Sequence[ScanFinding]) -> str:
    """Return how many findings there are of each severity, known ones left out: "2 errors, 1 warning"."""
    counts = {name: sum(one.severity == name and not one.known for one in findings) for name in SEVERITIES}
    return ", ".join(numbers.plural(count, name) for name, count in counts.items() if count)


def size_words(size: int) -> str:
    """Return a number of bytes in a unit that keeps it short ("2.15 GB"; powers of 1,000)."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return numbers.plural(size, "byte")


def groups(findings: Sequence[ScanFinding], ink: Ink, *, verbose: bool) -> list[Group]:
    """Return the findings in groups, in the order in which the report has them; known ones are left out."""
    together: dict[tuple[str, str, str], list[ScanFinding]] = {}
    for finding in findings:
        if not finding.known:
            detail = str(finding.evidence.get("format", ""))
            together.setdefault((finding.severity, finding.rule, detail), []).append(finding)
    return [_group(found, detail, ink, verbose) for (_, _, detail), found in together.items()]


def _group(found: list[ScanFinding], detail: str, ink: Ink, verbose: bool) -> Group:
    first = found[0]
    tensors = len({(finding.file, finding.tensor) for finding in found if finding.tensor is not None})
    what = numbers.plural(tensors, "tensor") if tensors == len(found) else numbers.plural(len(found), "finding")
    words = f"{first.rule} ({detail})" if detail else first.rule
    files = {finding.file for finding in found}
    shown = found if verbose else found[:FEW]
    if not verbose and first.severity == "note":
        shown = found[:1] if len(found) > 1 else found
    lines = [_line(finding, ink, with_file=len(files) > 1 or finding.tensor is None or verbose) for finding in shown]
    more = len(found) - len(shown)
    if more:
        lines.append(f"... and {more:,} more")
    remedies = list(dict.fromkeys(finding.remedy for finding in found if finding.remedy))
    remedy = ink.prose(remedies[0]) if len(remedies) == 1 and first.severity != "note" else None
    return Group(first.severity, f"{first.severity}: {ink.prose(words)}, {what}", tuple(lines), remedy)


def _line(finding: ScanFinding, ink: Ink, *, with_file: bool) -> str:
    parts = []
    if finding.tensor is not None:
        kind = (
            f" ({finding.dtype}{numbers.index(finding.shape)})" if finding.dtype and finding.shape is not None else ""
        )
        parts.append(f"{ink.name(finding.tensor)}{ink.prose(kind)}")
    if with_file and finding.file is not None:
        name = os.path.basename(os.path.normpath(finding.file)) if finding.tensor is not None else finding.file
        parts.append(("in " if parts else "") + ink.name(name))
    place = " ".join(parts)
    return f"{place}: {ink.prose(finding.message)}" if place else ink.prose(finding.message)


def facts(report: ScanReport, ink: Ink, *, verbose: bool) -> list[tuple[str, str]]:
    """Return what was looked at and under what conditions, as (name, words)."""
    summary = report.summary
    formats = ", ".join(ink.prose(kind) for kind in summary.formats) or "none"
    words = (
        f"{numbers.of(summary.scanned, summary.tensors, 'tensor') if summary.tensors else 'no tensors'} "
        f"({numbers.plural(summary.elements, 'element')}, {size_words(summary.bytes)}) in "
        f"{numbers.plural(summary.files, 'file')} ({formats}) in {numbers.seconds(summary.seconds)}; "
        f"{summary.skipped:,} skipped, {summary.unreadable:,} unreadable"
    )
    if summary.not_scanned:
        words += f"; {numbers.plural(summary.not_scanned, 'file')} without tensors or not scanned"
    made = [("Scanned", words)]
    known = sum(finding.known for finding in report.findings)
    if known:
        made.append(("Known", f"{numbers.plural(known, 'finding')} that the baseline lists"))
    if report.error is not None:
        made.append(("Not usable", ink.prose(report.error)))
    casts = report.conditions.get("casts")
    if isinstance(casts, list | tuple):
        judged = ", ".join(ink.prose(str(cast)) for cast in casts) or "none"
        made.append(("Casts judged", judged))
    if verbose:
        rest = {key: value for key, value in report.conditions.items() if key != "casts"}
        made.append(("Conditions", "; ".join(f"{key} {ink.prose(numbers.setting(v))}" for key, v in rest.items())))
    return made
