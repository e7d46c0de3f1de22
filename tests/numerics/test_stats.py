"""Statistics and differences against plain definitions, for every dtype, layout and special value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanprobe.formats import by_dtype
from nanprobe.numerics.stats import (
    TensorStats,
    difference,
    is_finite,
    measure,
    measure_against,
    plain_values,
    total_difference,
)

INF, NAN = math.inf, math.nan
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def plainly(values: list[float], dtype: torch.dtype) -> dict[str, Any]:
    """Return what the statistics of these numbers are, by their definitions."""
    finite = [v for v in values if math.isfinite(v)]
    fmt = by_dtype(str(dtype))
    assert fmt is not None
    # The error of a sum in FP64 is bounded by the magnitudes, not by what is left of them (Higham, 2002, section 4.2).
    rounding = len(finite) * 2.0**-52 * math.fsum(map(abs, finite))
    return {
        "elements": len(values),
        "nan": sum(math.isnan(v) for v in values),
        "posinf": values.count(INF),
        "neginf": values.count(-INF),
        "zero": sum(v == 0 for v in values),
        "subnormal": sum(0 < abs(v) < fmt.smallest_normal for v in values),
        "low": min(finite, default=None),
        "high": max(finite, default=None),
        "absmax": max(map(abs, finite), default=None),
        "total": pytest.approx(math.fsum(finite), rel=1e-6, abs=1e-30 + rounding),
        "squares": pytest.approx(math.fsum(v * v for v in finite), rel=1e-6, abs=1e-300),
    }


def assert_as_defined(tensor: Tensor) -> None:
    stats = measure(tensor)
    for name, wanted in plainly(tensor.double().flatten().tolist(), tensor.dtype).items():
        assert getattr(stats, name) == wanted, name
    assert is_finite(tensor) == (stats.bad == 0)


_patterns16 = st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(deadline=None)
@given(bits=_patterns16)
def test_any_bit_pattern_of_a_half_format(dtype: torch.dtype, bits: list[int]) -> None:
    assert_as_defined(torch.tensor(bits, dtype=torch.int16).view(dtype))


@settings(deadline=None)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40))
def test_any_bit_pattern_of_float32(bits: list[int]) -> None:
    assert_as_defined(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


@settings(deadline=None)
@given(
    values=st.lists(st.floats(width=64, min_value=-1e150, max_value=1e150) | st.sampled_from([INF, -INF, NAN, 5e-324]))
)
def test_float64(values: list[float]) -> None:
    assert_as_defined(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_a_half_format_at_once(dtype: torch.dtype) -> None:
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    stats = measure(everything)
    fmt = by_dtype(str(dtype))
    assert fmt is not None
    mantissas = 1 << fmt.mantissa_bits
    assert (stats.posinf, stats.neginf, stats.zero) == (1, 1, 2)
    assert stats.nan == 2 * (mantissas - 1)
    assert stats.subnormal == 2 * (mantissas - 1)
    assert stats.absmax == fmt.max
    assert stats.total == 0.0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 70_000])
def test_blocks_of_any_size(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator).to(dtype)
    values[size // 2] = NAN
    values[-1] = -INF
    values[0] = 0.0 if size > 2 else values[0]
    stats = measure(values)
    finite = values[torch.isfinite(values)].double()
    assert stats.nan + stats.neginf == (2 if size > 1 else 1)
    assert stats.finite == finite.numel()
    if finite.numel():
        assert stats.total == pytest.approx(float(finite.sum()), rel=1e-9, abs=1e-9)
        assert stats.squares == pytest.approx(float(finite.square().sum()), rel=1e-9)
        assert stats.absmax == float(finite.abs().max())


def test_fp16_sums_do_not_overflow() -> None:
    stats = measure(torch.full((100_000,), 300.0, dtype=torch.float16))
    assert stats.total == 3e7
    assert math.sqrt(stats.squares / stats.finite) == 300.0


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: torch.tensor([-3, 0, 7]), {"low": -3.0, "high": 7.0, "zero": 1, "floating": False, "dtype": "int64"}),
        (lambda: torch.tensor([True, False, True]), {"high": 1.0, "zero": 1, "dtype": "bool"}),
        (lambda: torch.tensor([250, 0], dtype=torch.uint8), {"high": 250.0, "zero": 1}),
        (lambda: torch.tensor(2.5), {"elements": 1, "shape": (), "high": 2.5}),
        (lambda: torch.zeros(0, 3), {"elements": 0, "low": None, "absmax": None, "shape": (0, 3)}),
        (
            lambda: torch.tensor([3 - 4j, complex(INF, 0)]),
            {"elements": 4, "posinf": 1, "low": -4.0, "dtype": "complex64"},
        ),
        (lambda: torch.tensor([3 - 4j]).conj(), {"high": 4.0}),
        (lambda: torch.tensor([1 + 2j]).conj().imag, {"low": -2.0}),
        (lambda: torch.arange(6.0).reshape(2, 3).t(), {"shape": (3, 2), "total": 15.0}),
        (lambda: torch.arange(6.0)[::2], {"elements": 3, "total": 6.0}),
        (lambda: torch.tensor([2.0]).expand(3, 4), {"elements": 12, "total": 24.0}),
        (lambda: torch.tensor([1.5, NAN], requires_grad=True), {"nan": 1, "high": 1.5}),
        (lambda: torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn), {"high": 448.0, "dtype": "float8_e4m3fn"}),
        (lambda: torch.eye(3).to_sparse(), {"total": 3.0, "elements": 3}),
        (lambda: torch.eye(3).to_sparse_csr(), {"total": 3.0}),
        (lambda: torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 0, torch.qint8), {"total": 3.0}),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
def test_other_dtypes_and_layouts(make: Any, wanted: dict[str, Any]) -> None:
    stats = measure(make())
    for name, value in wanted.items():
        assert getattr(stats, name) == value, name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((1, 3), 4.0)])
    stats = measure(nested)
    assert (stats.elements, stats.total, stats.absmax) == (9, 18.0, 4.0)
    assert plain_values(nested).shape == (9,)
    diff = difference(nested, nested)
    assert diff is not None
    assert diff.rel_error == 0.0


def test_sparse_gradients_with_repeated_rows_are_added_up_first() -> None:
    where, values = torch.tensor([[0, 0, 2]]), torch.tensor([[1.0], [-1.0], [3.0]])
    sparse = torch.sparse_coo_tensor(where, values, (4, 1), check_invariants=True)
    stats = measure(sparse)
    assert (stats.zero, stats.absmax, stats.squares) == (1, 3.0, 9.0)
    diff = difference(sparse.to(torch.float32), sparse)
    assert diff is not None
    assert diff.rel_error == 0.0


def rel(value: Any, reference: Any, **kwargs: Any) -> float | None:
    diff = difference(torch.as_tensor(value), torch.as_tensor(reference), **kwargs)
    assert diff is not None
    together = measure_against(torch.as_tensor(value), torch.as_tensor(reference), **kwargs)[1]
    assert together is not None
    assert together.rel_error == diff.rel_error
    return diff.rel_error


@pytest.mark.parametrize(
    ("value", "reference", "wanted"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 0.0], [0.0, 0.0], INF),
        ([NAN, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [INF, 4.0], 0.25),
        ([NAN], [1.0], None),
        ([-INF, 2.0], [-INF, 2.0], 0.0),
        ([], [], None),
        ([-65504.0, 1.0], [-3.4028234663852886e38, 1.0], 65504.0),  # no mask: far above FP32's own fill
        ([2e38, 2e38], [2e38, 2e38], 0.0),
    ],
)
def test_the_relative_error_by_hand(value: list[float], reference: list[float], wanted: float | None) -> None:
    found = rel(torch.tensor(value), torch.tensor(reference))
    if wanted == 65504.0:
        assert found == pytest.approx(1.0)
    else:
        assert found == (wanted if wanted is None else pytest.approx(wanted))


def test_a_masks_fill_counts_as_equal_in_every_format() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        low = torch.tensor([torch.finfo(dtype).min, 2.0], dtype=dtype)
        exact = torch.tensor([torch.finfo(torch.float32).min, 2.0])
        assert rel(low, exact) == 0.0


def test_the_loss_scale_is_divided_out() -> None:
    assert rel(torch.tensor([2.0, 4.0], dtype=torch.float16), torch.tensor([0.5, 1.0]), scale=4.0) == 0.0
    assert rel(torch.tensor([2.0, 8.0], dtype=torch.float16), torch.tensor([0.5, 1.0]), scale=4.0) == pytest.approx(
        1.0 / math.sqrt(1.25)
    )


def test_flushed_elements_are_those_that_only_the_reference_has() -> None:
    value = torch.tensor([0.0, 1.0, 0.0, -0.0], dtype=torch.bfloat16)
    diff = measure_against(value, torch.tensor([1e-9, 1.0, 0.0, -3.0]))[1]
    assert diff is not None
    assert diff.flushed == 2


def test_other_shapes_are_not_compared() -> None:
    assert difference(torch.ones(2, 3), torch.ones(3, 2)) is None
    assert measure_against(torch.ones(2), torch.ones(3))[1] is None


def test_a_lost_row_is_told_from_a_mask() -> None:
    exact = torch.tensor([[-1e9, 1.0], [-1e9, 2.0]])
    masked = torch.tensor([[-INF, 1.0], [-INF, 2.0]], dtype=torch.float16)
    diff = difference(masked, exact)
    assert diff is not None
    assert (diff.new_neginf, diff.lost) == (2, 0)
    empty = torch.tensor([[-INF, -INF], [-INF, 2.0]], dtype=torch.float16)
    diff = difference(empty, torch.tensor([[-1e9, -1e9], [-1e9, 2.0]]))
    assert diff is not None
    assert (diff.new_neginf, diff.lost) == (3, 2)
    overflow = difference(torch.tensor([-INF, 5.0]), torch.tensor([-7e4, 5.0]))
    assert overflow is not None
    assert overflow.lost == 1


def test_differences_of_several_tensors_add_up() -> None:
    parts = [difference(torch.tensor(a), torch.tensor(b)) for a, b in (([1.0], [2.0]), ([5.0, 0.0], [5.0, 2.0]))]
    total = total_difference(part for part in parts if part is not None)
    assert total.rel_error == pytest.approx(math.sqrt(5.0 / 33.0))
    assert total.compared == 3
    assert total_difference([]).rel_error is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32)), min_size=1, max_size=30))
def test_one_pass_gives_what_two_give(pairs: list[tuple[float, float]]) -> None:
    value = torch.tensor([a for a, _ in pairs], dtype=torch.float16)
    reference = torch.tensor([b for _, b in pairs])
    stats, diff = measure_against(value, reference)
    assert isinstance(stats, TensorStats)
    assert stats == measure(value)
    apart = difference(value, reference)
    assert diff is not None
    assert apart is not None
    assert diff.error_squares == pytest.approx(apart.error_squares)
    exact = (value.double() - reference.double()).square().sum()
    assert diff.error_squares == pytest.approx(float(exact), rel=1e-6, abs=1e-12)
