"""Silent faults: the operation that lost the digits is named wherever the loss shows, traced whole or in a stretch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.diagnose.drift import drift_of
from nanprobe.lanes.trace import OperationRecord, Operations
from nanprobe.records import Divergence
from tests.diagnose.support import Do, RMSNorm, mean_square, mlp

BOTH_WAYS = pytest.mark.parametrize("limit", [150_000_000, 0], ids=["whole", "focus"])


class Chain(nn.Module):
    """Modules one after the other, each under a name."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def running(output: Tensor, _: Any) -> Tensor:
    total = torch.zeros((), dtype=output.dtype)
    for row in output.square().flatten()[:1500]:
        total = total + row
    return total


def off_by_a_thousand(output: Tensor, _: Any) -> Tensor:
    return (output.square().mean(-1) + 1000 - 1000).float().mean()


def adding_ones(x: Tensor) -> Tensor:
    total = x[:, :1]
    for i in range(600):
        total = total + (x[:, i : i + 1] * 0 + 1)
    return total


def positions(x: Tensor) -> Tensor:
    return torch.arange(900, 900 + x.shape[1]).to(x.dtype)[None, :, None].expand_as(x)


Fault = tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, str | None, str, str]]

FAULTS: dict[str, Fault] = {
    "digits lost two modules before they are missed": (
        lambda: Chain(a=mlp(), lift=Do(lambda x: x + 1000), keep=nn.Identity(), drop=Do(lambda x: x - 1000), z=mlp()),
        {},
        ("forward", "lift", "aten.add", "cancellation"),
    ),
    "a square that underflows in an earlier module": (
        lambda: Chain(a=mlp(), n=nn.LayerNorm(32), small=Do(lambda x: x * 1e-4), square=Do(lambda x: x * x),
                      back=Do(lambda x: x * 1e8), z=mlp()),
        {"dtype": "fp16"},
        ("forward", "square", "aten.mul", "underflow"),
    ),
    "positions that bf16 rounds": (
        lambda: Chain(a=mlp(), ids=Do(positions), wave=Do(torch.sin), z=mlp()),
        {},
        ("forward", "ids", "aten._to_copy", "unrepresentable-constant"),
    ),
    "a bound that rounds to one": (
        lambda: Chain(a=mlp(), p=Do(lambda x: torch.sigmoid(x * 0 + 12).clamp(1e-4, 1 - 1e-4)),
                      log=Do(lambda p: torch.log(1 - p).clamp(min=-20)), z=mlp()),
        {},
        ("forward", "p", "aten.clamp", "unrepresentable-constant"),
    ),
    "a running sum in the loss": (
        lambda: Chain(a=mlp(), n=nn.LayerNorm(32)),
        {"loss": running, "backward": False},
        ("loss", None, "aten.add", "absorption"),
    ),
    "a difference in the loss": (
        lambda: Chain(a=mlp(), n=nn.LayerNorm(32)),
        {"loss": off_by_a_thousand, "backward": False},
        ("loss", None, "aten.add", "cancellation"),
    ),
    "a running sum in a module": (
        lambda: Chain(n=nn.LayerNorm(32), total=Do(adding_ones), z=mlp()),
        {"length": 600},
        ("forward", "total", "aten.add", "absorption"),
    ),
}  # fmt: skip


def divergence(name: str, monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[Divergence, nanprobe.Report]:
    monkeypatch.setattr("nanprobe.pipeline.tracing.WHOLE_UP_TO", limit)
    build, options, _ = FAULTS[name]
    options = dict(options)
    torch.manual_seed(0)
    x = torch.randn(4, options.pop("length", 64), 32)
    precision = options.setdefault("dtype", "bf16")
    report = nanprobe.replay(build(), x, mode="cast", **options)
    found = report.precisions[precision].first_divergence
    assert found is not None, report.render()
    return found, report


@BOTH_WAYS
@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_that_lost_the_digits_is_named(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = divergence(name, monkeypatch, limit)
    assert (found.phase, found.module, found.op, found.mechanism) == FAULTS[name][2], found.explanation
    assert report.verdict == "precision"
    finding = next(f for f in report.findings if f.severity == "error")
    assert (finding.module, finding.op, finding.mechanism) == (found.module, found.op, found.mechanism)
    assert finding.evidence["operation"].startswith(found.op)
    assert {remedy.kind for remedy in finding.remedies} >= ({"rewrite"} if found.module is not None else set())


def test_evidence_holds_the_figures_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def evidence(name: str) -> dict[str, Any]:
        _, report = divergence(name, monkeypatch, 150_000_000)
        return dict(next(f for f in report.findings if f.severity == "error").evidence)

    assert evidence("a running sum in the loss")["absorbed"] > 0.25
    bound = evidence("a bound that rounds to one")["constants"]
    assert {"given": 1 - 1e-4, "held": 1.0} in bound
    assert evidence("a square that underflows in an earlier module")["flushed"] > 1000
    lost = evidence("digits lost two modules before they are missed")
    assert (lost["operation"], lost["amplified_by"]) == ("aten.add in lift", "aten.sub in drop")


def test_where_it_shows_is_told_when_that_is_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = divergence("digits lost two modules before they are missed", monkeypatch, 150_000_000)
    assert found.seen_in == "drop"
    assert found.explanation.startswith("It shows in drop:")
    remedy = next(r for f in report.findings for r in f.remedies if r.kind == "keep-fp32")
    assert remedy.modules == ("lift", "drop")


NEAR_MISSES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "an offset that keeps most digits": (
        lambda: Chain(a=mlp(), lift=Do(lambda x: x + 1), drop=Do(lambda x: x - 1), z=mlp()), {}),
    "squares within the range": (
        lambda: Chain(a=mlp(), n=nn.LayerNorm(32), square=Do(lambda x: x * x), z=mlp()), {"dtype": "fp16"}),
    "positions that bf16 holds": (
        lambda: Chain(a=mlp(), ids=Do(lambda x: positions(x) * 0 + 0.5), wave=Do(torch.sin), z=mlp()), {}),
    "a sum in one operation": (
        lambda: Chain(a=mlp(), n=nn.LayerNorm(32)), {"loss": mean_square, "backward": True}),
    "a norm by hand": (lambda: Chain(a=mlp(), n=RMSNorm(32), z=mlp()), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_no_faults(name: str) -> None:
    build, options = NEAR_MISSES[name]
    torch.manual_seed(0)
    report = nanprobe.replay(build(), torch.randn(4, 64, 32), mode="cast", **{"dtype": "bf16", **options})
    assert report.exit_code == 0, report.render()


def record(order: int, op: str, error: float, local: float, *operands: int, **more: Any) -> OperationRecord:
    """An operation of a visit of "m" whose exact result has a norm of 1."""
    fields: dict[str, Any] = {"phase": "forward", "module": "m", "visit": 0, "class_": "M", "dtype": "bfloat16"}
    fields |= {"elements": 4, "inside": (("", 0), ("m", 0)), "size": 1.0, **more}
    return OperationRecord(order=order, op=op, error=error, local=local, operands=operands, **fields)


def found_in(*records: OperationRecord, tolerance: float = 0.1) -> tuple[str | None, str | None] | None:
    drift = drift_of(Operations(records=records), "forward", ("m", 0), tolerance)
    if drift is None:
        return None
    return drift.origin.op if drift.origin is not None else None, drift.mechanism


def test_errors_that_add_up_step_by_step_are_nobodys() -> None:
    chain = [record(n, "aten.mul", 0.01 * math.sqrt(n + 1), 0.01, *([n - 1] if n else [])) for n in range(400)]
    assert found_in(*chain) == (None, None)


def test_an_amplifier_after_errors_that_added_up_is_named_itself() -> None:
    chain = [record(n, "aten.mul", 0.001 * math.sqrt(n + 1), 0.001, *([n - 1] if n else [])) for n in range(400)]
    chain.append(record(400, "aten.sub", 0.4, 0.0, 399))
    assert found_in(*chain) == ("aten.sub", "cancellation")


def test_the_operand_with_the_larger_error_is_followed() -> None:
    product = (
        record(0, "aten.exp", 1.0, 1.0, size=100.0),
        record(1, "aten.tanh", 0.2, 0.2, size=1.0),
        record(2, "aten.mul", 20.0, 0.1, 0, 1, size=100.0),
    )
    assert found_in(*product) == ("aten.tanh", None)
    total = (*product[:2], record(2, "aten.add", 1.02, 0.1, 0, 1, size=100.0))
    assert found_in(*total, tolerance=0.005) == ("aten.exp", None)


def test_nothing_beyond_the_tolerance_is_no_drift() -> None:
    assert found_in(record(0, "aten.mul", 0.05, 0.05)) is None


def test_a_result_that_is_infinite_where_the_shadow_is_not_is_an_overflow() -> None:
    chain = (record(0, "aten.pow", math.inf, math.inf), record(1, "aten.rsqrt", 1.0, 0.0, 0))
    assert found_in(*chain) == ("aten.pow", "overflow")


@BOTH_WAYS
def test_code_that_does_something_else_in_a_precision_is_told_and_no_operation_blamed(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanprobe.pipeline.tracing.WHOLE_UP_TO", limit)
    other = Do(lambda x: x * 1.5 if x.dtype is torch.bfloat16 else x)
    report = nanprobe.replay(Chain(a=mlp(), other=other, z=mlp()), torch.randn(4, 64, 32), dtype="bf16", mode="cast")
    found = report.precisions["bf16"].first_divergence
    assert found is not None
    assert (found.module, found.op, found.mechanism) == ("other", None, "divergence")
    assert "the code does something else in this precision" in found.explanation
