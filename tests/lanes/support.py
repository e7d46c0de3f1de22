"""Looking things up in a report, and photographing everything a replay must leave as it was."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanprobe.records import GradientRow, Measure, VisitRow
from nanprobe.report import Report

LOW = ("fp16", "bf16")
ALL = ("fp32", "fp16", "bf16")


def mean_square(output: Any, batch: Any) -> Tensor:
    """A loss for models that return one tensor."""
    assert isinstance(output, Tensor)
    return output.float().square().mean()


def rows(report: Report, module: str, phase: str = "forward") -> list[VisitRow]:
    """Return a module's rows in the order of its visits."""
    found = [row for row in report.record.modules if row.module == module and row.phase == phase]
    return sorted(found, key=lambda row: row.visit)


def row(report: Report, module: str, visit: int = 0, phase: str = "forward") -> VisitRow:
    """Return one row; it must be there exactly once."""
    (found,) = [r for r in report.record.modules if (r.module, r.visit, r.phase) == (module, visit, phase)]
    return found


def measure(report: Report, module: str, precision: str, visit: int = 0, phase: str = "forward") -> Measure:
    """Return what one precision held at one place."""
    return row(report, module, visit, phase).precisions[precision]


def gradient(report: Report, parameter: str) -> GradientRow:
    """Return a parameter's row; it must be there exactly once."""
    (found,) = [r for r in report.record.gradients if r.parameter == parameter]
    return found


def rules(report: Report, severity: str | None = None) -> list[str]:
    """Return the rules of the findings, of one severity if asked for."""
    return [f.rule for f in report.findings if severity in (None, f.severity)]


def assert_healthy(report: Report, precisions: tuple[str, ...] = LOW) -> None:
    """Every lane ended, nothing was found, and every forward row has every precision and an error near zero."""
    for name in precisions:
        result = report.precisions[name]
        assert result.completed, report.findings
        assert result.verdict == "clean", [f.message for f in report.findings]
    assert rules(report) == []
    for found in report.record.modules:
        assert set(found.precisions) == {report.record.reference, *precisions}, found


def without_timings(report: Report) -> dict[str, Any]:
    """Return a report as data, without how long things took."""
    return {key: value for key, value in report.to_dict().items() if key != "timings"}


class Photograph:
    """Everything about a model and the process that a replay must not change; compared with :meth:`same`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = [(name, tensor, tensor.detach().clone()) for name, tensor in _tensors(model)]
        self.grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self.requires = [p.requires_grad for p in model.parameters()]
        self.modules = {path: (module, module.training) for path, module in model.named_modules()}
        self.attributes = {path: _attributes(module) for path, module in model.named_modules()}
        self.process = _process()

    def same(self) -> None:
        """Fail when anything differs from the time the photograph was taken."""
        now = list(_tensors(self.model))
        assert [name for name, _ in now] == [name for name, _, _ in self.tensors]
        for (name, tensor), (_, before, values) in zip(now, self.tensors, strict=True):
            assert tensor is before, name
            assert torch.equal(tensor.detach().nan_to_num(), values.nan_to_num()), name
            assert tensor.dtype == values.dtype, name
        for parameter, grad, values in self.grads:
            assert parameter.grad is grad
            assert grad is None or torch.equal(grad, values)
        assert [p.requires_grad for p in self.model.parameters()] == self.requires
        assert {path: (module, module.training) for path, module in self.model.named_modules()} == self.modules
        assert {path: _attributes(module) for path, module in self.model.named_modules()} == self.attributes
        assert _process() == self.process


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes by identity, and its hooks by their keys and functions."""
    found: dict[str, Any] = {name: id(value) for name, value in module.__dict__.items()}
    found |= {name: dict(value) for name, value in module.__dict__.items() if name.endswith("_hooks")}
    return found


def _process() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": repr(np.random.get_state(legacy=True)),
        "numpy keys": np.random.get_state(legacy=True)[1].tolist(),  # type: ignore[index]
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "gc": gc.get_threshold(),
        "collecting": gc.isenabled(),
        "threads": torch.get_num_threads(),
        "lanes": [t.name for t in threading.enumerate() if t.name in [f"nanprobe-{n}" for n in (*ALL, "fp64")]],
        "excepthook": threading.excepthook,
    }


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fail when the block changes the model or the process, also when it raises."""
    before = Photograph(model)
    try:
        yield
    finally:
        before.same()


class Code(nn.Module):
    """A module whose forward is given as a function of itself and its arguments; ``members`` become its attributes."""

    def __init__(self, code: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.code = code

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)
