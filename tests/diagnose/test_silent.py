"""Faults that leave no NaN and no Inf: found by comparing with FP32, at the first place that the tolerance excludes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanprobe.config import IgnoreRule, Tolerance
from tests.diagnose.support import (
    Do,
    RMSNorm,
    assert_clean,
    compare,
    errors,
    mean_square,
    mlp,
)


def assert_diverges(report: Any, precision: str, module: str | None, phase: str = "forward", **expected: Any) -> None:
    found = report.precisions[precision].first_divergence
    assert found is not None, report.render()
    assert (found.phase, found.module) == (phase, module), report.render()
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.rel_error > (found.tolerance or 0)
    assert report.precisions[precision].first_bad is None
    assert report.precisions[precision].verdict == "precision"
    (error,) = errors(report, precision)
    assert (error.module, error.phase) == (module, phase)
    assert report.exit_code == 1


class Rotary(nn.Module):
    """Rotary embedding with a buffer of frequencies that a cast converts; positions count in the model's dtype."""

    inv_freq: Tensor

    def __init__(self, width: int, base: float = 1e4) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, width, 2).float() / width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.arange(x.shape[1], dtype=self.inv_freq.dtype)[:, None] * self.inv_freq
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("length", [1024])
def test_rotary_embedding_in_half(length: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pos, self.mix, self.head = nn.Linear(8, 16), Rotary(32), nn.Linear(16, 16), mlp(16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            cos, sin = self.pos(h)
            return self.head(self.mix(h) * cos + h * sin)

    report = compare(Net(), torch.randn(2, length, 8))
    assert_diverges(report, "bf16", "pos", class_="Rotary", mechanism="divergence", between=None, visit=0)
    assert_diverges(report, "fp16", "pos")
    local = report.precisions["bf16"].first_divergence.local_error
    assert local == pytest.approx(report.precisions["bf16"].first_divergence.rel_error)
    assert_clean(compare(Net(), torch.randn(2, length, 8), keep_fp32=("pos",)))
    assert_clean(compare(Net(), torch.randn(2, length, 8), "autocast"))


def test_rotary_embedding_in_the_parents_own_code() -> None:
    class Heads(nn.Module):
        inv_freq: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, 16, 2).float() / 16))

        def forward(self, x: Tensor) -> Tensor:
            angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.inv_freq
            angle = torch.cat([angle, angle], -1)
            q, k = (p * angle.cos() + p.roll(8, -1) * angle.sin() for p in (self.q_proj(x), self.k_proj(x)))
            return self.o_proj(F.scaled_dot_product_attention(q, k, x))

    model = nn.Sequential(mlp(16), nn.LayerNorm(16), Heads(), mlp(16))
    with torch.no_grad():
        model[2].q_proj.weight *= 8
        model[2].k_proj.weight *= 8
    report = compare(model, torch.randn(2, 700, 16))
    assert_diverges(report, "bf16", "2", class_="Heads", between=("2.k_proj", "2.o_proj"))
    assert "own code" in report.precisions["bf16"].first_divergence.explanation


def test_a_diffusion_timestep_that_is_rounded() -> None:
    class Timestep(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            angle = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8, device=t.device).to(t.dtype) / 8)
            return torch.cat([angle.cos(), angle.sin()], -1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.time, self.out = nn.Linear(8, 16), Timestep(), mlp(16)

        def forward(self, x: Tensor, *, timestep: Tensor) -> Tensor:
            return self.out(self.inp(x) + self.time(timestep))

    batch = {"x": torch.randn(2, 8), "timestep": torch.tensor([998.39, 987.17])}
    report = compare(Net(), batch)
    assert_diverges(report, "bf16", "time", class_="Timestep")


@pytest.mark.parametrize("mode", ["cast"])
def test_integers_stored_as_floats(mode: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3000, 8), mlp(8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids.long()))

    batch = {"ids": torch.tensor([[5.0, 2801.0, 7.0], [1.0, 2.0, 3.0]])}
    report = compare(Net(), batch, mode)
    for precision in ("fp16", "bf16"):
        found = report.precisions[precision].first_divergence
        assert found is not None
        assert (found.phase, found.module, found.mechanism) == ("input", None, "unrepresentable-constant")
        assert found.parameter == "ids"
        (error,) = errors(report, precision)
        assert (error.rule, error.phase, error.severity) == ("unrepresentable-constant", "input", "error")
        assert error.evidence["parameter"] == "ids"
        assert (error.evidence["count"], error.evidence["index"], error.evidence["samples"]) == (1, [0, 1], [0])
    assert (report.verdict, report.exit_code) == ("precision", 1)


def test_integers_stored_as_floats_that_nothing_depends_on() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = mlp(8)

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            return self.head(x)

    report = compare(Net(), {"x": torch.randn(2, 8), "step": torch.tensor([4097.0, 4099.0])})
    assert_clean(report)
    assert {f.rule for f in report.findings} == {"unrepresentable-constant"}


def test_a_mean_by_a_running_sum_that_saturates() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x[:, 0])
            for step in range(x.shape[1]):
                total = total + x[:, step]
            return total / x.shape[1]

    model = nn.Sequential(mlp(8), Do(lambda x: x * 0.01 + 1.0), Pool(), mlp(8))
    report = compare(model, torch.randn(2, 1200, 8))
    assert_diverges(report, "bf16", "2", class_="Pool")
    assert report.precisions["fp16"].verdict == "clean", report.render()


def test_a_norm_by_hand_that_collapses_to_zeros() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Do(lambda x: 500 * x), RMSNorm(32), mlp(32))
    report = compare(model, torch.randn(4, 32) + 1.5)
    first = report.precisions["fp16"].first_bad
    assert first is None
    assert_diverges(report, "fp16", "2", class_="RMSNorm")
    assert "values are zero; in FP32 0 are" in report.precisions["fp16"].first_divergence.explanation
    assert report.precisions["bf16"].verdict == "clean", report.render()


def test_a_running_loss_that_stops_growing() -> None:
    def running(output: Tensor, batch: Any) -> Tensor:
        total = torch.zeros((), dtype=output.dtype)
        for row in output.square().flatten():
            total = total + row
        return total

    model = nn.Sequential(mlp(16), nn.LayerNorm(16))
    report = compare(model, torch.randn(64, 16), loss=running, backward=False)
    assert_diverges(report, "bf16", None, phase="loss", mechanism="divergence")
    assert_clean(compare(model, torch.randn(64, 16), loss=mean_square, backward=False))


def test_an_epsilon_that_is_zero_in_fp16() -> None:
    model = nn.Sequential(mlp(8), Do(lambda x: x * 1e-5), Do(lambda x: x / (x.abs() + 1e-5)), Do(lambda x: x * 1.0))
    report = compare(model, torch.randn(4, 8))
    assert report.precisions["bf16"].verdict == "clean", report.render()
    normalise = nn.Sequential(mlp(8), Do(lambda x: x * 1e-5), RMSNorm(8, eps=1e-10), mlp(8))
    report = compare(normalise, torch.randn(4, 8))
    assert report.precisions["fp16"].verdict == "precision"
    place = report.precisions["fp16"].first_bad or report.precisions["fp16"].first_divergence
    assert place.module == "2"
    assert report.precisions["bf16"].verdict == "clean"


def test_a_difference_of_nearly_equal_values() -> None:
    class Variance(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()

    model = nn.Sequential(mlp(32), Do(lambda x: 0.1 * x + 10), Variance(), nn.Linear(1, 4))
    report = compare(model, torch.randn(4, 32))
    assert_diverges(report, "bf16", "2", class_="Variance")


def test_gradients_that_flush_without_a_loss_scale() -> None:
    model = mlp(16, 3)
    report = compare(
        model, torch.randn(4, 16), "autocast", loss=lambda y, _: 1e-7 * mean_square(y, None), loss_scale=1.0
    )
    found = [f for f in report.findings if f.rule == "gradient-underflow"]
    assert [(f.precision, f.severity, f.phase) for f in found] == [("fp16", "warning", "backward")]
    assert found[0].evidence["share"] > 0.5
    scaled = compare(model, torch.randn(4, 16), "autocast", loss=lambda y, _: 1e-7 * mean_square(y, None))
    assert "gradient-underflow" not in {f.rule for f in scaled.findings}


def test_a_user_tolerance_and_an_ignore_rule() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos, self.head = Rotary(16), mlp(8)

        def forward(self, x: Tensor) -> Tensor:
            cos, sin = self.pos(x)
            return self.head(x * cos + x * sin)

    x = torch.randn(2, 700, 8)
    assert compare(Net(), x, dtypes=("fp32", "bf16")).verdict == "precision"
    ignoring = IgnoreRule(module="pos", mechanism="divergence", why="short sequences only")
    report = compare(Net(), x, dtypes=("fp32", "bf16"), ignore=(ignoring,))
    assert (report.verdict, report.exit_code) == ("clean", 0)
    assert [f.ignored_why for f in report.findings if f.ignored] == ["short sequences only"]
    loose = Tolerance(module=None, format="bf16", multiple=2000.0)
    assert compare(Net(), x, dtypes=("fp32", "bf16"), tolerances=(loose,)).verdict == "clean"
