"""The markdown format of scans and comparisons of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from nanprobe.render.ink import MarkdownInk
from nanprobe.render.options import Options
from nanprobe.render.scan_grid import change_cells, change_titles, row_cells, row_titles
from nanprobe.render.scan_text import Group, diff_headline, facts, groups, scan_headline
from nanprobe.render.shown_changes import diff_facts, shown_changes
from nanprobe.scan_records import DiffReport, ScanReport

__all__ = ["diff_markdown", "scan_markdown"]


def scan_markdown(report: ScanReport, options: Options) -> str:
    """Return a scan as Markdown."""
    ink = MarkdownInk()
    blocks = [f"**{scan_headline(report, ink)}**"]
    blocks += [_group(group) for group in groups(report.findings, ink, verbose=options.verbose)]
    if report.tensors:
        blocks.append(_table(row_titles(), [row_cells(row, ink) for row in report.tensors], 4, ink))
    blocks.append("\n".join(f"- {name}: {words}" for name, words in facts(report, ink, verbose=options.verbose)))
    return "\n\n".join(blocks) + "\n"


def diff_markdown(report: DiffReport, options: Options) -> str:
    """Return a comparison as Markdown."""
    ink = MarkdownInk()
    blocks = [f"**{diff_headline(report, ink)}**"]
    blocks += [_group(group) for group in groups(report.findings, ink, verbose=options.verbose)]
    shown, more = shown_changes(report, verbose=options.verbose)
    if shown:
        blocks.append(_table(change_titles(), [change_cells(change, ink) for change in shown], 3, ink))
    if more:
        blocks.append(f"... {more}")
    blocks.append("\n".join(f"- {name}: {words}" for name, words in diff_facts(report, ink, verbose=options.verbose)))
    return "\n\n".join(blocks) + "\n"


def _group(group: Group) -> str:
    lines = [f"### {group.title}", "", *(f"- {line}" for line in group.lines)]
    if group.remedy is not None:
        lines += ["", f"Try: {group.remedy}"]
    return "\n".join(lines)


def _table(titles: Sequence[str], body: Sequence[Sequence[str]], left: int, ink: MarkdownInk) -> str:
    padded = [
        [_cell(ink.name(row[0])), *(_cell(cell) for cell in row[1:])] + [""] * (len(titles) - len(row)) for row in body
    ]
    align = ["left"] * left + ["right"] * (len(titles) - left)
    return tabulate(padded, headers=list(titles), tablefmt="pipe", disable_numparse=True, colalign=align)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
