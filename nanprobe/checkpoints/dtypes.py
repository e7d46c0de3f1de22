"""Element types as names: how wide each is and what the file formats call it. No torch needed."""

from __future__ import annotations

__all__ = ["BITS", "SAFETENSORS", "STORAGE_CLASSES", "nbytes", "torch_dtype_name"]

BITS: dict[str, int] = {
    "float64": 64,
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,
    "float4_e2m1": 4,
    "float6_e2m3": 6,
    "float6_e3m2": 6,
    "complex32": 32,
    "complex64": 64,
    "complex128": 128,
    "int64": 64,
    "int32": 32,
    "int16": 16,
    "int8": 8,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "uint8": 8,
    "bool": 8,
    "qint32": 32,
    "qint8": 8,
    "quint8": 8,
    "quint4x2": 8,
    "quint2x4": 8,
    "bits8": 8,
    "bits16": 16,
    "bits1x8": 8,
    "bits2x4": 8,
    "bits4x2": 8,
}
"""Bits per element, by PyTorch's name for the type or, for the 4 and 6 bit ones it lacks, by the OCP standard's."""

SAFETENSORS: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Type codes of a safetensors header."""

STORAGE_CLASSES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
"""Storage classes that a torch.save file names, by the last part of the name."""

_TORCH_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


def nbytes(elements: int, dtype: str) -> int:
    """Return the bytes that ``elements`` of ``dtype`` take, rounded up to whole bytes; KeyError for an unknown type."""
    return (elements * BITS[dtype] + 7) // 8


def torch_dtype_name(name: str) -> str | None:
    """Return the canonical name of ``torch.<name>`` ("half" is "float16"), None when it is no element type."""
    canonical = _TORCH_ALIASES.get(name, name)
    return canonical if canonical in BITS else None
