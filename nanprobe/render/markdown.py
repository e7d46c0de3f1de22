"""The markdown format: what the table format says, as GitHub-flavoured Markdown for an issue or a pull request."""

from __future__ import annotations

from dataclasses import replace

from tabulate import tabulate

from nanprobe.records import ReplayReport
from nanprobe.render import sections
from nanprobe.render.columns import RICHEST, Columns, has_local, module_cell
from nanprobe.render.ink import MarkdownInk
from nanprobe.render.legend import legend
from nanprobe.render.lookup import path_of
from nanprobe.render.options import Options
from nanprobe.render.rows import Fold, Item, Note, Shown, fold_words, select
from nanprobe.render.sentences import headline, precision_lines, reasons
from nanprobe.render.step import step_lines

__all__ = ["markdown"]


def markdown(report: ReplayReport, options: Options) -> str:
    """Return the report as Markdown; the terminal's width and colour play no part."""
    ink, verbose = MarkdownInk(), options.verbose
    items = select(report, ink, verbose=verbose)
    folded = any(isinstance(item, Fold) for item in items)
    blocks = [f"## nanprobe {ink.prose(report.command)}", f"**{headline(report, ink)}**", _subject(report, ink)]
    blocks.append(
        "\n".join(
            f"- **{ink.prose(line.precision)}** {line.verdict}" + (f": {line.details}" if line.details else "")
            for line in precision_lines(report, ink)
        )
    )
    blocks += reasons(report, ink)
    if items:
        blocks += _table(report, items, ink)
    for title, lines in (
        ("Gradients", sections.gradients(report, ink, verbose=verbose)),
        ("Step", step_lines(report, ink)),
        ("Also found", sections.findings(report, ink, verbose=verbose)),
        ("What to look at next", sections.next_steps(report, ink, folded=folded)),
    ):
        if lines:
            blocks.append(f"### {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    facts = [f"Coverage: {sections.coverage(report, ink, verbose=verbose)}"]
    facts += [f"Not measured: {line}" for line in sections.not_measured(report, ink, verbose=verbose)]
    facts.append(f"Replayed: {sections.conditions(report, ink, verbose=verbose)}")
    facts += [f"Note: {line}" for line in sections.notes(report, ink)]
    if verbose:
        facts.append(f"Time: {sections.timings(report, ink)}")
    blocks.append("### Coverage and conditions\n\n" + "\n".join(f"- {fact}" for fact in facts))
    return "\n\n".join(blocks) + "\n"


def _subject(report: ReplayReport, ink: MarkdownInk) -> str:
    """Return which run this is about, and what made the report."""
    given = [(what, path_of(report, what)) for what in ("config", "checkpoint", "batch")]
    parts = [f"{what} {ink.name(path)}" for what, path in given if path is not None]
    return ", ".join([*parts, f"{ink.prose(report.tool.name)} {ink.prose(report.tool.version)}"])


def _table(report: ReplayReport, items: list[Item], ink: MarkdownInk) -> list[str]:
    """Return the table, what lies between its rows (a table has no line across its columns), and the legend."""
    columns = Columns.of(
        report, replace(RICHEST, local=has_local(item.row for item in items if isinstance(item, Shown)))
    )
    titles = ["", *(ink.prose(title) for title in columns.titles())]
    body: list[list[str]] = []
    between: list[str] = []
    for item in items:
        match item:
            case Shown(row, mark):
                body.append([mark, ink.name(module_cell(row)), *columns.cells(row, ink)])
            case Fold(rows):
                body.append(["...", fold_words(report, rows)])
            case Note(text, mark):
                between.append(f"- {len(between) + 1}: {text}")
                body.append([mark, f"*{len(between)}, see below*"])
    padded = [[_cell(text) for text in line] + [""] * (len(titles) - len(line)) for line in body]
    align = ["left"] * 3 + ["right"] * (len(titles) - 3)
    grid = tabulate(padded, headers=titles, tablefmt="pipe", disable_numparse=True, colalign=align)
    meaning = "; ".join(ink.prose(part) for part in legend(report, items, columns))
    return [grid, *(["\n".join(between)] if between else []), f"*{meaning}*"]


def _cell(text: str) -> str:
    """Return ``text`` for a table's cell, where a bar ends the cell even inside a code span."""
    return text.replace("|", "\\|")
