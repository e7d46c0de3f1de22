"""Every lane draws the same: dropout masks, noise after rounding, choices, Python's and NumPy's generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanprobe
from nanprobe.lanes.draws import draw_rounded
from tests.lanes.support import (
    LOW,
    Code,
    assert_healthy,
    mean_square,
    measure,
    rules,
    untouched,
    without_timings,
)

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


@MODES
@pytest.mark.parametrize("functional", [False, True])
def test_dropout_drops_the_same_elements(mode: str, functional: bool) -> None:
    def drop(self: Any, x: Tensor) -> Any:
        return nn.functional.dropout(x, 0.4, self.training) if functional else self.drop(x)

    inner = Code(drop, drop=nn.Dropout(0.4))
    model = Code(lambda self, x: self.last(self.inner(self.first(x))), first=nn.Linear(8, 64), inner=inner)
    model.last = nn.Linear(64, 2)
    report = nanprobe.compare_precisions(model, torch.randn(16, 8), mode=mode, loss=mean_square)
    assert_healthy(report)
    zeros = {name: measure(report, "inner", name).zero for name in ("fp32", *LOW)}
    assert 300 < zeros["fp32"] < 520
    assert zeros["fp16"] == zeros["bf16"] == zeros["fp32"]
    for name in LOW:
        error = measure(report, "inner", name).rel_error
        assert error is not None
        assert error < 0.02
        if not functional:
            # The extra run for the local error draws the same mask.
            assert measure(report, "inner.drop", name).local_error == pytest.approx(0.0, abs=0.01)


@MODES
def test_dropout_after_a_module_that_only_one_lane_visits_is_told(mode: str) -> None:
    """A lane that draws more than the reference gets other masks from then on: errors mean little and it is said."""

    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        if h.dtype == torch.float16:
            torch.rand(3)
        return self.drop(h)

    model = Code(forward, first=nn.Linear(8, 64), drop=nn.Dropout(0.5))
    report = nanprobe.compare_precisions(model, torch.randn(16, 8), mode=mode, loss=mean_square)
    found = [f for f in report.findings if f.rule == "random-draws-differ"]
    assert [(f.precision, f.module) for f in found] == [("fp16", "drop")]


DRAWS: dict[str, Any] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randn": lambda h: torch.randn(h.shape, dtype=h.dtype),
    "rand": lambda h: torch.rand(h.shape, dtype=h.dtype),
    "normal_": lambda h: torch.empty_like(h).normal_(1.0, 2.0),
    "uniform_": lambda h: torch.empty_like(h).uniform_(-3.0, 5.0),
    "exponential_": lambda h: torch.empty_like(h).exponential_(),
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.3),
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.25)),
    "normal": lambda h: torch.normal(torch.zeros_like(h), 1.5),
    "normal of tensors": lambda h: torch.normal(torch.zeros_like(h), torch.ones_like(h)),
    "poisson": lambda h: torch.poisson(torch.full_like(h, 4.0)),
    "multinomial": lambda h: torch.multinomial(torch.full_like(h, 0.5), 3),
    "distribution": lambda h: torch.distributions.Normal(torch.zeros_like(h), torch.ones_like(h)).rsample(),
    "gumbel": lambda h: nn.functional.gumbel_softmax(torch.zeros_like(h), hard=False),
    "dropout1d": lambda h: nn.functional.dropout1d(torch.ones_like(h)[:, None].expand(-1, 6, -1), 0.5),
    "alpha_dropout": lambda h: nn.functional.alpha_dropout(torch.ones_like(h), 0.5, training=True),
    "randint": lambda h: torch.randint(0, 100, h.shape),
    "randperm": lambda h: torch.randperm(50),
}


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_agree_after_rounding(draw: str, mode: str) -> None:
    # The draw after it agrees too: every lane has consumed the same share of its generator.
    inner = Code(lambda self, h: DRAWS[draw](h))
    after = Code(lambda self, h: torch.rand(9))
    model = Code(lambda self, x: (self.inner(self.lin(x)), self.after(x)), lin=nn.Linear(4, 33), inner=inner)
    model.after = after
    report = nanprobe.compare_precisions(model, torch.randn(5, 4), mode=mode)
    assert all(result.completed for result in report.precisions.values()), report.findings
    exact = measure(report, "inner", "fp32")
    for name, unit in (("fp16", 2**-11), ("bf16", 2**-8)):
        found = measure(report, "inner", name)
        if found.rel_error is not None:
            assert found.rel_error <= 4 * unit, name
        assert found.absmax == pytest.approx(exact.absmax, rel=4 * unit)
        assert found.mean == pytest.approx(exact.mean, rel=4 * unit, abs=4 * unit)
        assert measure(report, "after", name).rel_error == 0.0
    assert "routing-flip" not in rules(report)


def test_what_was_drawn_in_fp32_is_told() -> None:
    model = Code(lambda self, x: self.lin(x) + torch.randn_like(self.lin(x)), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), mode="cast")
    drawn = report.record.conditions["emulated"]["random draws made in FP32 and rounded"]
    assert drawn == {"fp16": 1, "bf16": 1}


def test_a_uniform_draw_never_rounds_up_to_its_end() -> None:
    torch.manual_seed(0)
    mode = _Drawing()
    with mode:
        low = torch.rand(40_000, dtype=torch.bfloat16)
        shifted = torch.empty(40_000, dtype=torch.bfloat16).uniform_(2.0, 4.0)
    torch.manual_seed(0)
    exact = torch.rand(40_000)
    assert bool((exact.to(torch.bfloat16) == 1.0).any())
    assert float(low.max()) < 1.0
    assert float(shifted.max()) < 4.0
    assert mode.drew == 2
    apart = (low.float() - exact).abs()
    assert float(apart.max()) <= 2**-8


class _Drawing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.drew = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drew, result = draw_rounded(func, args, kwargs or {})
        self.drew += drew
        return result if drew else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_python_and_numpy_draw_the_same_in_all_lanes(mode: str) -> None:
    drawn: list[tuple[float, float, float]] = []

    def forward(self: Any, x: Tensor) -> Any:
        for _ in range(2):
            draw = (random.random(), float(np.random.rand()), float(torch.rand(())))
            drawn.append(draw)
            x = self.lin(x) * (0.5 + draw[0]) + draw[1] + draw[2]
        return x

    model = Code(forward, lin=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    # The last replay is the one that counts: two draws of each of three lanes, in turns.
    last = drawn[-6:]
    assert len(set(last)) == 2
    assert all(last.count(draw) == 3 for draw in last)


def test_layers_skipped_at_random_are_skipped_in_all_lanes() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x

    model = Code(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(12)))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square, seed=3)
    assert_healthy(report)
    visited = {r.module for r in report.record.modules} - {""}
    assert 0 < len(visited) < 12


def test_a_generator_held_by_the_model_is_used_up_by_no_lane() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x) + torch.randn(x.shape, generator=self.generator)

    model = Code(forward, lin=nn.Linear(4, 4), generator=torch.Generator().manual_seed(4))
    before = model.generator.get_state().clone()
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert torch.equal(model.generator.get_state(), before)
    assert all(result.completed for result in report.precisions.values())
    assert_healthy(report)


def test_numpy_generators_held_by_the_model_are_copied() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x) * float(self.rng.random())

    model = Code(forward, lin=nn.Linear(4, 4), rng=np.random.default_rng(5))
    before = model.rng.bit_generator.state
    assert_healthy(nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square))
    assert model.rng.bit_generator.state == before


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_two_replays_give_the_same_report(mode: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    x = torch.randn(6, 8)
    first = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square, seed=11)
    torch.rand(5), random.random(), np.random.rand()
    again = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square, seed=11)
    assert without_timings(first) == without_timings(again)
    other = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square, seed=12)
    assert measure(other, "1", "fp32").zero != 0
    assert without_timings(other)["modules"] != without_timings(first)["modules"]


def test_the_reference_is_what_the_model_gives_by_itself_with_that_seed() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3)).train()
    x = torch.randn(6, 8)
    report = nanprobe.compare_precisions(model, x, loss=mean_square, seed=9)
    torch.manual_seed(9)
    assert report.precisions["fp32"].loss == pytest.approx(mean_square(model(x), x).item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_a_lane_that_is_run_again_for_its_operations_draws_the_same(mode: str) -> None:
    drawn: dict[str, list[Tensor]] = {}

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Any:
            hidden = self.lin(x)
            noise = torch.randn_like(hidden)
            drawn.setdefault(str(hidden.dtype), []).append(noise.detach().clone())
            return self.drop((hidden + noise).half() * 1e5 if hidden.dtype is torch.float16 else hidden + noise)

    report = nanprobe.replay(Noisy(), torch.randn(4, 8), dtype="fp16", mode=mode, loss=mean_square)
    assert report.first_bad is not None
    assert report.first_bad.op == "aten.mul", "the operation was not looked for"
    assert len(drawn["torch.float16"]) >= 2
    for other in drawn["torch.float16"][1:]:
        assert torch.equal(drawn["torch.float16"][0], other)
    assert torch.equal(drawn["torch.float16"][0], drawn["torch.float32"][0].half())


@pytest.mark.parametrize("dtype", ["tf32", "fp8-e4m3", "fp8-e5m2"])
def test_emulated_lanes_draw_the_same(dtype: str) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    report = nanprobe.replay(model, torch.randn(16, 8), dtype=dtype, loss=mean_square)
    assert measure(report, "1", dtype).zero == measure(report, "1", "fp32").zero
    assert rules(report) == []
