"""One precision's run of the model's own code, and what it writes down at every boundary.

Module visits are seen through the slot that ``nn.Module.compile`` uses to replace a module's call. Unlike a forward hook
it sees keyword inputs and exceptions, and leaves the conditions alone under which PyTorch takes a fused path. Gradients
are seen by tensor hooks on a visit's outputs: unlike full backward hooks these see dicts and lists, and forbid nothing.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from nanprobe.numerics.stats import Difference, TensorStats, difference, measure, total_difference
from nanprobe.numerics.tree import named_tensors, uninspected
from nanprobe.lanes.backward import NodeWatch
from nanprobe.lanes.conductor import Conductor, Key, Posted, Request
from nanprobe.lanes.lane_model import LaneModel
from nanprobe.lanes.local import LocalTwin
from nanprobe.lanes.measures import MeasureBuilder, bad_detail, health_of
from nanprobe.lanes.placement import Placement
from nanprobe.lanes.trace import HEALTHY, BadDetail, Flip, Health, Place, Raised, VisitFact

__all__ = ["Frame", "Lane", "LaneSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """How a lane runs: its precision, whether by cast or autocast, and what is measured.

    ``dtype`` is None for a lane that runs the model as it is. ``batch_size`` and ``batch_dim`` tie rows to samples.
    """

    precision: str
    dtype: torch.dtype | None
    mode: str
    device: torch.device
    grad: bool
    loss_scale: float = 1.0
    local_error: bool = True
    batch_size: int | None = None
    batch_dim: int = 0


@dataclass(slots=True, eq=False)
class Frame:
    """A module visit in progress."""

    path: str
    visit: int
    module: nn.Module
    depth: int
    parent: Frame | None
    entered: int
    sequence: int
    inputs: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    health: Health = HEALTHY
    children: int = 0
    previous: str | None = None
    last_child: str | None = None
    twin: LocalTwin | None = None
    choices: Counter[str] = field(default_factory=Counter)
    input_error: float | None = None
    output_error: float | None = None

    @property
    def key(self) -> Key:
        """The key under which the lanes meet when this visit ends."""
        return ("forward", self.path, self.visit, "")

    def chain(self) -> tuple[Key, ...]:
        """Keys of the visits around this one, outermost first."""
        keys: list[Key] = []
        frame = self.parent
        while frame is not None:
            keys.append(frame.key)
            frame = frame.parent
        return tuple(reversed(keys))


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors keep no version
        return -1


class Lane:
    """Everything one lane sees and keeps while it runs. Its methods are called inside the lane's own thread."""

    def __init__(
        self, settings: LaneSettings, copied: LaneModel, conductor: Conductor | None, *, is_reference: bool
    ) -> None:
        self.settings = settings
        self.copied = copied
        self.is_reference = is_reference
        self.phase = "forward"
        self.measures: dict[Place, MeasureBuilder] = {}
        self.order: dict[Place, int] = {}
        self.facts: list[VisitFact] = []
        self.flips: list[Flip] = []
        self.uninspected: dict[str, None] = {}
        self.ops_outside = 0
        self.drawn = 0
        self.dropout_differs: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.raised: Raised | None = None
        self.failing_inputs: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None
        self.measuring_seconds = 0.0
        self.placement = Placement(copied, settings.mode, settings.dtype, settings.device)
        self.watch = NodeWatch(settings.batch_size, settings.batch_dim)
        self._conductor = conductor
        self._stack: Frame | None = None
        self._visits: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        self._without_gradient: set[tuple[str, int]] = set()
        self._clock = 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Health]] = {}
        self._errors: dict[int, tuple[weakref.ref[torch.Tensor], int, Difference]] = {}
        self._last_outside: str | None = None
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

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # -- forward ---------------------------------------------------------------------------------------------------

    def _visit(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.phase == "backward":
            return self._recompute(path, module, args, kwargs)
        if self.phase == "muted":
            return module._call_impl(*args, **kwargs)
        args, kwargs = self.placement.enter(path, args, kwargs)
        frame = self._enter(path, module, args, kwargs)
        try:
            with self.placement.around(path):
                output = module._call_impl(*args, **kwargs)
        except Exception as error:
            self._note_failure(frame, error, args, kwargs)
            self._leave_without_output(frame)
            raise
        finally:
            self._stack = frame.parent
        self.placement.leave(path, output)
        self._leave(frame, output)
        return output

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        parent = self._stack
        visit = self._visits[path]
        self._visits[path] += 1
        frame = Frame(
            path=path,
            visit=visit,
            module=module,
            depth=parent.depth + 1 if parent is not None else 0,
            parent=parent,
            entered=self._tick(),
            sequence=torch._C._autograd._get_sequence_nr(),
            previous=parent.last_child if parent is not None else self._last_outside,
        )
        began = time.perf_counter()
        if parent is not None:
            parent.children += 1
        frame.inputs = [(name, t, _version(t)) for name, t in named_tensors((args, kwargs))]
        frame.arguments = (args, kwargs)
        frame.health = self._health([t for _, t, _ in frame.inputs])
        if self.settings.local_error:
            if not self.is_reference:
                frame.twin = LocalTwin.prepare(module)
            elif getattr(module, "inplace", False):
                frame.arguments = LocalTwin.keep_inputs(args, kwargs)
        self._stack = frame
        self.measuring_seconds += time.perf_counter() - began
        return frame

    def _health(self, tensors: list[torch.Tensor]) -> Health:
        """Sum the health of tensors, looking only at those that no earlier boundary has measured."""
        nan = posinf = neginf = lost = 0
        for tensor in tensors:
            if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                continue
            known = self._known.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == _version(tensor):
                health = known[2]
            else:
                health = self.watch.health(tensor)
                self._remember(tensor, health)
            nan, posinf, neginf, lost = (
                nan + health.nan,
                posinf + health.posinf,
                neginf + health.neginf,
                lost + health.lost,
            )
        if not (nan or posinf or neginf or lost):
            return HEALTHY
        return Health(nan=nan, posinf=posinf, neginf=neginf, lost=lost)

    def _remember(self, tensor: torch.Tensor, health: Health) -> None:
        key = id(tensor)
        self._known[key] = (weakref.ref(tensor, lambda _: self._known.pop(key, None)), _version(tensor), health)

    def _note_failure(self, frame: Frame, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.raised is None:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.raised = Raised(
                text=text,
                module=frame.path,
                visit=frame.visit,
                class_=type(frame.module).__name__,
                phase=self.phase,
            )
            self.failing_inputs = (frame.path, args, kwargs)

    def _leave_without_output(self, frame: Frame) -> None:
        self._add_fact(frame, HEALTHY, None, left=-1)

    def _leave(self, frame: Frame, output: Any) -> None:
        began = time.perf_counter()
        left = self._tick()
        if frame.parent is not None:
            frame.parent.last_child = frame.path
        else:
            self._last_outside = frame.path
        self.watch.visited(frame.sequence, torch._C._autograd._get_sequence_nr(), frame.path, frame.visit)
        hidden = uninspected(output)
        if hidden is not None:
            self.uninspected[f"{frame.path} ({hidden})".strip()] = None
        tensors = dict(named_tensors(output))
        stats = {path: measure(tensor) for path, tensor in tensors.items()}
        unchanged = all(_version(t) == version for _, t, version in frame.inputs)
        arguments = frame.arguments if unchanged or getattr(frame.module, "inplace", False) else None
        self.measuring_seconds += time.perf_counter() - began
        if self.is_reference:
            began = time.perf_counter()
            health = health_of([s for s in stats.values() if s.floating])
            self._record_forward(frame, tensors, stats, None, health, left, unchanged)
            self.measuring_seconds += time.perf_counter() - began
            self._post(Posted(key=frame.key, tensors=tensors, stats=stats, inputs=arguments))
        else:
            counterpart = self._meet(Request(frame.key, frame.chain()))
            began = time.perf_counter()
            self._compare_forward(frame, tensors, stats, counterpart, left, unchanged)
            self.measuring_seconds += time.perf_counter() - began
        self._watch_gradients(frame.path, frame.visit, tensors)

    def _compare_forward(
        self,
        frame: Frame,
        tensors: dict[str, torch.Tensor],
        stats: dict[str, TensorStats],
        counterpart: Posted | None,
        left: int,
        unchanged: bool,
    ) -> None:
        diffs: dict[str, Difference | None] = {}
        lost = 0
        if counterpart is not None:
            for path, tensor in tensors.items():
                reference = counterpart.tensors.get(path)
                if reference is None:
                    continue
                diffs[path] = diff = difference(tensor, reference)
                if diff is None and not tensor.is_nested:
                    self._flip(
                        frame, None, 0, 0, f"shape {list(tensor.shape)} where the reference has {list(reference.shape)}"
                    )
                elif diff is not None and stats[path].floating:
                    lost += diff.lost
        if frame.health.soft and unchanged and counterpart is not None and counterpart.inputs is not None:
            self._judge_negative_infinities(frame, counterpart.inputs)
        health = health_of([s for s in stats.values() if s.floating], lost)
        if unchanged and counterpart is not None and counterpart.inputs is not None:
            frame.input_error = self._input_error(frame, counterpart.inputs)
        for path, diff in diffs.items():
            if diff is not None and stats[path].floating:
                self._remember_error(tensors[path], diff)
        frame.output_error = total_difference(
            d for path, d in diffs.items() if d is not None and stats[path].floating
        ).rel_error
        builder = self._record_forward(frame, tensors, stats, (counterpart, diffs), health, left, unchanged)
        if counterpart is None:
            builder.note = "the reference did not come by"
            self._flip(frame, None, 1, 1, "this visit is not made by the reference")
        elif frame.children == 0 and frame.twin is not None:
            self._local_error(frame, counterpart, builder)
        if (
            counterpart is not None
            and isinstance(frame.module, nn.modules.dropout._DropoutNd)
            and frame.module.training
        ):
            self._check_dropout(frame, tensors, counterpart)

    def _input_error(self, frame: Frame, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> float | None:
        """Return how far a visit's inputs are from the reference's; what an earlier boundary compared is not compared again."""
        references = dict(named_tensors(inputs))
        diffs: list[Difference] = []
        for path, tensor, _ in frame.inputs:
            reference = references.get(path)
            if reference is None or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                continue
            known = self._errors.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == _version(tensor):
                diffs.append(known[2])
                continue
            diff = difference(tensor, reference)
            if diff is not None:
                diffs.append(diff)
                self._remember_error(tensor, diff)
        return total_difference(diffs).rel_error

    def _remember_error(self, tensor: torch.Tensor, diff: Difference) -> None:
        key = id(tensor)
        self._errors[key] = (weakref.ref(tensor, lambda _: self._errors.pop(key, None)), _version(tensor), diff)

    def _judge_negative_infinities(self, frame: Frame, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Tell -Inf that a mask put into a visit's inputs from -Inf that the reference does not have there."""
        references = dict(named_tensors(inputs))
        lost = 0
        for path, tensor, _ in frame.inputs:
            reference = references.get(path)
            if reference is not None and tensor.dtype.is_floating_point:
                diff = difference(tensor, reference)
                lost += diff.lost if diff is not None else 0
        if lost:
            frame.health = dataclasses.replace(frame.health, lost=lost)

    def _local_error(self, frame: Frame, counterpart: Posted, builder: MeasureBuilder) -> None:
        assert frame.twin is not None
        if counterpart.inputs is None:
            builder.note = "local error unknown: the inputs were changed in place"
            return
        actual = {path: t.dtype for path, t, _ in frame.inputs}
        self.phase, phase = "muted", self.phase
        try:
            outputs, note = frame.twin.run(counterpart.inputs, actual)
        finally:
            self.phase = phase
        if note is not None:
            builder.note = note
        for path, tensor in outputs.items():
            reference = counterpart.tensors.get(path)
            if reference is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                diff = difference(tensor, reference)
                if diff is not None:
                    builder.local.append(diff)

    def _check_dropout(self, frame: Frame, tensors: dict[str, torch.Tensor], counterpart: Posted) -> None:
        for path, tensor in tensors.items():
            reference = counterpart.tensors.get(path)
            if reference is None or reference.shape != tensor.shape:
                continue
            here = tensor.detach()
            kept_here = int(torch.count_nonzero((reference.detach() == 0) & torch.isfinite(here) & (here != 0)))
            if kept_here > 0.01 * tensor.numel():
                self.dropout_differs[frame.path] = None

    def _record_forward(
        self,
        frame: Frame,
        tensors: dict[str, torch.Tensor],
        stats: dict[str, TensorStats],
        compared: tuple[Posted | None, Mapping[str, Difference | None]] | None,
        health: Health,
        left: int,
        unchanged: bool,
    ) -> MeasureBuilder:
        counterpart, diffs = compared if compared is not None else (None, {})
        place: Place = ("forward", frame.path, frame.visit)
        builder = self.measures[place] = MeasureBuilder()
        self.order[place] = left
        for path, tensor in tensors.items():
            builder.add(path, tensor, stats[path], diffs.get(path))
            if stats[path].floating:
                one = health_of([stats[path]], health.lost if health.lost else 0)
                self._remember(tensor, HEALTHY if one == HEALTHY else one)
        bad_output = bad_input = None
        if health.hard:
            input_absmax = self._absmax([t for _, t, _ in frame.inputs]) if unchanged else None
            bad_output = self._detail(tensors, counterpart, input_absmax)
            builder.detail = bad_output
        elif health.soft:
            builder.detail = self._detail(tensors, counterpart, None)
        if frame.health.hard and unchanged:
            references: dict[str, torch.Tensor] = {}
            if counterpart is not None and counterpart.inputs is not None:
                references = dict(named_tensors(counterpart.inputs))
            bad_input = self._first_detail([(name, t) for name, t, _ in frame.inputs], references, None)
        self._add_fact(frame, health, bad_output, left=left, bad_input=bad_input)
        return builder

    def _absmax(self, tensors: list[torch.Tensor]) -> float | None:
        values = [s.absmax for s in (measure(t) for t in tensors if t.dtype.is_floating_point) if s.absmax is not None]
        return max(values) if values else None

    def _detail(
        self, tensors: dict[str, torch.Tensor], counterpart: Posted | None, input_absmax: float | None
    ) -> BadDetail | None:
        references = counterpart.tensors if counterpart is not None else {}
        return self._first_detail(list(tensors.items()), references, input_absmax)

    def _first_detail(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        references: Mapping[str, torch.Tensor],
        input_absmax: float | None,
    ) -> BadDetail | None:
        for path, tensor in tensors:
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                detail = bad_detail(
                    path,
                    tensor,
                    reference=references.get(path),
                    batch_size=self.settings.batch_size,
                    batch_dim=self.settings.batch_dim,
                    input_absmax=input_absmax,
                )
                if detail is not None:
                    return detail
        return None

    def _add_fact(
        self,
        frame: Frame,
        outputs: Health,
        bad_output: BadDetail | None,
        *,
        left: int,
        bad_input: BadDetail | None = None,
    ) -> None:
        self.facts.append(
            VisitFact(
                module=frame.path,
                visit=frame.visit,
                class_=type(frame.module).__name__,
                depth=frame.depth,
                leaf=frame.children == 0,
                parent=(frame.parent.path, frame.parent.visit) if frame.parent is not None else None,
                previous=frame.previous,
                last_child=frame.last_child,
                entered=frame.entered,
                left=left,
                inputs=frame.health,
                outputs=outputs,
                input_error=frame.input_error,
                output_error=frame.output_error,
                bad_input=bad_input,
                bad_output=bad_output,
            )
        )

    # -- discrete choices ------------------------------------------------------------------------------------------

    def choice(self, op: str, chosen: torch.Tensor) -> None:
        """A top-k, argmax, bucket or draw was made; compare it with the reference's as a choice."""
        if self.phase not in ("forward", "loss"):
            return
        frame = self._stack
        path, visit = (frame.path, frame.visit) if frame is not None else ("", 0)
        counter = frame.choices if frame is not None else self._outside_choices
        number = counter[op]
        counter[op] += 1
        part = f"{op}#{number}" if frame is not None else f"outside {op}#{number}"
        key: Key = (self.phase, path, visit, part)
        if self.is_reference:
            self._post(Posted(key=key, tensors={"": chosen}, stats={}))
            return
        chain = (*frame.chain(), frame.key) if frame is not None else ()
        counterpart = self._meet(Request(key, chain))
        if counterpart is None:
            return
        reference = counterpart.tensors[""]
        if reference.shape != chosen.shape:
            self._flip(frame, op, 1, 1, f"shape {list(chosen.shape)} where the reference has {list(reference.shape)}")
            return
        changed = int(torch.count_nonzero(reference != chosen))
        if changed:
            self._flip(frame, op, changed, chosen.numel(), f"{changed} of {chosen.numel()} choices differ")

    @property
    def _outside_choices(self) -> Counter[str]:
        counter: Counter[str] = self.__dict__.setdefault("_choices", Counter())
        return counter

    def _flip(self, frame: Frame | None, op: str | None, changed: int, total: int, text: str) -> None:
        self.flips.append(
            Flip(
                module=frame.path if frame is not None else None,
                visit=frame.visit if frame is not None else None,
                op=op,
                order=self._clock,
                changed=changed,
                total=total,
                text=text,
            )
        )

    # -- backward --------------------------------------------------------------------------------------------------

    def _recompute(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module again inside backward (activation checkpointing): no new visit, but its gradients are seen.

        Segments are recomputed last first, so the nth recomputation of a module belongs to its nth visit from the end.
        """
        visit = max(self._visits[path] - 1 - self._again[path], 0)
        self._again[path] += 1
        args, kwargs = self.placement.enter(path, args, kwargs)
        sequence = torch._C._autograd._get_sequence_nr()
        with self.placement.around(path):
            output = module._call_impl(*args, **kwargs)
        self.placement.leave(path, output)
        self.watch.visited(sequence, torch._C._autograd._get_sequence_nr(), path, visit)
        if (path, visit) in self._without_gradient:
            self._watch_gradients(path, visit, dict(named_tensors(output)))
        return output

    def _watch_gradients(self, path: str, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self.settings.grad:
            return
        watched = False
        for part, tensor in tensors.items():
            if tensor.requires_grad and tensor.grad_fn is not None and not tensor.is_nested:
                tensor.register_hook(partial(self._gradient, path, visit, part))
                watched = True
        if watched:
            self._without_gradient.discard((path, visit))
        else:
            self._without_gradient.add((path, visit))

    def _gradient(self, path: str, visit: int, part: str, gradient: torch.Tensor) -> None:
        began = time.perf_counter()
        place: Place = ("backward", path, visit)
        stats = measure(gradient)
        self.order.setdefault(place, self._tick())
        builder = self.measures.setdefault(place, MeasureBuilder(scale=self.settings.loss_scale))
        self.measuring_seconds += time.perf_counter() - began
        key: Key = ("backward", path, visit, part)
        diff = None
        if self.is_reference:
            self._post(Posted(key=key, tensors={part: gradient}, stats={part: stats}))
        else:
            counterpart = self._meet(Request(key))
            began = time.perf_counter()
            if counterpart is not None:
                diff = difference(gradient, counterpart.tensors[part], scale=self.settings.loss_scale)
            else:
                builder.note = "no gradient arrived here in the reference"
            self.measuring_seconds += time.perf_counter() - began
        builder.add(part, gradient, stats, diff)
        if stats.bad and builder.detail is None:
            builder.detail = self._detail({part: gradient}, None, None)

    # -- meeting ---------------------------------------------------------------------------------------------------

    def _post(self, posted: Posted) -> None:
        if self._conductor is not None:
            self._conductor.post(posted)

    def _meet(self, request: Request) -> Posted | None:
        return self._conductor.meet(self.settings.precision, request) if self._conductor is not None else None

    def exchange(self, phase: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Meet outside any module: hand over ``tensors`` (reference) or get the reference's (None when it has ended)."""
        key: Key = (phase, "", 0, phase)
        if self.is_reference:
            self._post(Posted(key=key, tensors=tensors, stats={}))
            return tensors
        counterpart = self._meet(Request(key))
        return counterpart.tensors if counterpart is not None else None


LossFunction = Callable[[Any, Any], torch.Tensor]
