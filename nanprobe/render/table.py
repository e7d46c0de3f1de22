"""The table format: the verdict in a sentence, the side-by-side table, and what to look at next, for a terminal."""

from __future__ import annotations

import textwrap

from nanprobe.records import ReplayReport
from nanprobe.render import sections
from nanprobe.render.grid import Grid, fitting_grid
from nanprobe.render.ink import Ink
from nanprobe.render.legend import legend
from nanprobe.render.names import neutral
from nanprobe.render.options import Options
from nanprobe.render.rows import ALSO, CULPRIT, Fold, Item, Note, Shown, fold_words, select
from nanprobe.render.sentences import headline, precision_lines, reasons
from nanprobe.render.step import step_lines
from nanprobe.render.style import Style

__all__ = ["table"]

_NARROWEST = 40
_TONES = {"precision": "bad", "not-precision": "bad", "inconclusive": "unsure", "clean": "good"}


def table(report: ReplayReport, options: Options) -> str:
    """Return the report as text for a terminal of ``options.width`` columns."""
    ink, style, width = Ink(), Style(color=options.color), max(options.width, _NARROWEST)
    items = select(report, ink, verbose=options.verbose)
    folded = any(isinstance(item, Fold) for item in items)
    blocks = [
        _painted(style, _TONES.get(report.verdict, ""), _wrapped(headline(report, ink), width)),
        _precision_block(report, ink, style, width),
    ]
    if paragraphs := reasons(report, ink):
        blocks.append([line for paragraph in paragraphs for line in _wrapped(paragraph, width)])
    if items:
        blocks.append(_table_block(report, items, style, width))
    for title, lines in (
        ("Gradients", sections.gradients(report, ink, verbose=options.verbose)),
        ("Step", step_lines(report, ink)),
        ("Also found", sections.findings(report, ink, verbose=options.verbose)),
        ("What to look at next", sections.next_steps(report, ink, folded=folded)),
    ):
        if lines:
            blocks.append([style.paint("title", title)] + [part for line in lines for part in _bullet(line, width)])
    facts = [("Coverage", sections.coverage(report, ink, verbose=options.verbose))]
    facts += [("Not measured", line) for line in sections.not_measured(report, ink, verbose=options.verbose)]
    facts.append(("Replayed", sections.conditions(report, ink, verbose=options.verbose)))
    facts += [("Note", line) for line in sections.notes(report, ink)]
    if options.verbose:
        facts.append(("Time", sections.timings(report, ink)))
    blocks.append([part for name, fact in facts if fact for part in _wrapped(f"{name}: {fact}", width, indent="  ")])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _precision_block(report: ReplayReport, ink: Ink, style: Style, width: int) -> list[str]:
    lines = precision_lines(report, ink)
    names = max(len(neutral(line.precision)) for line in lines)
    verdicts = max(len(line.verdict) for line in lines)
    block = []
    for line in lines:
        start = f"  {neutral(line.precision):<{names}}  {line.verdict:<{verdicts}}  "
        wrapped = _wrapped(start + line.details, width, indent=" " * len(start))
        block += _painted(style, line.tone, [part.rstrip() for part in wrapped])
    return block


def _table_block(report: ReplayReport, items: list[Item], style: Style, width: int) -> list[str]:
    shown = [item for item in items if isinstance(item, Shown)]
    grid = fitting_grid(report, shown, width) if shown else None
    lines = grid.lines(width) if grid is not None else []
    block = [style.paint("title", line) for line in lines[:2]]
    body = iter(lines[2:])
    for item in items:
        match item:
            case Shown(_, mark):
                block.append(style.paint("bad" if mark == CULPRIT else "unsure" if mark == ALSO else "", next(body)))
            case Fold(rows):
                block += _painted(
                    style, "dim", _wrapped(f"    ... {fold_words(report, rows)}", width, indent="        ")
                )
            case Note(text, mark):
                block += _painted(style, "bad", _wrapped(f"{mark}  {text}", width, indent="    "))
    return block + _painted(style, "dim", _legend(report, items, grid, width))


def _legend(report: ReplayReport, items: list[Item], grid: Grid | None, width: int) -> list[str]:
    columns = grid.columns if grid is not None else None
    return _wrapped("    " + "; ".join(legend(report, items, columns)), width, indent="    ")


def _bullet(line: str, width: int) -> list[str]:
    return _wrapped(f"  - {line}", width, indent="    ")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return ``text`` in lines of at most ``width``; names are never broken, so that they can be copied."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ) or [""]


def _painted(style: Style, tone: str, lines: list[str]) -> list[str]:
    return [style.paint(tone, line) for line in lines]
