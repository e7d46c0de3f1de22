"""The json format: the whole report, as the serialiser writes it."""

from __future__ import annotations

from nanprobe.render.options import Options
from nanprobe.serialize import AnyReport, to_json

__all__ = ["as_json"]


def as_json(report: AnyReport, options: Options) -> str:
    """Return the report as one strict JSON document; no option changes it."""
    del options
    return to_json(report) + "\n"
