"""Loss scales that overflow, lanes that raise, choices that flip, modules that are shared or tied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diagnose.support import Do, assert_clean, bad, compare, errors, mean_square, mlp


@pytest.mark.parametrize("mode", ["cast", "autocast"])
def test_a_given_loss_scale_that_overflows(mode: str) -> None:
    model = nn.Sequential(mlp(8), nn.Linear(8, 8))
    report = compare(model, torch.randn(4, 8), mode, loss=lambda y, _: 100 * mean_square(y, None), loss_scale=2.0**20)
    first = bad(report, "fp16")
    assert (first.phase, first.mechanism, first.precision_related) == ("backward", "loss-scale-overflow", True)
    assert first.limit == 65504.0
    assert [(f.rule, f.severity, f.precision) for f in errors(report)] == [("loss-scale-overflow", "error", "fp16")]
    assert (report.verdict, report.exit_code) == ("precision", 1)
    assert [r.kind for r in first.remedies] == ["lower-loss-scale"]
    assert report.precisions["bf16"].verdict == "clean"


@pytest.mark.parametrize("mode", ["cast", "autocast"])
def test_dynamic_scaling_settles(mode: str) -> None:
    model = nn.Sequential(mlp(8), nn.Linear(8, 8))
    report = compare(model, torch.randn(4, 8), mode, loss=lambda y, _: 100 * mean_square(y, None))
    assert_clean(report)
    assert 1 <= report.precisions["fp16"].loss_scale < 65536
    assert any("settled" in note for note in report.record.conditions["notes"])


def test_a_gradient_that_no_scale_helps() -> None:
    model = nn.Sequential(mlp(8), Do(lambda x: (x * 1e-4).square().sqrt()), nn.Linear(8, 2))
    report = compare(model, torch.randn(4, 8), loss=mean_square)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.precision_related) == ("backward", "1", True), report.render()
    assert first.mechanism != "loss-scale-overflow"
    assert report.precisions["bf16"].verdict == "clean"


def test_a_gradient_beyond_fp16_at_scale_one() -> None:
    model = nn.Sequential(mlp(8), nn.Linear(8, 8))
    report = compare(model, torch.randn(4, 8), loss=lambda y, _: 1e7 * mean_square(y, None), loss_scale=1.0)
    first = bad(report, "fp16")
    assert (first.phase, first.mechanism, first.precision_related) == ("backward", "overflow", True)
    assert report.precisions["bf16"].verdict == "clean"


def test_a_lane_that_raises() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("not implemented for 'Half'\nand more")
        return x

    model = nn.Sequential(mlp(8), nn.Sequential(Do(picky)), mlp(8))
    report = compare(model, torch.randn(2, 8))
    result = report.precisions["fp16"]
    assert (result.completed, result.verdict) == (False, "inconclusive")
    assert result.error == "RuntimeError: not implemented for 'Half'"
    assert [(f.rule, f.module, f.precision) for f in errors(report)] == [("raised", "1.0", "fp16")]
    assert (report.verdict, report.exit_code) == ("inconclusive", 1)
    assert report.precisions["bf16"].verdict == "clean"
    assert compare(model, torch.randn(2, 8), dtypes=("fp32", "fp16")).exit_code == 3


def test_a_fill_that_the_dtype_cannot_hold_raises() -> None:
    model = nn.Sequential(mlp(8), Do(lambda x: x.masked_fill(x > 0, -1e9)))
    report = compare(model, torch.randn(2, 8))
    assert "overflow" in (report.precisions["fp16"].error or "")
    assert errors(report)[0].module == "1"


class Experts(nn.Module):
    """Top-1 routing among experts whose gate logits lie within one unit of bf16."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.spread = spread
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (4 + self.spread * self.gate(x)).topk(1, -1).indices
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1)
            if rows.any():
                out[rows] = expert(x[rows])
        return out


def test_routing_that_flips_is_a_warning() -> None:
    model = nn.Sequential(mlp(8), Experts(0.002), mlp(8))
    report = compare(model, torch.randn(200, 8))
    assert_clean(report)
    flips = [f for f in report.findings if f.rule == "routing-flip"]
    assert {f.precision for f in flips} == {"fp16", "bf16"}
    assert all(f.severity == "warning" and f.module == "1" for f in flips)
    assert report.exit_code_for("warning") == 1


def test_a_fault_of_a_module_after_a_flip_is_its_own() -> None:
    drift = Do(lambda x: (x + 1000) - 1000)
    model = nn.Sequential(mlp(8), Do(lambda x: x + 0.0 * x.argmax()), Experts(0.002), nn.Linear(8, 8), drift, mlp(8))
    report = compare(model, torch.randn(200, 8))
    found = report.precisions["bf16"].first_divergence
    assert found is not None
    assert found.module in ("2", "4")


def test_a_fault_in_a_shared_modules_second_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())
            self.alias = self.block
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.alias(x)
            return self.norm(x)

    model = Net()
    with torch.no_grad():
        model.block[0].weight.copy_(torch.diag(torch.tensor([50.0, 40.0, 30.0, 20.0])))
    report = compare(model, torch.ones(2, 4))
    first = bad(report, "fp16")
    assert (first.module, first.visit, first.class_, first.mechanism) == ("block.0", 2, "Linear", "overflow")


def test_gradients_of_an_input_that_forward_masks() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return torch.nan_to_num(output.float().log(), neginf=0.0).mean()

    model = nn.Sequential(mlp(8), nn.ReLU())
    report = compare(model, torch.randn(4, 8), loss=loss)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.precision_related) == ("backward", None, False), report.render()
    assert first.mechanism == "masked-gradient"
    assert math.isfinite(report.precisions["fp32"].loss)


def test_what_differs_after_a_flip_names_the_choice() -> None:
    model = nn.Sequential(mlp(8), Experts(0.002), mlp(8))
    report = compare(model, torch.randn(200, 8))
    found = report.precisions["bf16"].first_divergence
    assert found is not None
    assert (found.phase, found.module, found.mechanism) == ("forward", "1", "routing-flip")
    assert [f.rule for f in report.findings if f.precision == "bf16"] == ["routing-flip"]


class Shared(nn.Module):
    """One linear layer, used four times; its weight gets four contributions of 3 x 8 x ``slope``."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.shared(x * factor) / factor for factor in (1.0, 0.5, 0.25)), self.shared(x))


@pytest.mark.parametrize(
    ("slope", "scale", "mechanism"), [(1000.0, 1.0, "overflow"), (2.0, 512.0, "loss-scale-overflow")]
)
def test_contributions_that_only_overflow_together(slope: float, scale: float, mechanism: str) -> None:
    report = compare(
        Shared(), torch.full((3, 8), 8.0), loss=lambda output, _: output.float().sum() * slope, loss_scale=scale
    )
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.parameter) == ("backward", "shared", "shared.weight")
    assert (first.mechanism, first.precision_related, first.count, first.elements) == (mechanism, True, 64, 64)
    assert (report.precisions["fp16"].verdict, report.exit_code) == ("precision", 1)
    assert report.precisions["bf16"].verdict == "clean"


def test_contributions_that_fit_together() -> None:
    def loss(output: Tensor, _: Any) -> Tensor:
        return output.float().sum() * 500.0

    assert_clean(compare(Shared(), torch.full((3, 8), 8.0), loss=loss, loss_scale=1.0))
