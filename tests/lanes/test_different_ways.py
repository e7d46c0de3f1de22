"""Lanes that take different ways, raise, or end early: nobody waits for ever, and matching resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import IncompleteError, UsageError
from nanprobe.lanes.conductor import WINDOW
from tests.lanes.support import ALL, LOW, Code, assert_healthy, mean_square, measure, row, rows, rules, untouched

BOTH_MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])
BACKWARD = pytest.mark.parametrize("backward", [True, False])


def low(x: Tensor) -> bool:
    """Whether a lane runs in low precision, told the way models tell it."""
    return x.dtype in (torch.float16, torch.bfloat16)


class Experts(nn.Module):
    """Top-1 routing whose scores are nearly tied, so that rounding decides."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.after = nn.Linear(8, 8)
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(1, 8) + 1e-4 * torch.randn(experts, 8))

    def forward(self, x: Tensor) -> Any:
        chosen = self.router(x).topk(1, dim=-1).indices[:, 0]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if bool(mine.any()):
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]).to(out.dtype))
        return self.after(out + x)


@BOTH_MODES
@BACKWARD
def test_a_mixture_of_experts_flips_and_meets_again(mode: str, backward: bool) -> None:
    torch.manual_seed(1)
    model, x = Experts(), torch.randn(12, 8)
    report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square if backward else None)
    assert all(result.completed for result in report.precisions.values())
    assert rules(report, "error") == []
    flips = [f for f in report.findings if f.rule == "routing-flip"]
    assert flips
    assert all(f.severity == "warning" for f in flips)
    first = next(f for f in flips if f.op is not None)
    assert (first.op, first.module) == ("aten.topk", "")
    assert 0 < first.evidence["changed"] <= first.evidence["total"] == 12
    for name in LOW:
        assert measure(report, "after", name).rel_error is not None
        assert measure(report, "", name).rel_error is not None
    assert report.verdict == "clean"
    assert report.exit_code == 0


def test_experts_that_only_one_lane_visits_have_a_row_with_a_reason() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        h = self.special(h) if low(h) else self.usual(h)
        return self.last(h)

    model = Code(forward, **{name: nn.Linear(4, 4) for name in ("first", "special", "usual", "last")})
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert all(result.completed for result in report.precisions.values())
    assert set(row(report, "usual").precisions) == {"fp32"}
    assert set(row(report, "special").precisions) == set(LOW)
    assert measure(report, "special", "fp16").note == "the reference did not come by"
    assert set(row(report, "last").precisions) == set(ALL)
    assert measure(report, "last", "bf16").rel_error is not None
    order = [r.module for r in report.record.modules if r.phase == "forward"]
    assert order.index("first") < order.index("special") < order.index("last")
    assert report.record.coverage.visited == 5


def looping(longer: str, times: int) -> nn.Module:
    """Return a model that makes ``times`` visits of a step in the ``longer`` lanes and three in the others."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        for _ in range(times if low(x) == (longer == "low") else 3):
            x = torch.tanh(self.step(x))
        return self.last(x)

    return Code(forward, **{name: nn.Linear(4, 4) for name in ("first", "step", "last")})


@BACKWARD
@pytest.mark.parametrize("longer", ["reference", "low"])
def test_a_loop_that_ends_earlier_in_one_lane(longer: str, backward: bool) -> None:
    loss = mean_square if backward else None
    report = nanprobe.compare_precisions(looping(longer, 40), torch.randn(3, 4), mode="cast", loss=loss)
    assert all(result.completed for result in report.precisions.values())
    assert [set(r.precisions) for r in rows(report, "step")[3:]] == [
        set(LOW) if longer == "low" else {"fp32"} for _ in range(37)
    ]
    for name in LOW:
        assert measure(report, "step", name, 2).rel_error is not None
        assert measure(report, "last", name).rel_error is not None
        assert measure(report, "", name).rel_error is not None
    if backward:
        assert measure(report, "last", "bf16", phase="backward").rel_error is not None
        assert all(set(r.precisions) == set(ALL) for r in report.record.gradients)


@pytest.mark.parametrize("longer", ["reference", "low"])
def test_lanes_far_apart_meet_again_at_the_end_of_the_module_around_them(longer: str) -> None:
    report = nanprobe.compare_precisions(looping(longer, 3 * WINDOW), torch.randn(3, 4), mode="cast", loss=mean_square)
    assert all(result.completed for result in report.precisions.values())
    assert len(rows(report, "step")) == 3 * WINDOW
    for name in LOW:
        assert measure(report, "step", name, 2).rel_error is not None
        assert measure(report, "", name).rel_error is not None
        assert measure(report, "first", name, phase="backward").rel_error is not None


def test_lanes_that_differ_from_each_other_as_well() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        for _ in range({torch.float32: 5, torch.float16: 2, torch.bfloat16: 9}[x.dtype]):
            x = torch.tanh(self.step(x))
        return self.last(x)

    model = Code(forward, **{name: nn.Linear(4, 4) for name in ("first", "step", "last")})
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square, mode="cast")
    steps = [set(r.precisions) for r in rows(report, "step")]
    assert steps == [set(ALL)] * 2 + [{"fp32", "bf16"}] * 3 + [{"bf16"}] * 4
    assert set(row(report, "last").precisions) == set(ALL)


def test_an_order_that_differs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        pair = (self.b(x), self.a(x)) if low(x) else (self.a(x), self.b(x))[::-1]
        return self.last(pair[0] + pair[1])

    model = Code(forward, **{name: nn.Linear(4, 4) for name in ("first", "a", "b", "last")})
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    for name in LOW:
        assert measure(report, "a", name).rel_error is not None
        assert measure(report, "b", name).rel_error is not None


def test_a_model_that_clamps_in_fp16_only() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.up(x)
        if h.dtype == torch.float16 and bool(torch.isinf(h).any()):
            limit = torch.finfo(h.dtype).max - 1000
            h = torch.clamp(h, min=-limit, max=limit)
        return self.down(h)

    model = Code(forward, up=nn.Linear(4, 4), down=nn.Linear(4, 4))
    with torch.no_grad():
        model.up.weight.fill_(1e3)
        model.down.weight.mul_(1e-3)
    report = nanprobe.compare_precisions(model, torch.full((3, 4), 100.0), mode="cast")
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.module, first.mechanism) == ("up", "overflow")
    assert measure(report, "up", "fp16").posinf == 12
    assert measure(report, "down", "fp16").posinf == 0
    assert report.precisions["bf16"].verdict == "clean"


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@BACKWARD
def test_a_lane_that_raises_ends_alone(where: str, backward: bool) -> None:
    def refusing(self: Any, x: Tensor) -> Any:
        if x.dtype == torch.float16:
            raise RuntimeError("\"magic_cpu\" not implemented for 'Half'\nand more")
        return self.lin(x)

    names = ("first", "middle", "last")
    parts = {name: Code(refusing if name == where else lambda self, x: self.lin(x)) for name in names}
    for part in parts.values():
        part.lin = nn.Linear(4, 4)
    model = Code(lambda self, x: self.last(self.middle(self.first(x))), **parts)
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square if backward else None)
    result = report.precisions["fp16"]
    assert (result.completed, result.verdict) == (False, "inconclusive")
    assert result.error == "RuntimeError: \"magic_cpu\" not implemented for 'Half'"
    (found,) = report.findings
    assert (found.rule, found.severity, found.precision, found.module) == ("raised", "error", "fp16", where)
    assert report.precisions["bf16"].verdict == "clean"
    assert report.verdict == "inconclusive"
    assert report.exit_code == 1
    assert set(row(report, "").precisions) == {"fp32", "bf16"}


def test_a_lane_that_raises_in_backward_only() -> None:
    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if grads[0].dtype == torch.bfloat16:
                raise RuntimeError("no bf16 here")
            return grads[0]

    model = Code(lambda self, x: self.b(Picky.apply(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), mode="cast", loss=mean_square)
    result = report.precisions["bf16"]
    assert result.completed is False
    assert result.loss is not None
    assert report.precisions["fp16"].verdict == "clean"
    (found,) = report.findings
    assert (found.rule, found.phase) == ("raised", "backward")
    assert set(row(report, "b", phase="backward").precisions) == set(ALL)


def test_an_operation_without_a_half_kernel_and_a_mismatch_in_the_models_own_code() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x) @ torch.eye(4)

    report = nanprobe.compare_precisions(Code(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4), mode="cast")
    assert [result.completed for result in report.precisions.values()] == [True, False, False]
    assert report.exit_code == 3  # every low precision raised

    def solve(self: Any, x: Tensor) -> Any:
        return torch.linalg.solve(self.lin(x), torch.ones(4, dtype=x.dtype))

    report = nanprobe.replay(Code(solve, lin=nn.Linear(4, 4)), torch.randn(4, 4), mode="cast")
    assert report.precisions["fp16"].completed is False
    assert report.exit_code == 3
    assert "Half" in str(report.precisions["fp16"].error)


def test_the_reference_that_raises_ends_everything_with_its_place() -> None:
    def broken(self: Any, x: Tensor) -> Any:
        raise ZeroDivisionError("the model divides by zero")

    model = nn.Sequential(nn.Linear(4, 4), Code(broken))
    x = torch.randn(3, 4)
    with untouched(model), pytest.raises(IncompleteError, match=r"^the reference raised ZeroDivisionError in 1: the"):
        nanprobe.compare_precisions(model, x, loss=mean_square)


def test_the_reference_that_raises_in_backward_or_loss() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise KeyError("lost")

    model = Code(lambda self, x: Broken.apply(self.a(x)), a=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with untouched(model), pytest.raises(IncompleteError, match="KeyError") as caught:
        nanprobe.compare_precisions(model, x, loss=mean_square)
    assert not isinstance(caught.value, UsageError)

    def loss(output: Any, batch: Any) -> Tensor:
        raise ArithmeticError("no loss today")

    plain = nn.Linear(4, 4)
    with untouched(plain), pytest.raises(IncompleteError, match="ArithmeticError"):
        nanprobe.compare_precisions(plain, x, loss=loss)


def test_a_batch_that_does_not_fit_is_the_users_mistake() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(3, 5)
    with untouched(model), pytest.raises(UsageError, match="batch: "):
        nanprobe.compare_precisions(model, x)


def test_a_model_that_calls_no_module() -> None:
    report = nanprobe.replay(Code(lambda self, x: x * 2), torch.randn(3, 4))
    assert report.verdict == "clean"
    assert [r.module for r in report.record.modules] == [""]


def test_recursion_of_a_module_into_itself() -> None:
    def forward(self: Any, x: Tensor, depth: int = 3) -> Any:
        return self.lin(x) if depth == 0 else self(torch.tanh(self.lin(x)), depth - 1)

    report = nanprobe.compare_precisions(Code(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [r.visit for r in rows(report, "lin")] == [0, 1, 2, 3]
    assert [(r.visit, r.depth) for r in rows(report, "")] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_errors_that_the_model_catches_itself() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        try:
            x = self.picky(x)
        except ValueError:
            x = self.other(x)
        return self.last(x)

    def picky(self: Any, x: Tensor) -> Any:
        if low(x):
            raise ValueError
        return self.lin(x)

    inner = Code(picky, lin=nn.Linear(4, 4))
    model = Code(forward, picky=inner, other=nn.Linear(4, 4), last=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), mode="cast", loss=mean_square)
    assert all(result.completed for result in report.precisions.values())
    assert all(result.error is None for result in report.precisions.values())
    assert set(row(report, "last").precisions) == set(ALL)
