"""Discrete choices are compared as choices: a flip is a warning, ties are no drift, equal choices are silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import LOW, Code, assert_healthy, mean_square, measure, rules

# In half precision both numbers of a pair are the same, so that the choice falls on the first; FP32 tells them apart.
PAIR = torch.tensor([[1.0, 1.0001, 0.5], [3.0, 2.0, 1.0]])

CHOICES: dict[str, tuple[Any, str]] = {
    "topk": (lambda s: s.topk(1, dim=-1).indices, "aten.topk"),
    "argmax": (lambda s: s.argmax(dim=-1), "aten.argmax"),
    "argmin": (lambda s: (-s).argmin(dim=-1), "aten.argmin"),
    "bucketize": (lambda s: torch.bucketize(s, torch.tensor([1.00005]).to(s.dtype)), "aten.bucketize"),
    "searchsorted": (lambda s: torch.searchsorted(torch.tensor([1.00005]).to(s.dtype), s), "aten.searchsorted"),
    "to integer": (lambda s: ((s - 1.0) * 16384).long(), "aten._to_copy"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_that_differs_is_named(choice: str) -> None:
    choose, op = CHOICES[choice]
    router = Code(lambda self, s: choose(s))
    model = Code(lambda self, s: s * self.router(s).float().mean(), router=router)
    report = nanprobe.compare_precisions(model, PAIR, mode="cast")
    for name in LOW:
        (flip,) = [f for f in report.findings if f.precision == name and f.rule == "routing-flip"]
        assert (flip.module, flip.op, flip.severity) == ("router", op, "warning")
        assert 0 < flip.evidence["changed"] <= flip.evidence["total"]
        assert "error" not in [f.severity for f in report.findings if f.rule == "divergence"]
    assert report.exit_code == 0


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_that_agree_are_silent(choice: str) -> None:
    choose, _ = CHOICES[choice]
    model = Code(lambda self, s: s * 0 + choose(s).reshape(-1)[0], lin=nn.Identity())
    assert_healthy(nanprobe.compare_precisions(model, torch.tensor([[1.0, 2.0, 3.0]]), mode="cast"))


def test_a_choice_in_the_loss_or_outside_any_module() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().sum() * output.argmax(dim=-1).float().sum()

    report = nanprobe.replay(
        Code(lambda self, s: s * self.one, one=nn.Parameter(torch.ones(()))), PAIR, loss=loss, mode="cast"
    )
    flips = [f for f in report.findings if f.rule == "routing-flip"]
    assert [(f.module, f.op) for f in flips] == [(None, "aten.argmax")]


def test_what_diverges_after_a_flip_is_attributed_to_it() -> None:
    def forward(self: Any, s: Tensor) -> Any:
        return self.table(s.argmax(dim=-1))

    model = Code(forward, table=nn.Embedding(3, 8))
    report = nanprobe.replay(model, PAIR, mode="cast", loss=mean_square)
    assert set(rules(report, "error")) == set()
    assert "routing-flip" in rules(report, "warning")
    assert report.verdict == "clean"
    error = measure(report, "table", "fp16").rel_error
    assert error is not None
    assert error > 0.1


def test_shapes_that_depend_on_a_value() -> None:
    """A threshold keeps more elements in one lane: shapes differ, nothing is compared, and that is said."""

    def forward(self: Any, s: Tensor) -> Any:
        kept = self.keep(s)
        return self.lin(kept.sum().reshape(1, 1).expand(2, 2))

    model = Code(forward, keep=Code(lambda self, s: s[s > 1.0]), lin=nn.Linear(2, 2))
    report = nanprobe.replay(model, PAIR, mode="cast", loss=mean_square)
    assert report.precisions["fp16"].completed
    assert "routing-flip" in rules(report, "warning")
    assert measure(report, "keep", "fp16").rel_error is None
    assert measure(report, "keep", "fp16").shape != measure(report, "keep", "fp32").shape
    assert measure(report, "lin", "fp16").rel_error is not None
    assert rules(report, "error") == []


def test_ids_and_masks_are_no_choices() -> None:
    """Casting integers to integers, or booleans, is not a choice that rounding makes."""

    def forward(self: Any, ids: Tensor) -> Any:
        mask = (ids.int() > 3).long()
        return self.emb(ids.to(torch.int64)) * mask[..., None]

    report = nanprobe.compare_precisions(
        Code(forward, emb=nn.Embedding(9, 4)), torch.tensor([[1, 5]]), loss=mean_square
    )
    assert_healthy(report)
