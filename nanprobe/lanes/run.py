"""A whole replay: one lane per precision over the same model and batch, in lock-step, and the trace they leave.

The caller's model, gradients, buffers, hooks and random state are as before when this returns or raises: lanes work on
copies, and process-wide state is put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from nanprobe.errors import IncompleteError, NanprobeError, UsageError
from nanprobe.formats import by_name
from nanprobe.inputs.rng import RandomState, seed_all
from nanprobe.numerics.stats import Difference, difference, is_finite, measure, total_difference
from nanprobe.numerics.tree import map_tensors, named_tensors
from nanprobe.progress import SILENT, Progress
from nanprobe.records import Gradient
from nanprobe.lanes.baton import LaneThread
from nanprobe.lanes.conductor import Conductor
from nanprobe.lanes.frames import LaneSettings
from nanprobe.lanes.lane import Lane, first_line
from nanprobe.lanes.lane_model import LaneModel, Weights, copy_model
from nanprobe.lanes.observer import Observer
from nanprobe.lanes.process_state import ProcessState, reference_flags
from nanprobe.lanes.trace import BackwardOrigin, LaneTrace, Raised, Trace

__all__ = [
    "Bind",
    "LaneFailure",
    "LossFunction",
    "ReplaySpec",
    "batch_size_of",
    "find_loss",
    "largest_loss_scale",
    "output_holds_loss",
    "replay_lanes",
    "torch_dtype",
]

LossFunction = Callable[[Any, Any], torch.Tensor]
Bind = Callable[[nn.Module, Any], tuple[tuple[Any, ...], dict[str, Any]]]

_HALF = (torch.float16, torch.bfloat16)
T = TypeVar("T")


class LaneFailure(IncompleteError):
    """The reference raised ``error``.

    ``model``, ``args`` and ``kwargs`` are what was called, ``inputs`` what the module that was running was called with.
    """

    def __init__(
        self,
        error: BaseException,
        raised: Raised | None,
        model: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self.error = error
        self.raised = raised
        self.model = model
        self.args_of_call, self.kwargs_of_call = call
        self.inputs = inputs
        where = f" in {raised.module or 'the model itself'}" if raised is not None and raised.module is not None else ""
        first = (str(error).splitlines() or [""])[0]
        super().__init__(f"the reference raised {type(error).__name__}{where}: {first}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """What to replay. ``precisions`` are the low ones; ``reference`` is "fp32" (or "fp64" to judge FP32 itself).

    ``loss_scales`` gives the scale of each low precision; ``random`` is the random state that every lane starts from
    (None: the seed's). ``weights`` maps the checkpoint afresh, so that lanes need not copy weights that live in a file.
    """

    model: nn.Module
    batch: Any
    bind: Bind
    precisions: tuple[str, ...]
    reference: str = "fp32"
    loss: LossFunction | None = None
    mode: str = "autocast"
    train: bool = False
    backward: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    random: RandomState | None = None
    loss_scales: Mapping[str, float] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    local_error: bool = True
    batch_size: int | None = None
    batch_dim: int = 0
    weights: Weights | None = None
    progress: Progress = SILENT


def torch_dtype(precision: str) -> torch.dtype:
    """Return PyTorch's dtype of a precision's name; UsageError for one that has none."""
    name = by_name(precision).dtype
    if name is None:
        raise UsageError(f"{precision} cannot be replayed: PyTorch has no such dtype")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a model's output holds: ``output.loss``, ``output["loss"]``, or a scalar output."""
    candidate = output
    if not isinstance(output, torch.Tensor):
        candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.is_floating_point():
        return candidate
    return None


class _Run:
    """One lane's body: prepare inputs, forward, loss, backward, gradients."""

    def __init__(self, spec: ReplaySpec, precision: str, conductor: Conductor | None, *, is_reference: bool) -> None:
        self.spec = spec
        self.precision = precision
        self.is_reference = is_reference
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.loss: float | None = None
        self.loss_found = False
        self.backward_ran = False
        self.backward_origin: BackwardOrigin | None = None
        self.gradients: dict[str, Gradient] = {}
        self.gradient_elements: dict[str, int] = {}
        self.gradient_norm: float | None = None
        self.gradient_rel_error: float | None = None
        self.poisoned: tuple[str, ...] = ()
        self.scale = 1.0 if is_reference else spec.loss_scales.get(precision, 1.0)
        dtype = torch_dtype(precision)
        self._autocast = spec.mode == "autocast" and not is_reference and dtype in _HALF
        self._cast_to = None if self._autocast else dtype
        copied = self._copy(dtype)
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
        )
        self.lane = Lane(settings, copied, conductor, is_reference=is_reference)
        self._dtype = dtype

    def _copy(self, dtype: torch.dtype) -> LaneModel:
        spec = self.spec
        if dtype in _HALF and spec.mode == "cast":
            return copy_model(spec.model, dtype=dtype, keep_fp32=spec.keep_fp32, weights=spec.weights)
        keep = () if self.is_reference else spec.keep_fp32
        copied = copy_model(spec.model, keep_fp32=keep, weights=spec.weights)
        if dtype is torch.float64:
            copied.model.to(torch.float64)
        elif any(t.dtype in _HALF for t in (*copied.model.parameters(), *copied.model.buffers())):
            copied.model._apply(lambda t: t.float() if t.dtype in _HALF else t)
        return copied

    def _fit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the lane's own copy of one batch tensor, in the dtype that the lane's mode asks for."""
        copy = tensor.detach().to(self.spec.device, copy=True)
        if copy.is_floating_point():
            if self._cast_to in (*_HALF, torch.float64):
                copy = copy.to(self._cast_to)
            elif copy.dtype in _HALF and not self._autocast:
                copy = copy.float()
        return copy.requires_grad_(tensor.requires_grad) if copy.is_floating_point() else copy

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(self.spec.backward))
            stack.enter_context(Observer(self.lane))
            yield

    def _forward(self) -> torch.Tensor | None:
        """Run the model and the loss on the lane's own copy of the batch; return the loss, None when there is none."""
        spec, lane = self.spec, self.lane
        batch = map_tensors(self._fit, spec.batch)
        args, kwargs = self.call = spec.bind(lane.copied.model, batch)
        lane.ops_outside = 0
        autocast = (
            torch.autocast(spec.device.type, dtype=self._dtype, cache_enabled=False)
            if self._autocast
            else contextlib.nullcontext()
        )
        with autocast:
            output = lane.copied.model(*args, **kwargs)
            lane.phase = "loss"
            loss = self._take_loss(output, batch)
        self.call = ((), {})
        return loss

    def finds_loss(self) -> bool:
        """Run forward alone, unobserved, and tell whether its output holds a loss."""
        with self._context():
            return self._forward() is not None

    def largest_scale(self, scales: Iterable[float]) -> float | None:
        """Run forward once, unobserved, and backward at each scale; return the first that leaves every gradient finite."""
        with self._context():
            loss = self._forward()
            if loss is None or not loss.requires_grad:
                return None
            self.lane.phase = "backward"
            for scale in scales:
                self._scaled(loss, scale).backward(retain_graph=True)
                gradients = [p.grad for p in self.lane.copied.model.parameters() if p.grad is not None]
                fits = all(is_finite(gradient) for gradient in gradients)
                for parameter in self.lane.copied.model.parameters():
                    parameter.grad = None
                if fits:
                    return scale
        return None

    def find_backward_origin(self) -> BackwardOrigin | None:
        """Run forward and backward alone and return the autograd node where a good gradient turned bad."""
        with self._context():
            loss = self._forward()
            if loss is None or not loss.requires_grad:
                return None
            self.lane.phase = "backward"
            scaled = self._scaled(loss, self.scale)
            removers = self.lane.watch.watch(scaled)
            try:
                scaled.backward()
            finally:
                for remove in removers:
                    remove()
        return self.lane.watch.origin

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
        loss = spec.loss(output, batch)
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
        scaled.backward()
        del scaled, loss
        self.backward_ran = True
        lane.phase = "gradients"
        named = {
            name: parameter.grad
            for name, parameter in lane.copied.model.named_parameters()
            if parameter.grad is not None
        }
        references = lane.exchange("gradients", named) or {}
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
            dropout_differs=tuple(lane.forward.dropout_differs),
            seconds=thread.seconds,
            measuring_seconds=lane.measuring_seconds,
            output_rel_error=measures[("forward", "", 0)].rel_error if root is not None else None,
            notes=(*lane.copied.notes, *lane.notes),
        )


def _gradient(
    gradient: torch.Tensor, reference: torch.Tensor | None, scale: float
) -> tuple[Gradient, float, Difference | None]:
    """Measure one parameter's gradient; also return its squared 2-norm after unscaling and its distance."""
    stats = measure(gradient)
    diff = difference(gradient, reference, scale=scale) if reference is not None else None
    flushed = 0
    if stats.zero and reference is not None and reference.shape == gradient.shape and not gradient.is_sparse:
        flushed = int(torch.count_nonzero((gradient.detach() == 0) & (reference.detach() != 0)))
    squares = stats.squares / (scale * scale)
    return (
        Gradient(
            norm=math.sqrt(squares) if stats.finite else None,
            absmax=None if stats.absmax is None else stats.absmax / scale,
            nan=stats.nan,
            posinf=stats.posinf,
            neginf=stats.neginf,
            zero=stats.zero,
            flushed=flushed,
            rel_error=diff.rel_error if diff is not None else None,
        ),
        squares,
        diff,
    )


def _lane_state(spec: ReplaySpec, outer: ProcessState, *, is_reference: bool) -> ProcessState:
    if spec.random is not None:
        random = spec.random
    else:
        seed_all(spec.seed)
        random = RandomState.capture()
    flags = {**outer.flags, **(reference_flags() if is_reference else {})}
    return ProcessState(random, {name: value for name, value in flags.items() if name in outer.flags})


def replay_lanes(spec: ReplaySpec) -> Trace:
    """Run every lane in lock-step and return the trace.

    Raises LaneFailure when the reference raises, UsageError for a loss that is no scalar. A low-precision lane that
    raises is recorded in its trace. Ctrl-C and a failure of nanprobe itself end every lane before they are raised.
    """
    outer = ProcessState.capture()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    threads_for_torch = torch.get_num_threads()
    runs: list[_Run] = []
    spec.progress.stage("replay")
    try:
        if spec.mode == "autocast":
            torch.backends.mha.set_fastpath_enabled(False)
        conductor = Conductor(lambda place: spec.progress.step(detail=place))
        names = (spec.reference, *spec.precisions)
        runs.extend(_Run(spec, name, conductor, is_reference=i == 0) for i, name in enumerate(names))
        lanes: list[LaneThread] = []
        for run in runs:

            def body(run: _Run = run) -> None:
                if torch.get_num_threads() != threads_for_torch:
                    torch.set_num_threads(threads_for_torch)
                run.body()

            lanes.append(LaneThread(run.precision, body, _lane_state(spec, outer, is_reference=run.is_reference)))
        conductor.run(lanes[0], lanes[1:])
        _check_reference(runs[0], lanes[0])
        for run, thread in zip(runs[1:], lanes[1:], strict=True):
            if isinstance(thread.error, NanprobeError):
                raise thread.error
            if thread.error is not None and not isinstance(thread.error, Exception):
                raise thread.error
        for run in runs:
            if run.gradients_went_bad():
                run.backward_origin = _alone(spec, run.precision, _Run.find_backward_origin)
        return Trace(
            reference=runs[0].trace(lanes[0]),
            lanes={run.precision: run.trace(thread) for run, thread in zip(runs[1:], lanes[1:], strict=True)},
            modules={path: type(module).__name__ for path, module in spec.model.named_modules()},
            not_callable=tuple(path for path, module in spec.model.named_modules() if _has_no_forward(module)),
            parameters=_owners(spec.model),
        )
    finally:
        for run in runs:
            run.lane.detach()
        torch.backends.mha.set_fastpath_enabled(fast_path)
        outer.install()


def _alone(spec: ReplaySpec, precision: str, act: Callable[[_Run], T]) -> T:
    """Run one lane by itself, unobserved, from the same starting point as in a replay."""
    outer = ProcessState.capture()
    is_reference = precision == spec.reference
    run = _Run(spec, precision, None, is_reference=is_reference)
    try:
        _lane_state(spec, outer, is_reference=is_reference).install()
        return act(run)
    finally:
        run.lane.detach()
        outer.install()


def output_holds_loss(spec: ReplaySpec) -> bool:
    """Run the reference's forward without gradients and tell whether its output holds a loss.

    False when it raises: the replay proper will raise the same, and say where.
    """
    try:
        return _alone(replace(spec, backward=False), spec.reference, _Run.finds_loss)
    except (MemoryError, NanprobeError):
        raise
    except Exception:  # the model's own; see above
        return False


def largest_loss_scale(spec: ReplaySpec, precision: str, scales: Iterable[float]) -> float | None:
    """Return the first of ``scales`` at which every gradient of one lane is finite, None when there is none."""
    return _alone(spec, precision, lambda run: run.largest_scale(scales))


def _check_reference(run: _Run, thread: LaneThread) -> None:
    if thread.error is None:
        return
    if isinstance(thread.error, NanprobeError) or not isinstance(thread.error, Exception):
        raise thread.error
    lane = run.lane
    raise LaneFailure(thread.error, lane.raised, lane.copied.model, run.call, lane.failing_inputs) from thread.error


def _has_no_forward(module: nn.Module) -> bool:
    """Whether calling the module can only raise, as with ``nn.ModuleList``."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _owners(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    owners: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            owners.setdefault(full, (path, tuple(parameter.shape)))
    return owners


def batch_size_of(batch: Any, dim: int) -> int | None:
    """Return the length of dimension ``dim`` of the batch's tensors when most of them agree, None when none can be told."""
    sizes = [tensor.shape[dim] for _, tensor in named_tensors(batch) if tensor.dim() > dim]
    if not sizes:
        return None
    return max(set(sizes), key=sizes.count)
