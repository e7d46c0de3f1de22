"""Rounding FP32 values to a narrower format by arithmetic on their bits, whether or not PyTorch has such a dtype.

Round to nearest, ties to even (IEEE 754-2019 section 4.3.1), subnormals included. Casting is not used: a cast to an
8-bit format means different things in different versions of PyTorch, and TF32 is no dtype.
"""

from __future__ import annotations

import torch

from nanprobe.formats import NumberFormat, by_name

__all__ = ["flush_to_zero", "round_to"]

_FP32 = by_name("fp32")


def round_to(values: torch.Tensor, fmt: NumberFormat, *, saturate: bool = False) -> torch.Tensor:
    """Return FP32 ``values`` (any shape, any device) rounded to ``fmt``, as FP32; NaN stays NaN.

    Magnitudes beyond the format become Inf, or with ``saturate`` its largest value, Inf included, as the conversions of
    GPUs to 8-bit formats do (``cvt.rn.satfinite`` of PTX). ``fmt`` must be no wider than FP32.
    """
    drop = _FP32.mantissa_bits - fmt.mantissa_bits
    bits = values.contiguous().view(torch.int32)
    even = (bits >> drop).bitwise_and_(1).add_((1 << (drop - 1)) - 1).add_(bits).bitwise_and_(-(1 << drop))
    rounded = even.view(torch.float32)
    if fmt.exponent_bits < _FP32.exponent_bits:
        # Adding a number whose spacing is the smallest subnormal rounds to a multiple of that, ties to even.
        anchor = 1.5 * 2.0**_FP32.mantissa_bits * fmt.smallest_subnormal
        small = (values + anchor) - anchor
        rounded = torch.where(values.abs() < fmt.smallest_normal, small, rounded)
    if saturate:
        rounded = rounded.clamp(-fmt.max, fmt.max)
    else:
        rounded = torch.where(
            rounded.abs() > fmt.max, torch.copysign(torch.full_like(rounded, torch.inf), values), rounded
        )
    return torch.where(values.isnan(), values, rounded)


def flush_to_zero(values: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """Set the subnormals of ``values``, which are of format ``fmt``, to zero in place, and return the same tensor."""
    return values.masked_fill_(values.abs() < fmt.smallest_normal, 0)
