"""A scan from paths to a report: index, count, look again where that is called for, judge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from nanprobe.checkpoints import CheckpointIndex, index_checkpoint
from nanprobe.checkpoints.records import TensorEntry
from nanprobe.errors import UsageError
from nanprobe.exit_codes import UNUSABLE, verdict_exit_code
from nanprobe.formats import FORMATS, NumberFormat, by_name
from nanprobe.nearest import suggestion
from nanprobe.progress import SILENT, Progress
from nanprobe.records import Tool
from nanprobe.scan.baseline import marked, read_baseline
from nanprobe.scan.judge import judge, sorted_findings
from nanprobe.scan.look import Looker
from nanprobe.scan.measure import default_workers, measure
from nanprobe.scan.roles import role_of
from nanprobe.scan.rules.model import ModelShape
from nanprobe.scan.subject import Subject, Tensor
from nanprobe.scan_records import ScanFinding, ScanReport, ScanSummary, TensorRow
from nanprobe.version import __version__

__all__ = ["CASTS", "DEFAULT_CASTS", "ScanOptions", "checked_casts", "scan"]

_NO_FORMATS = ("folder", "json", "shard-index", "dcp-metadata")
"""Kinds of files that say where tensors are, or something about them, and hold none."""

DEFAULT_CASTS: tuple[str, ...] = ("fp16", "bf16")

CASTS: tuple[str, ...] = tuple(fmt.name for fmt in FORMATS if fmt.name != "fp64")
"""Formats whose cast safety can be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """What to look at and how.

    ``include`` and ``exclude`` are patterns (``*``, ``?``, ``[...]``) of tensor names; a tensor is looked at when one
    of ``include`` matches (or there is none) and none of ``exclude`` does. ``model`` holds the names and shapes of the
    model to compare with. ``baseline`` is the path of a file of known findings. ``check_crc`` compares the CRCs of zip
    members. ``workers`` is the number of threads, None for one per processor.
    """

    casts: tuple[str, ...] = DEFAULT_CASTS
    tensors: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    baseline: str | None = None
    check_crc: bool = True
    workers: int | None = None
    model: ModelShape | None = field(default=None, repr=False)
    config: str | None = None


def checked_casts(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of formats, each once; UsageError when there is no such format."""
    for name in names:
        if name not in CASTS:
            raise UsageError(f"--cast: no such format '{name}'; {suggestion(name, CASTS)}")
    return tuple(dict.fromkeys(names))


@dataclass(slots=True)
class _Total:
    """What the checkpoints of several paths add up to."""

    files: int = 0
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    scanned: int = 0
    skipped: int = 0
    unreadable: int = 0
    not_scanned: int = 0
    kinds: dict[str, None] = field(default_factory=dict)
    findings: list[ScanFinding] = field(default_factory=list)
    rows: list[TensorRow] = field(default_factory=list)
    said: bool = False
    included: bool = False


def scan(paths: Sequence[str], options: ScanOptions | None = None, progress: Progress = SILENT) -> ScanReport:
    """Scan the checkpoints at ``paths`` and return the report.

    Nothing that a file holds is executed. UsageError when no path can be used; of several, those that cannot be are
    named in the report's ``error``, and its exit code is 2.
    """
    options = options or ScanOptions()
    started = time.perf_counter()
    casts = [by_name(name) for name in checked_casts(options.casts)]
    known = read_baseline(options.baseline) if options.baseline is not None else set()
    total = _Total()
    errors: list[UsageError] = []
    for path in dict.fromkeys(paths):
        try:
            _scan_one(path, options, casts, total, progress)
        except UsageError as error:
            errors.append(error)
    if errors and len(errors) == len(dict.fromkeys(paths)):
        raise UsageError("; ".join(str(error) for error in errors))
    missed = bool(options.include) and total.tensors > 0 and not total.included
    if (missed or not total.said) and not errors:
        raise UsageError(_nothing(paths, options, total))
    findings = sorted_findings(marked(total.findings, known, paths) if known else total.findings)
    report = ScanReport(
        tool=Tool(version=__version__),
        exit_code=UNUSABLE if errors else 0,
        subject={"paths": list(paths), "config": options.config, "baseline": options.baseline},
        conditions={
            "casts": list(options.casts),
            "include": list(options.include),
            "exclude": list(options.exclude),
            "check_crc": options.check_crc,
            "workers": options.workers or default_workers(),
        },
        summary=ScanSummary(
            files=total.files,
            tensors=total.tensors,
            elements=total.elements,
            bytes=total.bytes,
            formats=tuple(total.kinds),
            scanned=total.scanned,
            skipped=total.skipped,
            unreadable=total.unreadable,
            not_scanned=total.not_scanned,
            seconds=time.perf_counter() - started,
        ),
        findings=tuple(findings),
        tensors=tuple(total.rows),
        error="; ".join(str(error) for error in errors) or None,
    )
    return report if errors else _with_exit_code(report)


def _with_exit_code(report: ScanReport) -> ScanReport:
    from dataclasses import replace

    return replace(report, exit_code=verdict_exit_code(report))


def _nothing(paths: Sequence[str], options: ScanOptions, total: _Total) -> str:
    where = ", ".join(paths)
    if total.tensors and (options.include or options.exclude):
        return (
            f"nothing was scanned: none of the {total.tensors:,} tensors in {where} is left by --include and --exclude"
        )
    why = next((finding.message for finding in total.findings if finding.severity == "warning"), None)
    return f"nothing was scanned: {where} holds no tensors" if why is None else f"nothing was scanned: {where}: {why}"


def _scan_one(
    path: str, options: ScanOptions, casts: Sequence[NumberFormat], total: _Total, progress: Progress
) -> None:
    progress.stage("index", None)
    index = index_checkpoint(path)
    chosen = [entry for entry in index.tensors if _chosen(entry, options)]
    total.included = total.included or bool(chosen)
    # Placeholders stand for values that lie elsewhere, and tensors of no elements hold nothing.
    held = [entry for entry in chosen if entry.layout not in ("placeholder", "meta")]
    measured = measure(held, index.storages, casts, check=options.check_crc, workers=options.workers, progress=progress)
    tensors = [
        Tensor(
            entry=entry,
            role=role_of(entry),
            tally=measured.tallies.get(at),
            note=measured.unreadable.get(at),
            bad_blocks=measured.bad_blocks.get(at, 0),
        )
        for at, entry in enumerate(held)
    ]
    subject = Subject(index=index, tensors=tensors, casts=options.casts, scalars=index.scalars)
    progress.stage("judge", None)
    with Looker(index.storages) as looks:
        findings = judge(subject, looks, measured.problems, options.model)
    findings.extend(_unreadable(tensors, findings))
    total.findings.extend(findings)
    _add(total, index, tensors, len(index.tensors) - len(held), measured.read)
    if options.tensors:
        total.rows.extend(_row(tensor) for tensor in tensors)
        total.rows.extend(
            _skipped_row(entry, "saved without values") for entry in chosen if entry.layout in ("placeholder", "meta")
        )
    counted = any(tensor.tally is not None for tensor in tensors)
    if counted or index.scalars or any(_says_something(finding) for finding in findings):
        total.said = True


def _says_something(finding: ScanFinding) -> bool:
    return finding.severity != "note" and finding.rule != "not-scanned"


def _chosen(entry: TensorEntry, options: ScanOptions) -> bool:
    names = (entry.name,) if entry.key is None else (entry.name, entry.key)
    if options.include and not any(fnmatchcase(name, pattern) for pattern in options.include for name in names):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in options.exclude for name in names)


def _unreadable(tensors: Sequence[Tensor], findings: Sequence[ScanFinding]) -> list[ScanFinding]:
    """Return a finding for each tensor that could not be read and that no other finding tells about."""
    told = {finding.tensor for finding in findings}
    files = {finding.file for finding in findings if finding.severity == "error" and finding.tensor is None}
    whole = [(finding.file, finding.message) for finding in findings if finding.tensor is None]
    return [
        ScanFinding(
            rule="not-scanned",
            severity="warning",
            message=f"it was not scanned: {tensor.note}",
            file=tensor.entry.file,
            tensor=tensor.name,
            dtype=tensor.entry.dtype,
            shape=tensor.entry.shape,
        )
        for tensor in tensors
        if tensor.tally is None
        and tensor.name not in told
        and tensor.entry.file not in files
        and not any(file == tensor.entry.file and str(tensor.note) in message for file, message in whole)
    ]


def _add(total: _Total, index: CheckpointIndex, tensors: Sequence[Tensor], skipped: int, read: int) -> None:
    scanned = [tensor for tensor in tensors if tensor.tally is not None]
    total.files += len(index.files)
    total.tensors += len(index.tensors)
    total.elements += sum(tensor.entry.elements for tensor in scanned)
    total.bytes += read
    total.scanned += len(scanned)
    total.skipped += skipped
    total.unreadable += len(tensors) - len(scanned)
    total.not_scanned += len(index.skipped)
    kinds = [index.kind, *(file.kind for file in index.files)]
    total.kinds.update(dict.fromkeys(kind for kind in kinds if kind not in _NO_FORMATS))


def _row(tensor: Tensor) -> TensorRow:
    entry, tally = tensor.entry, tensor.tally
    if tally is None:
        return _skipped_row(entry, tensor.note or "not read", tensor.role.role)
    return TensorRow(
        tensor=entry.name,
        file=entry.file,
        dtype=entry.dtype,
        shape=entry.shape,
        elements=entry.elements,
        nan=tally.nan,
        posinf=tally.posinf,
        neginf=tally.neginf,
        zero=tally.zero,
        subnormal=tally.subnormal,
        absmax=tally.absmax,
        min=tally.low,
        max=tally.high,
        mean=tally.mean,
        rms=tally.rms,
        role=tensor.role.role,
    )


def _skipped_row(entry: TensorEntry, note: str, role: str | None = None) -> TensorRow:
    return TensorRow(
        tensor=entry.name,
        file=entry.file,
        dtype=entry.dtype,
        shape=entry.shape,
        elements=entry.elements,
        role=role or role_of(entry).role,
        note=note,
    )
