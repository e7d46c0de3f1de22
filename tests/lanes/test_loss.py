"""Where the loss comes from, what backward sees of it, and which loss scale is used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import UsageError
from nanprobe.formats import by_name
from tests.lanes.support import ALL, LOW, Code, assert_healthy, gradient, mean_square, measure, rows, rules


class Output(dict[str, Any]):
    """A mapping that also has its keys as attributes, as transformers' outputs do."""

    __getattr__ = dict.__getitem__


FORMS: dict[str, Any] = {
    "attribute": lambda loss: type("Result", (), {"__init__": lambda self: None, "loss": loss})(),
    "key": lambda loss: {"loss": loss, "logits": loss * 2},
    "both": lambda loss: Output(loss=loss),
    "scalar": lambda loss: loss,
    "one element": lambda loss: loss.reshape(1, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_in_the_output_is_found_and_backward_runs(form: str) -> None:
    model = Code(lambda self, x: FORMS[form](self.lin(x).float().square().mean()), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4))
    assert_healthy(report)
    assert report.record.conditions["backward"] is True
    assert len(report.record.gradients) == 2
    assert all(result.loss is not None for result in report.precisions.values())


def test_without_a_loss_only_forward_runs() -> None:
    report = nanprobe.compare_precisions(nn.Linear(4, 4), torch.randn(3, 4))
    assert_healthy(report)
    assert report.record.conditions["backward"] is False
    assert report.record.conditions["train"] is False
    assert report.record.gradients == ()
    assert all(r.phase == "forward" for r in report.record.modules)
    assert all(result.loss is None for result in report.precisions.values())


def test_backward_can_be_declined_and_is_refused_without_a_loss() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    report = nanprobe.compare_precisions(model, x, loss=mean_square, backward=False)
    assert report.record.gradients == ()
    assert report.precisions["fp16"].loss is not None
    with pytest.raises(UsageError, match=r"^backward was asked for, but there is no loss"):
        nanprobe.compare_precisions(model, x, backward=True)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda o, b: o, r"loss returned a tensor of shape \[3, 4\], expected a scalar"),
        (lambda o, b: 1.0, "loss returned a float, expected a scalar tensor"),
        (lambda o, b: None, "loss returned a NoneType, expected a scalar tensor"),
        (lambda o, b: (o > 0).sum(), r"loss returned a scalar of type torch.int64"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        nanprobe.compare_precisions(nn.Linear(4, 4), torch.randn(3, 4), loss=loss)


def test_the_loss_gets_the_lanes_own_output_and_batch() -> None:
    seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append((output.dtype, batch["x"].dtype, batch["labels"].dtype))
        return nn.functional.cross_entropy(output.float(), batch["labels"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 5)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return self.lin(x)

    batch = {"x": torch.randn(3, 4), "labels": torch.tensor([1, 2, 4])}
    assert_healthy(nanprobe.compare_precisions(Model(), batch, loss=loss, mode="cast"))
    assert len(seen) == 3
    assert set(seen) == {
        (torch.float32, torch.float32, torch.int64),
        (torch.float16, torch.float16, torch.int64),
        (torch.bfloat16, torch.bfloat16, torch.int64),
    }


def test_a_loss_in_half_precision_is_scaled_in_fp32() -> None:
    """A loss of 3 x 32768 overflows fp16, so scaling must not happen there; its gradient, the scale, must fit."""
    model = Code(lambda self, x: self.lin(x).mean() * 0 + 3.0, lin=nn.Linear(4, 4))
    report = nanprobe.replay(model, torch.randn(3, 4), mode="cast", train=True)
    assert_healthy(report, ("fp16",))
    assert report.precisions["fp16"].loss == 3.0
    assert report.precisions["fp16"].loss_scale == 32768.0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.7])
def test_a_scale_that_is_given_is_used_in_every_low_precision(scale: float) -> None:
    torch.manual_seed(5)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    report = nanprobe.compare_precisions(model, x, loss=mean_square, loss_scale=scale)
    assert_healthy(report)
    assert [report.precisions[name].loss_scale for name in ALL] == [1.0, scale, scale]
    # What is shown is unscaled.
    for name in LOW:
        found = measure(report, "", name, phase="backward")
        exact = measure(report, "", "fp32", phase="backward")
        assert found.absmax == pytest.approx(exact.absmax, rel=0.01)
        assert found.headroom_bits is not None
        assert exact.absmax is not None
        assert found.headroom_bits == pytest.approx(math.log2(by_name(name).max / (exact.absmax * scale)), abs=0.02)
        norm = gradient(report, "weight").precisions[name].norm
        assert norm == pytest.approx(gradient(report, "weight").precisions["fp32"].norm, rel=0.01)
        assert report.precisions[name].gradient_norm == pytest.approx(report.precisions["fp32"].gradient_norm, rel=0.01)


def steep(slope: float) -> tuple[nn.Module, Tensor, Any]:
    """A model whose only gradient is ``slope`` times the loss scale."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().sum() * slope

    model = nn.Linear(1, 1, bias=False)
    return model, torch.ones(1, 1), loss


@pytest.mark.parametrize("slope", [10.0, 1000.0, 40000.0])
def test_dynamic_scaling_settles_at_the_largest_power_of_two_that_fits(slope: float) -> None:
    model, x, loss = steep(slope)
    report = nanprobe.compare_precisions(model, x, loss=loss, mode="cast")
    assert_healthy(report)
    scale = report.precisions["fp16"].loss_scale
    assert scale is not None
    assert scale * slope < 65520 <= 2 * scale * slope
    assert math.log2(scale) == int(math.log2(scale))
    assert report.precisions["bf16"].loss_scale == 1.0
    assert any(f"settled at {scale:g}" in note for note in report.record.conditions["notes"])


def test_the_scale_stays_where_it_starts_when_it_fits() -> None:
    model, x, loss = steep(0.5)
    report = nanprobe.replay(model, x, loss=loss, mode="cast")
    assert report.precisions["fp16"].loss_scale == 65536.0
    assert not any("settled" in note for note in report.record.conditions["notes"])


def test_no_scale_fits() -> None:
    model, x, loss = steep(1e6)
    report = nanprobe.replay(model, x, loss=loss, mode="cast")
    assert report.precisions["fp16"].loss_scale == 1.0
    assert any("no loss scale down to 1" in note for note in report.record.conditions["notes"])
    assert report.verdict == "precision"
    first = report.first_bad
    assert first is not None
    assert first.phase == "backward"


def test_no_scale_is_looked_for_when_forward_fails_already(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("looked for a loss scale")

    monkeypatch.setattr("nanprobe.pipeline.scaling.largest_loss_scale", fail)
    model = Code(lambda self, x: self.lin(x) * 1e6, lin=nn.Linear(4, 4))
    report = nanprobe.replay(model, torch.randn(3, 4), loss=lambda o, b: o.mean(), mode="cast")
    assert report.verdict == "precision"
    assert any("no loss scale was looked for" in note for note in report.record.conditions["notes"])


def test_a_given_scale_that_overflows_is_an_error() -> None:
    model, x, loss = steep(10.0)
    report = nanprobe.compare_precisions(model, x, loss=loss, mode="cast", loss_scale=65536.0)
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.phase, first.mechanism) == ("backward", "loss-scale-overflow")
    assert "loss-scale-overflow" in rules(report, "error")
    assert report.precisions["bf16"].verdict == "clean"
    assert gradient(report, "weight").precisions["fp16"].posinf == 1


def test_parameters_outside_the_loss_and_frozen_ones_have_no_row() -> None:
    model = Code(
        lambda self, x: self.b(self.frozen(x)), b=nn.Linear(4, 4), frozen=nn.Linear(4, 4), idle=nn.Linear(2, 2)
    )
    for parameter in model.frozen.parameters():
        parameter.requires_grad_(False)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [r.parameter for r in report.record.gradients] == ["b.weight", "b.bias"]
    assert rows(report, "frozen", "backward") == []


def test_nothing_to_train() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert report.record.gradients == ()
    assert report.record.conditions["backward"] is False
    assert any("no parameter that requires a gradient" in note for note in report.record.conditions["notes"])


def test_a_model_without_parameters() -> None:
    report = nanprobe.compare_precisions(nn.Softmax(dim=-1), torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)


def test_detached_outputs_and_partial_graphs() -> None:
    model = Code(lambda self, x: self.b(self.a(x).detach()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [r.parameter for r in report.record.gradients] == ["b.weight", "b.bias"]


def test_a_loss_that_takes_a_derivative_of_its_own() -> None:
    """A gradient penalty differentiates once inside the loss; only the real backward makes rows."""

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.float().sum(), batch, create_graph=True)
        return output.float().square().mean() + (slope.float().norm() - 1).square()

    x = torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    report = nanprobe.compare_precisions(model, x, loss=loss)
    assert_healthy(report)
    assert len(rows(report, "0", "backward")) == 1
    plain = model(x)
    loss(plain, x).backward()
    exact = model[0].weight.grad
    assert exact is not None
    assert gradient(report, "0.weight").precisions["fp32"].norm == pytest.approx(exact.norm().item(), rel=1e-5)


def test_a_loss_module_with_parameters_is_not_part_of_the_model() -> None:
    report = nanprobe.compare_precisions(
        nn.Linear(4, 4), torch.randn(3, 4), loss=lambda o, b: nn.MSELoss()(o.float(), torch.zeros(3, 4))
    )
    assert_healthy(report)
    assert report.record.coverage.modules == 1


def test_a_loss_that_is_no_number_in_every_precision() -> None:
    report = nanprobe.compare_precisions(
        nn.Linear(4, 4), torch.randn(3, 4), loss=lambda o, b: (o.float().sum() * 0).log() * 0
    )
    assert report.verdict == "not-precision"
    first = report.first_bad
    assert first is not None
    assert (first.phase, first.module, first.precision_related) == ("loss", None, False)


def test_a_loss_found_by_mistake_does_not_break_a_replay_without_gradients() -> None:
    model = Code(lambda self, x: self.lin(x).detach().float().sum(), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4))
    assert report.verdict == "clean"
    assert report.record.conditions["backward"] is False
