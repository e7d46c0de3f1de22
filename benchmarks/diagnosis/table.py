"""The suite as a page: the shares, and every case with what each tool named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.score import QUESTIONS, Marks, shares

__all__ = ["lines"]

_INTRODUCTION = """\
# The proof suite

Faults that people reported, rebuilt as small models with healthy layers before and after the fault, and healthy models
that look like faults. What is expected of each was derived from its arithmetic; where two names are both fair, both
count. `make diagnosis` runs it, and this page is what `python -m benchmarks.diagnosis --peers -o
docs/diagnosis-suite.md` writes.

- **nanprobe** is asked for the phase, the module, the operation, the mechanism, whether the precision is to blame, and
  the samples. An answer is its `first_bad`, else its `first_divergence`, else its worst finding. The cases that it gets
  wrong stand in `benchmarks/diagnosis/known.py` with the reason; a test fails when one of them changes.
- **DebugUnderflowOverflow** (transformers) stops after the first module with NaN or Inf; it has no word for operations.
- **sherlorch** walks the operations back from a bad loss or output.
- **detect_anomaly** (PyTorch) names the first backward function that returns NaN; it has no word for modules.
- **msprobe** (the package `mindstudio-probe`) dumps statistics of functions and modules, and its `overflow_check` names
  the first anomaly in the dump.

The other tools are given the plain low-precision run, with CUDA's operator lists under autocast. They are not asked to
tell the model's own code from code outside the model, and a public function counts as the operation that it dispatches.
A false alarm is a finding on a healthy case that would fail a check.
"""

_HEADINGS = {"phase": "phase", "module": "module", "op": "operation", "mechanism": "mechanism",
             "precision_related": "precision to blame", "samples": "samples"}  # fmt: skip


def lines(
    faults: Sequence[Fault],
    controls: Sequence[Control],
    answers: Mapping[str, Mapping[str, Answer]],
    marks: Mapping[str, Mapping[str, Marks]],
) -> Iterator[str]:
    """Yield the lines of the page: right answers of each tool, then module and operation case by case."""
    yield from _INTRODUCTION.splitlines()
    yield ""
    yield "| tool | " + " | ".join(_HEADINGS[q] for q in QUESTIONS) + " | false alarms |"
    yield "|---|" + "---|" * (len(QUESTIONS) + 1)
    for tool, rows in marks.items():
        found = shares(rows.values())
        cells = [_share(tool, question, *found[question]) for question in QUESTIONS]
        alarms = sum(answers[tool][case.name].errors > 0 for case in controls)
        yield f"| {tool} | " + " | ".join(cells) + f" | {alarms} of {len(controls)} |"
    yield ""
    yield "| fault | expected | " + " | ".join(marks) + " |"
    yield "|---|---|" + "---|" * len(marks)
    for fault in faults:
        cells = [_named(answers[tool][fault.name], rows[fault.name]) for tool, rows in marks.items()]
        yield f"| {fault.name} | {_expected(fault)} | " + " | ".join(cells) + " |"
    yield ""
    yield "| control | " + " | ".join(marks) + " |"
    yield "|---|" + "---|" * len(marks)
    for case in controls:
        cells = ["false alarm" if answers[tool][case.name].errors else "quiet" for tool in marks]
        yield f"| {case.name} | " + " | ".join(cells) + " |"


_ASKED_OF_ALL = ("module", "op")


def _share(tool: str, question: str, right: int, asked: int) -> str:
    if tool != "nanprobe" and question not in _ASKED_OF_ALL:
        return "-"
    return f"{right} of {asked}" if asked else "-"


def _expected(fault: Fault) -> str:
    expected = fault.expected
    modules = " or ".join(sorted(_place(module) for module in expected.module))
    ops = " or ".join(sorted(op.removeprefix("aten.") for op in expected.op if op is not None)) or "-"
    phases = " or ".join(sorted(expected.phase))
    return f"{phases}, {modules}, {ops}, {' or '.join(sorted(expected.mechanism))}"


def _place(module: str | None) -> str:
    return "outside the model" if module is None else "(root)" if module == "" else f"`{module}`"


def _named(answer: Answer, marks: Marks) -> str:
    if not answer.found:
        return "nothing"
    right = [word for word, good in (("module", marks.module), ("operation", marks.op)) if good]
    place = _place(answer.module) if answer.places else "-"
    op = (
        answer.op.removeprefix("aten.") if answer.op else ", ".join(sorted(o.removeprefix("aten.") for o in answer.ops))
    )
    verdict = " and ".join(right) + " right" if right else "wrong"
    return f"{place}, {op or '-'}: {verdict}"
