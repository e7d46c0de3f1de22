"""Counting stored elements: exact for every element type, however the bytes are cut, compiled or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanprobe.formats import FORMATS, by_name
from nanprobe.numerics.native import Kernels, load_kernels
from nanprobe.numerics.stored import COUNTABLE, Counter, Tally, combined, decoded, negated
from nanprobe.numerics.stored_tables import SMALL_FLOATS, pattern_values

CASTS = [fmt for fmt in FORMATS if fmt.name not in ("fp64", "tf32")]

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def compiled_loops() -> Kernels:
    kernels = load_kernels()
    assert kernels is not None
    return kernels


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw_of(tensor: torch.Tensor) -> Any:
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), np.uint8)


def random_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def usual(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Return values as weights have them, with a few special ones."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.02
    for at, special in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0, 65504.0, 65520.0, 2.0**-25, 1e-40)):
        values[at * 7] = special
    return values.to(dtype)


def expect(tally: Tally, tensor: torch.Tensor) -> None:
    """Compare a tally with what FP64 says about the same elements."""
    values = tensor.to(torch.float64)
    finite = values[values.isfinite()]
    assert tally.elements == values.numel()
    assert tally.nan == int(values.isnan().sum())
    assert tally.posinf == int((values == math.inf).sum())
    assert tally.neginf == int((values == -math.inf).sum())
    assert tally.zero == int((values == 0).sum())
    if not finite.numel():
        assert tally.low is None
        return
    assert (tally.low, tally.high) == (finite.min().item(), finite.max().item())
    assert tally.absmax == finite.abs().max().item()
    if tensor.dtype.is_floating_point:
        tiny = torch.finfo(tensor.dtype).smallest_normal
        assert tally.subnormal == int(((finite.abs() < tiny) & (finite != 0)).sum())
        for cast in CASTS:
            assert tally.overflow[cast.name] == int((finite.abs() >= cast.overflow_threshold).sum())
            assert tally.underflow[cast.name] == int(((finite.abs() <= cast.flush_threshold) & (finite != 0)).sum())
    with np.errstate(over="ignore"):
        if math.isfinite(float((finite**2).sum())):
            assert tally.mean == pytest.approx(finite.mean().item(), rel=1e-9, abs=1e-300)
            assert tally.rms == pytest.approx((finite**2).mean().sqrt().item(), rel=1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["numpy", "compiled"])
@pytest.mark.parametrize("count", [64, 1000, 40_003])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("make", [random_bits, usual])
def test_floats_are_counted_exactly(make: Any, dtype: torch.dtype, count: int, compiled: bool) -> None:
    tensor = make(dtype, count)
    counter = Counter(name_of(dtype), CASTS)
    counter.feed(raw_of(tensor), compiled_loops() if compiled else None)
    expect(counter.finish(), tensor)


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
def test_integers_are_counted_exactly(dtype: torch.dtype) -> None:
    tensor = (
        torch.randint(0, 2, (999,), dtype=torch.uint8).to(dtype) if dtype == torch.bool else random_bits(dtype, 999)
    )
    counter = Counter(name_of(dtype), CASTS)
    counter.feed(raw_of(tensor))
    tally = counter.finish()
    assert (tally.low, tally.high) == (int(tensor.min()), int(tensor.max()))
    assert tally.zero == int((tensor == 0).sum())
    assert tally.nonfinite == 0
    assert tally.overflow == {}


def test_complex_numbers_count_as_one_element_each() -> None:
    nan, inf = math.nan, math.inf
    tensor = torch.tensor(
        [complex(nan, 0), complex(inf, nan), complex(inf, 1), complex(3, 4), 0], dtype=torch.complex64
    )
    counter = Counter("complex64")
    counter.feed(raw_of(tensor))
    tally = counter.finish()
    assert (tally.elements, tally.nan, tally.posinf, tally.zero, tally.absmax) == (5, 2, 1, 1, 5.0)
    assert tally.low is None


@pytest.mark.parametrize("name", [name for name in SMALL_FLOATS if hasattr(torch, name)])
def test_the_tables_of_patterns_are_those_of_pytorch(name: str) -> None:
    dtype = getattr(torch, name)
    patterns = torch.arange(1 << SMALL_FLOATS[name].bits, dtype=torch.int32)
    wide = patterns.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype).to(torch.float64).numpy()
    assert np.array_equal(pattern_values(name), wide, equal_nan=True)


def test_e8m0_and_the_packed_formats() -> None:
    assert pattern_values("float8_e8m0fnu")[127] == 1.0
    assert math.isnan(pattern_values("float8_e8m0fnu")[255])
    assert pattern_values("float4_e2m1").tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert pattern_values("float6_e2m3").max() == 7.5
    assert pattern_values("float6_e3m2").max() == 28.0
    assert decoded(np.array([0x21, 0x93], np.uint8), "float4_e2m1").tolist() == [0.5, 1.0, 1.5, -0.5]


@given(
    data=st.binary(min_size=0, max_size=4096),
    cuts=st.lists(st.integers(0, 512), max_size=6),
    dtype=st.sampled_from(sorted(COUNTABLE)),
    compiled=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_the_counts_do_not_depend_on_how_the_bytes_are_cut(
    data: bytes, cuts: list[int], dtype: str, compiled: bool
) -> None:
    raw = np.frombuffer(data[: len(data) // 48 * 48], np.uint8)
    casts = [by_name("fp16"), by_name("fp8-e4m3")]
    whole = Counter(dtype, casts)
    whole.feed(raw)
    merged = Counter(dtype, casts)
    position = 0
    for cut in [*cuts, len(raw)]:
        piece = raw[position : position + cut * 48]
        position += cut * 48
        other = Counter(dtype, casts)
        other.feed(piece, compiled_loops() if compiled else None)
        merged.merge(other)
    one, many = whole.finish(), merged.finish()
    assert (one.elements, one.nan, one.posinf, one.neginf, one.zero, one.subnormal, one.low, one.high) == (
        many.elements, many.nan, many.posinf, many.neginf, many.zero, many.subnormal, many.low, many.high,
    )  # fmt: skip
    assert (one.overflow, one.underflow) == (many.overflow, many.underflow)


def test_big_endian_elements() -> None:
    for name, code in (("float32", ">f4"), ("float64", ">f8"), ("int32", ">i4"), ("float16", ">f2")):
        raw = np.frombuffer(np.array([1, -3, 0, 7], code).tobytes(), np.uint8)
        for held in (None, compiled_loops()):
            counter = Counter(name, byteorder="big")
            counter.feed(raw, held)
            assert (counter.finish().low, counter.finish().high, counter.finish().zero) == (-3, 7, 1)


def test_parts_add_up_and_signs_turn() -> None:
    one = Counter("float32", [by_name("fp16")])
    one.feed(raw_of(torch.tensor([1.0, math.inf, 70000.0])))
    other = Counter("float32", [by_name("fp16")])
    other.feed(raw_of(torch.tensor([-5.0, 0.0])))
    tally = combined([(one.finish(), 1), (other.finish(), 3)])
    assert (tally.elements, tally.posinf, tally.zero, tally.low, tally.high) == (9, 1, 3, -5.0, 70000.0)
    assert tally.overflow == {"fp16": 1}
    turned = negated(tally)
    assert (turned.neginf, turned.posinf, turned.low, turned.high, turned.mean) == (1, 0, -70000.0, 5.0, -tally.mean)
