"""Objects and files for the tests that are written byte by byte, so that a test can choose every number."""

from __future__ import annotations

import random
import struct

import numpy as np

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
OBJECTS = {
    "a": ARRAY,
    "fortran": np.asfortranarray(ARRAY),
    "long": np.random.default_rng(0).standard_normal((200, 90)),
    "big": ARRAY.astype(">f8"),
    "empty": np.zeros((0, 3)),
    "nan": np.float64("nan"),
    "count": np.int64(7),
    "rng": random.Random(0).getstate(),
}
"""Arrays and scalars of numpy, as scripts pickle them."""


def gguf_bytes(tensors: int = 1, shape: int = 8, kind: int = 0, offset: int = 0, data: int = 32) -> bytes:
    """One key, and one row for each tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1)
    head += struct.pack("<Q", 3) + b"key" + struct.pack("<IQ", 8, 2) + b"ab"
    for number in range(tensors):
        head += struct.pack("<Q", 1) + b"%d" % number + struct.pack("<IQIQ", 1, shape, kind, offset)
    return head + bytes(-len(head) % 32) + bytes(data)


def onnx_model(location: str, length: int = 16, offset: int = 0, dims: int = 4) -> bytes:
    """One tensor of float32 with its data outside."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    def entry(key: bytes, value: bytes) -> bytes:
        return field(13, field(1, key) + field(2, value))

    tensor = bytes([8, dims, 16, 1]) + field(8, b"w") + entry(b"location", location.encode())
    tensor += entry(b"offset", b"%d" % offset) + entry(b"length", b"%d" % length) + bytes([14 << 3, 1])
    return bytes([8, 9]) + field(7, field(5, tensor))
