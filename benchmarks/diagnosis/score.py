"""How an answer compares with what is expected, and what share of them is right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import ANY, Fault

__all__ = ["QUESTIONS", "REQUIRED", "Marks", "judged", "shares"]

QUESTIONS = ("phase", "module", "op", "mechanism", "precision_related", "samples")

REQUIRED = {"module": 0.98, "op": 0.96, "mechanism": 0.92, "precision_related": 0.95, "samples": 0.95}
"""Shares of the faults that nanprobe has to answer rightly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Which questions about one fault were answered rightly; None stands for one that is not asked."""

    phase: bool
    module: bool
    op: bool
    mechanism: bool
    precision_related: bool
    samples: bool | None

    @property
    def wrong(self) -> tuple[str, ...]:
        """The questions that were answered wrongly."""
        return tuple(question for question in QUESTIONS if getattr(self, question) is False)


def judged(fault: Fault, answer: Answer, *, peer: bool = False) -> Marks:
    """Compare an answer with what is expected of the fault.

    A peer is not asked for the phase, nor to tell the model's own code from code outside the model.
    """
    expected = fault.expected
    found = answer.found
    there = answer.module in expected.module
    if peer and answer.places and answer.module in ("", None):
        there = bool(expected.module & {"", None})
    return Marks(
        phase=found and answer.phase in expected.phase,
        module=found and answer.places and there and (peer or answer.phase in expected.phase),
        op=found and (bool(answer.ops & expected.op) if answer.ops else answer.op in expected.op),
        mechanism=found and answer.mechanism in expected.mechanism,
        precision_related=found and answer.precision_related == expected.precision_related,
        samples=None if expected.samples == ANY else found and answer.samples == expected.samples,
    )


def shares(marks: Iterable[Marks]) -> dict[str, tuple[int, int]]:
    """Return for each question how many were right, of how many asked."""
    rows = list(marks)
    asked = {q: [getattr(row, q) for row in rows if getattr(row, q) is not None] for q in QUESTIONS}
    return {question: (sum(values), len(values)) for question, values in asked.items()}
