"""The Python interface of scans: checkpoints on disk, without torch, as functions that return a report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from nanprobe.errors import UsageError
from nanprobe.progress import SILENT, Progress
from nanprobe.report import Report
from nanprobe.scan import DEFAULT_CASTS, ScanOptions, checked_casts, scan
from nanprobe.scan.diff import DiffOptions, diff

__all__ = ["diff_checkpoints", "model_shape", "scan_checkpoint"]

PathLike = str | os.PathLike[str]


def scan_checkpoint(
    path: PathLike | Sequence[PathLike],
    *,
    cast: str | Sequence[str] = DEFAULT_CASTS,
    tensors: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    baseline: PathLike | None = None,
    model: Any = None,
    check_crc: bool = True,
    workers: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Look at every tensor of a checkpoint (a file or a folder, or several) and return what is wrong with it.

    ``cast`` names the formats whose cast safety is judged. With ``tensors`` the report lists every tensor and its
    statistics. ``include`` and ``exclude`` are patterns of tensor names. ``baseline`` is a file of known findings.
    ``model``, a ``torch.nn.Module`` (on the meta device if you like), has its names and shapes compared with the
    checkpoint's. Nothing that a file holds is executed; torch is not imported.

    UsageError when nothing can be scanned: no such path, no checkpoint, no such format.

    >>> import nanprobe, numpy, pathlib, tempfile
    >>> from safetensors.numpy import save_file
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> _ = save_file({"fc.weight": numpy.array([[1.0, numpy.nan]], numpy.float32)}, path)
    >>> report = nanprobe.scan_checkpoint(path)
    >>> [(finding.rule, finding.tensor, finding.evidence["first_index"]) for finding in report.findings]
    [('nonfinite-weight', 'fc.weight', [0, 1])]
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise UsageError("there is no checkpoint to scan: name at least one path")
    casts = cast.split(",") if isinstance(cast, str) else cast
    options = ScanOptions(
        casts=checked_casts([name.strip() for name in casts if name.strip()]),
        tensors=tensors,
        include=_patterns(include),
        exclude=_patterns(exclude),
        baseline=os.fspath(baseline) if baseline is not None else None,
        check_crc=check_crc,
        workers=workers,
        model=model_shape(model) if model is not None else None,
    )
    return Report(scan([os.fspath(one) for one in paths], options, progress))


def diff_checkpoints(
    a: PathLike,
    b: PathLike,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Compare the checkpoint ``b`` with ``a``, tensor by tensor, across formats and element types, worst first.

    Both are streamed. UsageError when one cannot be used, or when they have no tensor in common by name.
    """
    options = DiffOptions(include=_patterns(include), exclude=_patterns(exclude), workers=workers)
    return Report(diff(os.fspath(a), os.fspath(b), options, progress))


def model_shape(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the names and shapes of a module's state dict, and a label for each that tied names share."""
    try:
        state = model.state_dict(keep_vars=True)
        items = {str(name): tensor for name, tensor in state.items() if hasattr(tensor, "shape")}
    except (AttributeError, TypeError):
        raise UsageError(f"model: expected a torch.nn.Module, got a {type(model).__name__}") from None
    labels: dict[int, str] = {}
    return {name: (tuple(tensor.shape), labels.setdefault(id(tensor), name)) for name, tensor in items.items()}


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
