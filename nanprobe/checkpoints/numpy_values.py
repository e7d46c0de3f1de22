"""numpy arrays and scalars inside pickles, decoded from their raw bytes: numpy's own constructors are never called.

An array is pickled as a call of ``_reconstruct`` and a state (version, shape, dtype, Fortran order, bytes), or from
protocol 5 on as a call of ``_frombuffer``. Protocols before 3 write the bytes as text, one character for each byte.
Source: numpy/_core/src/multiarray/methods.c (``__reduce__``) and numpy/_core/numeric.py, numpy 1.20 to 2.4.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from nanprobe.checkpoints.dtypes import nbytes
from nanprobe.checkpoints.inert import Foreign, Global, Span, StorageRef, TensorValue
from nanprobe.checkpoints.strides import contiguous_strides, impossible
from nanprobe.checkpoints.trees import sizes

__all__ = ["NUMPY_BUILDERS", "array_value", "dtype_of", "is_array"]

_RECONSTRUCT = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_FROM_BUFFER = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})

_KINDS: dict[str, str] = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "b1": "bool",
    "c8": "complex64",
    "c16": "complex128",
    "bfloat16": "bfloat16",
}
"""Element types by numpy's code, without the byte order."""

_SCALARS = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "bool": "?",
}


def dtype_of(code: str) -> tuple[str, str] | None:
    """Return (element type, byte order) of numpy's code ("<f4"), None when it is no plain number."""
    order = "big" if code[:1] == ">" else "little"
    name = _KINDS.get(code.lstrip("<>|=")) if len(code) < 12 else None
    return (name, order) if name is not None else None


def _dtype(node: Any) -> tuple[str, str] | None:
    """Return (element type, byte order) of a pickled ``numpy.dtype``."""
    if not isinstance(node, Foreign) or node.class_name != "numpy.dtype":
        return None
    code = node.args[0] if isinstance(node.args, tuple) and node.args else None
    if not isinstance(code, str):
        return None
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "<"
    return dtype_of((order if order in ("<", ">", "|", "=") else "<") + code.lstrip("<>|="))


def _raw(node: Any) -> bytes | str | Span | None:
    """Return the raw bytes, or the text or the span of the file that holds them."""
    if isinstance(node, Foreign) and node.class_name in ("_codecs.encode", "builtins.bytearray", "builtins.bytes"):
        node = node.args[0] if isinstance(node.args, tuple) and node.args else b""
    return node if isinstance(node, (bytes, str, Span)) else None


def is_array(node: Foreign) -> bool:
    """Return whether the stand-in is a numpy array."""
    return node.class_name in _RECONSTRUCT or node.class_name in _FROM_BUFFER


def array_value(node: Foreign, number: int) -> TensorValue | None:
    """Return the array as a tensor whose storage knows its raw bytes, None when it is damaged or holds objects.

    ``number`` makes its key unique in the file.
    """
    if node.class_name in _RECONSTRUCT:
        state = node.state
        if not isinstance(state, tuple) or len(state) != 5:
            return None
        _, shape, dtype, fortran, raw = state
    else:
        if not isinstance(node.args, tuple) or len(node.args) != 4:
            return None
        raw, dtype, shape, order = node.args
        fortran = order == "F"
    known, extent, data = _dtype(dtype), sizes(shape), _raw(raw)
    if known is None or extent is None or data is None:
        return None
    if impossible(extent):
        return None
    strides = contiguous_strides(extent[::-1])[::-1] if fortran is True else contiguous_strides(extent)
    reference = StorageRef(f"array {number}", known[0], math.prod(extent), raw=data, byteorder=known[1])
    return TensorValue(known[0], reference, 0, extent, strides)


def _scalar(args: tuple[Any, ...]) -> Any:
    """Return the number that ``numpy.core.multiarray.scalar`` would make."""
    known = _dtype(args[0]) if len(args) == 2 else None
    raw = _raw(args[1]) if len(args) == 2 else None
    form = _SCALARS.get(known[0]) if known else None
    if known is not None and form is not None and isinstance(raw, (bytes, str)) and len(raw) <= 16:
        data = raw.encode("latin-1") if isinstance(raw, str) else raw
        if len(data) == nbytes(1, known[0]):
            return struct.unpack((">" if known[1] == "big" else "<") + form, data)[0]
    return Foreign(Global("numpy._core.multiarray", "scalar"), args)


NUMPY_BUILDERS = {
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Builders for the pickle machine."""
