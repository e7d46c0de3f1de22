"""What a lane does at single operations: round draws and products, compare choices, follow kept modules, count."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanprobe.lanes.draws import DRAWS, draw_rounded
from nanprobe.lanes.exact import operation_name
from nanprobe.lanes.lane import Lane
from nanprobe.lanes.operands import OperandFormats
from nanprobe.lanes.plans import ALLOCATING, OVERWRITES
from nanprobe.lanes.products import Products, Way

__all__ = ["Observer"]

aten = torch.ops.aten

_CHOICES: dict[Any, tuple[str, int | None]] = {
    aten.topk.default: ("aten.topk", 1),
    aten.argmax.default: ("aten.argmax", None),
    aten.argmin.default: ("aten.argmin", None),
    aten.multinomial.default: ("aten.multinomial", None),
    aten.searchsorted.Tensor: ("aten.searchsorted", None),
    aten.bucketize.Tensor: ("aten.bucketize", None),
}
"""Operations whose result is a choice: the name to report, and which of several results holds the indices."""


_ALLOCATING = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ALLOCATING
    for overload in getattr(aten, name).overloads()
    if overload != "out"
)

_Plan = tuple[bool, tuple[str, int | None] | None, Way | None, bool]
"""Of one operation: whether it draws, what it chooses, how its product is run, and whether there is nothing to do."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """The dispatch mode of one lane; active in its thread only, in forward and loss.

    In backward it is active in half-precision lanes on a CPU, whose products it runs, and where recomputed forward
    code may need it: after random draws were rounded, or with modules kept in FP32.
    """

    def __init__(self, lane: Lane) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # and __init__ as well
        self._lane = lane
        self._low = lane.settings.dtype in (torch.float16, torch.bfloat16)
        self.products = Products(lane.settings.dtype or torch.float32, lane.settings.device)
        self.formats = OperandFormats(lane, lane.settings.arithmetic)
        self._plans: dict[int, _Plan] = {}
        self._follow = lane.placement.active and lane.settings.mode == "cast"
        self.unwritten = False
        self._fresh: torch.Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the detour by which a mode is hidden from the compiler; lanes run eagerly."""
        return False

    @property
    def needed_in_backward(self) -> bool:
        """Whether code recomputed in backward would run differently without this mode."""
        return self._follow or self._lane.drawn > 0 or self.formats.active or (self._low and self.products.active)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, as it is unless it draws at random in half precision."""
        kwargs = kwargs or {}
        lane = self._lane
        if lane.frame is None and lane.observing and lane.phase in ("forward", "loss"):
            lane.ops_outside += 1
        if self._fresh is not None:
            self._settle(func, args, kwargs)
        plan = self._plans.get(id(func))
        if plan is None:
            # An operation is a module-level object that is never let go, and its own hash is slow to ask for.
            plan = self._plans[id(func)] = self._plan(func)
        draws, choice, way, plain = plan
        if plain:
            return func(*args, **kwargs)
        if func in _ALLOCATING:
            return self._allocated(func(*args, **kwargs))
        result = (
            self._run(func, args, kwargs, draws, way) if self._low or self.formats.active else func(*args, **kwargs)
        )
        if choice is not None:
            name, position = choice
            lane.choices.chosen(name, result if position is None else result[position])
        elif func is aten._to_copy.default and _becomes_integer(args[0], kwargs.get("dtype")):
            lane.choices.chosen("aten._to_copy", result)
        if self._follow:
            lane.placement.follow((args, kwargs), result)
        return result

    def _allocated(self, made: torch.Tensor) -> torch.Tensor:
        """Remember new memory until the next operation, which usually writes it."""
        if not self.unwritten and made.is_floating_point() and made.numel() and self._lane.phase != "backward":
            self._fresh = made
        return made

    def _settle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See whether the operation after an allocation writes all of it."""
        fresh, self._fresh = self._fresh, None
        overwrites = operation_name(func).rpartition(".")[2] in OVERWRITES
        self.unwritten = not bool((overwrites and args and args[0] is fresh) or kwargs.get("out") is fresh)

    def _plan(self, func: Any) -> _Plan:
        """Look up what is to be done at an operation; most are run as they are, and there are many of them."""
        draws, choice, way = func in DRAWS, _CHOICES.get(func), self.products.way_of(func)
        looked_at = self._follow or self.formats.active or func is aten._to_copy.default
        special = (
            (func in _ALLOCATING and self._lane.is_reference)
            or draws
            or choice is not None
            or way is not None
            or self.products.lacks(func)
        )
        return draws, choice, way, not (looked_at or special)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], draws: bool, way: Way | None) -> Any:
        if draws:
            drew, result = draw_rounded(func, args, kwargs)
            if drew:
                self._lane.drawn += not self._lane.in_twin
                return result
        if self.formats.active:
            result = self.formats.run(func, args, kwargs)
            if result is NotImplemented:
                result = self._plain(func, args, kwargs, way)
            if func is aten._to_copy.default:
                self.formats.cast(args[0], result)
            self.formats.after(func, result)
            return result
        return self._plain(func, args, kwargs, way)

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], way: Way | None) -> Any:
        if self._low and self.products.active:
            return self.products.run(func, way, args, kwargs, counting=self._lane.observing)
        return func(*args, **kwargs)

    def emulated(self) -> dict[str, dict[str, int]]:
        """Return, by what was done, how often each operation was run in another way than PyTorch would have."""
        both = (self.products.emulated, self.formats.emulated)
        return {why: dict(counts) for counters in both for why, counts in counters.items()}


def _becomes_integer(source: Any, dtype: torch.dtype | None) -> bool:
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return False
    return isinstance(source, torch.Tensor) and source.dtype.is_floating_point
