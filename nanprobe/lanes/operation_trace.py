"""Every operation of a lane, forward, loss and backward, beside its shadow in FP64.

The lane runs its real code in its own precision. Each operation is evaluated once more on the FP64 shadows of its
operands, which gives the *accumulated* error of its result, and once on its actual operands, which gives the error that
is its own, the *local* one. Shadows live per storage (see :mod:`nanprobe.lanes.mirrors`), so views cost nothing, and
in-place operations and ``out=`` write to the mirror as they write to the storage.

Choices follow the lane: integers, booleans and random draws are taken as they came out, so that a shadow takes the same
branch, the same expert and the same dropout mask. Where an operation has no FP64 kernel its shadow is evaluated in
FP32, and the trace says so; where it cannot be evaluated again its result counts as exact, and the trace says that too.

The local error of a result in half precision is taken in FP32: products of halves are exact there, and what the sum
rounds is four orders of magnitude below what the result rounds. Other results are compared with FP64.

A result that is non-finite and comes of good operands is looked at once more (:mod:`nanprobe.lanes.operations`); that
needs no shadows, and is done outside the traced stretch as well. A large model is shadowed only between the beginning
of one visit and the end of another; what enters the stretch counts as exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanprobe.lanes.backward import NodeWatch, forward_operation
from nanprobe.lanes.callers import public_function
from nanprobe.lanes.calls import (
    WITH_DRAWS,
    Call,
    absorbed_share,
    as_held,
    converted,
    copied,
    first_of,
    gives_back,
    is_number,
    memory_of,
    norms_of,
    operands_before,
    operands_of,
    rounded_constants,
    widens,
)
from nanprobe.lanes.exact import evaluated, floating, off_the_record
from nanprobe.lanes.lineage import Lineage
from nanprobe.lanes.literals import Literals
from nanprobe.lanes.mirrors import Mirrors, weakly
from nanprobe.lanes.operations import counted_in, look_at
from nanprobe.lanes.plans import Plan, plan_of
from nanprobe.lanes.products import is_product
from nanprobe.lanes.trace import IN_LOSS, OperationFact, OperationRecord, Operations
from nanprobe.numerics.stats import difference, is_finite, measure_against
from nanprobe.out_of_memory import is_out_of_memory

__all__ = ["NOTHING_HELD", "OperationTrace", "Stretch"]

Stretch = tuple[tuple[str, int], tuple[str, int]]
"""The (module, visit) whose beginning starts the shadows and the one whose end ends them."""

NOTHING_HELD: Mapping[int, bool] = MappingProxyType({})
"""No operation whose shadow is made of the lane's own operands."""

_HALF = (torch.float16, torch.bfloat16)
_MOST_FACTS = 1_000


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Traces one lane that runs alone.

    ``phase`` tells what the lane is at ("forward", "loss" or "backward"), ``nodes`` which visit made an autograd node.
    ``parameters`` names parameters by the identity of their tensors. Without ``shadows`` only non-finite values are
    looked at; with a ``stretch`` there are shadows inside it only. ``local_error`` measures local errors as well.
    Operations whose records have the numbers ``held`` get the lane's own operands in the shadow as well, and, where
    that is true, constants as the format holds them.
    ``kernels`` are the last to make something non-finite in each autograd node, by the node's sequence number.
    """

    def __init__(
        self,
        phase: Callable[[], str],
        nodes: NodeWatch,
        parameters: Mapping[int, str],
        *,
        shadows: bool = True,
        stretch: Stretch | None = None,
        local_error: bool = True,
        batch_size: int | None = None,
        batch_dim: int = 0,
        held: Mapping[int, bool] = NOTHING_HELD,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # and __init__ as well
        self.facts: list[OperationFact] = []
        self.records: list[OperationRecord] = []
        self.kernels: dict[int, str] = {}
        self._phase = phase
        self._nodes = nodes
        self._parameters = parameters
        self._stretch = stretch
        self._local_error = local_error
        self._lineage = Lineage(batch_size, batch_dim)
        self._held = held
        self._literals = Literals()
        self._wanted = shadows
        self._shadowing = shadows and stretch is None
        self._mirrors = Mirrors()
        self._plans: dict[int, Plan] = {}
        self._visits: list[tuple[str, int, str]] = []
        self._narrow: set[int] = set()
        self._notes: Counter[str] = Counter()
        self._tainted: dict[int, tuple[Any, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the detour by which a mode is hidden from the compiler; lanes run eagerly."""
        return False

    def result(self) -> Operations:
        """Return what was seen, and let the shadows go."""
        self._mirrors.clear()
        notes = tuple(f"{text}: {count:,}" for text, count in sorted(self._notes.items()))
        return Operations(
            facts=tuple(self.facts), records=tuple(self.records), whole=self._stretch is None, notes=notes
        )

    def given(self, tensor: torch.Tensor, exact: torch.Tensor, kind: str, name: str) -> None:
        """Say that ``tensor`` was cast from ``exact`` (same shape) before anything ran; ``kind`` is the phase."""
        if not self._wanted or tensor.dtype is exact.dtype or tensor.shape != exact.shape:
            return
        with off_the_record():
            order = len(self.records)
            diff = difference(tensor, exact) if self._mirrors.borrow(tensor, exact, order) else None
            if diff is None:
                return
            self.records.append(
                OperationRecord(
                    order=order,
                    phase=kind,
                    module=name.rpartition(".")[0] if kind != "input" else None,
                    visit=None,
                    class_=None,
                    op="",
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    elements=tensor.numel(),
                    parameter=name,
                    size=math.sqrt(diff.reference_squares),
                    error=math.sqrt(diff.error_squares),
                    local=math.sqrt(diff.error_squares),
                )
            )

    def of_batch(self, tensor: torch.Tensor) -> None:
        """Say that ``tensor`` is the lane's copy of a tensor of the batch."""
        self._lineage.given(tensor)

    # -- where we are ----------------------------------------------------------------------------------------------

    @contextmanager
    def visiting(self, path: str, visit: int, class_: str) -> Iterator[None]:
        """Say which module's code is running; the innermost visit is the one that an operation belongs to."""
        if self._wanted and self._stretch is not None and self._stretch[0] == (path, visit):
            self._shadowing = True
        self._visits.append((path, visit, class_))
        try:
            yield
        finally:
            self._visits.pop()
            if self._stretch is not None and self._stretch[1] == (path, visit):
                self._shadowing = False
                self._mirrors.clear()

    def _place(self) -> dict[str, Any]:
        """Return the fields that say where an operation runs; one in backward belongs where its node was made."""
        phase = self._phase()
        if phase == "backward" and not self._visits:
            node: Any = torch._C._current_autograd_node()
            sequence = int(node._sequence_nr()) if node is not None else None
            leaf = node is None or node.name().endswith("AccumulateGrad")
            place = self._nodes.visit_of(sequence) if not leaf and sequence is not None else None
            return {
                "phase": phase,
                "module": place[0] if place is not None else None,
                "visit": place[1] if place is not None else None,
                "class_": self._nodes.classes.get(place[0]) if place is not None else None,
                "inside": (place,) if place is not None else (),
                "sequence": sequence,
                "forward_op": forward_operation(node.name()) if node is not None else None,
            }
        inside = tuple((path, visit) for path, visit, _ in self._visits)
        path, visit, class_ = self._visits[-1] if self._visits else (None, None, None)
        return {
            "phase": "forward" if phase == "backward" else phase,
            "module": path,
            "visit": visit,
            "class_": class_,
            "inside": inside if phase != "loss" else (IN_LOSS, *inside),
            "sequence": None,
            "forward_op": None,
        }

    # -- one operation ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation as it is, and look at what it did."""
        kwargs = kwargs or {}
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = plan_of(func)
        if plan.passes:
            if func is torch.ops.aten.detach.default and self._shadowing:
                self._let_go(args[0])
            return func(*args, **kwargs)
        if types:  # a tensor that wraps others; what it does inside is its own
            self._notes[f"{plan.name} (on {types[0].__name__}, not looked into)"] += 1
            return func(*args, **kwargs)
        call = Call(args, kwargs, plan.repeats(args, kwargs))
        if plan.writes:
            with off_the_record():
                self._before_writing(plan, call)
        result = func(*args, **kwargs)
        if not plan.writes:
            call.outputs, call.result = floating(result), result
        if self._phase() != "backward":
            with off_the_record():
                self._lineage.follow(func, plan, args, kwargs, result)
        if call.outputs:
            with off_the_record():
                self._literals.note(plan, call.before, call.outputs)
                self._look_if_possible(func, plan, call)
        return result

    def _let_go(self, tensor: torch.Tensor) -> None:
        """Drop the shadow of a gradient that has become a parameter's: nothing reads it again in this backward."""
        node: Any = torch._C._current_autograd_node() if self._phase() == "backward" else None
        if node is not None and node.name().endswith("AccumulateGrad"):
            self._mirrors.forget(tensor)

    def _look_if_possible(self, func: Any, plan: Plan, call: Call) -> None:
        """Look at an operation; where its tensors cannot be looked into, take its result as exact and say so."""
        try:
            self._look(func, plan, call)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            self._notes[f"{plan.name} (could not be looked into: {type(error).__name__})"] += 1
            for output in call.outputs:
                self._mirrors.forget(output)

    def _before_writing(self, plan: Plan, call: Call) -> None:
        """Keep what an operation will write over, and get the mirrors ready that it will write to."""
        args, kwargs = call.args, call.kwargs
        call.before = (
            tuple(copied(a) if n in plan.written else a for n, a in enumerate(args)),
            {key: copied(value) if key in plan.outs else value for key, value in kwargs.items()},
        )
        call.outputs = floating(
            [*(args[n] for n in plan.written if n < len(args)), *(kwargs.get(key) for key in plan.outs)]
        )
        if not self._shadowing:
            return
        call.makers = self._makers(operands_of(plan, (args, kwargs)))
        if call.again:
            held = len(self.records) in self._held
            for position, output in enumerate(call.outputs):
                target = self._mirrors.writable(output, len(self.records) + position)
                call.targets[id(output)] = output.to(torch.float64, copy=True) if target is None else target
                if held and target is not None:
                    target.copy_(output)

    def _makers(self, operands: list[torch.Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(m for m in map(self._mirrors.maker, operands) if m is not None))

    def _look(self, func: Any, plan: Plan, call: Call) -> None:
        if not plan.writes and gives_back(call):
            return  # a view, whatever its schema says
        outputs = call.outputs
        call.operands = operands_of(plan, call.before)
        if not self._shadowing:
            bad = next((o for o in outputs if not is_finite(o)), None)
            self._follow(func, plan, call, bad, self._place() if bad is not None else None)
            return
        if not plan.writes:
            call.makers = self._makers(call.operands)
        if plan.is_cast and self._widened_exactly(plan, call):
            return
        shadows, note = self._shadows(func, plan, call)
        local = self._locally(func, plan, call) if shadows is not None else None
        place = self._place()
        first_bad = bad_record = None
        for number, output in enumerate(outputs):
            shadow = shadows[number] if shadows is not None else None
            alone = local[number] if local is not None else None
            record = self._record(plan, call, place, output, shadow, alone, note)
            self.records.append(record)
            if record.bad and first_bad is None:
                first_bad, bad_record = output, record.order
            if not plan.writes and shadow is not None and (record.error != 0 or record.bad):
                self._put(call, output, shadow, record.order)
        self._follow(func, plan, call, first_bad, place, bad_record)

    # -- shadows ---------------------------------------------------------------------------------------------------

    def _widened_exactly(self, plan: Plan, call: Call) -> bool:
        """Record a cast to a wider format, which changes no value, without looking at any; False when it is no such."""
        source, output = call.args[0], call.outputs[0]
        if len(call.makers) != 1 or not widens(source, output):
            return False
        made = self.records[call.makers[0]]
        if made.elements != source.numel() or made.bad or made.note is not None:
            return False
        order = len(self.records)
        if not self._mirrors.share(output, source, order):
            return False
        self.records.append(
            dataclasses.replace(
                self._blank(plan, call, self._place(), output),
                size=made.size,
                error=made.error,
                local=0.0 if self._local_error else None,
                flushed=made.flushed,
                wrong=made.wrong,
            )
        )
        return True

    def _put(self, call: Call, output: torch.Tensor, shadow: torch.Tensor, order: int) -> None:
        """Keep a shadow; one that is an operand itself, which was cast, is borrowed."""
        if call.args and shadow is call.args[0] and self._mirrors.borrow(output, shadow, order):
            return
        self._mirrors.put(output, converted(shadow.detach(), torch.float64), order)

    def _shadows(self, func: Any, plan: Plan, call: Call) -> tuple[list[torch.Tensor] | None, str | None]:
        """Return what each output would be exactly, and a note; None where the actual values count as exact.

        Outputs that were written to have their mirrors written to; the shadows are then those mirrors.
        """
        draw = WITH_DRAWS.get(func)
        if draw is not None:
            return draw(self._widened(call.args[0]), call), None
        exact = self._wide(func, plan, call) if call.again else None
        if exact is not None and [e.shape for e in exact] == [o.shape for o in call.outputs]:
            if id(func) not in self._narrow:
                return exact, None
            self._notes[f"{plan.name} (no FP64 kernel, shadow evaluated in FP32)"] += 1
            return exact, "evaluated in FP32: no FP64 kernel"
        for output in call.outputs:
            self._mirrors.forget(output)
        if not call.again and func.namespace == "aten":
            return None, "drawn at random"
        why = "could not be evaluated again" if call.again else "not PyTorch's own, not looked into"
        self._notes[f"{plan.name} ({why})"] += 1
        return None, why

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._mirrors.of(tensor)
        return converted(tensor.detach() if mine is None else mine, torch.float64)

    def _wide(self, func: Any, plan: Plan, call: Call) -> list[torch.Tensor] | None:
        """Evaluate an operation on the shadows of its operands, in FP64 or, without such a kernel, in FP32.

        Products with half results are summed in FP32: its rounding, 2^-24, is far below what is looked for, 2^-11 and
        more, and FP64 products are half of what a trace costs.
        """
        if plan.is_cast and not call.makers and widens(call.outputs[0], call.args[0]):
            return [call.args[0]]
        mirrors: set[int] = set()

        def shadow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            target = call.targets.get(id(tensor))
            if target is not None:
                return target
            if not is_number(tensor):
                return tensor.detach()
            mine = self._mirrors.of(tensor) if held is None else None
            exact = converted(tensor.detach() if mine is None else mine, dtype)
            mirrors.add(memory_of(exact))
            return exact

        args, kwargs = call.args, call.kwargs
        held = self._held.get(len(self.records))
        if held:
            args, kwargs = as_held((args, kwargs), call.outputs[0].dtype)
        results = None
        if not call.targets and held is None and call.outputs[0].dtype in _HALF and is_product(func):
            results = evaluated(func, args, kwargs, lambda t: shadow(t, torch.float32), torch.float32)
            if results is not None and not all(is_finite(r) for r in results):
                results = None  # beyond FP32 or bad in itself: FP64 tells
        if results is None and id(func) not in self._narrow:
            results = evaluated(func, args, kwargs, lambda t: shadow(t, torch.float64), torch.float64)
        if results is None and not call.targets:
            results = evaluated(func, args, kwargs, lambda t: shadow(t, torch.float32), torch.float32)
            if results is not None:
                self._narrow.add(id(func))
        if results is None:
            return None
        if call.targets:
            return list(call.targets.values())
        return [r.clone() if memory_of(r) in mirrors else converted(r, torch.float64) for r in results]

    def _locally(self, func: Any, plan: Plan, call: Call) -> list[torch.Tensor] | None:
        """Evaluate an operation on its actual operands; None where these are exact, so that the error is its own."""
        if not self._local_error or not call.again or all(self.records[maker].error == 0 for maker in call.makers):
            return None
        wide = torch.float32 if call.outputs[0].dtype in _HALF else torch.float64
        copies: dict[int, torch.Tensor] = {}

        def actual(tensor: torch.Tensor) -> torch.Tensor:
            if not is_number(tensor):
                return tensor.detach()
            if id(tensor) not in copies:
                copies[id(tensor)] = converted(tensor.detach(), wide)
            return copies[id(tensor)]

        results = evaluated(func, call.before[0], call.before[1], actual, wide)
        if results is None or [r.shape for r in results] != [o.shape for o in call.outputs]:
            return None
        return results

    # -- what is written down --------------------------------------------------------------------------------------

    def _record(
        self,
        plan: Plan,
        call: Call,
        place: dict[str, Any],
        output: torch.Tensor,
        shadow: torch.Tensor | None,
        alone: torch.Tensor | None,
        note: str | None,
    ) -> OperationRecord:
        size = error = local = absorbed = None
        flushed = underflowed = wrong = bad = 0
        if shadow is not None:
            stats, diff = measure_against(output, shadow)
            bad = stats.bad
            if diff is not None:
                size, error = norms_of(output, shadow, diff, bad)
                flushed, wrong = diff.flushed, diff.wrong
        elif not is_finite(output):
            bad = output.numel()
        if error is not None and self._local_error:
            local, underflowed = error, flushed
            if alone is not None:
                diff = measure_against(output, alone)[1] if flushed else difference(output, alone)
                underflowed = diff.flushed if diff is not None else 0
                local = norms_of(output, alone, diff, bad)[1] if diff is not None else None
        if plan.is_sum and local:
            absorbed = absorbed_share(call.operands, local)
        return dataclasses.replace(
            self._blank(plan, call, place, output),
            size=size,
            error=error,
            local=local,
            flushed=flushed,
            underflowed=underflowed,
            wrong=wrong,
            bad=bad,
            absorbed=absorbed,
            of_integers=plan.is_cast and not call.args[0].dtype.is_floating_point,
            rounded=rounded_constants(call, output.dtype) if plan.has_bounds else (),
            note=note,
        )

    def _blank(self, plan: Plan, call: Call, place: dict[str, Any], output: torch.Tensor) -> OperationRecord:
        """Return a record that says where an operation ran and on what, without any figures."""
        forward = place["forward_op"]
        backward = place["phase"] == "backward"
        return OperationRecord(
            order=len(self.records),
            phase=place["phase"],
            module=place["module"],
            visit=place["visit"],
            class_=place["class_"],
            op=(forward or plan.name) if backward else plan.name,
            backward_op=plan.name if backward else None,
            dtype=str(output.dtype).removeprefix("torch."),
            elements=output.numel(),
            inside=place["inside"],
            operands=call.makers,
        )

    def _follow(
        self,
        func: Any,
        plan: Plan,
        call: Call,
        bad: torch.Tensor | None,
        place: dict[str, Any] | None,
        record: int | None = None,
    ) -> None:
        """Note an origin of non-finite values, what comes of it, and where it turns finite again."""
        origin = self._origin_of(call) if self._tainted else None
        if bad is None:
            if origin is not None:
                where = place if place is not None else self._place()
                if self.facts[origin].absorbed_by is None:
                    absorbed_by = (where["module"], plan.name)
                    self.facts[origin] = dataclasses.replace(self.facts[origin], absorbed_by=absorbed_by)
            return
        assert place is not None
        if place["phase"] == "backward" and place["sequence"] is not None:
            self.kernels[place["sequence"]] = plan.name
        if len(self.facts) < _MOST_FACTS:
            placed = origin is not None and self.facts[origin].on_purpose
            fact = look_at(func, call.before[0], call.before[1], call.operands, bad, placed=placed)
            if fact is not None:
                cause = origin if origin is not None and not placed else None
                origin = len(self.facts)
                fact = dataclasses.replace(fact, record=record)
                self.facts.append(dataclasses.replace(self._completed(fact, plan, call, bad, place), cause=cause))
        if origin is not None:
            for output in call.outputs:
                if output.layout is torch.strided and not is_finite(output):
                    self._tainted[memory_of(output)] = (weakly(output), origin)

    def _origin_of(self, call: Call) -> int | None:
        """Return the origin of the non-finite values among the operands, None when there are none.

        One that was no purpose goes before one that was.
        """
        placed = None
        for tensor, before in operands_before(call):
            entry = self._tainted.get(memory_of(tensor))
            if entry is not None and not is_finite(before):
                if not self.facts[entry[1]].on_purpose:
                    return entry[1]
                placed = entry[1] if placed is None else placed
        return placed

    def _completed(
        self, fact: OperationFact, plan: Plan, call: Call, bad: torch.Tensor, place: dict[str, Any]
    ) -> OperationFact:
        parameter = self._parameters.get(id(call.args[0])) if plan.is_cast else None
        counted = counted_in(bad)
        strided = bad.layout is torch.strided and not bad.is_complex()
        of_samples = strided and place["phase"] != "backward"
        return dataclasses.replace(
            fact,
            parameter=parameter,
            call=public_function(plan.name) if place["phase"] != "backward" else None,
            phase=place["phase"],
            module=place["module"],
            visit=place["visit"],
            class_=place["class_"],
            inside=place["inside"],
            sequence=place["sequence"],
            index=first_of(counted) if strided else None,
            samples=self._lineage.samples(bad, counted) if of_samples else None,
            literal=self._literals.equal(fact.exact_absmax, call.operands) if plan.moves else None,
            made_zero=self._made_zero(call) if fact.operand_zero and self._shadowing else None,
        )

    def _made_zero(self, call: Call) -> str | None:
        """Return the operation that flushed elements of an operand to zero, None when none of them was flushed."""
        todo = [m for m in call.makers if self.records[m].flushed]
        while todo:
            record = self.records[todo[0]]
            # Few zeros before do not explain many after; then it is this operation that made them.
            todo = [m for m in record.operands if 2 * self.records[m].flushed >= record.flushed]
            if not todo:
                return record.op or record.parameter
        return None
