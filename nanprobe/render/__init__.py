"""Reports as text. A format is a pure function of a report: it returns text and writes nothing.

A report that was just made and one that was read back from its file are shown alike, in every format; nothing here
needs torch or a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nanprobe.errors import UsageError
from nanprobe.records import ReplayReport
from nanprobe.render.as_json import as_json
from nanprobe.render.markdown import markdown
from nanprobe.render.options import Options
from nanprobe.render.scan_markdown import diff_markdown, scan_markdown
from nanprobe.render.scan_table import diff_table, scan_table
from nanprobe.render.table import table
from nanprobe.scan_records import DiffReport, ScanReport
from nanprobe.serialize import AnyReport

__all__ = ["FORMATS", "render"]

_RENDERERS: Mapping[str, Callable[[ReplayReport, Options], str]] = MappingProxyType(
    {"table": table, "json": as_json, "markdown": markdown}
)
_SCAN_RENDERERS: Mapping[str, Callable[[ScanReport, Options], str]] = MappingProxyType(
    {"table": scan_table, "json": as_json, "markdown": scan_markdown}
)
_DIFF_RENDERERS: Mapping[str, Callable[[DiffReport, Options], str]] = MappingProxyType(
    {"table": diff_table, "json": as_json, "markdown": diff_markdown}
)

FORMATS: tuple[str, ...] = tuple(_RENDERERS)
"""The formats that exist, the default first."""


def render(
    report: AnyReport, format: str = "table", *, width: int = 100, color: bool = False, verbose: bool = False
) -> str:
    """Return ``report`` in ``format``, ending in one line break.

    ``width`` is the terminal's in characters, ``color`` allows terminal escapes; both matter to the table only.
    ``verbose`` shows every row, the timings and all conditions. Raises UsageError when there is no such format.
    """
    if format not in _RENDERERS:
        raise UsageError(f"there is no format {format!r}; the formats are {', '.join(FORMATS)}.")
    options = Options(width=width, color=color, verbose=verbose)
    if isinstance(report, ScanReport):
        return _SCAN_RENDERERS[format](report, options)
    if isinstance(report, DiffReport):
        return _DIFF_RENDERERS[format](report, options)
    return _RENDERERS[format](report, options)
