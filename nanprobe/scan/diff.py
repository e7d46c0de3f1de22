"""What changed between two checkpoints, tensor by tensor, whatever their formats and element types.

Both are streamed box by box, so that both can be larger than memory. Tensors belong together by name; the prefixes of
wrappers are taken off where that makes more of them fit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from nanprobe.checkpoints import CheckpointIndex, index_checkpoint
from nanprobe.checkpoints.records import Damage, TensorEntry
from nanprobe.errors import UsageError
from nanprobe.exit_codes import verdict_exit_code
from nanprobe.numerics.native import Kernels, load_kernels
from nanprobe.progress import SILENT, Progress
from nanprobe.records import Tool
from nanprobe.scan.compare import Compared, compare_tensors
from nanprobe.scan.look import Looker
from nanprobe.scan.measure import COMPILE_FROM, COMPILED_FROM, default_workers
from nanprobe.scan.names import fitting_prefixes
from nanprobe.scan.roles import role_of
from nanprobe.scan.rules.finding import REMEDIES
from nanprobe.scan.rules.structure import problem_finding
from nanprobe.scan_records import Change, DiffReport, DiffSummary, ScanFinding
from nanprobe.version import __version__

__all__ = ["JUMP", "DiffOptions", "diff"]

JUMP = 10.0
"""Times the median relative change of the weights from which on a parameter counts as jumped."""

_FEWEST = 4
"""Weights that must have changed before a median says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """``include`` and ``exclude`` are patterns of tensor names; ``workers`` is the number of threads."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint: its tensors by name, the first of each."""

    path: str
    index: CheckpointIndex
    tensors: dict[str, TensorEntry]


def diff(a: str, b: str, options: DiffOptions | None = None, progress: Progress = SILENT) -> DiffReport:
    """Compare the checkpoint at ``b`` with the one at ``a`` and return the report.

    UsageError when one of them cannot be used, or when they have no tensor in common by name.
    """
    options = options or DiffOptions()
    started = time.perf_counter()
    one, other = _side(a, options), _side(b, options)
    strip, add = fitting_prefixes(other.tensors, one.tensors)
    fitted = {
        add + name[len(strip) :] if name.startswith(strip) else name: entry for name, entry in other.tensors.items()
    }
    common = [name for name in one.tensors if name in fitted]
    if not common:
        raise UsageError(f"{a} and {b} have no tensor in common: the first has {_some(one)}, the second {_some(other)}")
    progress.stage("compare", len(common))
    changes: list[Change] = []
    read = 0
    for change, bytes_read in _compare_all(one, other, fitted, common, options, progress):
        changes.append(change)
        read += bytes_read
    changes += [_alone(name, entry, "removed") for name, entry in one.tensors.items() if name not in fitted]
    changes += [_alone(name, entry, "added") for name, entry in fitted.items() if name not in one.tensors]
    changes.sort(key=_order)
    findings = [*_findings(changes, one, fitted), *_problems(one), *_problems(other)]
    weights = [change for change in changes if change.role == "weight" and change.kind in ("changed", "unchanged")]
    report = DiffReport(
        tool=Tool(version=__version__),
        exit_code=0,
        subject={"a": a, "b": b},
        summary=_summary(changes, read, started),
        changes=tuple(changes),
        findings=tuple(findings),
        unmoved=tuple(change.tensor for change in weights if change.kind == "unchanged"),
        jumped=_jumped(weights),
    )
    return replace(report, exit_code=verdict_exit_code(report))


def _side(path: str, options: DiffOptions) -> _Side:
    index = index_checkpoint(path)
    tensors: dict[str, TensorEntry] = {}
    for entry in index.tensors:
        if entry.layout not in ("placeholder", "meta") and _chosen(entry.name, options):
            tensors.setdefault(entry.name, entry)
    if not tensors:
        problem = next((problem.message for problem in index.problems if problem.blocking), None)
        why = f": {problem}" if problem else "" if not index.tensors else " that --include and --exclude leave"
        raise UsageError(f"{path} holds no tensors{why}")
    return _Side(path, index, tensors)


def _chosen(name: str, options: DiffOptions) -> bool:
    if options.include and not any(fnmatchcase(name, pattern) for pattern in options.include):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in options.exclude)


def _some(side: _Side) -> str:
    names = list(side.tensors)
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _compare_all(
    one: _Side, other: _Side, fitted: dict[str, TensorEntry], common: Sequence[str], options: DiffOptions,
    progress: Progress,
) -> Iterator[tuple[Change, int]]:  # fmt: skip
    size = sum(storage.size for side in (one, other) for storage in side.index.storages.values())
    kernels = load_kernels(compile_missing=size >= COMPILE_FROM) if size >= COMPILED_FROM else None
    workers = max(1, min(options.workers or default_workers(), len(common)))

    def run(names: Sequence[str]) -> Iterator[tuple[Change, int]]:
        with Looker(one.index.storages) as looks_a, Looker(other.index.storages) as looks_b:
            for name in names:
                yield _compare(name, one.tensors[name], looks_a, fitted[name], looks_b, kernels)
                progress.step(detail=name)

    if workers == 1:
        yield from run(common)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="nanprobe-diff") as pool:
        # Dealt out by size, so that the threads end at about the same time.
        piles: list[list[str]] = [[] for _ in range(workers)]
        loads = [0] * workers
        for name in sorted(common, key=lambda name: -one.tensors[name].elements):
            least = loads.index(min(loads))
            piles[least].append(name)
            loads[least] += one.tensors[name].elements + 1000
        for made in pool.map(lambda names: list(run(names)), piles):
            yield from made


def _compare(
    name: str, a: TensorEntry, looks_a: Looker, b: TensorEntry, looks_b: Looker, kernels: Kernels | None
) -> tuple[Change, int]:  # fmt: skip
    change = Change(
        tensor=name,
        kind="changed",
        role=role_of(a).role,
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        shape_a=a.shape,
        shape_b=b.shape,
        elements=a.elements,
    )
    if a.shape != b.shape:
        return replace(change, kind="reshaped"), 0
    if a.elements == 0:
        return replace(change, kind="unchanged", rel_error=0.0), 0
    for entry, looks in ((a, looks_a), (b, looks_b)):
        if not looks.can(entry):
            return replace(change, kind="unreadable", note=entry.unreadable or "its values are not decoded"), 0
    try:
        found = compare_tensors(looks_a, a, looks_b, b, kernels)
    except Damage as damage:
        return replace(change, kind="unreadable", note=damage.problem.message), 0
    except OSError as error:
        return replace(change, kind="unreadable", note=f"it cannot be read: {error.strerror or error}"), 0
    return _changed(change, found), found.read


def _changed(change: Change, found: Compared) -> Change:
    kind = "nonfinite" if found.newly_nonfinite else "changed" if found.changed else "unchanged"
    return replace(
        change,
        kind=kind,
        rel_error=found.rel_error,
        max_abs=found.max_abs,
        index=found.index,
        cosine=found.cosine,
        changed=found.changed,
        newly_nonfinite=found.newly_nonfinite,
        repaired=found.repaired,
        first_index=found.first_index,
    )


def _alone(name: str, entry: TensorEntry, kind: str) -> Change:
    removed = kind == "removed"
    return Change(
        tensor=name,
        kind=kind,
        role=role_of(entry).role,
        dtype_a=entry.dtype if removed else None,
        dtype_b=None if removed else entry.dtype,
        shape_a=entry.shape if removed else None,
        shape_b=None if removed else entry.shape,
        elements=entry.elements,
    )


def _order(change: Change) -> tuple[int, float, float]:
    """Worst first: by relative change, then by the count of newly non-finite elements; those without a figure last."""
    if change.rel_error is None:
        return 1, 0.0, 0.0
    return 0, -change.rel_error, -float(change.newly_nonfinite)


def _findings(changes: Sequence[Change], one: _Side, fitted: dict[str, TensorEntry]) -> Iterator[ScanFinding]:
    for change in changes:
        entry = fitted.get(change.tensor) or one.tensors[change.tensor]
        if change.kind == "nonfinite":
            rule = "nonfinite-optimizer-state" if change.role in ("moment", "step") else "nonfinite-weight"
            evidence = {
                "elements": change.elements,
                "count": change.newly_nonfinite,
                "first_index": list(change.first_index or ()),
            }
            message = f"{change.newly_nonfinite:,} of {change.elements:,} elements became non-finite"
            yield _finding(rule, "error", message, entry, change.tensor, evidence)
        elif change.kind == "reshaped":
            shapes = {"expected": list(change.shape_a or ()), "elements": entry.elements}
            message = f"its shape was {list(change.shape_a or ())} and is {list(change.shape_b or ())}"
            yield _finding("shape-mismatch", "error", message, entry, change.tensor, shapes)
        elif change.kind == "removed":
            yield _finding("missing-key", "warning", "it is in the first checkpoint only", entry, change.tensor, {})
        elif change.kind == "added":
            yield _finding("unexpected-key", "warning", "it is in the second checkpoint only", entry, change.tensor, {})
        elif change.kind == "unreadable":
            yield _finding("not-scanned", "warning", f"it was not compared: {change.note}", entry, change.tensor, {})


def _finding(
    rule: str, severity: str, message: str, entry: TensorEntry, name: str, evidence: dict[str, object]
) -> ScanFinding:
    return ScanFinding(
        rule=rule,
        severity=severity,
        message=message,
        file=entry.file,
        tensor=name,
        dtype=entry.dtype,
        shape=entry.shape,
        evidence=evidence,
        remedy=REMEDIES.get(rule) if severity == "error" else None,
    )


def _problems(side: _Side) -> Iterator[ScanFinding]:
    """Yield what is wrong with the files of one side as far as it keeps values from being compared, or is unsafe."""
    for problem in side.index.problems:
        if problem.severity == "error":
            yield problem_finding(problem, {})


def _jumped(weights: Sequence[Change]) -> tuple[str, ...]:
    moved = [change.rel_error for change in weights if change.rel_error and math.isfinite(change.rel_error)]
    if len(moved) < _FEWEST:
        return ()
    limit = JUMP * statistics.median(moved)
    # What was zero has no relative change to compare: biases and LoRA B start there.
    return tuple(
        change.tensor
        for change in weights
        if change.rel_error is not None and math.isfinite(change.rel_error) and change.rel_error > limit
    )


def _summary(changes: Sequence[Change], read: int, started: float) -> DiffSummary:
    def count(*kinds: str) -> int:
        return sum(change.kind in kinds for change in changes)

    return DiffSummary(
        tensors=len(changes),
        changed=count("changed", "nonfinite"),
        unchanged=count("unchanged"),
        added=count("added"),
        removed=count("removed"),
        reshaped=count("reshaped"),
        nonfinite=count("nonfinite"),
        unreadable=count("unreadable"),
        bytes=read,
        seconds=time.perf_counter() - started,
    )
