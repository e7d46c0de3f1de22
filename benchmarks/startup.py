"""How long the commands take that need no torch: help, version, and a mistake in the config."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BOUND = 0.4
"""Seconds that each may take."""

ROUNDS = 7


def measured(arguments: list[str], expected: int) -> float:
    """Return the median seconds of a command, which must end with the exit code ``expected``."""
    seconds = []
    for round_ in range(ROUNDS + 1):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "nanprobe", *arguments], capture_output=True, check=False)
        if round_:
            seconds.append(time.perf_counter() - start)
        if done.returncode != expected:
            raise SystemExit(f"nanprobe {' '.join(arguments)} ended with {done.returncode}: {done.stderr.decode()}")
    return statistics.median(seconds)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print each beside its bound."""
    del arguments
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nanprobe.yaml"
        config.write_text("model: {factory: model.py:build}\nbathc: bad.pt\n")
        commands = {
            "--help": (["--help"], 0),
            "--version": (["--version"], 0),
            "config error": (["replay", "--config", str(config)], 2),
        }
        for name, (words, expected) in commands.items():
            print(f"{name:<14}{measured(words, expected):6.3f} s (at most {BOUND} s)")


if __name__ == "__main__":
    main()
