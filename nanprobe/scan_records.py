"""What a scan of checkpoints found, as data: the words of ``scan-checkpoint`` and ``diff-checkpoints``.

As all records these are frozen, hold no tensor, compare with ``==``, and are written to JSON and read back without
torch. Counts are elements unless their name says otherwise; None means "not measured or not applicable".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanprobe.records import SCHEMA_VERSION, Tool

__all__ = [
    "SCAN_COMMANDS",
    "Change",
    "DiffReport",
    "DiffSummary",
    "ScanFinding",
    "ScanReport",
    "ScanSummary",
    "TensorRow",
]

SCAN_COMMANDS: tuple[str, ...] = ("scan-checkpoint", "diff-checkpoints")
"""Commands whose reports are of this file; all others write a ReplayReport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanFinding:
    """One thing that is wrong with a tensor or a file.

    ``rule`` is the rule's name, ``severity`` "error", "warning" or "note". ``file`` is the path as found, ``tensor``
    the parameter's name where it is known, None for what concerns a whole file. ``known`` is true when a baseline lists
    it; it then counts for no exit code.
    """

    rule: str
    severity: str
    message: str
    file: str | None = None
    tensor: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str | None = None
    known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor and its statistics; ``note`` says why there are none.

    ``absmax``, ``min``, ``max``, ``mean`` and ``rms`` are over finite elements. ``role`` is "weight", "buffer",
    "moment", "step", "scale", "learning-rate", "ema", "rng" or "other".
    """

    tensor: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zero: int | None = None
    subnormal: int | None = None
    absmax: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    role: str = "other"
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSummary:
    """How much was looked at.

    ``scanned``, ``skipped`` and ``unreadable`` count tensors: looked at, left out (by a pattern, or saved without
    data), and those whose bytes could not be had. ``not_scanned`` counts files of the checkpoints' folders that hold no
    tensors or cannot be read. ``elements`` and ``bytes`` are of the tensors that were scanned; bytes that several
    tensors share count once. ``formats`` are the kinds of files, ``seconds`` the time from the first look at the paths
    to the last finding.
    """

    files: int
    tensors: int
    elements: int
    bytes: int
    formats: tuple[str, ...]
    scanned: int
    skipped: int
    unreadable: int
    not_scanned: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanReport:
    """Everything that ``scan-checkpoint`` found, worst first.

    ``error`` says which of several paths could not be used, None when all could. ``subject`` holds the paths as given.
    """

    schema_version: int = SCHEMA_VERSION
    tool: Tool
    command: str = "scan-checkpoint"
    exit_code: int
    subject: Mapping[str, Any]
    conditions: Mapping[str, Any]
    summary: ScanSummary
    findings: tuple[ScanFinding, ...]
    tensors: tuple[TensorRow, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one tensor from A to B.

    ``kind`` is "changed", "unchanged", "nonfinite" (finite in A, not in B), "reshaped", "added", "removed" or
    "unreadable". ``rel_error`` is ||B - A|| / ||A|| (2-norms in FP64, over elements finite in both; infinite when an
    element became non-finite), ``max_abs`` the largest |B - A| and ``index`` where it is, ``cosine`` that of the two as
    vectors. ``newly_nonfinite`` counts elements finite in A and not in B, ``first_index`` is the first of them;
    ``repaired`` counts the reverse.
    """

    tensor: str
    kind: str
    role: str = "other"
    dtype_a: str | None = None
    dtype_b: str | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    elements: int = 0
    rel_error: float | None = None
    max_abs: float | None = None
    index: tuple[int, ...] | None = None
    cosine: float | None = None
    changed: int | None = None
    newly_nonfinite: int = 0
    repaired: int = 0
    first_index: tuple[int, ...] | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSummary:
    """Counts of tensors by what became of them; ``seconds`` as in ScanSummary, ``bytes`` of both sides."""

    tensors: int
    changed: int
    unchanged: int
    added: int
    removed: int
    reshaped: int
    nonfinite: int
    unreadable: int
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What changed between two checkpoints, worst first by ``rel_error``.

    ``unmoved`` names the parameters whose values are exactly the same, ``jumped`` those that moved far more than the
    others.
    """

    schema_version: int = SCHEMA_VERSION
    tool: Tool
    command: str = "diff-checkpoints"
    exit_code: int
    subject: Mapping[str, Any]
    summary: DiffSummary
    changes: tuple[Change, ...]
    findings: tuple[ScanFinding, ...]
    unmoved: tuple[str, ...] = ()
    jumped: tuple[str, ...] = ()
    error: str | None = None
