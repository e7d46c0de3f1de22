"""The tables of a scan: every tensor with its statistics, and the changes between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.names import neutral, shortened_path
from nanprobe.scan_records import Change, TensorRow

__all__ = ["change_cells", "change_titles", "lines", "row_cells", "row_titles"]

_GAP = 2
_SHORTEST_NAME = 16


def row_titles() -> list[str]:
    """Return the titles of a tensor table."""
    return ["tensor", "role", "type", "shape", "NaN", "Inf", "zero", "subn.", "absmax", "min", "max", "mean", "rms"]


def row_cells(row: TensorRow, ink: Ink) -> list[str]:
    """Return the cells of one tensor; where there are no statistics, the reason."""
    start = [row.tensor, row.role, ink.prose(row.dtype), numbers.index(row.shape)]
    if row.note is not None:
        return [*start, ink.prose(row.note)]
    infinite = (row.posinf or 0) + (row.neginf or 0)
    counts = [numbers.count(value or 0) for value in (row.nan, infinite, row.zero, row.subnormal)]
    values = [numbers.magnitude(value) for value in (row.absmax, row.min, row.max, row.mean, row.rms)]
    return start + counts + values


def change_titles() -> list[str]:
    """Return the titles of a table of changes."""
    return ["tensor", "what", "type", "rel. change", "largest", "at", "cosine", "newly bad"]


def change_cells(change: Change, ink: Ink) -> list[str]:
    """Return the cells of one change."""
    kind = " > ".join(dict.fromkeys(kind for kind in (change.dtype_a, change.dtype_b) if kind is not None))
    where = numbers.index(change.index) if change.index is not None else ""
    if change.kind == "reshaped":
        where = f"{numbers.index(change.shape_a or ())} > {numbers.index(change.shape_b or ())}"
    return [
        change.tensor,
        change.kind,
        ink.prose(kind),
        numbers.error(change.rel_error),
        numbers.magnitude(change.max_abs),
        where,
        "-" if change.cosine is None else _cosine(change.cosine),
        numbers.count(change.newly_nonfinite) if change.newly_nonfinite else "",
    ]


def _cosine(value: float) -> str:
    """Return a cosine; one that is not quite 1 never reads as 1."""
    text = f"{value:.6f}"
    return f"{value:.3g}" if text in ("1.000000", "-1.000000") and abs(value) != 1 and abs(value) < 0.9999995 else text


def lines(titles: Sequence[str], body: Sequence[Sequence[str]], width: int, left: int) -> list[str]:
    """Return a table for a terminal: names are shortened to what the width leaves; ``left`` columns align left."""
    rest = [max([len(titles[at])] + [len(row[at]) for row in body if len(row) > at]) for at in range(1, len(titles))]
    room = max(width - sum(rest) - _GAP * len(rest), _SHORTEST_NAME)
    longest = max((len(neutral(row[0])) for row in body), default=0)
    room = max(room, _SHORTEST_NAME) if longest > room else longest
    padded = [[shortened_path(neutral(row[0]), room), *row[1:]] + [""] * (len(titles) - len(row)) for row in body]
    align = ["left"] * left + ["right"] * (len(titles) - left)
    text = tabulate([list(titles), *padded], tablefmt="plain", disable_numparse=True, colalign=align)
    made = [line.rstrip() for line in text.split("\n")]
    return [made[0], "-" * max(len(line) for line in made), *made[1:]]
