"""nanprobe's own answer to a case, read from the report that anybody gets."""

from __future__ import annotations

import warnings

import nanprobe
from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import Control, Fault, built
from nanprobe.report import Report

__all__ = ["answer", "replayed"]

_ABOUT_PRECISION = {"gradient-underflow", "update-underflow", "routing-flip", "absorption", "divergence", "underflow",
                    "unrepresentable-constant", "cancellation", "loss-scale-overflow"}  # fmt: skip
"""Mechanisms of findings below an error that only a low precision has."""

_RANK = {"error": 0, "warning": 1, "note": 2}


def replayed(case: Fault | Control) -> Report:
    """Replay a case as ``nanprobe replay`` does."""
    made = built(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nanprobe.replay(made.model, made.batch, dtype=case.dtype, loss=made.loss, **case.settings)


def answer(case: Fault | Control) -> Answer:
    """Return what the report names: the first bad place, else the first divergence, else the worst finding."""
    report = replayed(case)
    result = report.precisions[case.dtype]
    errors = sum(f.severity == "error" and not f.ignored for f in report.findings)
    first, drift = result.first_bad, result.first_divergence
    if first is not None:
        return Answer(
            found=True,
            phase=first.phase,
            module=first.module,
            op=first.op,
            mechanism=first.mechanism,
            precision_related=first.precision_related,
            samples=tuple(first.samples) if first.samples is not None else None,
            errors=errors,
        )
    if drift is not None:
        return Answer(
            found=True,
            phase=drift.phase,
            module=drift.module,
            op=drift.op,
            mechanism=drift.mechanism,
            precision_related=result.verdict == "precision" or drift.mechanism in _ABOUT_PRECISION,
            errors=errors,
        )
    found = sorted(
        (f for f in report.findings if f.precision in (case.dtype, None) and f.severity != "note"),
        key=lambda f: _RANK[f.severity],
    )
    if not found:
        return Answer(found=False, errors=errors, note=result.error or "")
    worst = found[0]
    return Answer(
        found=True,
        phase=worst.phase,
        module=worst.module,
        op=worst.op,
        mechanism=worst.mechanism or worst.rule,
        precision_related=(worst.mechanism or worst.rule) in _ABOUT_PRECISION,
        errors=errors,
        note=worst.message,
    )
