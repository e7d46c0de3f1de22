"""From the visit to the operation: which dispatched operation inside it first made something bad of good operands.

A lane in which a visit went bad is run once more, alone. Inside that visit every operation's result is looked at; the
first bad one whose operands were good is evaluated again in FP64 on the very same operands, which tells what the
result should have been: a finite value beyond the format, or nothing that any precision could hold.

-Inf that is put somewhere on purpose (a fill, a copy, a choice between two tensors) is no result of arithmetic and is
passed over, and so is a mask's fill that rounds to -Inf while its row keeps a finite element.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanprobe.lanes.trace import OperationFact
from nanprobe.numerics.stats import format_of, is_finite, measure
from nanprobe.numerics.tree import map_tensors, named_tensors

__all__ = ["OperationWatch"]

_PLACING = (
    "masked_fill", "fill", "full", "where", "copy", "index_put", "scatter", "clone", "tril", "triu", "slice_scatter",
    "new_full", "full_like", "constant_pad_nd", "scalar_tensor", "lift_fresh", "detach", "view", "expand", "cat",
    "stack", "select_scatter", "masked_scatter", "empty", "alias", "permute", "transpose", "t",
)  # fmt: skip
"""Operations that put values somewhere without computing any; names without the overload and a trailing underscore."""

_MAX_EXACT = 1 << 26
"""Elements of the largest operand or result that is evaluated again in FP64."""


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Looks at every operation while the place that :meth:`inside` names is running."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        """``parameters`` names parameters by the identity of their tensors."""
        super().__init__()  # type: ignore[no-untyped-call]  # and __init__ as well
        self.found: dict[tuple[str, int], OperationFact] = {}
        self._parameters = parameters
        self._place: tuple[str, int] | None = None
        self._innermost: list[tuple[str, int, str]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the detour by which a mode is hidden from the compiler; lanes run eagerly."""
        return False

    @contextmanager
    def visiting(self, path: str, visit: int, class_: str) -> Iterator[None]:
        """Say which module's code is running; the innermost visit is the one that an operation belongs to."""
        self._innermost.append((path, visit, class_))
        try:
            yield
        finally:
            self._innermost.pop()

    @contextmanager
    def inside(self, place: tuple[str, int]) -> Iterator[None]:
        """Look at what runs here as part of ``place``; a place inside another one is looked at on its own account."""
        outer, self._place = self._place, place
        try:
            if outer is None:
                with self:
                    yield
            else:
                yield
        finally:
            self._place = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at its result; operands that it writes over are kept until then."""
        kwargs = kwargs or {}
        place = self._place
        if place is None or place in self.found:
            return func(*args, **kwargs)
        kept = map_tensors(torch.clone, (args, kwargs)) if func._schema.is_mutable else (args, kwargs)
        result = func(*args, **kwargs)
        bad = next((t for t in _floating(result) if not is_finite(t)), None)
        if bad is not None:
            fact = _look(func, kept[0], kept[1], bad)
            if fact is not None:
                if fact.op == "aten._to_copy":
                    fact = dataclasses.replace(fact, parameter=self._parameters.get(id(args[0])))
                if self._innermost:
                    path, visit, class_ = self._innermost[-1]
                    fact = dataclasses.replace(fact, module=path, visit=visit, class_=class_)
                self.found[place] = fact
        return result


def _floating(value: Any) -> list[torch.Tensor]:
    return [t for _, t in named_tensors(value) if t.dtype.is_floating_point and not t.is_nested]


def _name(func: Any) -> str:
    return str(func._schema.name).replace("::", ".")


def _look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bad: torch.Tensor) -> OperationFact | None:
    """Return the fact of an operation that made ``bad`` of good operands, None when it did not or meant to."""
    name = _name(func)
    operands = _floating((args, kwargs))
    stats = [measure(t) for t in operands]
    if any(s.nan or s.posinf for s in stats):
        return None
    constants = _constants((args, kwargs))
    holds_inf = any(s.neginf for s in stats) or any(math.isinf(number) for number in constants)
    result = measure(bad)
    hard = bool(result.nan or result.posinf)
    if not hard and (holds_inf or name.removeprefix("aten.").rstrip("_") in _PLACING):
        return None
    exact = _exact(func, args, kwargs, bad)
    where = ~torch.isfinite(bad)
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
        input_absmax=max(absmaxes, default=None),
        exact_absmax=beyond,
        exact_known=exact is not None,
        operand_zero=any(s.zero for s in stats),
        operand_inf=holds_inf,
        masked_rows=_masked_rows(operands, bad) if holds_inf and result.nan else 0,
        of_mask=any(t.dim() > 0 and bool(((t == 0) | (t == 1)).all()) for t in operands),
        no_elements=any(t.numel() == 0 for t in operands),
        constant=max((number for number in constants if math.isfinite(number)), default=None),
    )


def _exact(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bad: torch.Tensor) -> torch.Tensor | None:
    """Evaluate the operation in FP64 on the same operands; None when there is no such kernel, or it is too large."""
    if max([bad.numel(), *(t.numel() for t in _floating((args, kwargs)))]) > _MAX_EXACT:
        return None

    def widen(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(torch.float64) if tensor.dtype.is_floating_point else tensor.detach().clone()

    try:
        with torch.no_grad():
            results = func(
                *(widen(a) for a in map_tensors(wide, args)),
                **{key: widen(value) for key, value in map_tensors(wide, kwargs).items()},
            )
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return next((t for t in _floating(results) if t.shape == bad.shape), None)


def _absmax(values: torch.Tensor) -> float | None:
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else None


def _row_survives(bad: torch.Tensor) -> bool:
    """Whether every row (last dimension) that holds -Inf keeps a finite element, as a mask's rows should."""
    return bad.dim() > 0 and bool(torch.isfinite(bad).any(dim=-1).all())


def _masked_rows(operands: list[torch.Tensor], bad: torch.Tensor) -> int:
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
