"""CRC-32 at the pace of a scan: bytes are folded to 64 that leave the same checksum, and zlib does the rest."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from nanprobe.numerics.native import Kernels

__all__ = ["crc32"]

_FOLDED_FROM = 4096
_LANES = 64
"""Bytes that are folded together."""


def crc32(data: Any, start: int = 0, kernels: Kernels | None = None) -> int:
    """Return what ``zlib.crc32(data, start)`` does; ``data`` is a contiguous uint8 array."""
    if kernels is None or "fold_crc" not in kernels or data.size < _FOLDED_FROM:
        return zlib.crc32(data, start)
    whole = data.size // _LANES * _LANES
    state = data[:_LANES].copy()
    # A CRC that goes on is one whose first 32 bits are combined with what is in the register, the complement of start.
    state[:4] ^= np.frombuffer((~start & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8)
    kernels("fold_crc", data.ctypes.data + _LANES, (whole - _LANES) // 8, state.ctypes.data)
    # 0xFFFFFFFF leaves zero in the register, so that the 64 bytes are taken as they are.
    return zlib.crc32(data[whole:], zlib.crc32(state, 0xFFFFFFFF))
