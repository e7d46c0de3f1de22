"""Which operation first reads memory that nothing wrote, found by filling what `empty` and its like hand out.

What unwritten memory holds is chance. Filled with NaN, it shows in the loss or the output only if some of it was read
and counted; memory that is written before it is read, or left out by a choice, does not.
"""

from __future__ import annotations

from typing import Any

import torch

from nanprobe.lanes.exact import floating, off_the_record
from nanprobe.lanes.mirrors import weakly
from nanprobe.lanes.operation_trace import OperationTrace
from nanprobe.lanes.operations import PLACING
from nanprobe.lanes.plans import ALLOCATING, Plan, plan_of
from nanprobe.lanes.trace import UnwrittenFact

__all__ = ["MemoryTrace"]

_HANDS_ON = frozenset(
    (*PLACING, "_to_copy", "index", "index_select", "gather", "slice", "index_copy", "repeat", "flip")
)
"""Operations that only move what they read."""

_UNREAD = -1


class MemoryTrace(OperationTrace):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Runs a lane with new memory filled with ``value``; after a NaN, tells who read it first."""

    def __init__(self, *given: Any, value: float, **options: Any) -> None:
        super().__init__(*given, shadows=False, **options)
        self._value = value
        self._source: dict[int, tuple[Any, int]] = {}
        self._readers: list[UnwrittenFact] = []

    def reader_of(self, tensor: torch.Tensor) -> UnwrittenFact | None:
        """Return the operation that first read the unwritten memory which a NaN in ``tensor`` comes from."""
        number = self._source.get(_key(tensor), (None, _UNREAD))[1]
        return self._readers[number] if number != _UNREAD else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; fill what it allocates, or follow what it reads."""
        kwargs = kwargs or {}
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = plan_of(func)
        base = plan.name.rpartition(".")[2]
        if base in ALLOCATING:
            made = func(*args, **kwargs)
            with off_the_record():
                for tensor in floating(made):
                    if tensor.layout is torch.strided:
                        tensor.fill_(self._value)
                        self._source[_key(tensor)] = (weakly(tensor), _UNREAD)
            return made
        if plan.passes or not self._source:
            return func(*args, **kwargs)
        with off_the_record():
            source = self._read(plan, args, kwargs)
        result = func(*args, **kwargs)
        if source is not None:
            with off_the_record():
                self._hand_on(plan, source, base.rstrip("_") in _HANDS_ON, _outputs(plan, args, kwargs, result))
        return result

    def _read(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return where a NaN among the operands comes from, None when none comes from unwritten memory."""
        overwritten = [] if plan.reads else _outputs(plan, args, kwargs, None)
        found = [
            entry[1]
            for tensor in floating((args, kwargs))
            if not any(tensor is other for other in overwritten)
            and tensor.layout is torch.strided
            and (entry := self._source.get(_key(tensor))) is not None
            and bool(torch.isnan(tensor).any())
        ]
        return max(found) if found else None

    def _hand_on(self, plan: Plan, source: int, moves: bool, outputs: list[torch.Tensor]) -> None:
        bad = [t for t in outputs if t.layout is torch.strided and bool(torch.isnan(t).any())]
        if not bad:
            return
        if source == _UNREAD and not moves:
            source = len(self._readers)
            place = self._place()
            self._readers.append(
                UnwrittenFact(
                    phase=place["phase"],
                    module=place["module"],
                    visit=place["visit"],
                    class_=place["class_"],
                    op=plan.name,
                    count=int(torch.isnan(bad[0]).sum()),
                    elements=bad[0].numel(),
                )
            )
        for tensor in bad:
            self._source[_key(tensor)] = (weakly(tensor), source)


def _outputs(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[torch.Tensor]:
    if not plan.writes:
        return floating(result)
    return floating([*(args[n] for n in plan.written if n < len(args)), *(kwargs.get(key) for key in plan.outs)])


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
