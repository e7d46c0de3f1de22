"""Each command as one readable function: load, look, replay, diagnose, report.

Nothing here prints or exits. The command line and the Python interface both end in :func:`run_replay`.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanprobe.checkpoints import content_digest
from nanprobe.config import Config, Settings
from nanprobe.diagnose.before import StoredFault, stored_faults
from nanprobe.diagnose.findings import apply_ignores, findings
from nanprobe.diagnose.lane import LaneDiagnosis, diagnose_lane
from nanprobe.diagnose.noise import not_deterministic, unsettled, without_noise, worth_repeating
from nanprobe.diagnose.operation import (
    diverging_place,
    needs_earlier,
    places_to_trace,
    with_drift,
    with_operations,
)
from nanprobe.diagnose.rows import coverage, gradient_rows, visit_rows
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.diagnose.verdicts import precision_results, worst_first_bad, worst_verdict
from nanprobe.errors import IncompleteError, NanprobeError, UsageError
from nanprobe.exit_codes import verdict_exit_code
from nanprobe.inputs.batch import load_batch
from nanprobe.inputs.call import Call, bind
from nanprobe.inputs.device import check_device
from nanprobe.inputs.loss import build_loss
from nanprobe.inputs.mismatch import explain_forward_error
from nanprobe.inputs.model import build_model
from nanprobe.inputs.rng import RandomState
from nanprobe.inputs.state_dict import read_state_dict
from nanprobe.inputs.weights import load_into
from nanprobe.lanes.lane_model import Weights, kept_paths
from nanprobe.lanes.process_state import read_flags
from nanprobe.lanes.run import (
    find_drift,
    find_operations,
    has_compiled_parts,
    largest_loss_scale,
    output_holds_loss,
    reference_noise,
    replay_lanes,
)
from nanprobe.lanes.spec import LaneFailure, LossFunction, ReplaySpec, batch_size_of
from nanprobe.lanes.stored import survey
from nanprobe.lanes.trace import BackwardOrigin, LaneTrace, Trace
from nanprobe.numerics.autocast_policy import unknown_to_us
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.progress import SILENT, Progress
from nanprobe.records import ReplayReport, Tool
from nanprobe.version import __version__

__all__ = ["Subject", "replay_command", "run_replay"]

_WITH_FUSED_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)

_ATTENTION = {
    "math": "scaled-dot-product attention took PyTorch's math back end in every lane",
    "math-half": (
        "scaled-dot-product attention was written out, its scores kept in each lane's own precision and scaled after "
        "the product, as hand-written code has it"
    ),
}
"""What a report says about attention that is not left to PyTorch's choice."""

DEFAULT_LOSS_SCALE = 65536.0
"""Where dynamic loss scaling starts: the initial scale of ``torch.amp.GradScaler``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What is replayed, loaded: the model, the batch as saved, the loss, and what the report says of them.

    ``call`` says how the batch becomes arguments. ``weights`` maps the checkpoint afresh; ``random`` is the random
    state of the original step; ``timings`` are seconds already spent by stage.
    """

    model: nn.Module
    batch: Any
    call: str = "auto"
    loss: LossFunction | None = None
    weights: Weights | None = None
    random: RandomState | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)


def replay_command(
    config: Config,
    *,
    command: str,
    precisions: tuple[str, ...],
    local_error: bool = True,
    operations: bool = True,
    trust_pickle: bool = False,
    overrides: Sequence[str] = (),
    progress: Progress = SILENT,
    started: float | None = None,
    import_seconds: float = 0.0,
) -> ReplayReport:
    """Load what ``config`` names and replay it: the commands ``replay`` and ``compare-precisions``.

    ``overrides`` are the words of the command line that beat the config file; the report keeps them.
    """
    started = time.perf_counter() if started is None else started
    progress.stage("load")
    began = time.perf_counter()
    subject = _load(config, trust_pickle=trust_pickle)
    timings = {"import": import_seconds, "load": time.perf_counter() - began}
    return run_replay(
        replace(subject, timings=timings, described={**subject.described, "overrides": list(overrides)}),
        config.settings,
        command=command,
        precisions=precisions,
        local_error=local_error,
        operations=operations,
        progress=progress,
        started=started,
    )


def _load(config: Config, *, trust_pickle: bool) -> Subject:
    settings = config.settings
    check_device(settings.device)
    if config.batch is None:
        raise UsageError("there is no batch to replay")
    loaded = load_batch(config.batch, trust_pickle=trust_pickle, folder=config.folder)
    model = build_model(config.model, config.folder, settings.seed, with_weights=config.checkpoint is None)
    loss = build_loss(config.loss, config.folder) if config.loss is not None else None
    described: dict[str, Any] = {
        "config": str(config.source) if config.source is not None else None,
        "batch": {"path": config.batch.given, "digest": content_digest(config.batch.path)},
        "checkpoint": None,
    }
    notes = list(config.notes)
    weights: Weights | None = None
    spec = config.checkpoint
    if spec is not None:
        # Mapped again later, when the model's code may have gone to another folder.
        fixed = spec.path.absolute()

        def weights() -> Mapping[str, torch.Tensor]:
            return read_state_dict(fixed, key=spec.key, strip_prefix=spec.strip_prefix)

        result = load_into(
            model,
            read_state_dict(spec.path, key=spec.key, strip_prefix=spec.strip_prefix),
            strict=spec.strict,
        )
        notes.extend(result.notes)
        described["checkpoint"] = {"path": spec.given, "digest": content_digest(spec.path)}
        if result.missing or result.unexpected:
            described["checkpoint"]["missing"] = list(result.missing)
            described["checkpoint"]["unexpected"] = list(result.unexpected)
    random = None
    if loaded.bundle is not None and loaded.bundle.rng is not None:
        random = loaded.bundle.rng
        unavailable = random.not_restorable()
        if unavailable is not None:
            notes.append(unavailable)
    return Subject(
        model=model,
        batch=loaded.value,
        call=config.batch.call,
        loss=loss,
        weights=weights,
        random=random,
        described=described,
        notes=tuple(notes),
    )


def run_replay(
    subject: Subject,
    settings: Settings,
    *,
    command: str,
    precisions: tuple[str, ...],
    local_error: bool = True,
    operations: bool = True,
    progress: Progress = SILENT,
    started: float | None = None,
) -> ReplayReport:
    """Replay ``subject`` and diagnose it; with ``operations`` down to the single operation where one can be told.

    UsageError when the batch does not fit the model, IncompleteError when the reference raises for another reason, no
    memory is left, or nothing could be observed. The model, its gradients and all random state are left as they were.
    """
    started = time.perf_counter() if started is None else started
    reference = "fp64" if "fp64" in precisions or set(precisions) == {"fp32"} else "fp32"
    low = tuple(name for name in precisions if name != reference)
    device = check_device(settings.device)
    dim = settings.batch_dim
    spec = ReplaySpec(
        model=subject.model,
        batch=subject.batch,
        bind=lambda model, value: _arguments(bind(model, value, subject.call)),
        precisions=low,
        reference=reference,
        loss=subject.loss,
        mode=settings.mode,
        autocast_policy=settings.autocast_policy,
        attention=settings.attention,
        train=settings.resolved_train(loss_given=subject.loss is not None),
        device=device,
        seed=settings.seed,
        random=subject.random,
        keep_fp32=settings.keep_fp32,
        local_error=local_error,
        batch_size=batch_size_of(subject.batch, dim),
        batch_dim=dim,
        weights=subject.weights,
        progress=progress,
    )
    bind(subject.model, subject.batch, subject.call)
    timings = dict(subject.timings)
    progress.stage("look at the batch and the weights")
    began = time.perf_counter()
    stored = _stored(subject, spec, settings)
    timings["survey"] = time.perf_counter() - began
    try:
        notes = list(subject.notes)
        spec = replace(spec, backward=_decide_backward(spec, settings, timings))
        trace, scale_notes = _with_loss_scale(spec, settings, timings)
        notes.extend(scale_notes)
    except LaneFailure as failure:
        raise _explained(failure) from failure.error
    if not trace.reference.visits:
        raise IncompleteError("nothing could be observed: no module of the model was called")
    began = time.perf_counter()
    diagnoses = {
        name: diagnose_lane(trace, lane, Tolerances(precision=name, given=settings.tolerances), stored)
        for name, lane in ((reference, trace.reference), *trace.lanes.items())
    }
    timings["diagnose"] = time.perf_counter() - began
    noise = None
    settled = diagnoses
    if worth_repeating(diagnoses):
        began = time.perf_counter()
        noise = reference_noise(spec)
        if noise:
            diagnoses = {name: without_noise(diagnosis, noise) for name, diagnosis in diagnoses.items()}
        timings["repeat"] = time.perf_counter() - began
    if operations:
        began = time.perf_counter()
        lanes = {reference: trace.reference, **trace.lanes}
        diagnoses = {
            name: _to_operations(spec, name, diagnosis, lanes[name].backward_origin)
            for name, diagnosis in diagnoses.items()
        }
        timings["trace"] = time.perf_counter() - began
    doubts = (not_deterministic(reference, noise),) if noise else ()
    found = apply_ignores((*findings(trace, diagnoses), *doubts), settings.ignore)
    lost = frozenset(n for n, d in settled.items() if d.divergence is not None and diagnoses[n].divergence is None)
    results = unsettled(precision_results(trace, diagnoses, found), lost)
    for lane in (trace.reference, *trace.lanes.values()):
        timings[f"lane {lane.precision}"] = lane.seconds - lane.measuring_seconds
    timings["compare"] = sum(lane.measuring_seconds for lane in (trace.reference, *trace.lanes.values()))
    timings["total"] = time.perf_counter() - started
    report = ReplayReport(
        tool=Tool(version=__version__),
        command=command,
        exit_code=0,
        verdict=worst_verdict(results, reference),
        subject=subject.described,
        environment=_environment(device),
        conditions=_conditions(spec, settings, trace, tuple(notes)),
        precisions=results,
        reference=reference,
        first_bad=worst_first_bad(results, reference),
        modules=visit_rows(trace, diagnoses),
        gradients=gradient_rows(trace),
        timings=timings,
        findings=found,
        coverage=coverage(trace),
    )
    return replace(report, exit_code=verdict_exit_code(report))


def _to_operations(
    spec: ReplaySpec, name: str, diagnosis: LaneDiagnosis, backward: BackwardOrigin | None
) -> LaneDiagnosis:
    """Go down from the visits that a diagnosis names to the operations in them, by running the lane again."""
    operations = find_operations(spec, name, places_to_trace(diagnosis))
    earlier = None
    if needs_earlier(diagnosis, operations):
        earlier = find_operations(spec, name, [("", 0)]).get(("", 0))
    named = with_operations(diagnosis, operations, earlier=earlier, backward=backward)
    place = diverging_place(diagnosis)
    if place is None or diagnosis.divergence is None or diagnosis.divergence.tolerance is None:
        return named
    return with_drift(named, find_drift(spec, name, place, diagnosis.divergence.tolerance))


def _explained(failure: LaneFailure) -> NanprobeError:
    """Tell apart why the reference raised: no memory, a batch that does not fit, or the model itself."""
    place = failure.raised.module if failure.raised is not None else None
    if is_out_of_memory(failure.error):
        where = f" in {place or 'the model itself'}" if place is not None else ""
        return IncompleteError(
            f"out of memory while the FP32 reference ran{where}; replay one precision at a time (replay --dtype), "
            "without backward (--no-backward), or a smaller batch"
        )
    call = Call(args=failure.args_of_call, kwargs=failure.kwargs_of_call)
    explained = explain_forward_error(failure.error, failure.model, call, place, failure.inputs)
    return UsageError(explained) if explained is not None else failure


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(call.args), dict(call.kwargs)


def _stored(subject: Subject, spec: ReplaySpec, settings: Settings) -> tuple[StoredFault, ...]:
    cast = settings.mode == "cast"
    formats = tuple(name for name in spec.precisions if name in ("fp16", "bf16")) if cast else ()
    return stored_faults(
        survey(
            subject.model,
            subject.batch,
            formats=formats,
            kept=kept_paths(subject.model, settings.keep_fp32),
            batch_size=spec.batch_size,
            batch_dim=spec.batch_dim,
        )
    )


def _decide_backward(spec: ReplaySpec, settings: Settings, timings: dict[str, float]) -> bool:
    """Return whether to run backward: as asked for, else when there is a loss, given or found in the output."""
    if settings.backward is not None:
        return settings.backward
    if spec.loss is not None:
        return True
    began = time.perf_counter()
    found = output_holds_loss(spec)
    timings["look for a loss"] = time.perf_counter() - began
    return found


def _with_loss_scale(spec: ReplaySpec, settings: Settings, timings: dict[str, float]) -> tuple[Trace, list[str]]:
    """Replay with the loss scale that was given, or as dynamic loss scaling would find it; say what it came to."""
    given = settings.loss_scale
    scales = dict.fromkeys(spec.precisions, given if given is not None else 1.0)
    dynamic = spec.backward and given is None and "fp16" in spec.precisions
    if dynamic:
        scales["fp16"] = DEFAULT_LOSS_SCALE
    spec = replace(spec, loss_scales=scales)
    trace = replay_lanes(spec)
    if settings.backward and not trace.reference.loss_found:
        raise UsageError(
            "backward was asked for, but there is no loss: name one with `loss:`, or return it as output.loss"
        )
    if not dynamic or not _scaled_gradients_overflow(trace):
        return trace, []
    if not math.isfinite(trace.lanes["fp16"].loss or 0.0):
        return trace, ["no loss scale was looked for: the fp16 loss is non-finite before any scaling, so none can help"]
    began = time.perf_counter()
    exponent = int(math.log2(DEFAULT_LOSS_SCALE))
    fitting = largest_loss_scale(spec, "fp16", (2.0**k for k in range(exponent - 1, -1, -1)))
    timings["look for a loss scale"] = time.perf_counter() - began
    settled = fitting if fitting is not None else 1.0
    note = (
        f"dynamic loss scaling settled at {settled:g}; larger powers of two overflow"
        if fitting is not None
        else "no loss scale down to 1 keeps the fp16 gradients finite"
    )
    return replay_lanes(replace(spec, loss_scales={**scales, "fp16": settled})), [note]


def _scaled_gradients_overflow(trace: Trace) -> bool:
    def bad(lane: LaneTrace) -> bool:
        return any(g.nan or g.posinf or g.neginf for g in lane.gradients.values())

    return bad(trace.lanes["fp16"]) and not bad(trace.reference)


def _environment(device: torch.device) -> dict[str, Any]:
    flags = read_flags()
    environment: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    environment.update({name: value for name, value in flags.items() if name != "default_dtype"})
    environment["default_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    environment["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return environment


def _conditions(spec: ReplaySpec, settings: Settings, trace: Trace, notes: tuple[str, ...]) -> dict[str, Any]:
    autocast = settings.mode == "autocast"
    followed = "cuda" if spec.emulates_cuda else spec.device.type
    policy = followed if autocast else None
    emulated: dict[str, Any] = {}
    drawn = {name: lane.drawn for name, lane in trace.lanes.items() if lane.drawn}
    if drawn:
        emulated["random draws made in FP32 and rounded"] = drawn
    for name, lane in trace.lanes.items():
        for why, counts in lane.emulated.items():
            emulated.setdefault(why, {})[name] = counts
    told = list(notes)
    if autocast and settings.autocast_policy != policy:
        told.append(
            f"autocast ran with PyTorch's {str(policy).upper()} operator lists, not the "
            f"{settings.autocast_policy.upper()} lists: PyTorch has no others for this device"
        )
    if autocast and spec.emulates_cuda and unknown_to_us():
        told.append(f"left alone, though CUDA's autocast changes them: {', '.join(unknown_to_us())}")
    if autocast and any(isinstance(module, _WITH_FUSED_PATHS) for module in spec.model.modules()):
        told.append(
            "fused paths of nn.MultiheadAttention and nn.TransformerEncoder are off in every lane, as under autocast"
        )
    if spec.attention in _ATTENTION:
        told.append(_ATTENTION[spec.attention])
    if has_compiled_parts(spec.model):
        told.append("compiled parts ran eagerly: compiled kernels keep FP32 where eager code rounds in between")
    for lane in (trace.reference, *trace.lanes.values()):
        told.extend(f"{lane.precision}: {note}" for note in lane.notes)
    scales = {name: lane.loss_scale for name, lane in trace.lanes.items()}
    return {
        "mode": settings.mode,
        "autocast_policy": policy,
        "attention": spec.attention,
        "loss_scale": max(scales.values(), default=1.0),
        "loss_scales": scales,
        "seed": settings.seed,
        "random_state": "restored from the bundle" if spec.random is not None else "from the seed",
        "train": spec.train,
        "backward": trace.reference.backward_ran,
        "local_error": spec.local_error,
        "keep_fp32": list(kept_paths(spec.model, settings.keep_fp32)),
        "batch_dim": spec.batch_dim,
        "batch_size": spec.batch_size,
        "emulated": emulated,
        "notes": list(dict.fromkeys(told)),
    }
