"""The commands ``replay`` and ``compare-precisions`` as one readable function: load, look, replay, diagnose, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanprobe.config import Config, Settings
from nanprobe.diagnose.before import StoredFault, stored_faults
from nanprobe.diagnose.findings import apply_ignores, findings
from nanprobe.diagnose.lane import diagnose_lane
from nanprobe.diagnose.noise import not_deterministic, unsettled, without_noise, worth_repeating
from nanprobe.diagnose.reproduction import not_reproduced
from nanprobe.diagnose.rows import coverage, gradient_rows, visit_rows
from nanprobe.diagnose.step import step_findings, with_step, with_window
from nanprobe.diagnose.tolerances import Tolerances
from nanprobe.diagnose.verdicts import precision_results, worst_first_bad, worst_verdict
from nanprobe.errors import IncompleteError, NanprobeError, UsageError
from nanprobe.exit_codes import verdict_exit_code
from nanprobe.formats import carrier_of
from nanprobe.inputs.call import Call, bind, left_to_the_loss
from nanprobe.inputs.device import check_device
from nanprobe.inputs.mismatch import explain_forward_error
from nanprobe.inputs.model import check_values
from nanprobe.lanes.lane_model import kept_paths
from nanprobe.lanes.run import has_compiled_parts, reference_noise
from nanprobe.lanes.spec import LaneFailure, ReplaySpec, batch_size_of
from nanprobe.lanes.stored import survey
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.pipeline.conditions import conditions, environment
from nanprobe.pipeline.memory import to_unwritten_memory
from nanprobe.pipeline.scaling import decide_backward, with_loss_scale, with_scale_window
from nanprobe.pipeline.subject import Subject, load_subject
from nanprobe.pipeline.tracing import to_operations
from nanprobe.progress import SILENT, Progress
from nanprobe.records import Finding, ReplayReport, Tool
from nanprobe.version import __version__

__all__ = ["replay_command", "run_replay"]


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
    subject = load_subject(config, trust_pickle=trust_pickle)
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
        bind=lambda model, value: _arguments(bind(model, value, subject.call, targets=subject.loss is not None)),
        precisions=low,
        reference=reference,
        loss=subject.loss,
        mode=settings.mode,
        autocast_policy=settings.autocast_policy,
        attention=settings.attention,
        fp8_scaling=settings.fp8_scaling,
        tf32=settings.tf32,
        reduced_precision_reduction=settings.reduced_precision_reduction,
        flush_subnormals=settings.flush_subnormals,
        train=settings.resolved_train(loss_given=subject.loss is not None),
        device=device,
        seed=settings.seed,
        random=subject.random,
        keep_fp32=settings.keep_fp32,
        local_error=local_error,
        batch_size=batch_size_of(subject.batch, dim),
        batch_dim=dim,
        weights=subject.weights,
        step=subject.step,
        progress=progress,
    )
    check_values(subject.model)
    bind(subject.model, subject.batch, subject.call, targets=subject.loss is not None)
    timings = dict(subject.timings)
    progress.stage("look at the batch and the weights")
    began = time.perf_counter()
    stored = _stored(subject, spec, settings)
    timings["survey"] = time.perf_counter() - began
    try:
        notes = list(subject.notes)
        targets = left_to_the_loss(subject.model, subject.batch, subject.call) if subject.loss is not None else None
        if targets is not None:
            notes.append(targets)
        spec = replace(spec, backward=decide_backward(spec, settings, timings))
        if spec.step is not None and not spec.backward:
            notes.append("no step was taken: `optimizer` and `clip_grad_norm` need a loss and a backward pass")
        trace, scale_notes = with_loss_scale(spec, settings, timings)
        trace = with_scale_window(spec, trace, timings)
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
    unwritten: tuple[Finding, ...] = ()
    if worth_repeating(diagnoses):
        began = time.perf_counter()
        noise = reference_noise(spec)
        if noise:
            diagnoses = {name: without_noise(diagnosis, noise) for name, diagnosis in diagnoses.items()}
        timings["repeat"] = time.perf_counter() - began
    if operations:
        began = time.perf_counter()
        lanes = {reference: trace.reference, **trace.lanes}
        diagnoses = {name: to_operations(spec, lanes[name], diagnosis) for name, diagnosis in diagnoses.items()}
        notes.extend(note for diagnosis in diagnoses.values() for note in diagnosis.notes)
        diagnoses, unwritten = to_unwritten_memory(spec, trace, diagnoses)
        timings["trace"] = time.perf_counter() - began
    by_name = {reference: trace.reference, **trace.lanes}
    diagnoses = {name: with_step(trace, by_name[name], diagnosis) for name, diagnosis in diagnoses.items()}
    doubts = (not_deterministic(reference, noise),) if noise else ()
    told = (*findings(trace, diagnoses), *step_findings(trace), *unwritten, *doubts)
    found = apply_ignores(with_window(told, trace.lanes), settings.ignore)
    lost = frozenset(n for n, d in settled.items() if d.divergence is not None and diagnoses[n].divergence is None)
    results = unsettled(precision_results(trace, diagnoses, found), lost)
    for lane in (trace.reference, *trace.lanes.values()):
        timings[f"lane {lane.precision}"] = lane.seconds - lane.measuring_seconds
    timings["compare"] = sum(lane.measuring_seconds for lane in (trace.reference, *trace.lanes.values()))
    timings["total"] = time.perf_counter() - started
    verdict = worst_verdict(results, reference)
    circumstances = conditions(spec, settings, trace, tuple(notes))
    around = {"precisions": low, "device": device.type, "compiled": has_compiled_parts(subject.model)}
    missed = not_reproduced(subject.original, verdict, {**circumstances, **around})
    if missed is not None:
        found = (*found, *apply_ignores((missed,), settings.ignore))
    report = ReplayReport(
        tool=Tool(version=__version__),
        command=command,
        exit_code=0,
        verdict=verdict,
        subject=subject.described,
        environment=environment(device),
        conditions=circumstances,
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
    formats = tuple(carrier_of(name).name for name in spec.precisions if carrier_of(name).bits == 16) if cast else ()
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
