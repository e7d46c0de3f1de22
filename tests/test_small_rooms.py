"""The rooms of a few lines: nearest names, exit codes of a report, signs of a lack of memory."""

from __future__ import annotations

import dataclasses

import pytest

from nanprobe.exit_codes import verdict_exit_code
from nanprobe.nearest import nearest, suggestion
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.records import Finding, PrecisionResult, ReplayReport
from tests.render.reports import clean


@pytest.mark.parametrize(
    ("name", "legal", "expected"),
    [
        ("modle", ("mode", "model"), "model"),
        ("Batch", ("batch", "backward"), "batch"),
        ("los_scale", ("loss", "loss_scale"), "loss_scale"),
        ("xyz", ("mode", "model"), None),
        ("x", (), None),
    ],
)
def test_nearest(name: str, legal: tuple[str, ...], expected: str | None) -> None:
    assert nearest(name, legal) == expected


def test_suggestion_names_the_nearest_or_some() -> None:
    assert suggestion("modle", ["model", "seed"]) == "did you mean `model`?"
    assert suggestion("xyz", ["a", "b", "c"], limit=2) == "there are `a`, `b` and 1 more"
    assert suggestion("xyz", []) == "there are none"


def report(
    *severities: str, ignored: bool = False, completed: tuple[bool, bool, bool] = (True, True, True)
) -> ReplayReport:
    names = ("fp32", "fp16", "bf16")
    return dataclasses.replace(
        clean(),
        reference="fp32",
        precisions={
            name: PrecisionResult(completed=done, verdict="clean") for name, done in zip(names, completed, strict=True)
        },
        findings=tuple(
            Finding(rule="overflow", severity=severity, message="", ignored=ignored) for severity in severities
        ),
    )


@pytest.mark.parametrize(
    ("severities", "fail_on", "code"),
    [
        ((), "error", 0),
        (("error",), "error", 1),
        (("error",), "never", 0),
        (("warning",), "error", 0),
        (("warning",), "warning", 1),
        (("note",), "warning", 0),
        (("note", "warning", "error"), "warning", 1),
    ],
)
def test_findings_decide_the_code(severities: tuple[str, ...], fail_on: str, code: int) -> None:
    assert verdict_exit_code(report(*severities), fail_on) == code


def test_ignored_findings_do_not_count() -> None:
    assert verdict_exit_code(report("error", ignored=True), "warning") == 0


@pytest.mark.parametrize(
    ("completed", "code"),
    [
        ((True, True, False), 1),
        ((True, False, False), 3),
        ((False, True, True), 3),
    ],
)
def test_nothing_compared_is_3(completed: tuple[bool, bool, bool], code: int) -> None:
    assert verdict_exit_code(report("error", completed=completed)) == code
    assert verdict_exit_code(report("error", completed=completed), "never") == (0 if code == 1 else 3)


def test_signs_of_a_lack_of_memory() -> None:
    import torch

    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("out of luck"))
    assert not is_out_of_memory(ValueError("CUDA out of memory"))
