"""The table format of scans and comparisons of checkpoints, for a terminal."""

from __future__ import annotations

import textwrap

from nanprobe.render.ink import Ink
from nanprobe.render.options import Options
from nanprobe.render.scan_grid import change_cells, change_titles, lines, row_cells, row_titles
from nanprobe.render.scan_text import Group, diff_headline, facts, groups, scan_headline
from nanprobe.render.shown_changes import diff_facts, shown_changes
from nanprobe.render.style import Style
from nanprobe.scan_records import DiffReport, ScanReport

__all__ = ["diff_table", "scan_table"]

_NARROWEST = 40
_TONES = {"error": "bad", "warning": "unsure", "note": "dim"}


def scan_table(report: ScanReport, options: Options) -> str:
    """Return a scan as text for a terminal of ``options.width`` columns."""
    ink, style, width = Ink(), Style(color=options.color), max(options.width, _NARROWEST)
    tone = _worst_tone(report)
    blocks = [[style.paint(tone, line) for line in _wrapped(scan_headline(report, ink), width)]]
    blocks += [_group_block(group, style, width) for group in groups(report.findings, ink, verbose=options.verbose)]
    if report.tensors:
        table = lines(row_titles(), [row_cells(row, ink) for row in report.tensors], width, 4)
        blocks.append([style.paint("title", line) for line in table[:2]] + table[2:])
    told = facts(report, ink, verbose=options.verbose)
    blocks.append([part for name, words in told for part in _wrapped(f"{name}: {words}", width, "  ")])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def diff_table(report: DiffReport, options: Options) -> str:
    """Return a comparison as text for a terminal of ``options.width`` columns."""
    ink, style, width = Ink(), Style(color=options.color), max(options.width, _NARROWEST)
    tone = "bad" if report.summary.nonfinite else "title"
    blocks = [[style.paint(tone, line) for line in _wrapped(diff_headline(report, ink), width)]]
    blocks += [_group_block(group, style, width) for group in groups(report.findings, ink, verbose=options.verbose)]
    shown, more = shown_changes(report, verbose=options.verbose)
    if shown:
        table = lines(change_titles(), [change_cells(change, ink) for change in shown], width, 3)
        block = [style.paint("title", line) for line in table[:2]] + table[2:]
        blocks.append(block + ([style.paint("dim", f"... {more}")] if more else []))
    told = diff_facts(report, ink, verbose=options.verbose)
    blocks.append([part for name, words in told for part in _wrapped(f"{name}: {words}", width, "  ")])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _worst_tone(report: ScanReport) -> str:
    severities = {finding.severity for finding in report.findings if not finding.known}
    return "bad" if "error" in severities else "unsure" if "warning" in severities or report.error else "good"


def _group_block(group: Group, style: Style, width: int) -> list[str]:
    block = [style.paint(_TONES.get(group.severity, ""), line) for line in _wrapped(group.title, width, "  ")]
    for line in group.lines:
        block += _wrapped(f"  - {line}", width, "    ")
    if group.remedy is not None:
        block += _wrapped(f"  try: {group.remedy}", width, "    ")
    return block


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ) or [""]
