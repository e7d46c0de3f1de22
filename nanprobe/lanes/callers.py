"""Which public function of PyTorch ran an operation, read off the Python stack.

``F.dropout`` multiplies by a mask and ``F.normalize`` divides by a norm: who looks for the operation in the code has to
know what it was called there. Functions that are written in C++ leave no frame, and no name.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

__all__ = ["public_function"]

_PUBLIC = ("functional.py", "_tensor.py")
"""Files of PyTorch whose functions are its public interface."""

_FURTHEST = 40
"""Frames that are looked at."""


def public_function(op: str) -> str | None:
    """Return the outermost public function that is running ``op`` ("aten.mul"), None without one of another name."""
    frame = sys._getframe(1)
    for _ in range(_FURTHEST):
        if frame.f_back is None:
            return None
        if frame.f_code.co_name == "__torch_dispatch__":
            break
        frame = frame.f_back
    found = None
    caller = frame.f_back
    while caller is not None and _is_public(caller.f_code.co_filename):
        found = caller.f_code.co_name
        caller = caller.f_back
    if found is None or found.strip("_") == op.rpartition(".")[2].strip("_"):
        return None
    return found


def _is_public(filename: str) -> bool:
    path = PurePath(filename)
    return path.name in _PUBLIC and "torch" in path.parts
