"""What every bit pattern of the 4, 6, 8 and 16 bit formats stands for, as tables of FP64 values.

A table is built from the format's definition and not by casting, whose meaning differs between libraries: IEEE 754
for fp16 and bf16, the OCP 8-bit Floating Point and Microscaling specifications (revision 1.0) for e4m3fn, e5m2, e8m0,
e2m1, e2m3 and e3m2, and the ``fnuz`` variants with one zero and one NaN as PyTorch and ONNX define them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

__all__ = ["SMALL_FLOATS", "SmallFloat", "pattern_values", "smallest_normal", "unpack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFloat:
    """A floating-point format of at most 16 bits.

    ``special`` says what the topmost patterns mean: "ieee" (Inf and NaN in the topmost exponent), "fn" (one NaN per
    sign, no Inf), "fnuz" (NaN instead of the negative zero, no Inf) or "finite" (nothing but numbers).
    """

    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str


SMALL_FLOATS: dict[str, SmallFloat] = {
    "float16": SmallFloat(bits=16, exponent_bits=5, mantissa_bits=10, bias=15, special="ieee"),
    "bfloat16": SmallFloat(bits=16, exponent_bits=8, mantissa_bits=7, bias=127, special="ieee"),
    "float8_e4m3fn": SmallFloat(bits=8, exponent_bits=4, mantissa_bits=3, bias=7, special="fn"),
    "float8_e5m2": SmallFloat(bits=8, exponent_bits=5, mantissa_bits=2, bias=15, special="ieee"),
    "float8_e4m3fnuz": SmallFloat(bits=8, exponent_bits=4, mantissa_bits=3, bias=8, special="fnuz"),
    "float8_e5m2fnuz": SmallFloat(bits=8, exponent_bits=5, mantissa_bits=2, bias=16, special="fnuz"),
    "float6_e2m3": SmallFloat(bits=6, exponent_bits=2, mantissa_bits=3, bias=1, special="finite"),
    "float6_e3m2": SmallFloat(bits=6, exponent_bits=3, mantissa_bits=2, bias=3, special="finite"),
    "float4_e2m1": SmallFloat(bits=4, exponent_bits=2, mantissa_bits=1, bias=1, special="finite"),
}
"""By the name that a checkpoint's records use. e8m0, which has no sign, is built apart."""


@cache
def pattern_values(dtype: str) -> Any:
    """Return the FP64 value of each pattern of ``dtype``, by pattern; KeyError when it has more than 16 bits."""
    if dtype == "float8_e8m0fnu":
        # Powers of two from 2**-127; the topmost pattern is NaN.
        return np.array([math.ldexp(1.0, exponent - 127) for exponent in range(255)] + [math.nan])
    form = SMALL_FLOATS[dtype]
    patterns = np.arange(1 << form.bits, dtype=np.int64)
    sign = np.where(patterns >> (form.bits - 1), -1.0, 1.0)
    exponent = (patterns >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    mantissa = patterns & ((1 << form.mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << form.mantissa_bits))
    scale = np.maximum(exponent, 1) - form.bias - form.mantissa_bits
    values = sign * np.ldexp(significand.astype(np.float64), scale.astype(np.int32))
    top = (1 << form.exponent_bits) - 1
    if form.special == "ieee":
        values = np.where(exponent == top, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    elif form.special == "fn":
        values[(exponent == top) & (mantissa == (1 << form.mantissa_bits) - 1)] = np.nan
    elif form.special == "fnuz":
        values[1 << (form.bits - 1)] = np.nan
    return values


def smallest_normal(dtype: str) -> float:
    """Return the smallest positive normal value of a floating-point ``dtype``; 0 for e8m0, which has no subnormals."""
    if dtype in ("float32", "complex64"):
        return math.ldexp(1.0, -126)
    if dtype in ("float64", "complex128"):
        return math.ldexp(1.0, -1022)
    if dtype == "complex32":
        dtype = "float16"
    form = SMALL_FLOATS.get(dtype)
    return 0.0 if form is None else math.ldexp(1.0, 1 - form.bias)


def unpack(raw: Any, dtype: str) -> Any:
    """Return the patterns packed in bytes: two of 4 bits, the low half first, or four of 6 bits in three bytes."""
    if dtype == "float4_e2m1":
        return np.stack((raw & 15, raw >> 4), axis=1).reshape(-1)
    whole = raw[: raw.size // 3 * 3].reshape(-1, 3).astype(np.uint32)
    word = whole[:, 0] | (whole[:, 1] << 8) | (whole[:, 2] << 16)
    return np.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], axis=1).reshape(-1).astype(np.uint8)
