"""Which changes between two checkpoints get a line, and what is said about the rest."""

from __future__ import annotations

from collections import Counter

from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.scan_text import size_words
from nanprobe.scan_records import Change, DiffReport

__all__ = ["diff_facts", "shown_changes"]

_WORDS = {"added": "added", "removed": "removed", "reshaped": "reshaped"}
_MOST = 40
_FEW = 6


def shown_changes(report: DiffReport, *, verbose: bool) -> tuple[list[Change], str]:
    """Return the changes to show, worst first, and how many more there are, in words ("" when none)."""
    if verbose:
        return list(report.changes), ""
    moved = [change for change in report.changes if change.kind != "unchanged"]
    shown = moved[:_MOST]
    left: list[str] = []
    if len(moved) > len(shown):
        kinds = Counter(_WORDS.get(change.kind, "changed less") for change in moved[_MOST:])
        left.extend(f"{count:,} more {words}" for words, count in kinds.items())
    same = len(report.changes) - len(moved)
    if same:
        left.append(f"{numbers.plural(same, 'tensor')} unchanged")
    return shown, ", ".join(left)


def diff_facts(report: DiffReport, ink: Ink, *, verbose: bool) -> list[tuple[str, str]]:
    """Return what never moved, what jumped, and what was compared."""
    made = []
    if report.jumped:
        made.append(("Jumped", _some(report.jumped, ink, verbose) + " moved far more than the others"))
    if report.unmoved:
        made.append(("Never moved", _some(report.unmoved, ink, verbose)))
    summary = report.summary
    words = f"{numbers.plural(summary.tensors, 'tensor')}, {size_words(summary.bytes)} of both sides"
    made.append(("Compared", f"{words}, in {numbers.seconds(summary.seconds)}"))
    return made


def _some(names: tuple[str, ...], ink: Ink, verbose: bool) -> str:
    shown = names if verbose else names[:_FEW]
    more = len(names) - len(shown)
    return ", ".join(ink.name(name) for name in shown) + (f" and {more:,} more" if more else "")
