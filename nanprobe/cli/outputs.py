"""Where a report goes and in which format: decided and checked before the work starts, written after it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from nanprobe._console.files import check_target, exists, write_atomically
from nanprobe._console.terminal import Terminal, discard_stdout, one_line, read_terminal, say, write_stdout
from nanprobe.errors import IncompleteError, NanprobeError, UsageError
from nanprobe.exit_codes import FAIL_ON, FOUND, OK, verdict_exit_code
from nanprobe.nearest import suggestion
from nanprobe.serialize import AnyReport

__all__ = ["Outputs", "Text", "plan_outputs", "print_text"]

_NOT_BUILT = ("html", "sarif", "junit", "github")
_SUFFIXES = {
    ".json": "json",
    ".md": "markdown",
    ".markdown": "markdown",
    ".txt": "table",
    ".html": "html",
    ".htm": "html",
    ".sarif": "sarif",
    ".xml": "junit",
}


class Text(Protocol):
    """Something that can be shown in several formats, as :func:`nanprobe.render.render` shows a report."""

    def __call__(self, format: str, /, *, width: int = ..., color: bool = ..., verbose: bool = ...) -> str:
        """Return it as text in one format."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What the output options ask for.

    ``stdout`` is the format to print, None when the report only goes to files; ``files`` are (path, format).
    """

    stdout: str | None
    files: tuple[tuple[Path, str], ...]
    fail_on: str
    terminal: Terminal
    quiet: bool
    verbose: bool

    def check(self, inputs: Iterable[Path], *, checkpoints: Iterable[Path] = ()) -> None:
        """Raise UsageError when a file cannot be written, or is one of the ``inputs`` or a file of a checkpoint."""
        paths = list(inputs)
        for checkpoint in checkpoints:
            paths.append(checkpoint)
            # Only what is there can be replaced, and reading an index takes its time.
            if any(exists(target) for target, _ in self.files):
                paths.extend(_files_of(checkpoint))
        for target, _ in self.files:
            check_target(target, paths)

    def deliver(self, report: AnyReport) -> int:
        """Write and print a report; return the exit code that it ends with under ``--fail-on``."""
        from nanprobe.render import render

        if report.exit_code in (OK, FOUND):
            report = dataclasses.replace(report, exit_code=verdict_exit_code(report, self.fail_on))
        self.emit(partial(render, report), told=lambda: _verdict(report))
        return report.exit_code

    def emit(self, text: Text, told: Callable[[], str] | None = None) -> None:
        """Write and print what ``text`` returns in each of the formats that are asked for.

        Where nothing goes to stdout, ``told`` gives a sentence for stderr.
        """
        silent = told is None or self.stdout is not None
        for target, format_name in self.files:
            write_atomically(target, text(format_name, verbose=self.verbose))
            if not self.quiet:
                if told is not None and not silent:
                    # Else the one who reads no file would not learn what it says.
                    say(f"nanprobe: {one_line(told())}")
                    silent = True
                say(f"nanprobe: wrote {one_line(str(target))}")
        if self.stdout is not None:
            terminal = self.terminal
            print_text(text(self.stdout, width=terminal.width, color=terminal.color, verbose=self.verbose))


def _files_of(checkpoint: Path) -> list[Path]:
    """Return the files that a checkpoint is made of, its shards among them; none where it cannot be read."""
    from nanprobe.checkpoints import index_weights

    try:
        index = index_weights(checkpoint)
    except (NanprobeError, OSError, ValueError):
        # What is wrong with it is told when it is read for its own sake.
        return []
    return [Path(file.path) for file in index.files] + [Path(other) for other in index.others]


def _verdict(report: AnyReport) -> str:
    """Return what a report says, in a sentence."""
    from nanprobe.records import ReplayReport
    from nanprobe.render.ink import Ink
    from nanprobe.render.scan_text import diff_headline, scan_headline
    from nanprobe.render.sentences import headline
    from nanprobe.scan_records import ScanReport

    if isinstance(report, ReplayReport):
        return headline(report, Ink())
    return scan_headline(report, Ink()) if isinstance(report, ScanReport) else diff_headline(report, Ink())


def print_text(text: str) -> None:
    """Print on stdout; a reader that left early is no error, a full disk is IncompleteError."""
    try:
        write_stdout(text)
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise IncompleteError(f"cannot write to stdout: {error.strerror or error}") from None


def plan_outputs(
    *,
    format_name: str | None,
    json: bool,
    output: Sequence[str] | None,
    fail_on: str,
    color: str,
    quiet: bool,
    verbose: bool,
) -> Outputs:
    """Return what the output options ask for; UsageError when they make no sense together.

    With ``-o FILE`` stdout stays empty, unless ``-o -``, ``--format`` or ``--json`` asks for it too.
    """
    if json and format_name not in (None, "json"):
        raise UsageError(f"--json and --format {format_name} contradict each other; keep one")
    chosen = "json" if json else format_name
    if chosen is not None:
        _check_format(chosen, f"--format {chosen}")
    if fail_on not in FAIL_ON:
        raise UsageError(f"--fail-on: no such severity '{fail_on}'; {suggestion(fail_on, FAIL_ON)}")
    files: list[tuple[Path, str]] = []
    reals: set[str] = set()
    to_stdout = not output or chosen is not None
    for name in output or ():
        if name == "-":
            to_stdout = True
            continue
        target = Path(name)
        try:
            real = os.path.realpath(target)
        except ValueError:
            raise UsageError(f"-o {name}: no file can have this name") from None
        if real in reals:
            raise UsageError(f"-o {name}: named twice")
        reals.add(real)
        files.append((target, _format_of(target)))
    return Outputs(
        stdout=(chosen or "table") if to_stdout else None,
        files=tuple(files),
        fail_on=fail_on,
        terminal=read_terminal(color),
        quiet=quiet,
        verbose=verbose,
    )


def _check_format(name: str, option: str) -> None:
    from nanprobe.render import FORMATS

    if name in _NOT_BUILT:
        raise UsageError(f"{option}: the format {name} is not built yet; there are {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise UsageError(f"{option}: no such format; {suggestion(name, FORMATS)}")


def _format_of(target: Path) -> str:
    """Return the format that a file's extension picks."""
    suffix = target.suffix.lower()
    name = _SUFFIXES.get(suffix)
    if name is None:
        ending = f"the extension {suffix}" if suffix else "no extension"
        raise UsageError(f"-o {target}: {ending} picks no format; use .json, .md or .txt")
    _check_format(name, f"-o {target}")
    return name
