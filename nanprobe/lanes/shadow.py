"""Which operation a silent drift comes from: every operation of one visit beside its shadow in FP64.

The visit's inputs and weights are taken as they are. From there on every operation is run twice, on the values that the
lane really has and on shadows in FP64, so that for each result two errors are known: the *accumulated* one, against the
shadow carried from the start, and the *local* one, of the operation on its actual operands. The first result whose
accumulated error is beyond the tolerance shows the drift. If its own local error is small, the operation only made
visible what was lost before it (a cosine of an angle that had been rounded), and the one that made the operand with the
largest absolute error is to blame.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanprobe.lanes.trace import DriftFact
from nanprobe.numerics.tree import map_tensors, named_tensors

__all__ = ["ShadowWatch"]

_MAX_ELEMENTS = 1 << 26
"""Elements of the largest tensor that gets a shadow."""

_OWN_SHARE = 0.25
"""Share of a result's error that must be the operation's own for it to be to blame itself."""


@dataclass(slots=True, eq=False)
class _Shadow:
    tensor: weakref.ref[torch.Tensor]
    values: torch.Tensor
    op: str
    error: float


class ShadowWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Shadows the operations of one visit until the first result beyond ``tolerance`` (a relative 2-norm error)."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # and __init__ as well
        self.found: DriftFact | None = None
        self._tolerance = tolerance
        self._shadows: dict[int, _Shadow] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the detour by which a mode is hidden from the compiler; lanes run eagerly."""
        return False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Shadow what runs here."""
        try:
            with self:
                yield
        finally:
            self._shadows.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation on the actual values and on their shadows."""
        kwargs = kwargs or {}
        if self.found is not None or not _worth(args, kwargs):
            return func(*args, **kwargs)
        call = map_tensors(self._of, (args, kwargs))
        actual = map_tensors(_wide, (args, kwargs)) if func._schema.is_mutable else (args, kwargs)
        result = func(*args, **kwargs)
        exact = _evaluated(func, call)
        outputs = [t for _, t in named_tensors(result) if t.dtype.is_floating_point]
        if exact is None or len(exact) != len(outputs):
            return result
        for position, (output, shadow) in enumerate(zip(outputs, exact, strict=True)):
            if output.shape == shadow.shape:
                self._compare(func, args, kwargs, actual, position, output, shadow)
        return result

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's shadow, or the tensor itself widened when it has none yet."""
        entry = self._entry(tensor)
        return entry.values.clone() if entry is not None else _wide(tensor)

    def _entry(self, tensor: torch.Tensor) -> _Shadow | None:
        entry = self._shadows.get(id(tensor))
        return entry if entry is not None and entry.tensor() is tensor else None

    def _compare(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        actual: Any,
        position: int,
        output: torch.Tensor,
        shadow: torch.Tensor,
    ) -> None:
        name = str(func._schema.name).replace("::", ".")
        wide = output.detach().to(torch.float64)
        error = float(torch.linalg.vector_norm(wide - shadow))
        size = float(torch.linalg.vector_norm(shadow))
        alone = _evaluated(func, map_tensors(_wide, actual)) if error else None
        here = None
        if alone is not None and alone[position].shape == output.shape:
            here = float(torch.linalg.vector_norm(wide - alone[position]))
        operands = [self._entry(t) for _, t in named_tensors((args, kwargs))]
        worst = max((e for e in operands if e is not None and e.error > 0), key=lambda e: e.error, default=None)
        if error <= self._tolerance * size or size == 0:
            key = id(output)
            forget = weakref.ref(output, lambda _: self._shadows.pop(key, None))
            # An operation that rounds nothing itself only hands on what an earlier one did.
            origin = worst.op if worst is not None and here == 0 else name
            self._shadows[key] = _Shadow(forget, shadow, origin, error)
            return
        own = here is None or worst is None or here > _OWN_SHARE * error
        self.found = DriftFact(
            op=name if own or worst is None else worst.op,
            seen_in=name,
            rel_error=error / size,
            local_error=here / size if here is not None else None,
        )


def _worth(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [t for _, t in named_tensors((args, kwargs))]
    floating = any(t.dtype.is_floating_point for t in tensors) or not tensors
    return floating and all(t.numel() <= _MAX_ELEMENTS and not t.is_nested for t in tensors)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64) if tensor.dtype.is_floating_point else tensor.detach()


def _evaluated(func: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor] | None:
    """Return the floating results of an operation on FP64 operands; None where there is no such kernel."""

    def widen(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    try:
        with torch.no_grad():
            results = func(*(widen(a) for a in call[0]), **{key: widen(value) for key, value in call[1].items()})
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return [t for _, t in named_tensors(results) if t.dtype.is_floating_point]
