"""Recognising that memory ran out, whichever of Python, PyTorch on a CPU or PyTorch on a GPU says so."""

from __future__ import annotations

__all__ = ["is_out_of_memory"]

_SIGNS = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "CUDA out of memory")
"""What PyTorch's plain RuntimeErrors about memory begin with; only its GPU allocator has an error type of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; needs no torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    try:
        return any(sign in str(error) for sign in _SIGNS)
    except Exception:
        # An error of the user's own may be unable to say what it is.
        return False
