"""Rules about plain numbers: loss scale, learning rate, schedule, the training log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from nanprobe.checkpoints.records import Scalar
from nanprobe.numerics.stored import Tally
from nanprobe.scan.rules.finding import counted, file_finding, tensor_finding
from nanprobe.scan.subject import Subject, Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["judge_scalars"]

SMALLEST_SCALE = 1.0
"""Loss scale below which scaling makes gradients smaller: every reported run that got there was lost."""

LARGEST_SCALE = 2.0**32
"""Loss scale above which fp16 overflows for any gradient above 1.5e-5; healthy runs stay below 2**24."""

LARGEST_RATE = 100.0

_LOSS_SCALE_TENSOR = "loss-scale"
_LEGITIMATE_INF = ("best", "mode_worse", "min_scale", "max_scale", "clip", "max_lr", "threshold")
"""Last parts of names of plain values that are infinite by design: the best score before the first."""


def judge_scalars(subject: Subject) -> Iterator[ScanFinding]:
    """Yield what is wrong with the plain numbers of a checkpoint, and with tensors that hold one."""
    scalars = subject.scalars
    stepping = any(scalar.role == "scheduler" for scalar in scalars)
    for scalar in scalars:
        if isinstance(scalar.value, str):
            continue
        if scalar.role == "loss-scale":
            yield from _loss_scale(scalar.file, scalar.name, float(scalar.value))
        elif scalar.role == "lr":
            yield from _rate(scalar.file, scalar.name, float(scalar.value), stepping)
        elif scalar.role in ("scaler", "param-group", "scheduler", "step", "epoch", "callback"):
            yield from _other(scalar)
    yield from _log([scalar for scalar in scalars if scalar.role == "log"])
    yield from _schedule(scalars)
    for tensor in subject.tensors:
        yield from _scalar_tensor(tensor, stepping)
    yield from _absent(subject)


def _loss_scale(file: str, key: str, value: float) -> Iterator[ScanFinding]:
    evidence = {"key": key, "value": value}
    if not math.isfinite(value):
        yield file_finding(file, "loss-scale-nonfinite", "error", f"{key}: the loss scale is {value}", evidence)
    elif value < SMALLEST_SCALE:
        what = "zero" if value == 0 else "negative" if value < 0 else f"{value:.3g}, less than 1"
        message = f"{key}: the loss scale is {what}: gradients overflowed at every scale that was tried"
        yield file_finding(file, "loss-scale-collapsed", "error", message, evidence)
    elif value > LARGEST_SCALE:
        message = f"{key}: the loss scale is {value:.3g}: it has grown for so long that no gradient can have been large"
        yield file_finding(
            file, "loss-scale-nonfinite", "warning", message, evidence, "check that gradients reach the scaler at all"
        )


def _rate(file: str, key: str, value: float, stepping: bool) -> Iterator[ScanFinding]:
    evidence = {"key": key, "value": value}
    if not math.isfinite(value):
        yield file_finding(file, "nonfinite-scalar", "error", f"the learning rate {key} is {value}", evidence)
    elif value < 0:
        yield file_finding(
            file, "learning-rate", "warning", f"the learning rate {key} is negative: {value:g}", evidence
        )
    elif value == 0:
        severity = "note" if stepping else "warning"
        why = "a schedule at its start or its end" if stepping else "nothing is learned, and there is no schedule"
        yield file_finding(file, "learning-rate", severity, f"the learning rate {key} is 0: {why}", evidence)
    elif value > LARGEST_RATE:
        yield file_finding(file, "learning-rate", "warning", f"the learning rate {key} is {value:g}", evidence)


def _other(scalar: Scalar) -> Iterator[ScanFinding]:
    value = float(scalar.value)
    if math.isfinite(value):
        return
    last = scalar.name.rpartition(".")[2]
    severity = "error"
    if scalar.role == "callback" or (not math.isnan(value) and last in _LEGITIMATE_INF):
        severity = "note"
    yield file_finding(
        scalar.file, "nonfinite-scalar", severity, f"{scalar.name} is {value}", {"key": scalar.name, "value": value}
    )


def _log(entries: Sequence[Scalar]) -> Iterator[ScanFinding]:
    """Judge a training log: one finding for each quantity that went bad, with the step from which on."""
    groups: dict[tuple[str, str], list[Scalar]] = {}
    for entry in entries:
        groups.setdefault((entry.file, str(entry.path[-1])), []).append(entry)
    for (file, key), values in groups.items():
        bad = [entry for entry in values if isinstance(entry.value, int | float) and not math.isfinite(entry.value)]
        if not bad:
            continue
        first = bad[0]
        only_inf = all(math.isinf(float(entry.value)) for entry in bad)
        # A gradient norm of Inf is what a loss scaler that tries a scale too large looks like.
        severity = "warning" if only_inf and "norm" in key else "error"
        evidence = {"key": key, "count": len(bad), "elements": len(values), "step": first.step, "value": first.value}
        since = f" from step {first.step:,} on" if first.step is not None else ""
        message = f"the training log's {key} is not finite in {len(bad):,} of {len(values):,} entries{since}"
        yield file_finding(file, "nonfinite-scalar", severity, message, evidence)


def _schedule(scalars: Sequence[Scalar]) -> Iterator[ScanFinding]:
    """Judge whether the schedule went along with the run: one that never moved starts again on resuming."""
    steps = [scalar for scalar in scalars if scalar.role == "step" and scalar.name == "global_step"]
    done = max((float(scalar.value) for scalar in steps if not isinstance(scalar.value, str)), default=0.0)
    if not done > 1:
        return
    for scalar in scalars:
        if scalar.role == "scheduler" and scalar.path[-1] == "last_epoch" and scalar.value == 0:
            message = f"the schedule {scalar.name} stands at its start, and the run at step {done:,.0f}"
            yield file_finding(
                scalar.file, "learning-rate", "warning", message, {"key": scalar.name, "value": 0, "step": done}
            )


def _scalar_tensor(tensor: Tensor, stepping: bool) -> Iterator[ScanFinding]:
    tally = tensor.tally
    if tally is None or not tally.elements:
        return
    state, role = tensor.role.state, tensor.role.role
    if role == "learning-rate":
        for value in dict.fromkeys(_values(tally)):
            yield from _rate(tensor.entry.file, tensor.name, value, stepping)
    elif role == "other" and state == _LOSS_SCALE_TENSOR:
        for value in dict.fromkeys(_values(tally)):
            yield from _loss_scale(tensor.entry.file, tensor.name, value)
    elif role == "other" and tally.nonfinite and state != "bytes":
        severity = "note" if state == "callback" or "callbacks" in tensor.entry.path else "error"
        if not tally.nan and tensor.name.rpartition(".")[2] in _LEGITIMATE_INF:
            severity = "note"
        evidence = counted(
            tensor, nan=tally.nan, posinf=tally.posinf, neginf=tally.neginf, count=tally.nonfinite, absmax=tally.absmax
        )
        rule = "nonfinite-optimizer-state" if state == "optimizer" and severity != "note" else "nonfinite-scalar"
        message = f"{tally.nonfinite:,} of {tally.elements:,} elements are not finite"
        yield tensor_finding(tensor, rule, severity, message, evidence)


def _values(tally: Tally) -> list[float]:
    """Return one value for each kind that a small tensor holds: the extremes, and each kind of non-finite."""
    values = [value for value in (tally.low, tally.high) if value is not None]
    values += [math.nan] * bool(tally.nan) + [math.inf] * bool(tally.posinf) + [-math.inf] * bool(tally.neginf)
    return values


def _absent(subject: Subject) -> Iterator[ScanFinding]:
    """Say when a run in fp16 saved its optimizer and no loss scaler."""
    if any(scalar.role == "loss-scale" for scalar in subject.scalars):
        return
    tensors = subject.tensors
    if any(tensor.role.state == _LOSS_SCALE_TENSOR for tensor in tensors):
        return
    moments = [tensor for tensor in tensors if tensor.role.role == "moment"]
    if not moments:
        return
    asked = [
        scalar for scalar in subject.scalars
        if scalar.role == "training-args" and scalar.path[-1] in ("fp16", "use_fp16") and scalar.value is True
    ]  # fmt: skip
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.role.role == "weight":
            weights[tensor.entry.dtype] += tensor.entry.elements
    half = bool(weights) and weights.most_common(1)[0][0] == "float16"
    if not asked and not half:
        return
    why = f"{asked[0].name} is true" if asked else "the weights are in fp16"
    message = (
        f"{why} and the optimizer's state is there, but no loss scale: resuming starts at the scaler's initial one"
    )
    file = asked[0].file if asked else moments[0].entry.file
    yield file_finding(file, "loss-scale-absent", "warning", message, {"moments": len(moments)})
