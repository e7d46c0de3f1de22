"""What the operation trace costs beside a plain FP32 forward and backward, in time and in memory.

The 12-layer decoder, batch 4 x 128, BF16 autocast traced whole, with local errors and without. All are measured in
turn, round after round in one process, so that a machine that slows down slows all of them; medians are compared.
Memory is the peak of the process beyond what it held before (RssAnon, sampled), each in a process of its own.
``--large`` runs the 800 million parameter decoder with an overflow planted in it, down to modules and to operations.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import nanprobe
from benchmarks import decoder
from benchmarks.turns import medians, spec_of, timed
from nanprobe.lanes.run import trace_operations

BOUNDS = {"with local error": 6.0, "without local error": 3.5}
"""What a trace may take, in multiples of the plain run."""

MEMORY_BOUND = 4.0
"""What a trace may hold beyond the weights, in multiples of what the plain run holds."""


def runs() -> dict[str, Callable[[], None]]:
    """Return the plain run and the two traces, ready to be called."""
    torch.manual_seed(0)
    model = decoder.small().train()
    batch = decoder.batch(4, 128)

    def plain() -> None:
        decoder.loss(model(**batch), batch).backward()
        model.zero_grad(set_to_none=True)

    def trace(local_error: bool) -> None:
        spec = spec_of(model, batch, decoder.loss, "bf16", local_error=local_error)
        if not trace_operations(spec, "bf16").records:
            raise SystemExit("nothing was traced")

    return {
        "plain FP32": plain,
        "with local error": lambda: trace(True),
        "without local error": lambda: trace(False),
    }


def measured(rounds: int) -> dict[str, float]:
    """Return the median seconds of each, after one round that is not counted."""
    return medians({name: timed(run) for name, run in runs().items()}, rounds)


def resident() -> int:
    """Return the bytes that the process holds in anonymous memory."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:"))


def held(name: str) -> int:
    """Run one of the runs in this process and return the peak of what it holds beyond what was there before."""
    run = runs()[name]
    torch.ones(8, 8) @ torch.ones(8, 8)
    before, peak, ended = resident(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, resident())

    thread = threading.Thread(target=sample)
    thread.start()
    run()
    ended.set()
    thread.join()
    return peak - before


def in_a_process(name: str) -> int:
    """Return what :func:`held` gives in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trace", "--held", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def large() -> dict[str, float]:
    """Return the seconds of a replay of the large decoder with an overflow, down to modules and to operations."""
    torch.manual_seed(0)
    model = decoder.large().eval()
    with torch.no_grad():
        model.blocks[8].mlp[2].bias[0] = 1e5
    batch = decoder.batch(1, 64)
    seconds = {}
    for name, operations in (("modules", False), ("operations", True)):
        start = time.perf_counter()
        report = nanprobe.replay(model, batch, dtype="fp16", operations=operations)
        seconds[name] = time.perf_counter() - start
        bad = report.first_bad
        if bad is None or bad.module != "blocks.8.mlp.2":
            raise SystemExit(f"the planted overflow was not found: {bad}")
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; the bounds are printed beside the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--held", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.held is not None:
        print(held(given.held))
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if given.large:
        seconds = large()
        print(f"down to modules {seconds['modules']:.1f} s, down to operations {seconds['operations']:.1f} s: ", end="")
        print(f"{seconds['operations'] / seconds['modules']:.2f} x (at most 2)")
        return
    seconds = measured(given.rounds)
    memory = {name: in_a_process(name) for name in seconds}
    for name, value in seconds.items():
        bound = BOUNDS.get(name)
        beside = f"  {value / seconds['plain FP32']:.2f} x (at most {bound})" if bound else ""
        ratio = memory[name] / memory["plain FP32"]
        print(f"{name:<22}{value:7.3f} s{beside}  {memory[name] / 1e9:.2f} GB, {ratio:.2f} x (at most {MEMORY_BOUND})")


if __name__ == "__main__":
    main()
