"""The loops over stored elements that are compiled: what a scan counts in a whole checkpoint, at the pace of its bytes.

Importing this file imports the compiler, which takes longer than scanning a gigabyte: ``nanprobe.numerics.native``
does so once for a machine and keeps the result. Every kernel takes addresses and lengths, allocates nothing and calls
nothing of Python's. All floating-point types go block by block through loops that vectorise, bytes through a
histogram. Four tables take turns in a histogram, since two increments of
the same counter in a row would wait for each other.

``limits`` are magnitudes in ascending order; ``below`` gains, for each, the elements whose magnitude is less;
``counts`` gains NaN, Inf and -Inf; ``sums`` holds the lowest, the highest, the total and the total of squares of finite
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, float64, int16, int32, int64, njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["KERNELS", "compile_kernels"]

_BLOCK = 8192

_plain = njit(nogil=True, error_model="numpy")
# Sums may be taken in any order, and a product may be fused with a sum; NaN and Inf keep their meaning.
_any_order = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

_P = types.CPointer
_VOID = types.void
_U32, _U64, _I16, _I32, _I64, _F32, _F64, _U8, _U16 = (
    types.uint32, types.uint64, types.int16, types.int32, types.int64, types.float32, types.float64, types.uint8,
    types.uint16,
)  # fmt: skip


@intrinsic
def _as_float32(typing_context: Any, bits: Any) -> Any:
    """Take the bits of an int32 for a float32."""
    del typing_context, bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _as_float64(typing_context: Any, bits: Any) -> Any:
    """Take the bits of an int64 for a float64."""
    del typing_context, bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@_plain
def _tally(v: Any, times: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    if v != v:
        counts[0] += times
        return
    m = abs(v)
    for k in range(limits.shape[0] - 1, -1, -1):
        if m >= limits[k]:
            break
        below[k] += times
    if m == np.inf:
        counts[1 if v > 0 else 2] += times
        return
    sums[0] = min(sums[0], v)
    sums[1] = max(sums[1], v)
    sums[2] += v * times
    sums[3] += v * v * times


@_plain
def _extremes32(bits: Any) -> Any:
    low, high = int32(2147483647), int32(-2147483648)
    for i in range(bits.shape[0]):
        b = bits[i]
        key = int32(b ^ int32(int32(b >> int32(31)) & int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    return low, high


@_plain
def _below32(bits: Any, limit: Any) -> Any:
    count = int32(0)
    for i in range(bits.shape[0]):
        count = int32(count + int32(int32(bits[i] & int32(0x7FFFFFFF)) < limit))
    return count


@_any_order
def _sums32(bits: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(bits.shape[0]):
        v = float64(_as_float32(bits[i]))
        total += v
        squares += v * v
    return total, squares


@_plain
def _pass32(bits: Any, limits32: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    for start in range(0, bits.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last = _extremes32(block)
        largest = max(last, int32(first ^ int32(0x7FFFFFFF)) & int32(0x7FFFFFFF) if first < 0 else first)
        if largest >= int32(0x7F800000):
            for i in range(block.shape[0]):
                _tally(float64(_as_float32(block[i])), 1, limits, below, counts, sums)
            continue
        for k in range(limits32.shape[0] - 1, -1, -1):
            if limits32[k] > largest:
                below[k] += block.shape[0]
                continue
            found = _below32(block, limits32[k])
            if found == 0:
                break
            below[k] += found
        total, squares = _sums32(block)
        sums[0] = min(
            sums[0], float64(_as_float32(int32(first ^ int32(int32(first >> int32(31)) & int32(0x7FFFFFFF)))))
        )
        sums[1] = max(sums[1], float64(_as_float32(int32(last ^ int32(int32(last >> int32(31)) & int32(0x7FFFFFFF))))))
        sums[2] += total
        sums[3] += squares


@_plain
def _extremes64(bits: Any) -> Any:
    low, high = int64(9223372036854775807), int64(-9223372036854775808)
    for i in range(bits.shape[0]):
        b = bits[i]
        key = b ^ ((b >> int64(63)) & int64(0x7FFFFFFFFFFFFFFF))
        low = min(low, key)
        high = max(high, key)
    return low, high


@_plain
def _below64(bits: Any, limit: Any) -> Any:
    count = int64(0)
    for i in range(bits.shape[0]):
        count += int64((bits[i] & int64(0x7FFFFFFFFFFFFFFF)) < limit)
    return count


@_any_order
def _sums64(bits: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(bits.shape[0]):
        v = _as_float64(bits[i])
        total += v
        squares += v * v
    return total, squares


@_plain
def _pass64(bits: Any, limits64: Any, limits: Any, below: Any, counts: Any, sums: Any) -> None:
    mask = int64(0x7FFFFFFFFFFFFFFF)
    for start in range(0, bits.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last = _extremes64(block)
        largest = max(last, (first ^ mask) & mask if first < 0 else first)
        if largest >= int64(0x7FF0000000000000):
            for i in range(block.shape[0]):
                _tally(_as_float64(block[i]), 1, limits, below, counts, sums)
            continue
        for k in range(limits64.shape[0] - 1, -1, -1):
            if limits64[k] > largest:
                below[k] += block.shape[0]
                continue
            found = _below64(block, limits64[k])
            if found == 0:
                break
            below[k] += found
        total, squares = _sums64(block)
        sums[0] = min(sums[0], _as_float64(first ^ ((first >> int64(63)) & mask)))
        sums[1] = max(sums[1], _as_float64(last ^ ((last >> int64(63)) & mask)))
        sums[2] += total
        sums[3] += squares


@_plain
def _extremes16(bits: Any) -> Any:
    low, high, small = int16(32767), int16(-32768), int16(32767)
    for i in range(bits.shape[0]):
        b = bits[i]
        key = int16(b ^ int16(int16(b >> int16(15)) & int16(0x7FFF)))
        low = min(low, key)
        high = max(high, key)
        small = min(small, int16(b & int16(0x7FFF)))
    return low, high, small


@_plain
def _below16(bits: Any, limit: Any) -> Any:
    count = int16(0)
    for i in range(bits.shape[0]):
        count = int16(count + int16(int16(bits[i] & int16(0x7FFF)) < limit))
    return count


@_any_order
def _sums_bf16(bits: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(bits.shape[0]):
        v = float64(_as_float32(int32(int32(bits[i]) << int32(16))))
        total += v
        squares += v * v
    return total, squares


@_any_order
def _sums_fp16(bits: Any) -> Any:
    """Sum FP16 numbers times 2**-112: with three bits less of exponent they are FP32 patterns, subnormal ones too."""
    total, squares = 0.0, 0.0
    for i in range(bits.shape[0]):
        b = int32(bits[i])
        wide = int32(int32(b & int32(-2147483648)) | int32(int32(b & int32(0x7FFF)) << int32(13)))
        v = float64(_as_float32(wide))
        total += v
        squares += v * v
    return total, squares


@_plain
def _pass16(
    bits: Any, half: Any, infinite: Any, table: Any, limits16: Any, limits: Any, below: Any, counts: Any, sums: Any
) -> None:
    for start in range(0, bits.shape[0], _BLOCK):
        block = bits[start : start + _BLOCK]
        first, last, smallest = _extremes16(block)
        largest = max(last, int16(int16(first ^ int16(0x7FFF)) & int16(0x7FFF)) if first < 0 else first)
        if largest >= infinite:
            for i in range(block.shape[0]):
                _tally(table[int64(block[i]) & 0xFFFF], 1, limits, below, counts, sums)
            continue
        for k in range(limits16.shape[0] - 1, -1, -1):
            if limits16[k] > largest:
                below[k] += block.shape[0]
            elif limits16[k] <= smallest:
                break
            else:
                below[k] += _below16(block, limits16[k])
        if half:
            total, squares = _sums_fp16(block)
            total *= 2.0**112
            squares *= 2.0**224
        else:
            total, squares = _sums_bf16(block)
        low = int16(first ^ int16(int16(first >> int16(15)) & int16(0x7FFF)))
        high = int16(last ^ int16(int16(last >> int16(15)) & int16(0x7FFF)))
        sums[0] = min(sums[0], table[int64(low) & 0xFFFF])
        sums[1] = max(sums[1], table[int64(high) & 0xFFFF])
        sums[2] += total
        sums[3] += squares


@_plain
def _histogram8(words: Any, tables: Any) -> None:
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    mask = uint64(0xFF)
    for i in range(words.shape[0]):
        w = words[i]
        a[w & mask] += uint32(1)
        b[(w >> uint64(8)) & mask] += uint32(1)
        c[(w >> uint64(16)) & mask] += uint32(1)
        d[(w >> uint64(24)) & mask] += uint32(1)
        a[(w >> uint64(32)) & mask] += uint32(1)
        b[(w >> uint64(40)) & mask] += uint32(1)
        c[(w >> uint64(48)) & mask] += uint32(1)
        d[w >> uint64(56)] += uint32(1)


def _pass32_c(data, n, limits32, limits, nl, below, counts, sums):
    _pass32(
        carray(data, (n,)), carray(limits32, (nl,)), carray(limits, (nl,)), carray(below, (nl,)), carray(counts, (3,)),
        carray(sums, (4,)),
    )  # fmt: skip


def _pass16_c(data, n, half, infinite, table, limits16, limits, nl, below, counts, sums):
    _pass16(
        carray(data, (n,)), half, int16(infinite), carray(table, (65536,)), carray(limits16, (nl,)),
        carray(limits, (nl,)), carray(below, (nl,)), carray(counts, (3,)), carray(sums, (4,)),
    )  # fmt: skip


def _pass64_c(data, n, limits64, limits, nl, below, counts, sums):
    _pass64(
        carray(data, (n,)), carray(limits64, (nl,)), carray(limits, (nl,)), carray(below, (nl,)), carray(counts, (3,)),
        carray(sums, (4,)),
    )  # fmt: skip


def _tally8_c(data, n, table, size, tables, limits, nl, below, counts, sums):
    """Count bytes: ``data`` are words of eight, ``tables`` are four of ``size`` counters, zero before and after."""
    held = carray(tables, (4, 256))
    _histogram8(carray(data, (n,)), held)
    values, bounds, lower = carray(table, (size,)), carray(limits, (nl,)), carray(below, (nl,))
    kinds, totals = carray(counts, (3,)), carray(sums, (4,))
    for i in range(size):
        times = int64(held[0, i]) + int64(held[1, i]) + int64(held[2, i]) + int64(held[3, i])
        if times:
            _tally(values[i], times, bounds, lower, kinds, totals)
    held[:, :] = uint32(0)


@_plain
def _largest64(bits: Any) -> Any:
    largest = int64(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & int64(0x7FFFFFFFFFFFFFFF))
    return largest


@_any_order
def _gaps64(one: Any, other: Any) -> Any:
    difference, before, after, product, furthest = 0.0, 0.0, 0.0, 0.0, 0.0
    changed = int64(0)
    for i in range(one.shape[0]):
        a, b = _as_float64(one[i]), _as_float64(other[i])
        d = b - a
        changed += int64(d != 0.0)
        furthest = max(furthest, abs(d))
        difference += d * d
        before += a * a
        after += b * b
        product += a * b
    return difference, before, after, product, furthest, changed


@_plain
def _compare64(one: Any, other: Any, counts: Any, sums: Any, places: Any) -> None:
    infinite = int64(0x7FF0000000000000)
    for start in range(0, one.shape[0], _BLOCK):
        x, y = one[start : start + _BLOCK], other[start : start + _BLOCK]
        if _largest64(x) < infinite and _largest64(y) < infinite:
            difference, before, after, product, furthest, changed = _gaps64(x, y)
            counts[0] += changed
            sums[0] += difference
            sums[1] += before
            sums[2] += after
            sums[3] += product
            if furthest > sums[4]:
                sums[4] = furthest
                for i in range(x.shape[0]):
                    if abs(_as_float64(y[i]) - _as_float64(x[i])) == furthest:
                        places[0] = start + i
                        break
            continue
        for i in range(x.shape[0]):
            a, b = _as_float64(x[i]), _as_float64(y[i])
            good_a, good_b = abs(a) < np.inf, abs(b) < np.inf
            if good_a and good_b:
                d = b - a
                counts[0] += int64(d != 0.0)
                sums[0] += d * d
                sums[1] += a * a
                sums[2] += b * b
                sums[3] += a * b
                if abs(d) > sums[4]:
                    sums[4] = abs(d)
                    places[0] = start + i
            elif good_a:
                counts[0] += 1
                counts[1] += 1
                if places[1] < 0:
                    places[1] = start + i
            elif good_b:
                counts[0] += 1
                counts[2] += 1
            elif not (a == b or (a != a and b != b)):
                counts[0] += 1


def _compare64_c(one, other, n, counts, sums, places):
    """Compare two arrays of FP64.

    ``counts`` gains elements that differ, that became non-finite, and that became finite; ``sums`` the squares of the
    difference, of one, of the other, and their product, over elements finite in both, and holds the largest difference;
    ``places`` holds where that is, and the first element that became non-finite (-1 where there is none).
    """
    _compare64(carray(one, (n,)), carray(other, (n,)), carray(counts, (3,)), carray(sums, (5,)), carray(places, (2,)))


@intrinsic
def _carryless(typing_context: Any, a: Any, b: Any) -> Any:
    """Multiply two 64-bit polynomials over GF(2); the 128-bit product as its lower and its upper half."""
    del typing_context, a, b

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = ir.VectorType(ir.IntType(64), 2)
        first, second, byte = ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), 1), ir.IntType(8)
        one, other = (builder.insert_element(ir.Constant(pair, None), part, first) for part in arguments)
        kind = ir.FunctionType(pair, [pair, pair, byte])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.pclmulqdq")
        product = builder.call(function, [one, other, ir.Constant(byte, 0)])
        halves = [builder.extract_element(product, first), builder.extract_element(product, second)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


def _fold_crc_c(data, n, state):
    """Fold ``n`` words (a multiple of 8) into the eight words of ``state``, which leave the same CRC-32.

    Four lanes of 128 bits; the constants are x**(512 + 32) and x**(512 - 32) modulo the polynomial, bits reflected.
    Source: Gopal and others, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel, 2009.
    """
    words, held = carray(data, (n,)), carray(state, (8,))
    up, down = uint64(0x0154442BD4), uint64(0x01C6E41596)
    a0, a1, b0, b1 = held[0], held[1], held[2], held[3]
    c0, c1, d0, d1 = held[4], held[5], held[6], held[7]
    for i in range(0, n, 8):
        p, q = _carryless(a0, up)
        r, s = _carryless(a1, down)
        a0, a1 = p ^ r ^ words[i], q ^ s ^ words[i + 1]
        p, q = _carryless(b0, up)
        r, s = _carryless(b1, down)
        b0, b1 = p ^ r ^ words[i + 2], q ^ s ^ words[i + 3]
        p, q = _carryless(c0, up)
        r, s = _carryless(c1, down)
        c0, c1 = p ^ r ^ words[i + 4], q ^ s ^ words[i + 5]
        p, q = _carryless(d0, up)
        r, s = _carryless(d1, down)
        d0, d1 = p ^ r ^ words[i + 6], q ^ s ^ words[i + 7]
    held[0], held[1], held[2], held[3] = a0, a1, b0, b1
    held[4], held[5], held[6], held[7] = c0, c1, d0, d1


_SUMS = (_P(_I64), _P(_I64), _P(_F64))

KERNELS: dict[str, tuple[Any, Callable[..., None]]] = {
    "pass32": (_VOID(_P(_I32), _I64, _P(_I32), _P(_F64), _I64, *_SUMS), _pass32_c),
    "pass16": (
        _VOID(_P(_I16), _I64, _I64, _I64, _P(_F64), _P(_I16), _P(_F64), _I64, *_SUMS),
        _pass16_c,
    ),
    "pass64": (_VOID(_P(_I64), _I64, _P(_I64), _P(_F64), _I64, *_SUMS), _pass64_c),
    "compare64": (_VOID(_P(_I64), _P(_I64), _I64, _P(_I64), _P(_F64), _P(_I64)), _compare64_c),
    "fold_crc": (_VOID(_P(_U64), _I64, _P(_U64)), _fold_crc_c),
    "tally8": (_VOID(_P(_U64), _I64, _P(_F64), _I64, _P(_U32), _P(_F64), _I64, *_SUMS), _tally8_c),
}
"""Signature and body of each kernel, by name; all arguments are addresses and 64-bit integers."""


def compile_kernels(features: Mapping[str, bool]) -> dict[str, tuple[str, str]]:
    """Return the name of each kernel's function and its module as LLVM assembly, optimised for this machine.

    ``features`` are those of the processor; a kernel that needs one that is missing is left out.
    """
    made: dict[str, tuple[str, str]] = {}
    for name, (signature, body) in KERNELS.items():
        if name == "fold_crc" and not features.get("pclmul"):
            continue
        function = cfunc(signature, error_model="numpy")(body)
        made[name] = function.native_name, function.inspect_llvm()
    return made
