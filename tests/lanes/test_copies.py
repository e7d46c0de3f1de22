"""Lanes run on copies: models that hold what cannot be copied, what is no leaf, and what they write to."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.lanes.lane_model import copy_model
from tests.lanes.support import Code, assert_healthy, mean_square, measure, rules, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


class Holder(nn.Module):
    """A model that holds ``thing`` in an attribute."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.thing = thing

    def forward(self, x: Tensor) -> Any:
        return self.lin(x)


class Plain:
    """An object of the user's with a lock inside."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scale = 2.0


def _numbers() -> Iterator[int]:
    yield from range(3)


THINGS: dict[str, Any] = {
    "lock": threading.Lock,
    "generator": _numbers,
    "lambda": lambda: lambda x: x,
    "file": lambda: open("/dev/null"),  # noqa: SIM115 - held on purpose
    "object with a lock": Plain,
    "dict of locks": lambda: {"a": threading.Lock(), "b": [1, 2]},
    "bound method": lambda: nn.Linear(2, 2).forward,
    "partial": lambda: functools.partial(torch.add, 1),
    "weak reference": lambda: weakref.ref(nn.Linear(2, 2)),
    "thread": lambda: threading.current_thread(),
    "module object": lambda: torch,
}


@MODES
@pytest.mark.parametrize("thing", THINGS)
def test_attributes_that_cannot_be_copied(thing: str, mode: str) -> None:
    held = THINGS[thing]()
    model = Holder(held)
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    if thing in ("lock", "generator", "file", "object with a lock", "dict of locks", "thread"):
        notes = report.record.conditions["notes"]
        assert any("thing" in note and "shared between lanes" in note for note in notes)
    getattr(held, "close", lambda: None)()


@MODES
def test_the_weights_of_a_lane_are_right_when_an_attribute_cannot_be_copied(mode: str) -> None:
    """The second try at copying must share and tie as the first one does."""
    model = Holder(threading.Lock())
    model.other = nn.Linear(4, 4)
    model.other.weight = model.lin.weight
    copied = copy_model(model, dtype=torch.float16 if mode == "cast" else None).model
    assert isinstance(copied, Holder)
    assert copied.lin is not model.lin
    assert copied.lin.weight is copied.other.weight
    assert copied.lin.weight is not model.lin.weight
    assert torch.equal(copied.lin.weight.float(), model.lin.weight.to(copied.lin.weight.dtype).float())


def test_fp32_copies_share_memory_until_one_writes() -> None:
    model = nn.Linear(64, 64)
    first, second = copy_model(model).model, copy_model(model).model
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    before = model.weight.detach().clone()
    with torch.no_grad():
        first.weight.add_(1.0)
    assert torch.equal(model.weight, before)
    assert torch.equal(second.weight, before)
    assert torch.equal(first.weight, before + 1.0)
    with torch.no_grad():
        model.weight.mul_(3.0)
    assert torch.equal(second.weight, before)


@MODES
@pytest.mark.parametrize("kind", ["plain", "list", "dict", "nested"])
def test_results_of_an_earlier_step_in_attributes(kind: str, mode: str) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.kept: Any = None

        def forward(self, x: Tensor) -> Any:
            h = self.lin(x)
            old = self.kept
            while isinstance(old, (list, dict)):
                old = old[0] if isinstance(old, list) else old["h"]
            forms: dict[str, Any] = {"plain": h, "list": [h], "dict": {"h": h}, "nested": [{"h": [h]}]}
            self.kept = forms[kind]
            return h if old is None else h + 0 * old.to(h.dtype)

    model, x = Remembering(), torch.randn(3, 4)
    model(x)  # leaves a tensor that is no leaf of a graph
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)


def test_loss_terms_left_in_attributes_are_each_lanes_own() -> None:
    class Balanced(nn.Module):
        aux: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.lin(x)
            self.aux = h.float().square().mean()
            return {"loss": h.float().mean() + self.aux}

    model, x = nn.Sequential(Balanced()), torch.randn(3, 4)
    exact = model(x)["loss"].item()
    report = nanprobe.compare_precisions(model, x)
    assert_healthy(report)
    assert report.precisions["fp32"].loss == pytest.approx(exact, rel=1e-6)
    assert report.precisions["bf16"].loss != report.precisions["fp32"].loss


def test_caches_and_counters_start_anew_in_each_lane() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        self.cache.append(self.lin(x))
        return torch.stack(self.cache).sum(0) / self.calls

    model = Code(forward, lin=nn.Linear(4, 4), cache=[], calls=0)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert (model.calls, model.cache) == (0, [])


def test_positions_and_masks_in_plain_attributes() -> None:
    """Tensors that are neither parameters nor buffers stay FP32 under ``half()``, as they do for the user."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x) * self.scale.to(x.dtype)

    model = Code(forward, lin=nn.Linear(4, 4), scale=torch.full((4,), 3.0))
    x = torch.randn(3, 4)
    for mode in ("autocast", "cast"):
        with untouched(model):
            assert_healthy(nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square))


def test_a_bound_method_of_the_model_itself_is_the_copys() -> None:
    """A model that calls itself through an attribute must not run the caller's modules."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.step = self.helper

        def helper(self, x: Tensor) -> Any:
            return self.lin(x)

        def forward(self, x: Tensor) -> Any:
            return self.step(x)

    model, x = Own(), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square)
    assert_healthy(report)
    assert report.record.coverage.never_visited == ()


def test_half_models_are_judged_against_their_fp32_values() -> None:
    """A checkpoint stored in half: the reference and the autocast lanes hold its values in FP32."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).half()
    x = torch.randn(3, 4).half()
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert measure(report, "0", "fp32").dtype == "float32"


@MODES
def test_float64_modules(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Code(lambda self, x: self.lin(x.double()), lin=nn.Linear(4, 4).double()))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), mode=mode, loss=mean_square)
    assert report.precisions["fp32"].completed
    if mode == "autocast":
        assert_healthy(report)
        assert measure(report, "1", "fp32").dtype == "float64"
    else:
        # half() converts doubles as well, and the model's own .double() no longer fits: the user would see the same.
        assert [f.rule for f in report.findings] == ["raised", "raised"]
        assert report.exit_code == 3


def test_a_whole_model_in_float64() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert report.precisions["fp32"].completed
    assert rules(report, "error") == []


def test_custom_copy_protocols_are_respected() -> None:
    class Counted(nn.Linear):
        copies = 0

        def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
            Counted.copies += 1
            twin = Counted(4, 4)
            twin.load_state_dict(self.state_dict())
            return twin

    model, x = nn.Sequential(Counted(4, 4), nn.ReLU()), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert Counted.copies >= 3


def test_parameters_of_a_subclass_and_lazy_modules() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    model[0].weight = Special(torch.randn(4, 4))
    x = torch.randn(3, 4)
    model(x)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert {r.parameter for r in report.record.gradients} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_views_of_parameters_kept_flat() -> None:
    """Weights that are views of one flat tensor, as some trainers keep them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32)
    model[0].weight = nn.Parameter(flat[:16].view(4, 4))
    model[1].weight = nn.Parameter(flat[16:].view(4, 4))
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert measure(report, "", "fp32").absmax == pytest.approx(model(x).abs().max().item(), rel=1e-5)


def test_buffers_shared_between_modules_stay_shared() -> None:
    class Counter(nn.Module):
        seen: Tensor

        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.register_buffer("seen", seen)

        def forward(self, x: Tensor) -> Any:
            self.seen.add_(1.0)
            return x * self.seen

    shared = torch.zeros(1)
    model, x = nn.Sequential(Counter(shared), Counter(shared)), torch.ones(2, 2)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x)
    assert_healthy(report)
    assert measure(report, "1", "fp32").absmax == 2.0
    assert measure(report, "1", "fp16").absmax == 2.0
