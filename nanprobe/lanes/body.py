"""One lane from its first operation to its last: inputs, forward, loss, backward, gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from nanprobe.errors import NanprobeError, UsageError
from nanprobe.lanes.arithmetic import arithmetic_of, subnormals_flushed
from nanprobe.lanes.attention import written_out_here
from nanprobe.lanes.backward import NodeWatch
from nanprobe.lanes.baton import LaneThread
from nanprobe.lanes.conductor import Conductor
from nanprobe.lanes.frames import LaneSettings
from nanprobe.lanes.lane import Lane, first_line
from nanprobe.lanes.lane_model import LaneModel, copy_model
from nanprobe.lanes.masked import bad_only_where_masked
from nanprobe.lanes.observer import Observer
from nanprobe.lanes.operation_trace import NOTHING_HELD, OperationTrace, Stretch
from nanprobe.lanes.spec import HALF, ReplaySpec, find_loss, torch_dtype
from nanprobe.lanes.step import StepSpec, take_step
from nanprobe.lanes.step_facts import StepFact
from nanprobe.lanes.trace import BackwardOrigin, LaneTrace, Operations, Raised, UnwrittenRun
from nanprobe.lanes.unwritten import MemoryTrace
from nanprobe.numerics.autocast_regions import as_on_cuda
from nanprobe.numerics.stats import Difference, is_finite, measure, measure_against, total_difference
from nanprobe.numerics.tree import map_tensors, named_tensors
from nanprobe.records import Gradient

__all__ = ["LaneRun"]

T = TypeVar("T")


class LaneRun:
    """One lane's body: prepare inputs, forward, loss, backward, gradients."""

    def __init__(self, spec: ReplaySpec, precision: str, conductor: Conductor | None, *, is_reference: bool) -> None:
        self.spec = spec
        self.precision = precision
        self.is_reference = is_reference
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.kept_outputs: list[torch.Tensor] | None = None
        self.loss: float | None = None
        self.loss_found = False
        self.backward_ran = False
        self.backward_origin: BackwardOrigin | None = None
        self.gradients: dict[str, Gradient] = {}
        self.gradient_elements: dict[str, int] = {}
        self.gradient_norm: float | None = None
        self.gradient_rel_error: float | None = None
        self.bad_only_where_masked = False
        self.poisoned: tuple[str, ...] = ()
        self.step: StepFact | None = None
        self.scale = 1.0 if is_reference else spec.loss_scales.get(precision, 1.0)
        dtype = torch_dtype(precision)
        self._autocast = spec.mode == "autocast" and not is_reference and dtype in HALF
        self._cast_to = None if self._autocast else dtype
        copied = self._copy(dtype)
        copied.model.to(spec.device)
        copied.model.train(spec.train)
        settings = LaneSettings(
            precision=precision,
            dtype=None if is_reference else dtype,
            mode=spec.mode,
            device=spec.device,
            grad=spec.backward,
            loss_scale=self.scale,
            local_error=spec.local_error,
            batch_size=spec.batch_size,
            batch_dim=spec.batch_dim,
            arithmetic=arithmetic_of(spec, precision, is_reference=is_reference),
        )
        self.lane = Lane(settings, copied, conductor, is_reference=is_reference)
        self.observer = Observer(self.lane)
        self._dtype = dtype

    def _copy(self, dtype: torch.dtype) -> LaneModel:
        spec = self.spec
        if dtype in HALF and spec.mode == "cast":
            return copy_model(spec.model, dtype=dtype, keep_fp32=spec.keep_fp32, weights=spec.weights)
        keep = () if self.is_reference else spec.keep_fp32
        copied = copy_model(spec.model, keep_fp32=keep, weights=spec.weights)
        if dtype is torch.float64:
            copied.model.to(torch.float64)
        elif any(t.dtype in HALF for t in (*copied.model.parameters(), *copied.model.buffers())):
            apply: Any = copied.model._apply
            apply(lambda t: t.float() if t.dtype in HALF else t)
        return copied

    def _fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the lane's own copy of one batch tensor, in the dtype that the lane's mode asks for."""
        copy = tensor.detach().to(self.spec.device, copy=True)
        if copy.is_floating_point():
            if self._cast_to in (*HALF, torch.float64):
                copy = copy.to(self._cast_to)
            elif copy.dtype in HALF and not self._autocast:
                copy = copy.float()
        return copy.requires_grad_(tensor.requires_grad) if copy.is_floating_point() else copy

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.spec.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.spec.device))
            stack.enter_context(torch.set_grad_enabled(self.spec.backward))
            if self.spec.emulates_cuda:
                stack.enter_context(as_on_cuda(regions=self._dtype in HALF))
            stack.enter_context(written_out_here(self.spec.attention))
            stack.enter_context(subnormals_flushed(self.lane.settings.arithmetic.flush))
            if any(isinstance(module, torch.jit.ScriptModule) for module in self.lane.copied.modules.values()):
                # Optimised TorchScript keeps the autocast dtype of the lane that ran it first.
                jit: Any = torch.jit
                stack.enter_context(jit.optimized_execution(False))
            yield

    def _forward(self) -> torch.Tensor | None:
        """Run the model and the loss on the lane's own copy of the batch; return the loss, None when there is none."""
        spec, lane = self.spec, self.lane
        batch = map_tensors(self._fit, spec.batch)
        if lane.operations is not None:
            for (name, exact), (_, tensor) in zip(named_tensors(spec.batch), named_tensors(batch), strict=True):
                lane.operations.given(tensor, exact, "input", name)
                lane.operations.of_batch(tensor)
        args, kwargs = self.call = spec.bind(lane.copied.model, batch)
        lane.thread = threading.get_ident()
        lane.ops_outside = 0
        autocast = (
            # PyTorch's cache of cast parameters is shared by all threads and not told apart by dtype.
            torch.autocast(spec.device.type, dtype=self._dtype, cache_enabled=spec.emulates_cuda)
            if self._autocast
            else contextlib.nullcontext()
        )
        with self.observer, autocast, lane.tracing():
            output = lane.copied.model(*args, **kwargs)
            if self.kept_outputs is not None:
                self.kept_outputs.extend(t.detach().clone() for _, t in named_tensors(output))
            lane.phase = "loss"
            loss = self._take_loss(output, batch)
        if loss is None and (self.lane.observing or self.kept_outputs is not None):
            self.bad_only_where_masked = bad_only_where_masked(output, batch)
        self.call = ((), {})
        return loss

    def outputs(self) -> list[torch.Tensor]:
        """Run forward alone, unobserved, and return copies of the tensors in the model's output."""
        kept: list[torch.Tensor] = []
        self.kept_outputs = kept
        with self._context():
            self._forward()
        return kept

    def finds_loss(self) -> bool:
        """Run forward alone, unobserved, and tell whether its output holds a loss."""
        with self._context():
            return self._forward() is not None

    def largest_scale(self, scales: Iterable[float]) -> float | None:
        """Run forward once, unobserved, and backward at each scale; return the first that keeps gradients finite."""
        with self._context():
            loss = self._forward()
            if loss is None or not loss.requires_grad:
                return None
            self.lane.phase = "backward"
            return next((scale for scale in scales if self._fits(loss, scale)), None)

    def _fits(self, loss: torch.Tensor, scale: float) -> bool:
        """Run backward at a loss scale, keeping the graph, and tell whether every parameter's gradient is finite."""
        parameters = list(self.lane.copied.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        with self._observed_if_needed():
            _backward(self._scaled(loss, scale), retain_graph=True)
        fits = all(is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)
        for parameter in parameters:
            parameter.grad = None
        return fits

    def trace_operations(
        self, *, shadows: bool, stretch: Stretch | None, held: Mapping[int, bool] = NOTHING_HELD
    ) -> Operations:
        """Run the lane alone, through backward if it is replayed, and return what its operations did.

        What was seen before the model's own code raised is returned as well.
        """
        trace = self.lane.operations = self._operation_trace(shadows=shadows, stretch=stretch, held=held)
        try:
            with self._context():
                loss = self._forward()
                if loss is not None and loss.requires_grad and self.spec.backward:
                    self.lane.phase = "backward"
                    with self._observed_if_needed(), trace:
                        _backward(self._scaled(loss, self.scale))
        except (MemoryError, NanprobeError):
            raise
        except Exception:  # the model's own: it is known from the replay that it does
            return trace.result()
        return trace.result()

    def with_memory(self, value: float) -> UnwrittenRun:
        """Run forward and loss alone with new memory filled with ``value``, and tell how it ends."""
        lane, spec = self.lane, self.spec
        trace = MemoryTrace(
            lambda: lane.phase, lane.watch, {}, value=value, batch_size=spec.batch_size, batch_dim=spec.batch_dim
        )
        lane.operations = trace
        self.kept_outputs = []
        with self._context():
            loss = self._forward()
        ends = [loss.detach()] if loss is not None else [] if self.bad_only_where_masked else self.kept_outputs
        bad = [t for t in ends if not is_finite(t)]
        readers = (trace.reader_of(t) for t in bad)
        return UnwrittenRun(bad=bool(bad), reader=next((r for r in readers if r is not None), None))

    def _operation_trace(
        self, *, shadows: bool, stretch: Stretch | None = None, held: Mapping[int, bool] = NOTHING_HELD
    ) -> OperationTrace:
        lane, spec = self.lane, self.spec
        trace = OperationTrace(
            lambda: lane.phase,
            lane.watch,
            {id(p): name for name, p in lane.copied.model.named_parameters()},
            shadows=shadows,
            stretch=stretch,
            local_error=spec.local_error,
            batch_size=spec.batch_size,
            batch_dim=spec.batch_dim,
            held=held,
        )
        if not self.is_reference:
            exact = {**dict(spec.model.named_parameters()), **dict(spec.model.named_buffers())}
            for kind, named in (
                ("parameter", lane.copied.model.named_parameters()),
                ("buffer", lane.copied.model.named_buffers()),
            ):
                for name, tensor in named:
                    if name in exact:
                        trace.given(tensor, exact[name], kind, name)
        return trace

    def find_backward_origin(self) -> BackwardOrigin | None:
        """Run forward and backward alone and return the autograd node where a good gradient turned bad."""
        with self._context():
            loss = self._forward()
            if loss is None or not loss.requires_grad:
                return None
            self.lane.phase = "backward"
            scaled = self._scaled(loss, self.scale)
            removers = self.lane.watch.watch(scaled)
            is_scaled = self.scale != 1.0
            trace = self._operation_trace(shadows=False)
            try:
                with self._observed_if_needed(), trace:
                    _backward(scaled, retain_graph=is_scaled)
            finally:
                for remove in removers:
                    remove()
            origin = self.lane.watch.origin
            if origin is None:
                return None
            ran = (fact for fact in trace.facts if fact.sequence == self.lane.watch.sequence)
            last = trace.kernels.get(self.lane.watch.sequence) if self.lane.watch.sequence is not None else None
            origin = dataclasses.replace(origin, kernel=next(ran, None), backward_op=last)
            if not is_scaled:
                return origin
            return dataclasses.replace(origin, fits_unscaled=self._fits(loss, 1.0) and self._good_unscaled(loss))

    def _good_unscaled(self, loss: torch.Tensor) -> bool:
        """Whether no autograd node makes a good gradient bad at loss scale 1, those that are absorbed included."""
        watch = NodeWatch(None, 0)
        removers = watch.watch(loss)
        try:
            with self._observed_if_needed():
                _backward(self._scaled(loss, 1.0), retain_graph=True)
        finally:
            for remove in removers:
                remove()
        return watch.origin is None

    def gradients_at(self, scales: Callable[[Callable[[float], tuple[bool, int]]], T]) -> T | None:
        """Run forward once, unobserved, and hand ``scales`` a function that runs backward at a loss scale.

        That tells whether every gradient is finite, and how many elements are zero. None when there is no gradient.
        """
        with self._context():
            loss = self._forward()
            if loss is None or not loss.requires_grad:
                return None
            self.lane.phase = "backward"
            return scales(lambda scale: self._zeros(loss, scale))

    def _zeros(self, loss: torch.Tensor, scale: float) -> tuple[bool, int]:
        """Run backward at a loss scale, keeping the graph; return whether gradients are finite, and the zeros."""
        parameters = list(self.lane.copied.model.parameters())
        with self._observed_if_needed():
            _backward(self._scaled(loss, scale), retain_graph=True)
        stats = [measure(p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return not any(s.bad for s in stats), sum(s.zero for s in stats)

    def _observed_if_needed(self) -> contextlib.AbstractContextManager[Any]:
        return self.observer if self.observer.needed_in_backward else contextlib.nullcontext()

    @staticmethod
    def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
        return loss.reshape(()).to(torch.float64 if loss.dtype is torch.float64 else torch.float32) * scale

    def body(self) -> None:
        """Run the lane from its first operation to its last; called inside the lane's thread."""
        spec, lane = self.spec, self.lane
        with self._context():
            loss = self._forward()
            if loss is not None:
                self.loss = float(loss.detach())
                lane.exchange("loss", {"loss": loss.detach()})
                if spec.backward:
                    self._backward(loss)
        lane.phase = "end"
        self.poisoned = self._poisoned_buffers()

    def _take_loss(self, output: Any, batch: Any) -> torch.Tensor | None:
        spec = self.spec
        if spec.loss is None:
            found = find_loss(output)
            self.loss_found = found is not None
            return found
        try:
            loss = spec.loss(output, batch)
        except Exception as error:
            if self.lane.raised is None:
                self.lane.raised = Raised(text=first_line(error), module=None, visit=None, class_=None, phase="loss")
            raise
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"the loss function must return a scalar tensor, it returned {what}")
        self.loss_found = True
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        lane = self.lane
        if not loss.requires_grad:
            lane.notes["the loss depends on no parameter that requires a gradient: no backward"] = None
            return
        lane.phase = "backward"
        scaled = self._scaled(loss, self.scale)
        with self._observed_if_needed():
            _backward(scaled)
        del scaled, loss
        self.backward_ran = True
        lane.phase = "gradients"
        named = lane.copied.gradients()
        references = lane.exchange("gradients", named) or {}
        if lane.is_reference:
            references = {}
        squares, finite = 0.0, True
        diffs: list[Difference] = []
        for name, gradient in named.items():
            measured, part, diff = _gradient(gradient, references.get(name), self.scale)
            self.gradients[name] = measured
            self.gradient_elements[name] = gradient.numel()
            squares += part
            if diff is not None:
                diffs.append(diff)
            finite = finite and not (measured.nan or measured.posinf or measured.neginf)
        self.gradient_norm = math.sqrt(squares) if finite else math.nan
        self.gradient_rel_error = total_difference(diffs).rel_error
        del named, references
        self.step = take_step(
            lane.copied.model,
            self.spec.step or StepSpec(),
            self.gradients,
            scale=self.scale,
            scaled=self.precision == "fp16" and self.scale != 1.0,
        )
        for parameter in lane.copied.model.parameters():
            parameter.grad = None

    def _poisoned_buffers(self) -> tuple[str, ...]:
        before = dict(self.spec.model.named_buffers())
        poisoned = []
        for name, buffer in self.lane.copied.model.named_buffers():
            if buffer.is_floating_point() and name in before and measure(buffer).bad and not measure(before[name]).bad:
                poisoned.append(name)
        return tuple(poisoned)

    def gradients_went_bad(self) -> bool:
        """Whether forward and loss were finite and some gradient is not."""
        if not self.backward_ran or self.loss is None or not math.isfinite(self.loss):
            return False
        if any(g.nan or g.posinf or g.neginf for g in self.gradients.values()):
            return True
        return any(builder.is_bad for place, builder in self.lane.measures.items() if place[0] == "backward")

    def trace(self, thread: LaneThread) -> LaneTrace:
        """Return what the lane left behind, once it has ended."""
        lane = self.lane
        error = thread.error
        raised = lane.raised
        if error is not None and raised is None:
            raised = Raised(text=first_line(error), module=None, visit=None, class_=None, phase=lane.phase)
        root = lane.measures.get(("forward", "", 0))
        operands, tight = lane.settings.arithmetic.operands, self.observer.formats.tight
        for builder in lane.measures.values():
            if any(storage.cdata in tight for storage in builder.storages):
                builder.fmt = operands
        measures = {place: builder.build() for place, builder in lane.measures.items()}
        return LaneTrace(
            precision=self.precision,
            completed=error is None,
            raised=raised if error is not None else None,
            loss=self.loss,
            loss_found=self.loss_found,
            loss_scale=self.scale,
            visits=tuple(lane.forward.facts),
            measures=measures,
            order=dict(lane.order),
            gradients=self.gradients,
            gradient_elements=self.gradient_elements,
            gradient_norm=self.gradient_norm,
            gradient_rel_error=self.gradient_rel_error,
            backward_ran=self.backward_ran,
            backward_origin=self.backward_origin,
            poisoned_buffers=self.poisoned,
            flips=tuple(lane.choices.flips),
            uninspected=tuple(lane.forward.uninspected),
            ops_outside_modules=lane.ops_outside,
            drawn=lane.drawn,
            emulated=self.observer.emulated(),
            saturated=tuple(self.observer.formats.saturated),
            unwritten=self.observer.unwritten,
            dropout_differs=tuple(lane.forward.dropout_differs),
            seconds=thread.seconds,
            measuring_seconds=lane.measuring_seconds,
            bad_only_where_masked=self.bad_only_where_masked,
            step=self.step,
            output_rel_error=measures[("forward", "", 0)].rel_error if root is not None else None,
            notes=(*lane.copied.notes, *lane.notes),
        )


def _backward(loss: torch.Tensor, *, retain_graph: bool = False) -> None:
    backward: Any = loss.backward
    backward(retain_graph=retain_graph)


def _gradient(
    gradient: torch.Tensor, reference: torch.Tensor | None, scale: float
) -> tuple[Gradient, float, Difference | None]:
    """Measure one parameter's gradient; also return its squared 2-norm after unscaling and its distance."""
    stats, diff = (
        measure_against(gradient, reference, scale=scale) if reference is not None else (measure(gradient), None)
    )
    squares = stats.squares / (scale * scale)
    return (
        Gradient(
            norm=math.sqrt(squares) if stats.finite else None,
            absmax=None if stats.absmax is None else stats.absmax / scale,
            nan=stats.nan,
            posinf=stats.posinf,
            neginf=stats.neginf,
            zero=stats.zero,
            flushed=diff.flushed if diff is not None else 0,
            rel_error=diff.rel_error if diff is not None else None,
        ),
        squares,
        diff,
    )
