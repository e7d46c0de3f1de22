"""The table of number formats: range, spacing, and the thresholds at which a cast overflows or flushes to zero.

Everything follows from three integers per format: exponent bits, stored mantissa bits, and what the topmost exponent
means (IEEE 754-2019 section 3.4; for e4m3 and e5m2 the OCP 8-bit Floating Point Specification, revision 1.0). Counting
what a cast *would* do goes by these thresholds and never by casting, since the meaning of a cast to an 8-bit format
differs between PyTorch versions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["FORMATS", "LOW_PRECISIONS", "NumberFormat", "by_dtype", "by_name", "carrier_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """One binary floating-point format.

    ``name`` is the word used on the command line and in reports, ``dtype`` PyTorch's name for it without the
    ``torch.`` prefix (None where PyTorch has no such dtype). ``mantissa_bits`` counts stored bits, without the
    implicit one. ``max`` is the largest finite value.
    """

    name: str
    dtype: str | None
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    has_inf: bool = True

    @property
    def unit_roundoff(self) -> float:
        """Half the spacing just above 1: the largest relative error of one rounding in the normal range."""
        return math.ldexp(1.0, -(self.mantissa_bits + 1))

    @property
    def bias(self) -> int:
        """Exponent bias, 2**(exponent_bits - 1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value, the spacing of the subnormal range."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def overflow_threshold(self) -> float:
        """Smallest magnitude that a round-to-nearest-even cast turns into Inf (or NaN, or saturates).

        Halfway between the largest finite value and the next one that the format would have; 65520 for fp16.
        """
        spacing = math.ldexp(1.0, math.frexp(self.max)[1] - 1 - self.mantissa_bits)
        return self.max + spacing / 2

    @property
    def flush_threshold(self) -> float:
        """Largest magnitude that a round-to-nearest-even cast turns into zero: half the smallest subnormal."""
        return self.smallest_subnormal / 2

    @property
    def integer_limit(self) -> int:
        """Every integer up to this magnitude is exact: 2048 for fp16, 256 for bf16."""
        return 1 << (self.mantissa_bits + 1)


FORMATS: tuple[NumberFormat, ...] = (
    NumberFormat(name="fp64", dtype="float64", bits=64, exponent_bits=11, mantissa_bits=52, max=1.7976931348623157e308),
    NumberFormat(name="fp32", dtype="float32", bits=32, exponent_bits=8, mantissa_bits=23, max=3.4028234663852886e38),
    NumberFormat(name="tf32", dtype=None, bits=19, exponent_bits=8, mantissa_bits=10, max=3.4011621342146535e38),
    NumberFormat(name="fp16", dtype="float16", bits=16, exponent_bits=5, mantissa_bits=10, max=65504.0),
    NumberFormat(name="bf16", dtype="bfloat16", bits=16, exponent_bits=8, mantissa_bits=7, max=3.3895313892515355e38),
    NumberFormat(
        name="fp8-e4m3", dtype="float8_e4m3fn", bits=8, exponent_bits=4, mantissa_bits=3, max=448.0, has_inf=False
    ),
    NumberFormat(name="fp8-e5m2", dtype="float8_e5m2", bits=8, exponent_bits=5, mantissa_bits=2, max=57344.0),
)

LOW_PRECISIONS: tuple[str, ...] = ("fp16", "bf16", "tf32", "fp8-e4m3", "fp8-e5m2")
"""Formats that a lane can run in beside the reference."""

_CARRIERS = {"tf32": "fp32", "fp8-e4m3": "bf16", "fp8-e5m2": "bf16"}

_BY_NAME = {fmt.name: fmt for fmt in FORMATS}
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS if fmt.dtype}


def by_name(name: str) -> NumberFormat:
    """Return the format called ``name`` ("fp16", "bf16", ...); KeyError when there is none."""
    return _BY_NAME[name]


def carrier_of(name: str) -> NumberFormat:
    """Return the format in which a lane of precision ``name`` holds its tensors.

    TF32 and the 8-bit formats are formats of a product's operands alone: a TF32 product takes and gives FP32, an 8-bit
    one takes and gives BF16, as in the recipes of Transformer Engine and torchao. Any other precision holds its own.
    """
    return _BY_NAME[_CARRIERS.get(name, name)]


def by_dtype(dtype: str) -> NumberFormat | None:
    """Return the format of PyTorch's dtype name ("float16", "torch.float16"), None for integers and unknown ones."""
    return _BY_DTYPE.get(dtype.removeprefix("torch."))
