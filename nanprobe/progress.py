"""How long-running work tells an observer where it is, without knowing who watches.

Rooms below the command line call a :class:`Progress`; the default one does nothing, and the command line passes one
that draws a bar on stderr.
"""

from __future__ import annotations

__all__ = ["SILENT", "Progress"]


class Progress:
    """An observer that ignores everything; subclass it to show progress."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin the stage ``name``; ``total`` is the number of steps expected, None when it cannot be known."""

    def step(self, count: int = 1, detail: str = "") -> None:
        """``count`` more steps of the current stage are done; ``detail`` names what was just finished."""

    def note(self, text: str) -> None:
        """Say something worth knowing now (a warning that does not belong into the report alone)."""

    def close(self) -> None:
        """The work has ended, well or not."""


SILENT = Progress()
