"""Memory that nothing wrote: named when it reaches the result, whatever it holds, and passed over when it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.report import Report
from tests.diagnose.support import Do, mlp

Code = Callable[[Tensor], Tensor]


def replayed(code: Code) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(4), Do(code), nn.LayerNorm(4), mlp(4))
    return nanprobe.replay(model, torch.randn(3, 4), dtype="bf16", mode="cast")


def _weighted(x: Tensor) -> Tensor:
    buffer = x.new_empty(2, 3, 4)
    buffer[0] = x
    return buffer[0] + 0.0 * buffer[1]


def _filled(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    for row in range(3):
        buffer[row] = x[row]
    return buffer * 2


def _selected(x: Tensor) -> Tensor:
    buffer = x.new_empty(2, 3, 4)
    buffer[0] = x
    written = torch.tensor([True, False])[:, None, None]
    return torch.where(written, buffer, torch.zeros_like(buffer)).sum(0)


def _zeroed(x: Tensor) -> Tensor:
    buffer = x.new_empty(2, 3, 4).zero_()
    buffer[0] = x
    return buffer.sum(0)


def _out_of_domain(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    buffer[:] = x
    return torch.log(buffer * 0 - 1)


def test_what_is_read_and_never_written_is_named() -> None:
    report = replayed(_weighted)
    found = [f for f in report.findings if f.mechanism == "uninitialized"]
    assert [(f.phase, f.module, f.op) for f in found] == [("forward", "1", "aten.mul")], report.render()
    first = report.precisions["bf16"].first_bad
    if first is not None:  # the memory happened to hold something that showed
        assert (first.mechanism, first.precision_related) == ("uninitialized", False)


@pytest.mark.parametrize("code", [_filled, _selected, _zeroed], ids=lambda code: code.__name__)
def test_memory_that_is_written_or_left_out_is_not(code: Code) -> None:
    report = replayed(code)
    assert not report.findings, report.render()


def test_a_fault_of_another_kind_keeps_its_name() -> None:
    first = replayed(_out_of_domain).precisions["bf16"].first_bad
    assert first is not None
    assert (first.module, first.op, first.mechanism) == ("1", "aten.log", "domain-error")


def test_memory_that_holds_nan_is_the_origin_in_every_precision() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory with NaN
    try:
        report = replayed(_weighted)
    finally:
        torch.use_deterministic_algorithms(False)
    first = report.precisions["bf16"].first_bad
    assert first is not None
    assert (first.phase, first.module, first.op) == ("forward", "1", "aten.mul")
    assert (first.mechanism, first.precision_related) == ("uninitialized", False)
    assert (report.verdict, report.exit_code) == ("not-precision", 1)
