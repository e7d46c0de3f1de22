"""Which exit code a finished report ends with, as a pure function of the report.

0: nothing at or above the threshold; 1: findings; 3: the reference or every low precision raised, so that nothing was
compared. Code 2 (unusable input) comes with a report only where one of several checkpoints could not be used.
"""

from __future__ import annotations

from nanprobe.records import ReplayReport
from nanprobe.scan_records import DiffReport, ScanReport

__all__ = ["FAIL_ON", "FOUND", "INCOMPLETE", "INTERRUPTED", "OK", "UNUSABLE", "verdict_exit_code"]

OK = 0
FOUND = 1
UNUSABLE = 2
INCOMPLETE = 3
INTERRUPTED = 130

FAIL_ON: tuple[str, ...] = ("error", "warning", "never")
"""Lowest severity that makes the exit code 1; a note never does."""

_COUNTED = {"error": ("error",), "warning": ("error", "warning"), "never": ()}


def verdict_exit_code(report: ReplayReport | ScanReport | DiffReport, fail_on: str = "error") -> int:
    """Return the exit code of a finished command: 3 when nothing was compared, 1 on findings at ``fail_on``, else 0.

    Ignored and known findings count for nothing. KeyError when ``fail_on`` is none of :data:`FAIL_ON`.
    """
    counted = _COUNTED[fail_on]
    if not isinstance(report, ReplayReport):
        if report.error is not None:
            return UNUSABLE
        return FOUND if any(one.severity in counted and not one.known for one in report.findings) else OK
    low = [result for name, result in report.precisions.items() if name != report.reference]
    reference = report.precisions.get(report.reference)
    if reference is None or not reference.completed or (low and not any(result.completed for result in low)):
        return INCOMPLETE
    found = any(finding.severity in counted and not finding.ignored for finding in report.findings)
    return FOUND if found else OK
