"""An operation that fails on a wrong operand: what made that wrong is told from what only lies on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nanprobe
from tests.diagnose.support import Do
from tests.diagnose.test_drift import Chain

Code = Callable[[Tensor], Tensor]


def replayed(code: Code, x: Tensor, dtype: str = "fp16", **options: Any) -> nanprobe.Report:
    return nanprobe.replay(Chain(a=Do(lambda v: v * 1), code=Do(code), z=Do(lambda v: v * 1)), x, dtype=dtype,
                           mode="cast", **options)  # fmt: skip


def logits() -> Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    x[1, 4] = 15.0
    return x


def near_a_hundred(spread: float = 0.25) -> Tensor:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    x[1] = 100 + spread * torch.randint(-3, 4, (16,), generator=torch.Generator().manual_seed(1)).float()
    return x


def filled(fill: float) -> Code:
    def code(x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape)
        mask[1] = fill
        bias = torch.zeros(x.shape).masked_fill(mask != 0, fill)
        return torch.softmax(x + bias.to(x.dtype), -1)

    return code


def variance(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square() + 1e-5)


CAUSES: dict[str, tuple[Code, Callable[[], Tensor], str, str, str]] = {
    "a bound that rounds to one": (
        lambda x: torch.log(1 - torch.sigmoid(x).clamp(1e-4, 1 - 1e-4)), logits,
        "aten.log", "unrepresentable-constant", "0.9999 as 1"),
    "a bound that rounds to one, in place": (
        lambda x: torch.log(1 - torch.sigmoid(x).clamp_(1e-4, 1 - 1e-4)), logits,
        "aten.log", "unrepresentable-constant", "0.9999 as 1"),
    "a bound that rounds harmlessly and does not apply": (
        lambda x: torch.log(1 - torch.sigmoid(x).clamp(min=1e-4)), logits, "aten.log", "cancellation", "aten.rsub"),
    "a bound that rounds harmlessly after the difference": (
        lambda x: torch.log((1 - torch.sigmoid(x)).clamp(max=0.9)), logits, "aten.log", "cancellation", "aten.rsub"),
    "a square that flushes to zero": (
        lambda x: torch.log((x * 1e-6).square()), logits, "aten.log", "underflow", "aten.pow"),
    "a variance as a difference": (
        variance, near_a_hundred, "aten.sqrt", "cancellation", "aten.sub"),
    "the lowest value of FP32, converted": (
        filled(torch.finfo(torch.float32).min), logits, "aten._to_copy", "unrepresentable-constant", ""),
    "values that grew too large, converted": (
        lambda x: torch.softmax((x.float() - 30).exp2().reciprocal().mul(-1).to(x.dtype), -1), logits,
        "aten._to_copy", "overflow", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_what_made_the_operand_wrong_is_named(name: str) -> None:
    code, x, op, mechanism, told = CAUSES[name]
    bad = replayed(code, x()).first_bad
    assert bad is not None
    assert (bad.op, bad.mechanism) == (op, mechanism), bad.explanation
    assert bad.precision_related
    assert told in bad.explanation


HARMLESS: dict[str, tuple[Code, Callable[[], Tensor]]] = {
    "a bound that fp16 tells from one": (lambda x: torch.log(1 - torch.sigmoid(x).clamp(1e-2, 1 - 1e-2)), logits),
    "a difference with digits left": (lambda x: variance(x / 50), lambda: near_a_hundred(20.0)),
    "a fill that fp16 holds": (filled(-6e4), logits),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_rounds_harmlessly_is_no_fault(name: str) -> None:
    code, x = HARMLESS[name]
    report = replayed(code, x())
    assert report.first_bad is None, report.render()


def test_a_root_that_fp64_cannot_take_either_has_no_cause_before_it() -> None:
    bad = replayed(lambda x: torch.sqrt(x - 3), logits()).first_bad
    assert bad is not None
    assert bad.mechanism == "domain-error"
    assert "wrong already" not in bad.explanation
