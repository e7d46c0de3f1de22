"""One operation while the trace looks at it: its arguments, operands and results, and figures of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanprobe.lanes.exact import floating
from nanprobe.lanes.plans import Plan
from nanprobe.numerics.stats import Difference

__all__ = [
    "WITH_DRAWS",
    "Call",
    "absorbed_share",
    "as_held",
    "converted",
    "copied",
    "first_of",
    "gives_back",
    "is_number",
    "memory_of",
    "norms_of",
    "operands_before",
    "operands_of",
    "rounded_constants",
    "widens",
]


@dataclass(slots=True, eq=False)
class Call:
    """One operation: its arguments, whether it can be evaluated ``again``, and what is known of it.

    ``before`` are the arguments as they were before it wrote to any of them. ``operands`` are the floating tensors it
    reads, as they were before; ``makers`` the records that made them. ``outputs`` are the floating results among its
    ``result``, ``targets`` the mirrors of those that it writes to, by identity.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: bool
    before: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    operands: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    makers: tuple[int, ...] = ()
    targets: dict[int, torch.Tensor] = field(default_factory=dict)
    result: Any = None

    def __post_init__(self) -> None:
        self.before = (self.args, self.kwargs)


def first_of(where: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element that is true, None when there is none."""
    flat = where.reshape(-1)
    first = int(flat.to(torch.uint8).argmax()) if flat.numel() else -1
    if first < 0 or not bool(flat[first]):
        return None
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(first), where.shape)) if where.dim() else ()


def copied(value: Any) -> Any:
    """Return a copy of a tensor's values, or of those in a list or tuple of tensors; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [copied(v) for v in value] if isinstance(value, (list, tuple)) else value


def operands_of(plan: Plan, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """Return the floating tensors that an operation reads: not those that it only writes to."""
    args, kwargs = call
    if plan.reads:
        return floating(call)
    return floating(
        [
            *(a for n, a in enumerate(args) if n not in plan.written),
            *(value for key, value in kwargs.items() if key not in plan.outs),
        ]
    )


def operands_before(call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each operand with what it was before the operation ran."""
    now, before = floating((call.args, call.kwargs)), floating(call.before)
    read = {id(t) for t in call.operands}
    return [(tensor, earlier) for tensor, earlier in zip(now, before, strict=True) if id(earlier) in read]


def gives_back(call: Call) -> bool:
    """Whether a result lies in the memory of an operand."""
    given = {memory_of(t) for t in floating((call.args, call.kwargs)) if t.numel()}
    return any(memory_of(output) in given for output in call.outputs if output.numel())


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds real or complex numbers in one block, so that it can have a shadow."""
    return (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and not tensor.is_nested


def dropped(exact: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """Return the shadow of ``native_dropout``: the same elements dropped, the others scaled."""
    share, training = float(call.args[1]), call.args[2] is None or bool(call.args[2])
    if not training:
        return [exact.clone()]
    kept = call.result[1]
    return [exact * kept / (1 - share)] if share < 1 else [torch.zeros_like(exact)]


WITH_DRAWS: dict[Any, Callable[[torch.Tensor, Call], list[torch.Tensor]]] = {
    torch.ops.aten.native_dropout.default: dropped
}
"""Random operations whose draw is among their results, so that the shadow can take it."""


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a real or complex tensor in the width of ``dtype``."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor.to(dtype)


def memory_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from others while it lives."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def widens(output: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether ``output`` is a narrower copy of a tensor in FP32, which can then stand for its shadow."""
    return source.dtype in (torch.float32, torch.float64) and output.dtype.itemsize < source.dtype.itemsize


def norms_of(output: torch.Tensor, shadow: torch.Tensor, diff: Difference, bad: int) -> tuple[float, float]:
    """Return the 2-norms of the shadow and of the error, infinite where the output is bad and the shadow is not."""
    size, error = math.sqrt(diff.reference_squares), math.sqrt(diff.error_squares)
    if bad and bool((torch.isfinite(shadow) & ~torch.isfinite(output)).any()):
        error = math.inf
    return size, error


def absorbed_share(operands: list[torch.Tensor], local: float) -> float | None:
    """Return the share of the smaller of two operands, by 2-norm, that their sum lacks; None where it is not small."""
    if len(operands) != 2 or operands[0].dtype is not operands[1].dtype:
        return None
    norms = [float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64)) for t in operands]
    smaller, larger = min(norms), max(norms)
    return local / smaller if 0 < smaller < larger and math.isfinite(larger) else None


def as_held(call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the arguments of a call with their float constants as a format holds them."""

    def held(value: Any) -> Any:
        return float(torch.tensor(value, dtype=torch.float64).to(dtype)) if isinstance(value, float) else value

    return tuple(map(held, call[0])), {key: held(value) for key, value in call[1].items()}


def rounded_constants(call: Call, dtype: torch.dtype) -> tuple[tuple[float, float], ...]:
    """Return the float constants of a call that a format cannot hold, with what it holds instead."""
    pairs = []
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, float) and math.isfinite(value) and dtype.is_floating_point:
            held = float(torch.tensor(value, dtype=torch.float64).to(dtype))
            if held != value:
                pairs.append((value, held))
    return tuple(pairs)
