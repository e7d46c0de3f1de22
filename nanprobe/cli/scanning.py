"""From the flags of ``scan-checkpoint`` and ``diff-checkpoints`` to their exit codes. torch stays out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanprobe._console.bar import ConsoleProgress
from nanprobe._console.files import check_target, write_atomically
from nanprobe._console.terminal import one_line, say
from nanprobe._console.user_code import user_code
from nanprobe.cli.outputs import Outputs
from nanprobe.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from nanprobe.scan.rules.model import ModelShape

__all__ = ["ScanFlags", "run_diff", "run_scan"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScanFlags:
    """The flags of ``scan-checkpoint`` that are not about output."""

    paths: Sequence[str]
    cast: str
    tensors: bool
    include: Sequence[str]
    exclude: Sequence[str]
    baseline: str | None
    update_baseline: bool
    config: str | None
    check_crc: bool


def run_scan(flags: ScanFlags, outputs: Outputs) -> int:
    """Scan, write the baseline where that is asked for, deliver the report; return the exit code."""
    from nanprobe.scan import ScanOptions, checked_casts, scan
    from nanprobe.scan.baseline import baseline_text, marked, read_baseline

    if flags.update_baseline and flags.baseline is None:
        raise UsageError("--update-baseline writes the file that --baseline names; add --baseline FILE")
    casts = checked_casts([name.strip() for name in flags.cast.split(",") if name.strip()])
    inputs = [Path(path) for path in flags.paths]
    beside = [Path(name) for name in (flags.config, flags.baseline) if name is not None]
    outputs.check(beside, checkpoints=inputs)
    if flags.update_baseline and flags.baseline is not None:
        check_target(Path(flags.baseline), inputs)
    progress = ConsoleProgress(show=outputs.terminal.stderr, quiet=outputs.quiet)
    try:
        options = ScanOptions(
            casts=casts,
            tensors=flags.tensors,
            include=tuple(flags.include),
            exclude=tuple(flags.exclude),
            baseline=None if flags.update_baseline else flags.baseline,
            check_crc=flags.check_crc,
            model=_model(flags.config, outputs) if flags.config is not None else None,
            config=flags.config,
        )
        report = scan(flags.paths, options, progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    finally:
        progress.close()
    if flags.update_baseline and flags.baseline is not None:
        write_atomically(Path(flags.baseline), baseline_text(report.findings, flags.paths))
        known = marked(report.findings, read_baseline(flags.baseline), flags.paths)
        report = dataclasses.replace(report, findings=tuple(known))
        if not outputs.quiet:
            say(f"nanprobe: wrote {flags.baseline}")
    if report.error is not None:
        say(f"nanprobe: error: {one_line(report.error)}")
    return outputs.deliver(report)


def _model(config_path: str, outputs: Outputs) -> ModelShape:
    """Build the model of a config and return its names and shapes; this alone imports torch."""
    from nanprobe.config import load_config

    config = load_config(Path(config_path))
    with user_code(silent=outputs.quiet):
        from nanprobe.inputs.model import build_model
        from nanprobe.scanning import model_shape

        return model_shape(build_model(config.model, config.folder, config.settings.seed, with_weights=False))


def run_diff(a: str, b: str, include: Sequence[str], exclude: Sequence[str], outputs: Outputs) -> int:
    """Compare two checkpoints and deliver the report; return the exit code."""
    from nanprobe.scan.diff import DiffOptions, diff

    outputs.check((), checkpoints=[Path(a), Path(b)])
    progress = ConsoleProgress(show=outputs.terminal.stderr, quiet=outputs.quiet)
    try:
        report = diff(a, b, DiffOptions(include=tuple(include), exclude=tuple(exclude)), progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    finally:
        progress.close()
    return outputs.deliver(report)
