"""The side-by-side rows as lines of text of one width, one line for each visit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from nanprobe.records import ReplayReport
from nanprobe.render.columns import LAYOUTS, Columns, has_local, module_cell
from nanprobe.render.ink import Ink
from nanprobe.render.names import neutral, shortened_path
from nanprobe.render.rows import CULPRIT, Shown

__all__ = ["Grid", "fitting_grid"]

_GAP = 2
"""Spaces between columns."""

_COMFORTABLE_NAME = 30
"""Characters from which on a module's path may be shortened rather than columns left out."""

_SHORTEST_NAME = 12


@dataclass(frozen=True, slots=True)
class Grid:
    """Marks, module names (whole) and the cells beside them, under their columns."""

    columns: Columns
    marks: Sequence[str]
    names: Sequence[str]
    cells: Sequence[Sequence[str]]

    def room(self, width: int) -> int:
        """Return how many of ``width`` characters the other columns leave for the module's path."""
        titles = self.columns.titles()[1:]
        widths = [max(len(title), *(len(row[at]) for row in self.cells)) for at, title in enumerate(titles)]
        return width - len(CULPRIT) - sum(widths) - _GAP * (len(titles) + 1)

    def lines(self, width: int) -> list[str]:
        """Return the lines: the titles, a rule, then one for each row."""
        room = max(self.room(width), _SHORTEST_NAME)
        body = [
            [mark, shortened_path(name, room), *row]
            for mark, name, row in zip(self.marks, self.names, self.cells, strict=True)
        ]
        titles = ["", *self.columns.titles()]
        left = 3 if self.columns.layout.type_width else 2
        align = ["left"] * left + ["right"] * (len(titles) - left)
        # The titles go in as a row of their own: tabulate widens a column by two characters for a proper header.
        widths = [max(len(row[at]) for row in [titles, *body]) for at in range(len(titles))]
        rule = ["-" * wide for wide in [max(widths[0], len(CULPRIT)), *widths[1:]]]
        text = tabulate([titles, rule, *body], tablefmt="plain", disable_numparse=True, colalign=align)
        return [line.rstrip() for line in text.split("\n")]


def fitting_grid(report: ReplayReport, shown: Sequence[Shown], width: int) -> Grid:
    """Return ``shown`` (at least one row) in the richest layout that leaves the module paths room."""
    ink = Ink()
    marks = [item.mark for item in shown]
    names = [neutral(module_cell(item.row)) for item in shown]
    wanted = min(max(len(name) for name in names), _COMFORTABLE_NAME)
    with_local = has_local(item.row for item in shown)
    for layout in LAYOUTS:
        if layout.local and not with_local:
            continue
        columns = Columns.of(report, layout)
        grid = Grid(columns, marks, names, [columns.cells(item.row, ink) for item in shown])
        if grid.room(width) >= wanted:
            break
    return grid
