"""Findings that the readers already made, and what was not looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nanprobe.checkpoints.records import CheckpointIndex, Problem
from nanprobe.scan.rules.finding import REMEDIES
from nanprobe.scan.subject import Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["judge_structure", "problem_finding"]

_MOST_CLASSES = 20
_PLAIN = (
    "torch.",
    "collections.",
    "numpy.",
    "_codecs.",
    "copyreg.",
    "builtins.",
    "__builtin__.",
    "copy_reg.",
    "pathlib.",
    "?",
)
"""Beginnings of the names that tensors, arrays and plain containers are made of."""


def problem_finding(problem: Problem, tensors: Mapping[str, Tensor]) -> ScanFinding:
    """Return a reader's problem as a finding."""
    tensor = tensors.get(problem.tensor) if problem.tensor is not None else None
    return ScanFinding(
        rule=problem.rule,
        severity=problem.severity,
        message=problem.message,
        file=problem.file,
        tensor=problem.tensor,
        dtype=tensor.entry.dtype if tensor else None,
        shape=tensor.entry.shape if tensor else None,
        evidence=dict(problem.evidence),
        remedy=REMEDIES.get(problem.rule),
    )


def judge_structure(
    index: CheckpointIndex, tensors: Mapping[str, Tensor], more: Iterable[Problem] = ()
) -> Iterator[ScanFinding]:
    """Yield the problems of the files, those met while reading, and notes on what was not looked at."""
    told: set[tuple[str, str, str | None, str]] = set()
    for problem in (*index.problems, *more):
        key = (problem.rule, problem.file, problem.tensor, problem.message)
        if key not in told:
            told.add(key)
            yield problem_finding(problem, tensors)
    for skipped in index.skipped:
        yield ScanFinding(
            rule="not-scanned", severity="note", message=f"it is not scanned: {skipped.reason}", file=skipped.file
        )
    named = _named(index)
    harmless = [name for name in index.foreign if name not in named and not name.startswith(_PLAIN)]
    if harmless:
        shown = ", ".join(harmless[:_MOST_CLASSES])
        more_words = f" and {len(harmless) - _MOST_CLASSES} more" if len(harmless) > _MOST_CLASSES else ""
        yield ScanFinding(
            rule="not-scanned",
            severity="note",
            message=f"objects of these classes were read as plain data and not looked into: {shown}{more_words}",
            file=index.path,
            evidence={"count": len(harmless), "names": harmless[:_MOST_CLASSES]},
        )


def _named(index: CheckpointIndex) -> set[str]:
    """Return the names that findings already tell about."""
    return {str(problem.evidence["name"]) for problem in index.problems if "name" in problem.evidence}
