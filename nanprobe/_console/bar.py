"""The progress bar on stderr: only on a terminal, and only once a run has lasted long enough to make one wonder."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nanprobe._console.terminal import one_line, say
from nanprobe.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["PATIENCE", "ConsoleProgress"]

PATIENCE = 2.0
"""Seconds a run goes on before a bar appears."""


class ConsoleProgress(Progress):
    """Shows stages and steps as a bar that vanishes at the end, and notes as lines on stderr.

    ``show`` is false where nobody watches, and there is no bar then; ``quiet`` drops the bar and the notes. A timer
    opens the bar, since the first stage may be a long one without steps.
    """

    def __init__(self, *, show: bool, quiet: bool) -> None:
        self._quiet = quiet
        self._lock = threading.RLock()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._stage: tuple[str, int | None] = ("", None)
        self._done = 0
        self._timer: threading.Timer | None = None
        if show and not quiet:
            self._timer = threading.Timer(PATIENCE, self._open)
            self._timer.daemon = True
            self._timer.start()

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage; the bar starts again with its name."""
        with self._lock:
            self._stage, self._done = (name, total), 0
            if self._bar is not None and self._task is not None:
                self._bar.reset(self._task, total=total, description=name, detail="")

    def step(self, count: int = 1, detail: str = "") -> None:
        """Move the bar on by ``count`` steps."""
        with self._lock:
            self._done += count
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=self._done, detail=one_line(detail)[:60])

    def note(self, text: str) -> None:
        """Print a line, above the bar when there is one."""
        if self._quiet:
            return
        line = f"nanprobe: note: {one_line(text)}"
        with self._lock:
            if self._bar is not None:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                say(line)

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _open(self) -> None:
        """Start the bar, unless the work has ended meanwhile; rich is imported here, since most runs do without."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        with self._lock:
            if self._timer is None:
                return
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
            name, total = self._stage
            self._task = self._bar.add_task(name, total=total, completed=self._done, detail="")
            self._bar.start()
