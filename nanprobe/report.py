"""A report as the Python interface hands it out: the record, and what one does with it.

Reading and rendering a saved report needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanprobe import serialize
from nanprobe.exit_codes import verdict_exit_code
from nanprobe.records import Finding, FirstBad, PrecisionResult, ReplayReport
from nanprobe.render import render
from nanprobe.scan_records import ScanFinding
from nanprobe.serialize import AnyReport

__all__ = ["Report", "load_report"]


class Report:
    """What a command found. ``record`` holds everything; the properties are what scripts ask for most.

    Two reports are equal when their records are.
    """

    __slots__ = ("record",)

    def __init__(self, record: AnyReport) -> None:
        self.record = record

    @property
    def verdict(self) -> str | None:
        """Return "clean", "precision", "not-precision" or "inconclusive"; None for a scan, which has findings only."""
        return self.record.verdict if isinstance(self.record, ReplayReport) else None

    @property
    def exit_code(self) -> int:
        """Return the exit code that the command would end with (findings of severity error count)."""
        return self.record.exit_code

    @property
    def first_bad(self) -> FirstBad | None:
        """Return the worst precision's origin of non-finite values, None when there is none."""
        return self.record.first_bad if isinstance(self.record, ReplayReport) else None

    @property
    def findings(self) -> tuple[Finding, ...] | tuple[ScanFinding, ...]:
        """Return all findings, ignored and known ones included."""
        return self.record.findings

    @property
    def precisions(self) -> dict[str, PrecisionResult]:
        """Return how each precision ended, by name; nothing for a scan."""
        return dict(self.record.precisions) if isinstance(self.record, ReplayReport) else {}

    def exit_code_for(self, fail_on: str) -> int:
        """Return the exit code under another threshold: "error", "warning" or "never"."""
        return verdict_exit_code(self.record, fail_on)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with the keys of the JSON document."""
        return serialize.to_dict(self.record)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as strict JSON; non-finite numbers are the strings "nan", "inf" and "-inf"."""
        return serialize.to_json(self.record, indent)

    def render(self, format: str = "table", *, width: int = 100, color: bool = False, verbose: bool = False) -> str:
        """Return the report as text in one of the formats; ``width`` is in columns."""
        return render(self.record, format, width=width, color=color, verbose=verbose)

    def __eq__(self, other: object) -> bool:
        """Return whether both hold the same record."""
        return isinstance(other, Report) and self.record == other.record

    def __hash__(self) -> int:
        """Return the identity's hash: records hold mappings and cannot be hashed."""
        return id(self)

    def __repr__(self) -> str:
        """Return the command and the verdict, or how many findings a scan has."""
        said = self.verdict if self.verdict is not None else f"{len(self.record.findings)} findings"
        return f"<nanprobe.Report {self.record.command}: {said}>"


def load_report(path: str | Path) -> Report:
    """Read a report that was saved as JSON; UsageError when the file is missing, damaged or no report."""
    return Report(serialize.load_report(path))
