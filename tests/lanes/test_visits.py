"""One row per visit: shared modules, tied weights, in-place code, recomputation, modules that are never called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanprobe
from tests.lanes.support import ALL, Code, assert_healthy, gradient, mean_square, measure, row, rows, untouched


def test_a_shared_module_has_a_row_for_each_visit() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.block(x))
        return x

    model = Code(forward, block=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [r.visit for r in rows(report, "block")] == [0, 1, 2, 3]
    back = rows(report, "block", "backward")
    assert [r.visit for r in back] == [0, 1, 2, 3]
    assert [r.visit for r in sorted(back, key=lambda r: r.order)] == [3, 2, 1, 0]
    assert report.record.coverage.visited == report.record.coverage.modules == 2


def test_a_module_under_two_names_goes_by_the_first() -> None:
    shared = nn.Linear(4, 4)
    model = Code(lambda self, x: self.second(self.first(x)), first=shared, second=shared)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [r.visit for r in rows(report, "first")] == [0, 1]
    assert rows(report, "second") == []
    assert report.record.coverage.modules == 2
    assert report.record.coverage.never_visited == ()


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_tied_weights_have_one_gradient_the_sum_of_both_uses(mode: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.emb(ids))

    model = Tied()
    ids = torch.tensor([[1, 2, 3], [4, 5, 5]])
    with untouched(model):
        report = nanprobe.compare_precisions(model, ids, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert [r.parameter for r in report.record.gradients] == ["emb.weight"]
    mean_square(model(ids), None).backward()
    assert model.emb.weight.grad is not None
    exact = model.emb.weight.grad.norm().item()
    for name in ALL:
        norm = gradient(report, "emb.weight").precisions[name].norm
        assert norm == pytest.approx(exact, rel=1e-6 if name == "fp32" else 0.02)


def test_a_weight_used_outside_its_module() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.emb(ids), self.emb.weight)

    for mode in ("autocast", "cast"):
        model = Code(forward, emb=nn.Embedding(11, 6))
        report = nanprobe.compare_precisions(model, torch.tensor([[1, 2]]), mode=mode, loss=mean_square)
        assert_healthy(report)
        assert [r.parameter for r in report.record.gradients] == ["emb.weight"]


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_in_place_activations(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True))
    x = torch.randn(3, 4)
    report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    # The row of the linear layer shows what it gave out, not what the activation made of it.
    low = measure(report, "0", "fp32").min
    assert low == pytest.approx(model[0](x).min().item(), rel=1e-5)
    assert low < 0 == measure(report, "1", "fp32").min
    assert measure(report, "1", "bf16").local_error is not None


def test_adding_to_an_output_afterwards() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        h.add_(100.0)
        h.mul_(self.gain)
        return self.second(h)

    model = Code(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4), gain=2.0)
    x = torch.randn(3, 4)
    report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert measure(report, "first", "fp32").absmax == pytest.approx(model.first(x).abs().max().item(), rel=1e-5)
    for name in ("fp16", "bf16"):
        error = measure(report, "first", name).rel_error
        assert error is not None
        assert 0 < error < 0.01


def test_overflow_by_an_in_place_operation_is_the_parents_own_code() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        h.mul_(6e4)
        return self.second(h)

    model = Code(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    report = nanprobe.replay(model, 8.0 * torch.randn(3, 4), mode="cast")
    first = report.first_bad
    assert first is not None
    assert (first.module, first.between, first.mechanism) == ("", ("first", "second"), "overflow")
    assert measure(report, "first", "fp16").state == "clean"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.drop = nn.Dropout(dropout)
        self.reentrant = reentrant

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        out = self.drop(block(x))
        assert isinstance(out, Tensor)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = self.run(block, x)
            else:
                x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_neither_rows_nor_gradients(reentrant: bool, dropout: float, mode: str) -> None:
    reports = []
    for how in (None, reentrant):
        torch.manual_seed(3)
        model, x = Stack(how, dropout), torch.randn(4, 6)
        with untouched(model):
            reports.append(nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square))
    plain, recomputed = reports
    assert_healthy(plain)
    assert_healthy(recomputed)
    keys = [{(r.module, r.visit, r.phase) for r in report.record.modules} for report in reports]
    assert keys[0] == keys[1]
    for place in keys[0]:
        mine, theirs = (row(report, *place) for report in reports)
        for name in ALL:
            a, b = mine.precisions[name], theirs.precisions[name]
            assert a.rms == pytest.approx(b.rms, rel=1e-3), (place, name)
            if a.rel_error is not None:
                assert a.rel_error == pytest.approx(b.rel_error, rel=0.05, abs=1e-5), (place, name)
    assert [r.parameter for r in recomputed.record.gradients] == [r.parameter for r in plain.record.gradients]
    for mine_, theirs_ in zip(plain.record.gradients, recomputed.record.gradients, strict=True):
        for name in ALL:
            assert mine_.precisions[name].norm == pytest.approx(theirs_.precisions[name].norm, rel=1e-3)


def test_nested_checkpoints() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Any:
            return self.b(torch.relu(self.a(x)))

        def outer(x: Tensor) -> Any:
            return self.c(checkpoint(inner, x, use_reentrant=False))

        out = checkpoint(outer, self.inp(x), use_reentrant=False)
        assert isinstance(out, Tensor)
        return out

    model = Code(forward, **{name: nn.Linear(4, 4) for name in ("inp", "a", "b", "c")})
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert all([r.visit for r in rows(report, name)] == [0] for name in ("inp", "a", "b", "c", ""))
    assert len(report.record.gradients) == 8


def test_modules_that_are_never_called_are_counted_and_listed() -> None:
    model = Code(
        lambda self, x: self.used(x),
        used=nn.Linear(4, 4),
        unused=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        many=nn.ModuleList([nn.Linear(4, 4)]),
    )
    coverage = nanprobe.compare_precisions(model, torch.randn(3, 4)).record.coverage
    assert (coverage.modules, coverage.visited) == (7, 2)
    assert coverage.never_visited == ("unused", "unused.0", "unused.1", "many", "many.0")
    assert coverage.not_callable == ("many",)


def test_a_call_of_forward_itself_is_not_seen_but_told() -> None:
    model = Code(lambda self, x: self.lin.forward(x), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert report.verdict == "clean"
    assert report.record.coverage.never_visited == ("lin",)


def test_parents_come_after_children_and_depths_are_right() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    report = nanprobe.replay(model, torch.randn(3, 4))
    assert [(r.module, r.depth, r.leaf) for r in report.record.modules] == [
        ("0.0", 2, True),
        ("0.1", 2, True),
        ("0", 1, False),
        ("1", 1, True),
        ("", 0, False),
    ]
    assert [r.order for r in report.record.modules] == [0, 1, 2, 3, 4]


def test_operations_outside_modules_are_counted_but_not_those_inside() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    report = nanprobe.replay(plain, torch.randn(3, 4))
    assert report.record.coverage.ops_outside_modules == 0
    report = nanprobe.replay(plain, torch.randn(3, 4), loss=lambda o, b: o.sin().cos().sum())
    assert report.record.coverage.ops_outside_modules == 3
