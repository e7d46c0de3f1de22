"""The samples of an operation's bad elements: followed from the batch, and null for what does not derive from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.report import Report
from tests.diagnose.support import Do, bad, mlp


def compare(model: nn.Module, x: Tensor, **options: Any) -> Report:
    torch.manual_seed(0)
    return nanprobe.replay(model, x, dtype="fp16", mode="cast", **options)


X = torch.rand(4, 4) + 0.5


def _big(*rows: int) -> Tensor:
    x = X.clone()
    x[list(rows), 1] = 300.0
    return x


def _written(x: Tensor) -> Tensor:
    buffer = x.new_zeros(4, 2, 4)
    buffer[:, 1] = x
    return buffer.square().sum(1)


CODES: dict[str, tuple[Any, Tensor, tuple[int, ...] | None]] = {
    "a product": (lambda x: x * x, _big(1, 3), (1, 3)),
    "transposed": (lambda x: (x.t() * x.t()).t(), _big(2), (2,)),
    "repeated in blocks": (lambda x: x.repeat_interleave(2, 0).square().view(4, 2, 4).mean(1), _big(1), (1,)),
    "repeated in turn": (lambda x: x.repeat(2, 1).square().view(2, 4, 4).mean(0), _big(1), (1,)),
    "two views put together": (lambda x: torch.cat([x, x]).square().view(2, 4, 4).mean(0), _big(3), (3,)),
    "in another order": (lambda x: x[torch.tensor([3, 2, 1, 0])].square(), _big(0), (0,)),
    "picked by a mask": (lambda x: x + x[x[:, 1] > 100].square().sum(), _big(2), (2,)),
    "written to a buffer": (_written, _big(2), (2,)),
    "summed over the batch": (lambda x: x + (x.sum(0) * 300).square(), X, None),
    "a constant as long as the batch": (lambda x: x + torch.full((4, 4), 300.0).to(x).square(), X, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_samples(name: str) -> None:
    code, x, samples = CODES[name]
    first = bad(compare(nn.Sequential(nn.Identity(), Do(code), nn.LayerNorm(4)), x), "fp16")
    assert (first.module, first.samples) == ("1", samples), first


def test_a_weight_as_long_as_the_batch_has_no_samples() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            with torch.no_grad():
                self.weight[2] = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight / self.weight.abs().amax(1, keepdim=True)).t()

    first = bad(compare(nn.Sequential(mlp(4), Quantised(), mlp(4)), torch.randn(4, 4)), "fp16")
    assert (first.module, first.op, first.samples, first.count) == ("1", "aten.div", None, 4), first


def test_inf_put_there_on_purpose_is_not_what_is_to_blame() -> None:
    keep = torch.ones(4, 4)
    keep[2, 1] = 0
    fill = Do(lambda x: torch.zeros_like(x).masked_fill(keep.to(x) == 0, math.inf))
    multiply = Do(lambda d: d * keep.to(d))
    first = bad(compare(nn.Sequential(mlp(4), fill, multiply, mlp(4)), torch.randn(4, 4)), "fp16")
    assert (first.module, first.op, first.mechanism, first.samples) == ("2", "aten.mul", "invalid-operation", (2,))
    selected = Do(lambda d: torch.where(keep.to(d) == 0, torch.zeros_like(d), d))
    report = compare(nn.Sequential(mlp(4), fill, selected, mlp(4)), torch.randn(4, 4))
    assert report.exit_code == 0, report.render()


def test_minus_inf_by_arithmetic_stays_to_blame_when_the_loss_fails_on_it() -> None:
    model = nn.Sequential(mlp(4), nn.ReLU(), Do(lambda x: torch.log(x * 0)))
    report = compare(model, torch.randn(4, 4), loss=lambda y, _: (y.float() * 0).mean())
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.op, first.mechanism) == ("forward", "2", "aten.log", "domain-error"), first


def _entropy(select: bool) -> Any:
    def loss(output: Tensor, _: Any) -> Tensor:
        log_p = output.log_softmax(-1)
        terms = log_p.exp() * (torch.where(torch.isinf(log_p), torch.zeros_like(log_p), log_p) if select else log_p)
        return -terms.sum(-1).mean()

    return loss


def test_minus_inf_put_there_on_purpose_is_the_fault_of_the_loss_that_multiplies_it() -> None:
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[2, 1] = False
    model = nn.Sequential(mlp(4), Do(lambda x: x.masked_fill(~keep, -math.inf)))
    first = bad(compare(model, torch.randn(4, 4), loss=_entropy(select=False)), "fp16")
    assert (first.phase, first.module, first.op, first.mechanism) == ("loss", None, "aten.mul", "invalid-operation")
    assert (first.samples, first.index, first.precision_related) == ((2,), (2, 1), False)
    report = compare(model, torch.randn(4, 4), loss=_entropy(select=True), backward=False)
    assert report.exit_code == 0, report.render()


def test_gradients_that_are_bad_in_fp32_too_are_judged_without_a_loss_scale() -> None:
    branch = Do(lambda t: torch.where(t < 50, t.exp(), t))
    x = torch.rand(4, 4)
    x[1, 2] = 100.0
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), branch, nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
        model[1].bias.zero_()
    report = compare(model, x, loss=lambda y, _: y.float().square().mean())
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.op, first.mechanism) == ("backward", "2", "aten.exp", "masked-gradient")
