"""Rounding by bits against PyTorch's casts where those are the definition, and against the formats table elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from nanprobe.formats import by_name
from nanprobe.numerics.rounding import flush_to_zero, round_to


def many() -> torch.Tensor:
    """Random bit patterns of FP32, with every special value among them."""
    draw = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=draw, dtype=torch.int64).to(torch.int32)
    near = torch.randn(50_000, generator=draw) * torch.logspace(-45, 38, 50_000)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65519.99, 65520.0, 2.0**-25, 2.0**-24 * 1.5]
    )
    return torch.cat([bits.view(torch.float32), near, special])


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_are_rounded_as_pytorch_casts_them(name: str, dtype: torch.dtype) -> None:
    values = many()
    assert torch.equal(
        round_to(values, by_name(name)).nan_to_num(1.5, 3e38, -3e38),
        values.to(dtype).float().nan_to_num(1.5, 3e38, -3e38),
    )


def test_the_largest_nan_stays_one() -> None:
    worst = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert bool(round_to(worst, by_name("tf32")).isnan().all())


def test_tf32_keeps_ten_bits_and_the_range_of_fp32() -> None:
    step = 2.0**-10
    given = torch.tensor([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, 1e-40, 3.4e38, 3.4028235e38, math.inf])
    found = round_to(given, by_name("tf32")).tolist()
    assert found[:3] == [1.0, 1 + 2 * step, 1 + step]
    assert found[3] == pytest.approx(1e-40, rel=0.06)
    assert found[4] == pytest.approx(3.4e38, rel=2.0**-11)
    assert found[5:] == [math.inf, math.inf]


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2"])
def test_8_bit_formats_hold_their_own_values_and_round_to_the_nearest(name: str) -> None:
    fmt = by_name(name)
    # Every value of the format, from its bits: exponent, mantissa, and the subnormals below.
    held = [fmt.smallest_subnormal * m for m in range(1 << fmt.mantissa_bits)]
    exponent = 1 - fmt.bias
    while (value := math.ldexp(1.0, exponent)) <= fmt.max:
        held += [value * (1 + m / (1 << fmt.mantissa_bits)) for m in range(1 << fmt.mantissa_bits)]
        exponent += 1
    held = [value for value in held if value <= fmt.max]
    grid = torch.tensor(held)
    assert torch.equal(round_to(grid, fmt, saturate=True), grid)
    assert torch.equal(round_to(-grid, fmt, saturate=True), -grid)
    middle = (grid[1:] + grid[:-1]) / 2
    even = torch.where(torch.arange(len(middle)) % 2 == 0, grid[:-1], grid[1:])
    assert torch.equal(round_to(middle, fmt), even)
    above, below = torch.nextafter(middle, grid[1:]), torch.nextafter(middle, grid[:-1])
    assert torch.equal(round_to(above, fmt), grid[1:])
    assert torch.equal(round_to(below, fmt), grid[:-1])
    beyond = torch.tensor([fmt.max * 1.01, fmt.overflow_threshold, 1e30, math.inf, -math.inf])
    assert round_to(beyond, fmt, saturate=True).abs().tolist() == [fmt.max] * 5
    assert bool(round_to(torch.tensor([math.nan]), fmt, saturate=True).isnan().all())


def test_flushing_leaves_normal_values_and_nan() -> None:
    half = torch.tensor([6e-5, 6.2e-5, -1e-7, math.nan, math.inf, 0.0], dtype=torch.float16)
    found = flush_to_zero(half, by_name("fp16"))
    assert found is half
    assert found[0] == 0
    assert found[2] == 0
    assert float(found[1]) == pytest.approx(6.2e-5, rel=1e-3)
    assert found[3].isnan()
    assert found[4].isinf()
