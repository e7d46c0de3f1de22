"""What the marks and columns of a side-by-side table mean, for those that occur in it."""

from __future__ import annotations

from nanprobe.records import ReplayReport
from nanprobe.render.columns import Columns, has_local
from nanprobe.render.names import ROOT
from nanprobe.render.rows import ALSO, CULPRIT, Fold, Item, Shown

__all__ = ["legend"]


def legend(report: ReplayReport, items: list[Item], columns: Columns | None) -> list[str]:
    """Return one explanation for each mark and column that ``items`` show; ``columns`` is None without rows."""
    shown = [item for item in items if isinstance(item, Shown)]
    marks = {item.mark for item in items if not isinstance(item, Fold)}
    reference = report.reference.upper()
    parts = []
    if CULPRIT in marks:
        parts.append(f"{CULPRIT} goes wrong first")
    elif ALSO not in marks and any(isinstance(item, Fold) for item in items) and shown:
        parts.append("the rows shown have the largest errors")
    if ALSO in marks:
        too = " too" if CULPRIT in marks else ""
        parts.append(f"{ALSO} bad values arise here{too}, or end here (absorbed)")
    if any(item.row.visit for item in shown):
        parts.append("#n the visit of a module that is called again, from #0")
    if any(not item.row.module for item in shown):
        parts.append(f"{ROOT} the whole model")
    if any(item.row.phase == "backward" for item in shown):
        parts.append("grad the gradient that arrives at a module's outputs")
    if columns is None:
        return parts
    parts.append("numbers are largest magnitudes (absmax)")
    if columns.layout.merged:
        parts.append(f"err relative error against {reference}")
    else:
        parts.append(f"rel.err relative error against {reference}, accumulated")
    if columns.layout.local and has_local(report):
        parts.append(f"local the module's own error, on {reference}'s inputs")
    if columns.headroom:
        parts.append("bits of headroom below the format's largest value")
    return parts
