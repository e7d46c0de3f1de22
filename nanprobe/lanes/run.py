"""A whole replay: one lane per precision over the same model and batch, in lock-step, and the trace they leave.

The caller's model, gradients, buffers, hooks and random state are as before when a function here returns or raises:
lanes work on copies, and process-wide state is put back.
"""

from __future__ import annotations

import contextvars
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from nanprobe.errors import NanprobeError
from nanprobe.inputs.rng import RandomState, seed_all
from nanprobe.lanes.arithmetic import flushes_subnormals, has_tf32
from nanprobe.lanes.attention import written_out
from nanprobe.lanes.baton import LaneThread
from nanprobe.lanes.body import LaneRun
from nanprobe.lanes.conductor import Conductor
from nanprobe.lanes.operation_trace import NOTHING_HELD, Stretch
from nanprobe.lanes.process_state import ProcessState, low_flags, reference_flags
from nanprobe.lanes.scales import window_of
from nanprobe.lanes.spec import LaneFailure, ReplaySpec
from nanprobe.lanes.step_facts import ScaleWindow
from nanprobe.lanes.trace import Operations, Trace, UnwrittenRun
from nanprobe.numerics.autocast_regions import emulate_cuda
from nanprobe.numerics.stats import difference, total_difference

__all__ = [
    "has_compiled_parts",
    "largest_loss_scale",
    "output_holds_loss",
    "reference_noise",
    "replay_lanes",
    "run_with_memory",
    "scale_window",
    "trace_operations",
]

T = TypeVar("T")

_COLLECT_AFTER = 50_000
"""New objects before the garbage collector runs while lanes do."""


@contextmanager
def _put_back(spec: ReplaySpec) -> Iterator[ProcessState]:
    """Yield the caller's process-wide state, and put it back at the end.

    Fused attention and encoder paths are off meanwhile if autocast would turn them off: the reference must go the same
    way as the lanes that run under autocast. Compiled parts run eagerly, since compiled code hides its modules.
    """
    outer = ProcessState.capture()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    collecting = gc.get_threshold()
    threads, flushing = torch.get_num_threads(), flushes_subnormals()
    stack = ExitStack()
    try:
        # What the caller is in the middle of is not for lanes; this thread copies models, and runs some lanes itself.
        stack.enter_context(torch.inference_mode(False))
        if spec.device.type == "cuda":
            # Lanes run on the default stream, whichever stream the caller's work is on.
            torch.cuda.synchronize(spec.device)
            stack.callback(torch.cuda.synchronize, spec.device)
        for device in {"cpu", spec.device.type}:
            stack.enter_context(torch.autocast(device, enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Lanes make many small objects and no garbage; looking for some costs 4 % of a replay.
        gc.set_threshold(max(collecting[0], _COLLECT_AFTER) if collecting[0] else 0, *collecting[1:])
        if spec.emulates_cuda:
            stack.enter_context(emulate_cuda())
        stack.enter_context(written_out(spec.attention))
        if spec.mode == "autocast":
            torch.backends.mha.set_fastpath_enabled(False)
        yield outer
    finally:
        stack.close()
        gc.set_threshold(*collecting)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_flush_denormal(flushing)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        outer.install()


def _start(spec: ReplaySpec) -> RandomState:
    """Return the random state that every lane starts from; this changes the present one."""
    seed_all(spec.seed)
    seeded, given = RandomState.capture(), spec.random
    if given is None:
        return seeded
    # What the bundle does not hold must be the same in every lane all the same.
    return RandomState(
        torch=given.torch if given.torch is not None else seeded.torch,
        cuda=(*given.cuda, *seeded.cuda[len(given.cuda) :]),
        python=given.python if given.python is not None else seeded.python,
        numpy=given.numpy if given.numpy is not None else seeded.numpy,
    )


def _lane_state(
    start: RandomState, outer: ProcessState, run: LaneRun, *, is_reference: bool, everything: bool
) -> ProcessState:
    flags = {**outer.flags, **(reference_flags() if is_reference else _flags_of(run))}
    known = {name: value for name, value in flags.items() if name in outer.flags}
    random = start if everything else replace(start, python=None, numpy=None)
    return ProcessState(random, known, everything=everything)


def _flags_of(run: LaneRun) -> dict[str, bool | str]:
    """Return the flags of a low-precision lane. TF32 that is emulated needs FP32 products to be FP32."""
    spec = run.spec
    tf32 = True if run.precision == "tf32" else spec.tf32
    if tf32 is not None:
        tf32 = tf32 and has_tf32(spec.device)
    return low_flags(tf32=tf32, reduced_precision_reduction=spec.reduced_precision_reduction)


def replay_lanes(spec: ReplaySpec) -> Trace:
    """Run every lane in lock-step and return the trace.

    Raises LaneFailure when the reference raises, UsageError for a loss that is no scalar. A low-precision lane that
    raises is recorded in its trace. Ctrl-C and a failure of nanprobe itself end every lane before they are raised.

    Swapping Python's and NumPy's generators at every boundary costs more than everything else about a switch, and few
    models draw from them: a replay first goes without, and is repeated with it when they were drawn from.
    """
    trace, drew = _replay(spec, everything=False)
    return _replay(spec, everything=True)[0] if drew else trace


def _replay(spec: ReplaySpec, *, everything: bool) -> tuple[Trace, bool]:
    """Return the trace, and whether Python's or NumPy's generator was drawn from without being swapped."""
    spec.progress.stage("replay")
    runs: list[LaneRun] = []
    with _put_back(spec) as outer:
        try:
            conductor = Conductor(lambda place: spec.progress.step(detail=place))
            names = (spec.reference, *spec.precisions)
            runs.extend(LaneRun(spec, name, conductor, is_reference=i == 0) for i, name in enumerate(names))
            start = _start(spec)
            threads = [
                LaneThread(
                    run.precision,
                    _in_lane(run, torch.get_num_threads()),
                    _lane_state(start, outer, run, is_reference=run.is_reference, everything=everything),
                )
                for run in runs
            ]
            start.restore()
            before = RandomState.capture()
            conductor.run(threads[0], threads[1:])
            drew = not everything and not RandomState.capture().same_outside_torch(before)
            _check(runs, threads)
        finally:
            for run in runs:
                run.lane.detach()
    if not drew:
        for run in runs:
            if run.gradients_went_bad():
                run.backward_origin = _alone(spec, run.precision, LaneRun.find_backward_origin)
    return _trace(spec, runs, threads), drew


def _in_lane(run: LaneRun, threads: int) -> Callable[[], None]:
    context = contextvars.copy_context()

    def body() -> None:
        # The number of threads of an operation is kept per thread.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        context.run(run.body)

    return body


def _trace(spec: ReplaySpec, runs: list[LaneRun], threads: list[LaneThread]) -> Trace:
    traces = [run.trace(thread) for run, thread in zip(runs, threads, strict=True)]
    return Trace(
        reference=traces[0],
        lanes={trace.precision: trace for trace in traces[1:]},
        modules={path: type(module).__name__ for path, module in spec.model.named_modules()},
        not_callable=tuple(path for path, module in spec.model.named_modules() if _has_no_forward(module)),
        parameters=_owners(spec.model),
    )


def _check(runs: list[LaneRun], threads: list[LaneThread]) -> None:
    """Raise what ended the reference, and whatever in another lane was no failure of the model's."""
    for run, thread in zip(runs, threads, strict=True):
        error = thread.error
        if error is None:
            continue
        if isinstance(error, (NanprobeError, KeyboardInterrupt, SystemExit)):
            raise error
        if run.is_reference:
            lane = run.lane
            raise LaneFailure(error, lane.raised, lane.copied.model, run.call, lane.failing_inputs) from error


def _alone(spec: ReplaySpec, precision: str, act: Callable[[LaneRun], T]) -> T:
    """Run one lane by itself, unobserved, from the same starting point as in a replay."""
    is_reference = precision == spec.reference
    with _put_back(spec) as outer:
        run = LaneRun(spec, precision, None, is_reference=is_reference)
        try:
            _lane_state(_start(spec), outer, run, is_reference=is_reference, everything=True).install()
            return contextvars.copy_context().run(act, run)
        finally:
            run.lane.detach()


def output_holds_loss(spec: ReplaySpec) -> bool:
    """Run the reference's forward without gradients and tell whether its output holds a loss.

    False when it raises: the replay proper will raise the same, and say where.
    """
    try:
        return _alone(replace(spec, backward=False), spec.reference, LaneRun.finds_loss)
    except (MemoryError, NanprobeError):
        raise
    except Exception:  # the model's own; see above
        return False


def reference_noise(spec: ReplaySpec) -> float | None:
    """Run the reference's forward twice from the same random state and return how far its outputs are apart.

    A relative 2-norm over all floating outputs; 0 for a deterministic model, None when there is nothing to compare.
    """
    alone = replace(spec, backward=False)
    try:
        first, second = (_alone(alone, spec.reference, LaneRun.outputs) for _ in range(2))
    except (MemoryError, NanprobeError):
        raise
    except Exception:  # the model's own; see above
        return None
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a.dtype.is_floating_point]
    if len(first) != len(second) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return total_difference(d for d in (difference(a, b) for a, b in pairs) if d is not None).rel_error


def largest_loss_scale(spec: ReplaySpec, precision: str, scales: Iterable[float]) -> float | None:
    """Return the first of ``scales`` at which every gradient of one lane is finite, None when there is none."""
    return _alone(spec, precision, lambda run: run.largest_scale(scales))


def scale_window(spec: ReplaySpec, precision: str, trace: Trace) -> ScaleWindow | None:
    """Return the loss scales that would serve one lane of a replay, None when it has no gradients."""
    counted = [(g.zero, trace.reference.gradient_elements[n]) for n, g in trace.reference.gradients.items()]
    zeros, elements = (sum(column) for column in zip(*counted, strict=True)) if counted else (0, 0)
    try:
        return _alone(spec, precision, lambda run: run.gradients_at(lambda at: window_of(at, zeros, elements)))
    except (MemoryError, NanprobeError):
        raise
    except Exception:  # the model's own: it may not run backward twice
        return None


def trace_operations(
    spec: ReplaySpec,
    precision: str,
    *,
    shadows: bool = True,
    stretch: Stretch | None = None,
    held: Mapping[int, bool] = NOTHING_HELD,
) -> Operations:
    """Run one lane alone and return what its operations did; without ``shadows`` only where they went non-finite.

    ``stretch`` bounds the shadows: from the beginning of one (module, visit) to the end of another. What was seen of a
    lane that raises before its end is returned. ``held`` are the numbers of records whose operations get the lane's
    own operands in the shadow too, and, where that is true, constants as the format holds them.
    """
    return _alone(spec, precision, lambda run: run.trace_operations(shadows=shadows, stretch=stretch, held=held))


def run_with_memory(spec: ReplaySpec, precision: str, value: float) -> UnwrittenRun | None:
    """Run forward and loss of one lane with new memory filled with ``value``; None when the model's code raises."""
    try:
        return _alone(replace(spec, backward=False), precision, lambda run: run.with_memory(value))
    except (MemoryError, NanprobeError):
        raise
    except Exception:  # the model's own: it may stumble over what the memory holds
        return None


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to the model or to a module in it."""
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _has_no_forward(module: nn.Module) -> bool:
    """Whether calling the module can only raise, as with ``nn.ModuleList``."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _owners(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    owners: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(f"{path}.{name}" if path else name, (path, tuple(parameter.shape)))
    return owners
