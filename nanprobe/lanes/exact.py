"""Evaluating a dispatched operation again in another precision, out of sight of every dispatch mode and of autograd.

Only operations of PyTorch's own are evaluated again: one that a model registered may have effects besides its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["evaluated", "floating", "off_the_record", "operation_name", "repeatable"]

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

_FAILS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""What PyTorch raises where an operation has no kernel for a dtype, or checks that dtypes agree."""

aten = torch.ops.aten

_KEEPS_DTYPE = {aten._softmax.default: 2, aten._log_softmax.default: 2}
"""Operations with a flag that turns halves into FP32, which other dtypes must not be given; its position."""


@contextmanager
def off_the_record() -> Iterator[None]:
    """Run tensor code that no dispatch mode sees, that autocast leaves alone, and that makes no autograd graph."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
    ):
        yield


def operation_name(func: Any) -> str:
    """Return an operation's name without its overload: ``aten.addmm``."""
    return str(func._schema.name).replace("::", ".")


def repeatable(func: Any) -> bool:
    """Whether an operation is PyTorch's own and a function of its operands alone, with no draw of random numbers."""
    return func.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in func.tags


def floating(value: Any) -> list[torch.Tensor]:
    """Return the dense real or complex tensors in what an operation takes or returns, in order, repeats included."""
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(node: Any, found: list[torch.Tensor]) -> None:
    # A function that calls itself is a cycle of references when it is a closure, and would keep tensors alive.
    if isinstance(node, torch.Tensor):
        if (node.dtype.is_floating_point or node.dtype.is_complex) and not (node.is_nested or node.is_meta):
            found.append(node)
    elif isinstance(node, (tuple, list)):
        for child in node:
            _gather(child, found)
    elif isinstance(node, dict):
        for child in node.values():
            _gather(child, found)


def evaluated(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operand: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> list[torch.Tensor] | None:
    """Return the floating results of ``func`` with ``operand(tensor)`` in place of every tensor.

    Arguments that are floating dtypes become ``dtype``. None where there is no such kernel. To be called inside
    :func:`off_the_record`.
    """
    new_args = [_replaced(a, operand, dtype) for a in args]
    flag = _KEEPS_DTYPE.get(func)
    if flag is not None and len(new_args) > flag:
        new_args[flag] = False
    try:
        results = func(*new_args, **{key: _replaced(value, operand, dtype) for key, value in kwargs.items()})
    except _FAILS:
        return None
    return floating(results)


def _replaced(node: Any, operand: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Any:
    if isinstance(node, torch.Tensor):
        return operand(node)
    if isinstance(node, (tuple, list)):
        return type(node)(_replaced(child, operand, dtype) for child in node)
    if not isinstance(node, torch.dtype):
        return node
    if node.is_complex:
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if node.is_floating_point else node
