"""``python -m nanprobe`` is the same program as ``nanprobe``."""

from __future__ import annotations

from nanprobe.cli import entry_point

if __name__ == "__main__":
    entry_point()
