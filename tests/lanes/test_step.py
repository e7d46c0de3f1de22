"""The step: gradients unscaled, clipped and handed to an optimizer, in every lane as training would do it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.config import OptimizerSpec
from nanprobe.errors import IncompleteError, UsageError
from nanprobe.inputs.optimizer import build_optimizer, optimizer_state
from nanprobe.lanes.scales import HIGHEST, window_of
from nanprobe.lanes.step import StepSpec, take_step
from nanprobe.records import Finding, Gradient, Step
from nanprobe.report import Report
from tests.lanes.support import mean_square, rules, untouched


def net(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 4))


def batch(width: int = 16) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(8, width) + 0.5


def optimizer(name: str, **kwargs: Any) -> OptimizerSpec:
    return OptimizerSpec(name=name, kwargs=kwargs)


def replay(model: nn.Module, x: Tensor, dtype: str, **settings: Any) -> Report:
    return nanprobe.replay(model, x, dtype=dtype, **{"loss": mean_square, **settings})


def step(report: Report, precision: str) -> Step:
    found = report.precisions[precision].step
    assert found is not None
    return found


def finding(report: Report, rule: str) -> Finding:
    (found,) = [f for f in report.findings if f.rule == rule]
    return found


# -- an optimizer that makes NaN --------------------------------------------------------------------------------------


def silent_feature() -> Tensor:
    """A batch whose fourth feature is zero, so that a column of the first weight has no gradient."""
    x = batch()
    x[:, 3] = 0.0
    return x


def test_adam_divides_zero_by_an_eps_that_fp16_has_not() -> None:
    model, x = net(), silent_feature()
    with untouched(model):
        report = replay(model, x, "fp16", mode="cast", loss_scale=1.0, optimizer=optimizer("Adam", lr=1e-3))
    bad = report.first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.parameter) == ("optimizer", "0", "0.weight")
    assert (bad.op, bad.mechanism, bad.precision_related) == ("aten.addcdiv_", "optimizer-error", True)
    assert bad.index == (0, 3)
    assert "zero in float16" in bad.explanation
    assert report.verdict == "precision"
    assert report.exit_code == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "cast", "loss_scale": 1.0, "optimizer": optimizer("Adam", lr=1e-3, eps=1e-4)},
        {"mode": "autocast", "optimizer": optimizer("Adam", lr=1e-3)},
        {"mode": "cast", "loss_scale": 1.0, "optimizer": optimizer("SGD", lr=1e-1)},
    ],
)
def test_an_eps_that_the_format_holds_is_no_fault(settings: dict[str, Any]) -> None:
    report = replay(net(), silent_feature(), "fp16", **settings)
    assert rules(report, "error") == []
    assert step(report, "fp16").taken


def test_a_step_that_fp32_fails_at_as_well_is_not_precision() -> None:
    report = replay(
        net(),
        batch(),
        "bf16",
        mode="cast",
        loss=lambda o, b: o.float().square().mean() * 1e6,
        optimizer=optimizer("SGD", lr=3e38),
    )
    assert report.verdict == "not-precision"
    assert report.first_bad is not None
    assert report.first_bad.mechanism == "optimizer-error"


# -- updates that are lost --------------------------------------------------------------------------------------------


def large_weights() -> nn.Sequential:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.0)
    return model


def test_updates_below_half_the_spacing_are_lost() -> None:
    report = replay(large_weights(), batch(), "bf16", mode="cast", optimizer=optimizer("AdamW", lr=1e-5))
    found = finding(report, "update-underflow")
    assert found.severity == "error"
    assert found.evidence["share"] > 0.9
    drift = report.precisions["bf16"].first_divergence
    assert drift is not None
    assert (drift.phase, drift.module, drift.mechanism) == ("optimizer", "0", "update-underflow")
    assert report.first_bad is None
    assert report.verdict == "precision"
    assert step(report, "bf16").lost > 0.9 * step(report, "bf16").moved
    assert step(report, "fp32").lost == 0


def test_an_optimizer_that_mixes_parameters_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "joint.py").write_text(
        "import torch\n"
        "class Joint(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        every = [p for g in self.param_groups for p in g['params']]\n"
        "        size = sum(float(p.grad.abs().sum()) for p in every)\n"
        "        for p in every:\n"
        "            p.sub_(1e-5 * size / len(every) ** 2 * p.grad.sign())\n"
    )
    spec = optimizer(f"{tmp_path / 'joint.py'}:Joint")
    report = replay(large_weights(), batch(), "bf16", mode="cast", optimizer=spec)
    assert step(report, "bf16").taken
    assert "update-underflow" not in rules(report)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_healthy_step_is_no_error(mode: str, dtype: str) -> None:
    report = replay(
        net(),
        batch(),
        dtype,
        mode=mode,
        clip_grad_norm=1.0,
        optimizer=optimizer("AdamW", lr=1e-3, eps=1e-4 if (mode, dtype) == ("cast", "fp16") else 1e-8),
    )
    assert rules(report, "error") == []
    assert step(report, dtype).taken


def test_fp32_weights_keep_small_updates() -> None:
    report = replay(large_weights(), batch(), "bf16", mode="autocast", optimizer=optimizer("AdamW", lr=1e-5))
    assert rules(report) == []
    assert step(report, "bf16").lost == 0


# -- clipping ---------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose gradients are all of the size that the loss's factor gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]  # modules return Any


def summed(factor: float) -> Any:
    return lambda output, given: output.float().sum() * factor


def test_an_infinite_norm_clears_every_gradient() -> None:
    model = Scaled()
    with untouched(model):
        report = replay(
            model, torch.ones(1, 8), "fp16", mode="cast", loss=summed(4e4), loss_scale=1.0, clip_grad_norm=1.0
        )
    bad = report.first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.op, bad.mechanism) == (
        "optimizer",
        None,
        "aten.linalg_vector_norm",
        "overflow",
    )
    assert bad.precision_related is True
    assert "multiplies every gradient by zero" in bad.explanation
    assert step(report, "fp16").total_norm == math.inf
    assert step(report, "fp16").clip_coefficient == 0.0
    assert step(report, "fp32").total_norm == pytest.approx(4e4 * math.sqrt(72), rel=1e-3)


@pytest.mark.parametrize(("mode", "factor"), [("cast", 4e3), ("autocast", 4e4)])
def test_a_norm_that_fits_is_no_fault(mode: str, factor: float) -> None:
    report = replay(
        Scaled(), torch.ones(1, 8), "fp16", mode=mode, loss=summed(factor), loss_scale=1.0, clip_grad_norm=1.0
    )
    assert rules(report, "error") == []
    assert 0 < (step(report, "fp16").clip_coefficient or 0) < 1


# -- the loss scale ---------------------------------------------------------------------------------------------------


def test_fp16_parameters_are_refused_by_a_gradient_scaler() -> None:
    report = replay(net(), batch(), "fp16", mode="cast", optimizer=optimizer("SGD", lr=1e-2))
    refused = finding(report, "optimizer-error")
    assert refused.severity == "warning"
    assert refused.evidence["count"] == 6
    assert "optimizer-error" not in rules(replay(net(), batch(), "fp16", optimizer=optimizer("SGD", lr=1e-2)))


def test_a_scale_that_overflows_skips_the_step_and_is_halved() -> None:
    report = replay(
        Scaled(), torch.ones(1, 8), "fp16", loss=summed(4.0), loss_scale=2.0**20, optimizer=optimizer("SGD", lr=1e-2)
    )
    here = step(report, "fp16")
    assert (here.skipped, here.taken, here.loss_scale, here.next_scale) == (True, False, 2.0**20, 2.0**19)
    assert here.scale_window == (1.0, 2.0**13)
    assert finding(report, "loss-scale-overflow").evidence["largest_scale"] == 2.0**13
    assert step(report, "fp32").taken


def test_a_loss_that_vanishes_says_which_scales_serve() -> None:
    report = replay(net(), batch(), "fp16", loss=lambda o, b: o.float().square().mean() * 1e-6, loss_scale=1.0)
    window = step(report, "fp16").scale_window
    assert window is not None
    assert 1.0 < window[0] <= window[1] == 2.0**HIGHEST
    assert f"{window[0]:,.0f}" in finding(report, "gradient-underflow").message
    assert "is not learned" in report.render(width=200)


@pytest.mark.parametrize(
    ("overflows_from", "keeps_from", "expected"),
    [
        (30, 0, (2.0**24, 1.0)),
        (11, 5, (2.0**10, 2.0**5)),
        (6, 6, (2.0**5, None)),
        (0, 0, (None, 1.0)),
        (30, 30, (2.0**24, None)),
        (1, 0, (1.0, 1.0)),
    ],
)
def test_the_window_is_found_by_bisection(
    overflows_from: int, keeps_from: int, expected: tuple[float | None, float | None]
) -> None:
    tried: list[float] = []

    def run(scale: float) -> tuple[bool, int]:
        tried.append(scale)
        return scale < 2.0**overflows_from, 100 if scale < 2.0**keeps_from else 5

    window = window_of(run, zeros=5, elements=1000)
    assert (window.largest, window.smallest) == expected
    assert len(tried) == len(set(tried)) <= 12


# -- as training does it ----------------------------------------------------------------------------------------------


def with_gradients(model: nn.Module, factor: float = 1.0) -> nn.Module:
    (mean_square(model(batch()), None) * factor).backward()
    return model


def figures(model: nn.Module) -> dict[str, Gradient]:
    """What the lane measures of the gradients before the step."""
    return {
        name: Gradient(
            norm=float(p.grad.double().norm()),
            absmax=None,
            posinf=int(torch.isposinf(p.grad).sum()),
            zero=int((p.grad == 0).sum()),
        )
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"])
def test_the_step_is_pytorchs_own(name: str) -> None:
    ours, theirs = with_gradients(net()), with_gradients(net())
    made = build_optimizer(optimizer(name, lr=1e-2))
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    getattr(torch.optim, name)(theirs.parameters(), lr=1e-2).step()
    fact = take_step(ours, StepSpec(clip_grad_norm=0.1, make=made), figures(ours), scale=1.0, scaled=False)
    assert fact.stepped
    assert fact.error is None
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert all(p.lost == 0 and p.update_absmax for p in fact.parameters)


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    ours, theirs = with_gradients(net(), 1024.0), with_gradients(net())
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    take_step(ours, StepSpec(clip_grad_norm=0.1), figures(ours), scale=1024.0, scaled=True)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("state", "finite", "expected"),
    [
        ({}, True, 1024.0),
        ({}, False, 512.0),
        ({"_growth_tracker": 1999}, True, 2048.0),
        ({"_growth_tracker": 9, "growth_interval": 10, "growth_factor": 4.0}, True, 4096.0),
        ({"backoff_factor": 0.25}, False, 256.0),
    ],
)
def test_the_next_scale_is_the_scalers(state: dict[str, Any], finite: bool, expected: float) -> None:
    model = with_gradients(net())
    if not finite:
        next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]  # there is one
    fact = take_step(model, StepSpec(scaler=state), figures(model), scale=1024.0, scaled=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.load_state_dict({**scaler.state_dict(), **state})
    assert fact.next_scale == expected


def test_the_figures_that_training_logs_are_there_without_an_optimizer() -> None:
    report = replay(net(), batch(), "fp16")
    here = step(report, "fp16")
    assert here.gradient_norm == pytest.approx(report.precisions["fp16"].gradient_norm)
    assert (here.taken, here.skipped, here.total_norm) == (False, False, None)
    assert here.loss_scale == here.next_scale == report.precisions["fp16"].loss_scale
    assert "Step\n" not in report.render()


def test_an_optimizer_without_a_loss_is_told() -> None:
    report = nanprobe.replay(net(), batch(), dtype="bf16", optimizer=optimizer("SGD", lr=1e-2))
    assert any("no step was taken" in note for note in report.record.conditions["notes"])
    assert report.precisions["bf16"].step is None


def test_without_a_gradient_scaler_nothing_is_skipped() -> None:
    model = with_gradients(net())
    next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]  # there is one
    made = build_optimizer(optimizer("SGD", lr=1e-2))
    fact = take_step(model, StepSpec(make=made), figures(model), scale=1.0, scaled=False)
    assert (fact.finite, fact.skipped, fact.stepped, fact.next_scale) == (False, False, False, None)


@pytest.mark.parametrize(
    ("factor", "scale", "kind"),
    [(4.0, 2.0**20, "lower-loss-scale"), (1e-9, 1.0, "enable-loss-scaling"), (1e-9, 4.0, "raise-loss-scale")],
)
def test_the_remedy_is_a_scale_that_serves(factor: float, scale: float, kind: str) -> None:
    report = replay(Scaled(), torch.ones(1, 8), "fp16", loss=summed(factor), loss_scale=scale)
    offered = [remedy for f in report.findings for remedy in f.remedies]
    assert kind in [remedy.kind for remedy in offered]


def test_frozen_and_tied_parameters_step_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())  # type: ignore[no-any-return]  # modules return Any

    report = replay(Tied(), torch.rand(4, 8), "bf16", optimizer=optimizer("SGD", lr=0.1))
    assert step(report, "bf16").elements == 64 + 8


def test_an_optimizer_that_refuses_sparse_gradients_is_quoted() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)  # type: ignore[no-any-return]  # modules return Any

    report = replay(Sparse(), torch.arange(4), "bf16", optimizer=optimizer("Adam"))
    raised = finding(report, "raised")
    assert raised.phase == "optimizer"
    assert "sparse" in raised.message
    assert report.verdict == "inconclusive"
    assert step(replay(Sparse(), torch.arange(4), "bf16", optimizer=optimizer("SGD", lr=0.1)), "bf16").taken


# -- optimizers and their state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (optimizer("AdamV"), r"torch.optim has no `AdamV`; did you mean .*Adam"),
        (optimizer("Adam", lrr=1e-3), r"`optimizer.kwargs`: Adam: .*lrr"),
        (optimizer("Adam", lr=-1.0), r"`optimizer.kwargs`: Adam: .*[Ii]nvalid learning rate"),
        (optimizer("LBFGS"), r"needs a closure"),
        (optimizer("missing.py:Mine"), r"missing.py"),
        (optimizer("torch.optim:Optimizer"), r"Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_in_one_line(spec: OptimizerSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        replay(net(), batch(), "bf16", optimizer=spec)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.optim.Optimizer):\n"
        "    def __init__(self, params, lr=0.1):\n"
        "        super().__init__(params, {'lr': lr})\n"
        "    @torch.no_grad()\n"
        "    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                p.sub_(group['lr'] / p.grad)\n"
    )
    made = build_optimizer(optimizer("mine.py:Mine", lr=0.5), tmp_path)
    model = with_gradients(net())
    model[0].weight.grad[:] = 0.0  # type: ignore[index]  # a Sequential
    fact = take_step(model, StepSpec(make=made), figures(model), scale=1.0, scaled=False)
    assert fact.origin is not None
    assert fact.parameters[0].bad == 256


def adam_with_history(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        with_gradients(model)
        made.step()
        made.zero_grad()
    return made


def test_the_state_of_a_bundle_is_stepped_from() -> None:
    theirs = net()
    made = adam_with_history(theirs)
    ours = net()
    ours.load_state_dict(theirs.state_dict())
    saved = copy.deepcopy(made.state_dict())
    kept = copy.deepcopy(saved)
    state, note = optimizer_state(saved, None, ours, build_optimizer(optimizer("Adam")))
    assert note == "the optimizer state of the bundle was taken"
    with_gradients(theirs)
    made.step()
    take_step(
        with_gradients(ours),
        StepSpec(make=build_optimizer(optimizer("Adam", lr=1e-2)), state=state),
        figures(ours),
        scale=1.0,
        scaled=False,
    )
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    for number, values in kept["state"].items():
        torch.testing.assert_close(saved["state"][number], values)


def test_a_live_optimizer_is_stepped_like_and_not_changed() -> None:
    model = net()
    live = adam_with_history(model)
    before = copy.deepcopy(live.state_dict())
    report = replay(model, batch(), "bf16", optimizer=live)
    assert step(report, "fp32").taken
    after = live.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, values in before["state"].items():
        torch.testing.assert_close(after["state"][number], values)


@pytest.mark.parametrize("given", [3, {"nme": "Adam"}, [1]])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^optimizer: expected"):
        replay(net(), batch(), "bf16", optimizer=given)


def test_a_loss_that_raises_is_named_with_its_line() -> None:
    def broken(output: Any, given: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(IncompleteError, match=r"KeyError in the loss function: .*test_step.py:\d+\)"):
        nanprobe.replay(net(), batch(), dtype="bf16", loss=broken)


def test_state_that_does_not_fit_is_said_and_left_out() -> None:
    other = nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    made = torch.optim.Adam(other.parameters())
    made.step()
    state, note = optimizer_state(made.state_dict(), None, net(), build_optimizer(optimizer("Adam")))
    assert state is None
    assert note is not None
    assert "does not fit" in note


class Branch(nn.Module):
    """Three layers of one shape, of which the first is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]  # modules return Any


def test_a_parameter_without_a_gradient_shifts_no_state() -> None:
    model = Branch()
    live = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 8)).sum().backward()
    live.step()
    saved = copy.deepcopy(live.state_dict())
    state, _ = optimizer_state(saved, None, model, build_optimizer(optimizer("AdamW")))
    assert state is not None
    assert set(state) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    state["b.weight"]["exp_avg"].fill_(math.nan)
    model.zero_grad()
    model(torch.rand(4, 8)).sum().backward()
    spec = StepSpec(make=build_optimizer(optimizer("AdamW")), state=state)
    fact = take_step(model, spec, figures(model), scale=1.0, scaled=False)
    assert [p.parameter for p in fact.parameters if p.bad] == ["b.weight"]


def _without_moment(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg"]


def _text(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = "none"


def _wrong_step(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = "three"


def _small(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(1)


def _unhashable(state: dict[str, Any]) -> None:
    state["param_groups"] = [{"params": [[1], [2]]}]


def _two_groups(state: dict[str, Any]) -> None:
    state["param_groups"] = [{"params": [0, 2, 4]}, {"params": [1, 3, 5]}]


@pytest.mark.parametrize("damage", [_without_moment, _text, _wrong_step, _small, _unhashable])
def test_state_that_is_not_the_optimizers_is_left_out(damage: Any) -> None:
    model = net()
    saved = copy.deepcopy(adam_with_history(model).state_dict())
    damage(saved)
    state, note = optimizer_state(saved, None, model, build_optimizer(optimizer("Adam")))
    assert state is None
    assert note is not None
    assert "does not fit" in note


def test_groups_in_another_order_are_told_apart_or_left_out() -> None:
    model = net()
    saved = copy.deepcopy(adam_with_history(model).state_dict())
    _two_groups(saved)
    state, _ = optimizer_state(saved, None, model, build_optimizer(optimizer("Adam")))
    for name, entry in (state or {}).items():
        assert entry["exp_avg"].shape == dict(model.named_parameters())[name].shape


def test_the_state_of_a_training_checkpoint_is_found(tmp_path: Path) -> None:
    from nanprobe.config import CheckpointSpec

    model = net()
    made = adam_with_history(model)
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": made.state_dict(), "epoch": 3}, path)
    state, note = optimizer_state(
        None, CheckpointSpec(path=path, given="last.pt"), model, build_optimizer(optimizer("Adam"))
    )
    assert note == "the optimizer state of the checkpoint was taken"
    assert state is not None
    assert len(state) == 6
    torch.testing.assert_close(state["0.weight"]["exp_avg"], made.state_dict()["state"][0]["exp_avg"])
    assert float(state["0.weight"]["step"]) == 3.0


def test_lost_updates_are_told_where_there_are_enough() -> None:
    lines = replay(large_weights(), batch(), "bf16", mode="cast", optimizer=optimizer("AdamW", lr=1e-5)).render()
    assert "are lost to rounding" in " ".join(lines.split())
    quiet = replay(net(), batch(), "bf16", optimizer=optimizer("AdamW", lr=1e-3)).render()
    assert "lost to rounding" not in quiet
    assert "the step changes" in quiet
