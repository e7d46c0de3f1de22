"""All rules over one checkpoint, and the order in which findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nanprobe.checkpoints.records import Damage, Problem
from nanprobe.records import SEVERITIES
from nanprobe.scan.rules.model import ModelShape, judge_model
from nanprobe.scan.rules.optimizer import judge_moment, judge_pairs, judge_steps
from nanprobe.scan.rules.relations import judge_averages, judge_declared_type, judge_storages, judge_ties
from nanprobe.scan.rules.scalars import judge_scalars
from nanprobe.scan.rules.structure import judge_structure, problem_finding
from nanprobe.scan.rules.values import judge_values
from nanprobe.scan.subject import Looks, Subject, by_name
from nanprobe.scan_records import ScanFinding

__all__ = ["RULES", "judge", "sorted_findings"]

RULES: tuple[str, ...] = (
    "unsafe-pickle", "corrupt-file", "truncated-file", "missing-shard", "index-mismatch", "shape-mismatch",
    "nonfinite-weight", "nonfinite-optimizer-state", "negative-second-moment", "nonfinite-scalar",
    "loss-scale-nonfinite", "loss-scale-collapsed", "cast-overflow", "zero-second-moment", "step-stalled", "all-zero",
    "constant", "subnormal", "outlier", "dead-rows", "tied-mismatch", "ema-mismatch", "missing-key", "unexpected-key",
    "learning-rate", "loss-scale-absent", "cast-underflow", "near-limit", "dtype-mismatch", "storage-bloat",
    "not-scanned",
)  # fmt: skip
"""Rules in the order in which findings of one severity are shown."""


def judge(
    subject: Subject, looks: Looks, problems: Iterable[Problem] = (), model: ModelShape | None = None
) -> list[ScanFinding]:
    """Return everything that is wrong with a checkpoint; ``problems`` were met while its values were read."""
    tensors = by_name(subject.tensors)
    found = list(judge_structure(subject.index, tensors, problems))
    for rules in (_values(subject, looks), judge_pairs(subject.tensors, looks), judge_ties(subject, looks)):
        found.extend(_guarded(rules))
    found.extend(judge_steps(subject.tensors, subject.scalars))
    found.extend(judge_scalars(subject))
    found.extend(judge_averages(subject))
    found.extend(judge_storages(subject))
    found.extend(judge_declared_type(subject))
    if model is not None:
        found.extend(judge_model(subject, model))
    return found


def _values(subject: Subject, looks: Looks) -> Iterator[ScanFinding]:
    for tensor in subject.tensors:
        # A file that changes while it is read costs one tensor its second look, not the report.
        if tensor.role.role == "moment":
            yield from _guarded(judge_moment(tensor, looks))
        else:
            yield from _guarded(judge_values(tensor, subject.casts, looks))


def _guarded(rules: Iterator[ScanFinding]) -> Iterator[ScanFinding]:
    """Yield findings; bytes that have gone since they were counted become one more."""
    try:
        yield from rules
    except Damage as damage:
        yield problem_finding(damage.problem, {})


def sorted_findings(findings: Iterable[ScanFinding]) -> list[ScanFinding]:
    """Return findings worst first: by severity, then by rule, in the order of the checkpoint; known ones last."""
    ranks = {rule: rank for rank, rule in enumerate(RULES)}
    return sorted(
        findings,
        key=lambda finding: (
            finding.known,
            SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else len(SEVERITIES),
            ranks.get(finding.rule, len(RULES)),
        ),
    )
