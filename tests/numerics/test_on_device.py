"""The reductions that a GPU is asked for, run on CPU tensors: they must give what the compiled loops give."""

from __future__ import annotations

import math

import pytest
import torch

from nanprobe.numerics import kernels
from nanprobe.numerics.stats import _on_device, _tiny, measure, measure_against


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_same_figures_as_the_compiled_loops(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = torch.randn(5000)
    values = (reference * 1.01).to(dtype)
    values[::7] = 0
    values[1] = 1e-7 if dtype is torch.float16 else 1e-39
    summary, distance = _on_device(values, _tiny(dtype), reference, 0.5)
    stats, diff = measure_against(values, reference, scale=2.0)
    assert diff is not None
    counts = (stats.nan, stats.posinf, stats.neginf, stats.zero, stats.subnormal)
    assert counts == (summary.nan, summary.posinf, summary.neginf, summary.zero, summary.subnormal)
    assert (stats.low, stats.high) == (summary.low, summary.high)
    assert stats.squares == pytest.approx(summary.squares, rel=1e-12)
    assert diff.error_squares == pytest.approx(distance.error_squares, rel=1e-9)
    assert diff.reference_squares == pytest.approx(distance.reference_squares, rel=1e-12)
    assert diff.flushed == distance.flushed > 0


def test_non_finite_values_call_for_a_second_look() -> None:
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    summary, distance = _on_device(values, _tiny(values.dtype), torch.ones(4), 1.0)
    assert (summary.nan, summary.posinf, summary.neginf) == (1, 1, 1)
    assert not math.isfinite(distance.error_squares)
    assert measure(values).bad == 3


def test_nothing_is_reduced_to_nothing() -> None:
    assert _on_device(torch.zeros(0), 1.0, torch.zeros(0), 1.0) == (kernels.Summary(), kernels.Distance(0.0, 0.0))
