"""Small models to plant faults in, and how to ask a report what it blames."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.records import Finding, FirstBad
from nanprobe.report import Report

LOW = ("fp16", "bf16")


class Do(nn.Module):
    """A leaf that computes a function of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Residual(nn.Module):
    """x + inner(x), added in the block's own code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), multiplied in its own code."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Self-attention by hand; ``prescale`` divides the queries before the product instead of the scores after it."""

    def __init__(self, width: int, heads: int, *, prescale: bool = False) -> None:
        super().__init__()
        self.heads, self.prescale = heads, prescale
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        scale = 1 / math.sqrt(q.shape[-1])
        scores = (q * scale) @ k.transpose(-1, -2) if self.prescale else (q @ k.transpose(-1, -2)) * scale
        if mask is not None:
            scores = scores + mask
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in the dtype of its input."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def mlp(width: int = 32, depth: int = 2) -> nn.Sequential:
    """Healthy layers."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def mean_square(output: Any, batch: Any) -> Tensor:
    """A loss for models that return one tensor."""
    return output.float().square().mean()


def compare(model: nn.Module, batch: Any, mode: str = "cast", *, operations: bool = False, **settings: Any) -> Report:
    """Replay in all three precisions, down to modules."""
    return nanprobe.compare_precisions(model, batch, mode=mode, operations=operations, **settings)


def errors(report: Report, precision: str | None = "any") -> list[Finding]:
    """Return the findings of severity error, of one precision if asked for."""
    return [f for f in report.findings if f.severity == "error" and precision in ("any", f.precision)]


def warnings(report: Report, precision: str | None = "any") -> list[Finding]:
    """Return the findings of severity warning."""
    return [f for f in report.findings if f.severity == "warning" and precision in ("any", f.precision)]


def bad(report: Report, precision: str) -> FirstBad:
    """Return the origin of one precision, which must have one."""
    found = report.precisions[precision].first_bad
    assert found is not None, report.render()
    return found


def assert_clean(report: Report, precisions: Sequence[str] = LOW) -> None:
    """No error finding, a clean verdict, exit code 0."""
    for name in precisions:
        result = report.precisions[name]
        assert result.completed, result.error
        assert result.verdict == "clean", report.render()
    assert not errors(report), report.render()
    if set(precisions) == set(LOW):
        assert report.exit_code == 0
