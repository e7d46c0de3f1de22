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
from nanprobe.render.table import table

__all__ = ["FORMATS", "render"]

_RENDERERS: Mapping[str, Callable[[ReplayReport, Options], str]] = MappingProxyType(
    {"table": table, "json": as_json, "markdown": markdown}
)

FORMATS: tuple[str, ...] = tuple(_RENDERERS)
"""The formats that exist, the default first."""


def render(
    report: ReplayReport, format: str = "table", *, width: int = 100, color: bool = False, verbose: bool = False
) -> str:
    """Return ``report`` in ``format``, ending in one line break.

    ``width`` is the terminal's in characters, ``color`` allows terminal escapes; both matter to the table only.
    ``verbose`` shows every row, the timings and all conditions. Raises UsageError when there is no such format.
    """
    renderer = _RENDERERS.get(format)
    if renderer is None:
        raise UsageError(f"there is no format {format!r}; the formats are {', '.join(FORMATS)}.")
    return renderer(report, Options(width=width, color=color, verbose=verbose))
