"""The markdown format: what the table format says, as GitHub-flavoured Markdown for an issue or a pull request."""

from __future__ import annotations

from dataclasses import replace

from tabulate import tabulate

from nanprobe.records import ReplayReport
from nanprobe.render import sections
from nanprobe.render.columns import RICHEST, Columns, has_local, module_cell
from nanprobe.render.ink import MarkdownInk
from nanprobe.render.options import Options
from nanprobe.render.rows import Fold, Item, Note, Shown, fold_words, select
from nanprobe.render.sentences import headline, precision_lines, reasons

__all__ = ["markdown"]


def markdown(report: ReplayReport, options: Options) -> str:
    """Return the report as Markdown; the terminal's width and colour play no part."""
    ink, verbose = MarkdownInk(), options.verbose
    items = select(report, ink, verbose=verbose)
    folded = any(isinstance(item, Fold) for item in items)
    blocks = [f"**{headline(report, ink)}**"]
    blocks.append(
        "\n".join(
            f"- **{ink.prose(line.precision)}** {line.verdict}" + (f": {line.details}" if line.details else "")
            for line in precision_lines(report, ink)
        )
    )
    blocks += reasons(report, ink)
    if items:
        blocks.append(_table(report, items, ink))
    for title, lines in (
        ("Gradients", sections.gradients(report, ink, verbose=verbose)),
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
    blocks.append("\n".join(f"- {fact}" for fact in facts))
    return "\n\n".join(blocks) + "\n"


def _table(report: ReplayReport, items: list[Item], ink: MarkdownInk) -> str:
    columns = Columns.of(report, replace(RICHEST, local=has_local(report)))
    titles = ["", *(ink.prose(title) for title in columns.titles())]
    body = []
    for item in items:
        match item:
            case Shown(row, mark):
                body.append([mark, ink.name(module_cell(row)), *columns.cells(row, ink)])
            case Fold(rows):
                body.append(["...", fold_words(report, rows)])
            case Note(text, mark):
                body.append([mark, text])
    padded = [[_cell(text) for text in line] + [""] * (len(titles) - len(line)) for line in body]
    align = ["left"] * 3 + ["right"] * (len(titles) - 3)
    return tabulate(padded, headers=titles, tablefmt="pipe", disable_numparse=True, colalign=align)


def _cell(text: str) -> str:
    """Return ``text`` for a table's cell, where a bar ends the cell even inside a code span."""
    return text.replace("|", "\\|")
