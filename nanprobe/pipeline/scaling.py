"""Whether to run backward, and at which loss scale."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from nanprobe.config import Settings
from nanprobe.diagnose.underflow import gradient_underflow
from nanprobe.errors import UsageError
from nanprobe.lanes.run import largest_loss_scale, output_holds_loss, replay_lanes, scale_window
from nanprobe.lanes.spec import ReplaySpec
from nanprobe.lanes.trace import LaneTrace, Trace

__all__ = ["DEFAULT_LOSS_SCALE", "decide_backward", "with_loss_scale", "with_scale_window"]

DEFAULT_LOSS_SCALE = 65536.0
"""Where dynamic loss scaling starts: the initial scale of ``torch.amp.GradScaler``."""


def decide_backward(spec: ReplaySpec, settings: Settings, timings: dict[str, float]) -> bool:
    """Return whether to run backward: as asked for, else when there is a loss, given or found in the output."""
    if settings.backward is not None:
        return settings.backward
    if spec.loss is not None:
        return True
    began = time.perf_counter()
    found = output_holds_loss(spec)
    timings["look for a loss"] = time.perf_counter() - began
    return found


def with_loss_scale(spec: ReplaySpec, settings: Settings, timings: dict[str, float]) -> tuple[Trace, list[str]]:
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
    if not dynamic or not _has_bad_gradients(trace.lanes["fp16"]):
        return trace, []
    in_reference = _has_bad_gradients(trace.reference)
    if not math.isfinite(trace.lanes["fp16"].loss or 0.0):
        note = "no loss scale was looked for: the fp16 loss is non-finite before any scaling, so none can help"
        return trace, [] if in_reference else [note]
    began = time.perf_counter()
    exponent = int(math.log2(DEFAULT_LOSS_SCALE))
    # What is bad without any scaling in FP32 can hardly be helped by a scale: then the smallest one tells.
    fitting = largest_loss_scale(spec, "fp16", (1.0,)) if in_reference else 1.0
    if fitting is not None:
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
    return _has_bad_gradients(trace.lanes["fp16"]) and not _has_bad_gradients(trace.reference)


def _has_bad_gradients(lane: LaneTrace) -> bool:
    return any(g.nan or g.posinf or g.neginf for g in lane.gradients.values())


def with_scale_window(spec: ReplaySpec, trace: Trace, timings: dict[str, float]) -> Trace:
    """Look for the loss scales that would serve, where FP16's gradients overflow or vanish and FP32's do neither."""
    lane = trace.lanes.get("fp16")
    if lane is None or not lane.backward_ran or not math.isfinite(lane.loss or 0.0):
        return trace
    if not _scaled_gradients_overflow(trace) and gradient_underflow(trace, lane) is None:
        return trace
    began = time.perf_counter()
    window = scale_window(spec, "fp16", trace)
    timings["look for the window of loss scales"] = time.perf_counter() - began
    return replace(trace, lanes={**trace.lanes, "fp16": replace(lane, scale_window=window)})
