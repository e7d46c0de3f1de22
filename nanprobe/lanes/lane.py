"""One precision's run of the model's own code, observed at every module boundary.

Module visits are seen through the slot that ``nn.Module.compile`` uses to replace a module's call. Unlike a forward
hook it sees keyword inputs and exceptions, and leaves the conditions alone under which PyTorch takes a fused path. What
is seen goes to three recorders: forward visits, gradients, and discrete choices.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from nanprobe.lanes.backward import NodeWatch
from nanprobe.lanes.choices import ChoiceRecorder
from nanprobe.lanes.conductor import Conductor, Key, Posted, Request
from nanprobe.lanes.forward import ForwardRecorder
from nanprobe.lanes.frames import Frame, LaneSettings
from nanprobe.lanes.gradients import GradientRecorder
from nanprobe.lanes.lane_model import LaneModel
from nanprobe.lanes.measures import MeasureBuilder
from nanprobe.lanes.operation_trace import OperationTrace
from nanprobe.lanes.placement import Placement
from nanprobe.lanes.trace import Place, Raised
from nanprobe.numerics.tree import named_tensors

__all__ = ["Lane"]


class Lane:
    """Everything one lane sees and keeps while it runs. Its methods are called inside the lane's own thread.

    ``thread`` is the identifier of the lane's thread, ``phase`` "forward", "loss", "backward", "gradients" or "end". A
    lane without a conductor is run alone and unobserved: modules stay in the precision they should, autograd nodes are
    tied to visits, and nothing is recorded.
    """

    def __init__(
        self, settings: LaneSettings, copied: LaneModel, conductor: Conductor | None, *, is_reference: bool
    ) -> None:
        self.settings = settings
        self.copied = copied
        self.is_reference = is_reference
        self.thread = threading.get_ident()
        self.phase = "forward"
        self.measures: dict[Place, MeasureBuilder] = {}
        self.order: dict[Place, int] = {}
        self.ops_outside = 0
        self.drawn = 0
        self.notes: dict[str, None] = {}
        self.raised: Raised | None = None
        self.failing_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.measuring_seconds = 0.0
        self.placement = Placement(copied, settings.mode, settings.dtype, settings.device)
        self.watch = NodeWatch(settings.batch_size, settings.batch_dim)
        self.watch.classes = {path: type(module).__name__ for path, module in copied.modules.items()}
        self.choices = ChoiceRecorder(self)
        self.forward = ForwardRecorder(self)
        self.gradients = GradientRecorder(self)
        self._conductor = conductor
        self._stack: Frame | None = None
        self._visits: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._clock = 0
        self._last_outside: str | None = None
        self._in_twin = False
        self.operations: OperationTrace | None = None
        for path, module in copied.modules.items():
            module.__dict__["_compiled_call_impl"] = partial(self._visit, path, module)

    def detach(self) -> None:
        """Take the lane's tap off its modules, so that the model copy can be let go."""
        for module in self.copied.modules.values():
            module.__dict__.pop("_compiled_call_impl", None)

    @property
    def frame(self) -> Frame | None:
        """The innermost module visit that is running now, None outside the model."""
        return self._stack

    @property
    def observing(self) -> bool:
        """Whether what happens now is to be recorded: not in a lane run alone, nor in the extra run of a leaf."""
        return self._conductor is not None and not self._in_twin

    @property
    def in_twin(self) -> bool:
        """Whether the extra run of a leaf is under way."""
        return self._in_twin

    @property
    def clock(self) -> int:
        """The number of module entries, exits and gradients so far."""
        return self._clock

    def tick(self) -> int:
        """Advance the clock and return it."""
        self._clock += 1
        return self._clock

    # -- visits ----------------------------------------------------------------------------------------------------

    def _visit(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._in_twin:
            return _call(module, args, kwargs)
        if threading.get_ident() != self.thread:
            return self._elsewhere(path, module, args, kwargs)
        args, kwargs = self.placement.enter(path, args, kwargs)
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if self.phase == "backward" or not self.observing or transformed:
            if transformed:
                self.forward.uninspected[f"{path} (inside a torch.func transform)"] = None
            return self._unobserved(path, module, args, kwargs)
        frame = self._enter(path, module, args, kwargs)
        try:
            with self.placement.around(path):
                output = _call(module, args, kwargs)
        except Exception as error:
            self._note_failure(frame, error)
            self.forward.broken_off(frame)
            raise
        finally:
            self._stack = frame.parent
        self.placement.leave(path, output)
        left = self.tick()
        if frame.parent is not None:
            frame.parent.last_child = frame.path
        else:
            self._last_outside = frame.path
        tensors = self.forward.leave(frame, output, left)
        self.gradients.watch(frame.path, frame.visit, tensors)
        return output

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        parent = self._stack
        frame = Frame(
            path=path,
            visit=self._visits[path],
            module=module,
            depth=parent.depth + 1 if parent is not None else 0,
            parent=parent,
            entered=self.tick(),
            sequence=next_sequence(),
            previous=parent.last_child if parent is not None else self._last_outside,
        )
        self._visits[path] += 1
        if parent is not None:
            parent.children += 1
        self.forward.enter(frame, args, kwargs)
        self._stack = frame
        return frame

    def _unobserved(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a visit that makes no row: in a lane run alone, or recomputed inside backward (activation checkpointing).

        Recomputed segments come last first, so the nth recomputation of a module belongs to its nth visit from the end.
        """
        again = self.phase == "backward"
        if again:
            visit = max(self._visits[path] - 1 - self._again[path], 0)
            self._again[path] += 1
        else:
            visit = self._visits[path]
            self._visits[path] += 1
        sequence = next_sequence()
        with self.placement.around(path), self._visiting(path, visit, module):
            output = _call(module, args, kwargs)
        self.placement.leave(path, output)
        self.watch.visited(sequence, next_sequence(), path, visit)
        if again and self.observing:
            self.gradients.watch_again(path, visit, dict(named_tensors(output)))
        return output

    def _visiting(self, path: str, visit: int, module: nn.Module) -> AbstractContextManager[None]:
        if self.operations is None:
            return nullcontext()
        return self.operations.visiting(path, visit, type(module).__name__)

    def tracing(self) -> AbstractContextManager[Any]:
        """Look at every operation, if the lane is run for that."""
        return self.operations if self.operations is not None else nullcontext()

    def _elsewhere(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a visit in a thread that the model started: it must not wait for other lanes, which could wait for it."""
        self.forward.uninspected[f"{path} (called in a thread of the model's)"] = None
        args, kwargs = self.placement.enter(path, args, kwargs)
        with self.placement.around(path):
            output = _call(module, args, kwargs)
        self.placement.leave(path, output)
        return output

    def _note_failure(self, frame: Frame, error: Exception) -> None:
        if self.raised is None:
            self.raised = Raised(
                text=first_line(error),
                module=frame.path,
                visit=frame.visit,
                class_=type(frame.module).__name__,
                phase=self.phase,
            )
            self.failing_inputs = frame.arguments

    # -- meeting the other lanes -----------------------------------------------------------------------------------

    def post(self, posted: Posted) -> None:
        """Hand over what the reference holds at a boundary, and wait."""
        if self._conductor is not None:
            self._conductor.post(posted)

    def meet(self, request: Request) -> Posted | None:
        """Wait for the reference at a boundary; None when it does not come by."""
        return self._conductor.meet(self.settings.precision, request) if self._conductor is not None else None

    def exchange(self, phase: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Meet outside any module: the reference hands over ``tensors``, the others get them (None if it has ended)."""
        key: Key = (phase, "", 0, phase)
        if self.is_reference:
            self.post(Posted(key=key, tensors=tensors, stats={}))
            return tensors
        counterpart = self.meet(Request(key))
        return counterpart.tensors if counterpart is not None else None

    def run_twin(self, frame: Frame, counterpart: Posted) -> tuple[dict[str, torch.Tensor], str | None]:
        """Run a leaf again on the reference's inputs; return its outputs by path, or the reason why there are none."""
        if frame.twin is None:
            return {}, None
        if counterpart.inputs is None:
            return {}, "local error unknown: the inputs were changed in place"
        dtypes = {path: tensor.dtype for path, tensor, _ in frame.inputs}
        self._in_twin = True
        try:
            with self.placement.around(frame.path):
                return frame.twin.run(counterpart.inputs, dtypes)
        finally:
            self._in_twin = False


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module past the lane's tap; its own hooks run as ever."""
    call: Any = module._call_impl
    return call(*args, **kwargs)


def next_sequence() -> int:
    """Return the sequence number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    return (f"{type(error).__name__}: {error}".splitlines() or [type(error).__name__])[0]
