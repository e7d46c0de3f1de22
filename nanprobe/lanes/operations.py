"""What can be told of one operation that made something non-finite of good operands.

It is evaluated again in FP64 on the very same operands, which tells what the result should have been: a finite value
beyond the format, or nothing that any precision could hold.

Inf that is put somewhere on purpose (a fill, a copy, a choice between two tensors) is no result of arithmetic. -Inf of
that kind is passed over; +Inf, which masks hold less often, is noted as put there on purpose, and what then makes NaN
of it is an origin, as it is of -Inf. So is a mask's fill that rounds to -Inf while its row keeps a finite element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from nanprobe.lanes.exact import evaluated, floating, operation_name, repeatable
from nanprobe.lanes.trace import OperationFact
from nanprobe.numerics.stats import format_of, measure

__all__ = ["PLACING", "counted_in", "look_at"]

PLACING = (
    "masked_fill", "fill", "full", "where", "copy", "index_put", "scatter", "clone", "tril", "triu", "slice_scatter",
    "new_full", "full_like", "constant_pad_nd", "scalar_tensor", "lift_fresh", "detach", "view", "expand", "cat",
    "stack", "select_scatter", "masked_scatter", "empty", "alias", "permute", "transpose", "t",
)  # fmt: skip
"""Operations that put values somewhere without computing any; names without the overload and a trailing underscore."""

_MAX_EXACT = 1 << 26
"""Elements of the largest operand or result that is evaluated again in FP64."""


def look_at(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    bad: torch.Tensor,
    *,
    placed: bool = False,
) -> OperationFact | None:
    """Return the fact of an operation that made ``bad`` of good ``operands``, None when it did not or meant to.

    ``args`` and ``kwargs`` are as they were before it ran; ``operands`` are the floating tensors that it reads.
    ``placed`` says that +Inf among them was put there on purpose. An operation that puts +Inf somewhere itself has a
    fact with ``on_purpose``; what only hands it on has none.
    """
    name = operation_name(func)
    stats = [measure(t) for t in operands]
    if any(s.nan or (s.posinf and not placed) for s in stats):
        return None
    constants = _constants((args, kwargs))
    from_literal = any(math.isinf(number) for number in constants)
    given_inf = any(s.posinf for s in stats)
    holds_inf = given_inf or any(s.neginf for s in stats) or from_literal
    result = measure(bad)
    hard = bool(result.nan or result.posinf)
    places = name.removeprefix("aten.").rstrip("_") in PLACING
    if not hard and (holds_inf or places):
        return None
    if given_inf and not result.nan:
        return None
    exact = _exact(func, args, kwargs, bad)
    where = counted_in(bad)
    beyond = _absmax(exact[where]) if exact is not None else None
    if not hard and beyond is not None and _row_survives(bad):
        return None
    absmaxes = [s.absmax for s in stats if s.absmax is not None]
    return OperationFact(
        module=None,
        visit=None,
        class_=None,
        op=name,
        dtype=str(bad.dtype).removeprefix("torch."),
        count=int(torch.count_nonzero(where)),
        elements=bad.numel(),
        nan=result.nan,
        posinf=result.posinf,
        neginf=result.neginf,
        input_absmax=max(absmaxes, default=None),
        exact_absmax=beyond,
        exact_known=exact is not None,
        operand_zero=any(s.zero for s in stats),
        operand_inf=holds_inf,
        masked_rows=_masked_rows(operands, bad) if holds_inf and result.nan and not _multiplies(name) else 0,
        of_mask=any(t.dim() > 0 and bool(((t == 0) | (t == 1)).all()) for t in operands),
        no_elements=any(t.numel() == 0 for t in operands),
        on_purpose=places and from_literal and not result.nan,
        constant=max((number for number in constants if math.isfinite(number)), default=None),
    )


def counted_in(bad: torch.Tensor) -> torch.Tensor:
    """Return where the result of an origin is bad (bool, same shape).

    Beside NaN and +Inf, or in rows that keep a finite element, -Inf may be a mask's and is not counted, unless there is
    nothing else.
    """
    soft = torch.isneginf(bad) if not bad.is_complex() else torch.zeros_like(bad, dtype=torch.bool)
    hard = ~torch.isfinite(bad) & ~soft
    if bool(hard.any()) or not bad.dim():
        return hard if bool(hard.any()) else soft
    lost = soft & ~torch.isfinite(bad).any(dim=-1, keepdim=True)
    return lost if bool(lost.any()) else soft


def _exact(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bad: torch.Tensor) -> torch.Tensor | None:
    """Evaluate the operation in FP64 on the same operands; None when there is no such kernel, or it is too large."""
    if not repeatable(func) or max([bad.numel(), *(t.numel() for t in floating((args, kwargs)))]) > _MAX_EXACT:
        return None

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        is_real = tensor.dtype.is_floating_point and not tensor.is_nested
        return tensor.detach().to(torch.float64) if is_real else tensor.detach().clone()

    results = evaluated(func, args, kwargs, wide, torch.float64)
    return next((t for t in results or () if t.shape == bad.shape), None)


def _absmax(values: torch.Tensor) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else None


def _row_survives(bad: torch.Tensor) -> bool:
    """Whether every row (last dimension) that holds -Inf keeps a finite element, as a mask's rows should."""
    return bad.dim() > 0 and bool(torch.isfinite(bad).any(dim=-1).all())


def _multiplies(name: str) -> bool:
    """Whether an operation makes NaN of an Inf by a zero that it is multiplied with, whatever else is in its row."""
    base = name.rpartition(".")[2].rstrip("_")
    return base in ("mul", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution", "addcmul", "lerp")


def _masked_rows(operands: Sequence[torch.Tensor], bad: torch.Tensor) -> int:
    """Count rows of an operand of the result's shape that are -Inf throughout, along any one dimension."""
    for operand in operands:
        if operand.shape != bad.shape:
            continue
        rows = [int(torch.isneginf(operand).all(dim=d).sum()) for d in range(operand.dim()) if operand.shape[d] > 1]
        if any(rows):
            return max(rows)
    return 0


def _constants(value: Any) -> list[float]:
    """Return the magnitudes of the operation's number arguments and of its operands without dimensions."""
    numbers: list[float] = []

    def walk(node: Any) -> None:
        if isinstance(node, (bool, str)):
            return
        if isinstance(node, (int, float)) or (
            isinstance(node, torch.Tensor) and node.dim() == 0 and format_of(node.dtype) is not None
        ):
            numbers.append(abs(float(node)))
        elif isinstance(node, (tuple, list)):
            for child in node:
                walk(child)
        elif isinstance(node, dict):
            for child in node.values():
                walk(child)

    walk(value)
    return numbers
