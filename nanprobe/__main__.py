"""The entry point of ``nanprobe`` and of ``python -m nanprobe``, which are the same program.

It takes over Ctrl-C before anything slow is imported, and ends the process itself: threads that a model's code left
running would otherwise keep it alive after the report.
"""

from __future__ import annotations

import contextlib
import os
import sys

from nanprobe._console import interrupts

__all__ = ["entry_point"]


def entry_point() -> None:
    """Run the command line of this process and exit with its code."""
    interrupts.install()
    from nanprobe.cli import main

    interrupts.begin()
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        # Pressed while an earlier error was being reported.
        code = 130
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write("nanprobe: interrupted\n")
    interrupts.finish()
    _end(code)


def _end(code: int) -> None:
    """End the process with ``code``, without waiting for threads and without what was registered for the exit."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        # Workers that a data loader left are ended by Python's own exit, which does not come.
        with contextlib.suppress(Exception):
            for child in multiprocessing.active_children():
                child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    entry_point()
