"""The progress bar on stderr: only on a terminal, and only once a run has lasted long enough to make one wonder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nanprobe._console.terminal import one_line, say
from nanprobe.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["ConsoleProgress"]

PATIENCE = 2.0
"""Seconds a run goes on before a bar appears."""


class ConsoleProgress(Progress):
    """Shows stages and steps as a bar that vanishes at the end, and notes as lines on stderr.

    ``show`` is false where nobody watches (no terminal, or --quiet): then there is no bar. ``quiet`` drops notes too.
    """

    def __init__(self, *, show: bool, quiet: bool) -> None:
        self._show = show and not quiet
        self._quiet = quiet
        self._started = time.monotonic()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._name = ""
        self._total: int | None = None
        self._done = 0

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage; the bar starts again with its name."""
        self._name, self._total, self._done = name, total, 0
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=total, description=name)
        self._draw("")

    def step(self, count: int = 1, detail: str = "") -> None:
        """Move the bar on by ``count`` steps."""
        self._done += count
        self._draw(detail)

    def note(self, text: str) -> None:
        """Print a line, above the bar when there is one."""
        if self._quiet:
            return
        line = f"nanprobe: note: {one_line(text)}"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            say(line)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._show = False

    def _draw(self, detail: str) -> None:
        if not self._show:
            return
        if self._bar is None:
            if time.monotonic() - self._started < PATIENCE:
                return
            self._open()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, detail=one_line(detail)[:60])

    def _open(self) -> None:
        """Start the bar; rich is imported here, since most runs end before they need it."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(self._name, total=self._total, completed=self._done, detail="")
        self._bar.start()
