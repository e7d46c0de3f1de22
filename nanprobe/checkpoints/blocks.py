"""Block formats of GGUF: how many elements and bytes a block has, its scales, and its values as float32.

A block holds a few integers and one or two scales; a scale that is NaN or Inf spoils all its elements. Values come from
the ``gguf`` package (an optional extra); sizes and scales are known here, so that a file can be checked without it.
Source: ggml-common.h and the quantisation tables of gguf 0.19.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nanprobe.checkpoints.records import Damage, Problem

__all__ = ["BLOCKS", "MISSING_EXTRA", "block_layout", "block_scales", "can_decode", "decode_blocks"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MISSING_EXTRA = "block formats are decoded by a recent gguf package: install nanprobe[gguf]"

BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q8_1": (32, 40),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq3_xxs": (256, 98),
    "iq1_s": (256, 50),
    "iq4_nl": (32, 18),
    "iq3_s": (256, 110),
    "iq2_s": (256, 82),
    "iq4_xs": (256, 136),
    "iq1_m": (256, 56),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
}
"""Elements and bytes of one block, by the format's name in lower case."""

_HALF_SCALES: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq3_xxs": (0,),
    "iq1_s": (0,),
    "iq4_nl": (0,),
    "iq3_s": (0,),
    "iq2_s": (0,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "q1_0": (0,),
}
"""Where the half-precision scales lie in a block."""


def block_layout(dtype: str) -> tuple[int, int]:
    """Return the elements and the bytes of one block; KeyError for an unknown format."""
    return BLOCKS[dtype]


_DECODED: set[str] = set()
"""Formats that were decoded once, so that the next question costs nothing."""


def can_decode(dtype: str) -> bool:
    """Return whether the installed packages decode blocks of ``dtype``."""
    if dtype in _DECODED:
        return True
    try:
        import gguf.quants as quants
        from gguf.constants import GGMLQuantizationType

        quants.dequantize(np.zeros((1, BLOCKS[dtype][1]), np.uint8), GGMLQuantizationType[dtype.upper()])
    except (ImportError, KeyError, NotImplementedError):
        return False
    _DECODED.add(dtype)
    return True


def decode_blocks(data: Bytes, dtype: str) -> Floats:
    """Return the elements of whole blocks, float32 of shape (blocks, elements of a block).

    ``data`` are their bytes. Elements of a block whose scale is NaN by its format are NaN. Damage when the gguf package
    is missing or does not know the format.
    """
    elements, size = BLOCKS[dtype]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, size)
    if not can_decode(dtype):
        raise Damage(Problem(rule="not-scanned", severity="warning", message=MISSING_EXTRA, file=""))
    if not len(blocks):
        return np.empty((0, elements), np.float32)
    import gguf.quants as quants
    from gguf.constants import GGMLQuantizationType

    with np.errstate(all="ignore"):
        values: Any = quants.dequantize(blocks, GGMLQuantizationType[dtype.upper()])
        made: Floats = np.ascontiguousarray(values, np.float32).reshape(-1, elements)
        if dtype in ("mxfp4", "nvfp4"):
            bad = np.isnan(block_scales(data, dtype))
            made = made.reshape(len(blocks), bad.shape[1], -1)
            made[bad] = np.nan
            made = made.reshape(-1, elements)
    return made


def block_scales(data: Bytes, dtype: str) -> Floats:
    """Return the scales of whole blocks, float32 of shape (blocks, scales of a block)."""
    _, size = BLOCKS[dtype]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, size)
    with np.errstate(all="ignore"):
        if dtype == "mxfp4":
            exponent = blocks[:, :1].astype(np.float32)
            return np.where(exponent == 255, np.float32("nan"), np.exp2(exponent - 127)).astype(np.float32)
        if dtype == "nvfp4":
            return _unsigned_e4m3(blocks[:, :4])
        if dtype == "iq1_m":
            parts = np.ascontiguousarray(blocks[:, 48:56]).view("<u2") & np.uint16(0xF000)
            bits = parts[:, 0] >> 12 | parts[:, 1] >> 8 | parts[:, 2] >> 4 | parts[:, 3]
            return bits.view(np.float16).astype(np.float32).reshape(-1, 1)
        if dtype in ("q8_k", "q8_1"):
            return np.ascontiguousarray(blocks[:, :4]).view("<f4").astype(np.float32)
        places = _HALF_SCALES[dtype]
        columns = [np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32) for at in places]
        return np.concatenate(columns, axis=1)


def _unsigned_e4m3(codes: Bytes) -> Floats:
    exponent = ((codes >> 3) & 15).astype(np.float32)
    mantissa = (codes & 7).astype(np.float32)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent - 7))
    return np.where((codes & 127) == 127, np.nan, value).astype(np.float32)
