"""How far healthy models are from FP32 in half precision, beside what the default tolerances allow.

``python -m benchmarks.tolerances`` prints the table of ``docs/tolerances.md``. Errors are relative 2-norm errors: of
forward visits in units of u, of gradients in units of the square root of u. A ratio of 1 would be a finding. Rows that
the diagnosis does not judge (single numbers, values below the format's normal range) are left out.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import nanprobe
from benchmarks.healthy import FAMILIES, HAND_WRITTEN, batch_for, mean_square
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.formats import by_name
from nanprobe.records import Measure
from nanprobe.report import Report

SEEDS = (0, 1, 2)
PRECISIONS = ("fp16", "bf16")


@dataclass(slots=True)
class Worst:
    """The worst errors of one family in one precision, over seeds and modes."""

    forward: float = 0.0
    backward: float = 0.0
    gradient: float = 0.0
    forward_ratio: float = 0.0
    gradient_ratio: float = 0.0
    findings: int = 0

    def take(self, report: Report, precision: str) -> None:
        """Add what one replay measured."""
        unit = by_name(precision).unit_roundoff
        tolerances = Tolerances(precision=precision)
        forward = [row for row in report.record.modules if row.phase == "forward" and precision in row.precisions]
        for position, row in enumerate(forward):
            error = _judged(row.precisions[precision])
            self.forward = max(self.forward, error / unit)
            self.forward_ratio = max(self.forward_ratio, error / tolerances.at("forward", row.module, position))
        for row in report.record.modules:
            if row.phase == "backward" and precision in row.precisions:
                self.backward = max(self.backward, _judged(row.precisions[precision]) / math.sqrt(unit))
        total = _total(report, precision)
        self.gradient = max(self.gradient, total / math.sqrt(unit))
        limit = tolerances.at("backward", "", len(forward))
        self.gradient_ratio = max(self.gradient_ratio, total / limit)
        self.findings += sum(f.precision == precision and f.rule != "routing-flip" for f in report.findings)


def _judged(measure: Measure) -> float:
    name = {"float16": "fp16", "bfloat16": "bf16"}.get(measure.dtype, "fp32")
    small = (measure.absmax or 0.0) < by_name(name).smallest_normal
    error = measure.rel_error
    return 0.0 if error is None or measure.elements == 1 or small or not math.isfinite(error) else error


def _total(report: Report, precision: str) -> float:
    """Return the relative error of all parameters' gradients taken as one vector."""
    error = size = 0.0
    for row in report.record.gradients:
        here, there = row.precisions.get(precision), row.precisions.get("fp32")
        if here is not None and there is not None and there.norm and here.rel_error is not None:
            error += (here.rel_error * there.norm) ** 2
            size += there.norm**2
    return math.sqrt(error / size) if size else 0.0


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 or value == 0 else "<0.01"


def _cases(seed: int) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    for name, build in FAMILIES.items():
        torch.manual_seed(seed)
        yield name, build(), batch_for(name), {}
    for name, make in HAND_WRITTEN.items():
        torch.manual_seed(seed)
        model, batch = make()
        yield name, model, batch, {"loss": mean_square}


def main(arguments: list[str]) -> None:
    """Replay every family with every seed in both modes, and print the table; names choose families."""
    warnings.simplefilter("ignore")
    table: dict[tuple[str, str], Worst] = {}
    for seed in SEEDS:
        for name, model, batch, settings in _cases(seed):
            if arguments and name not in arguments:
                continue
            for mode in ("autocast", "cast"):
                report = nanprobe.compare_precisions(model, batch, mode=mode, local_error=False, **settings)
                for precision in PRECISIONS:
                    table.setdefault((name, precision), Worst()).take(report, precision)
    print(
        "| family | format | forward / u | of tolerance | backward / sqrt(u) | all gradients / sqrt(u) | of tolerance |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for (name, precision), worst in table.items():
        print(
            f"| {name} | {precision} | {worst.forward:.1f} | {_ratio(worst.forward_ratio)} | {worst.backward:.2f} "
            f"| {worst.gradient:.2f} | {_ratio(worst.gradient_ratio)} |"
        )
    found = sum(worst.findings for worst in table.values())
    print(f"\n{len(table) * len(SEEDS) * 2} lanes, {found} findings")


if __name__ == "__main__":
    main(sys.argv[1:])
