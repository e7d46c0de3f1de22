"""Functions that the model holds, or that hook it, work on the lane's copy and not on the caller's model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import ALL, Code, assert_healthy, gradient, mean_square, measure, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


@MODES
def test_hooks_that_collect_features_in_the_model(mode: str) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.features: list[Tensor] = []
            self.layers[1].register_forward_hook(lambda module, args, output: self.features.append(output))

        def forward(self, x: Tensor) -> Any:
            out = self.layers(x)
            return out + self.features[-1]

    model, x = Features(), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert model.features == []


@MODES
@pytest.mark.parametrize("form", ["closure", "default", "keyword", "nested", "list", "partial", "assigned forward"])
def test_functions_that_call_a_layer(form: str, mode: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin = nn.Linear(4, 4)

            def deep(x: Tensor) -> Any:
                return (lambda y: self.lin(y))(x)

            def caller(x: Tensor, *, layer: Any = lin) -> Any:
                return layer(x)

            self.step: Any = {
                "closure": lambda x: self.lin(x),
                "default": lambda x, layer=lin: layer(x),
                "keyword": caller,
                "nested": lambda x: deep(x),
                "list": [lambda x: self.lin(x)],
                "partial": functools.partial(Model.apply_layer, self),
                "assigned forward": None,
            }[form]
            if form == "assigned forward":
                plain = self.lin.forward
                self.lin.forward = lambda x: plain(x) * 2.0  # type: ignore[method-assign]

        def apply_layer(self, x: Tensor) -> Any:
            return self.lin(x)

        def forward(self, x: Tensor) -> Any:
            step = self.step[0] if isinstance(self.step, list) else self.step
            return torch.tanh(step(x) if step is not None else self.lin(x))

    model, x = Model(), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert len(report.record.gradients) == 2
    assert measure(report, "", "fp32").absmax == pytest.approx(model(x).abs().max().item(), rel=1e-5)


def test_a_function_that_holds_itself_and_one_with_an_empty_cell() -> None:
    lin = nn.Linear(4, 4)

    def again(x: Tensor, depth: int = 2) -> Any:
        return lin(x) if depth == 0 else again(torch.tanh(lin(x)), depth - 1)

    def never() -> Any:
        return later

    model = Code(lambda self, x: self.again(x), lin=lin, again=again, never=never)
    if x is None:
        later = 1
    report = nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square)
    assert_healthy(report)


x = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_gradient_hooks_of_parameters_run_in_every_lane() -> None:
    """A mask on a gradient is part of the training step; an optimizer that steps in backward is not replayed."""
    model = nn.Linear(4, 4)
    stepped: list[int] = []
    model.weight.register_hook(lambda grad: grad * 0.5)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: stepped.append(1))
    mean_square(model(x), None).backward()
    assert model.weight.grad is not None
    exact = model.weight.grad.norm().item()
    stepped.clear()
    for mode in ("autocast", "cast"):
        with untouched(model):
            report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
        assert_healthy(report)
        for name in ALL:
            assert gradient(report, "weight").precisions[name].norm == pytest.approx(exact, rel=0.01)
    assert stepped == []
