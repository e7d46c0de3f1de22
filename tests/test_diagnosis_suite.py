"""The proof suite: every fault is named rightly, but for those listed as known; no control is called a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.diagnosis import ours
from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import ANY, Control, Fault, built
from benchmarks.diagnosis.cases import CONTROLS, FAULTS
from benchmarks.diagnosis.known import KNOWN
from benchmarks.diagnosis.score import QUESTIONS, REQUIRED, judged


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_named(fault: Fault) -> None:
    answer = ours.answer(fault)
    wrong = judged(fault, answer).wrong
    known = KNOWN.get(fault.name)
    if known is None:
        assert not wrong, (fault.expected, answer)
    else:
        assert wrong == known.wrong, f"take it off the list of known cases, or correct its entry: {answer}"


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_a_control_is_no_error(case: Control) -> None:
    report = ours.replayed(case)
    assert [f for f in report.findings if f.severity == "error"] == []
    assert report.precisions[case.dtype].completed
    assert report.exit_code == 0


@pytest.mark.parametrize("question", REQUIRED)
def test_the_required_shares(question: str) -> None:
    asked = [f for f in FAULTS if question != "samples" or f.expected.samples != ANY]
    wrong = [f for f in asked if f.name in KNOWN and question in KNOWN[f.name].wrong]
    assert 1 - len(wrong) / len(asked) >= REQUIRED[question]


def test_the_suite_is_as_large_as_it_says() -> None:
    names = [case.name for case in (*FAULTS, *CONTROLS)]
    assert len(names) == len(set(names))
    assert len(FAULTS) >= 52
    assert len(CONTROLS) >= 20
    assert set(KNOWN) <= {fault.name for fault in FAULTS}
    for fault in FAULTS:
        assert built(fault).model is not built(fault).model


def test_a_wrong_answer_is_marked_wrong() -> None:
    fault = next(f for f in FAULTS if f.name == "gated_product-fp16-cast")
    right = Answer(
        found=True, phase="forward", module="layers.2.inner", op="aten.mul", mechanism="overflow",
        precision_related=True, samples=(3,),
    )  # fmt: skip
    assert judged(fault, right).wrong == ()
    others = {"phase": "loss", "module": "layers.2", "op": "aten.add", "mechanism": "underflow",
              "precision_related": False, "samples": None}  # fmt: skip
    for question, value in others.items():
        assert question in judged(fault, replace(right, **{question: value})).wrong
    assert set(judged(fault, Answer(found=False)).wrong) == set(QUESTIONS)
