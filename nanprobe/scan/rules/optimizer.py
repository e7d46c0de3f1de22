"""Rules about an optimizer's state: moments that are no moments, counters that no longer count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from nanprobe.checkpoints.records import Scalar
from nanprobe.formats import by_dtype
from nanprobe.scan.look import boxes
from nanprobe.scan.roles import SECOND_MOMENTS
from nanprobe.scan.rules.finding import counted, file_finding, tensor_finding
from nanprobe.scan.rules.values import kinds_of, nonfinite_evidence, share_of
from nanprobe.scan.subject import Looks, Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["judge_moment", "judge_pairs", "judge_steps"]

_PAIRS = (("exp_avg", "exp_avg_sq"), ("momentum_buffer", "square_avg"), ("grad_avg", "square_avg"))
"""A first moment and the second moment that divides it."""


def judge_moment(tensor: Tensor, looks: Looks) -> Iterator[ScanFinding]:
    """Yield what is wrong with one moment on its own."""
    tally, state = tensor.tally, tensor.role.state
    if tally is None or not tally.elements:
        return
    if tally.nonfinite:
        evidence = nonfinite_evidence(tensor, tally, looks)
        at = f", first at {evidence['first_index']}" if "first_index" in evidence else ""
        message = f"{state or 'this state'} holds {kinds_of(tally)}: {share_of(tally.nonfinite, tally.elements)}{at}"
        yield tensor_finding(tensor, "nonfinite-optimizer-state", "error", message, evidence)
    if state in SECOND_MOMENTS and tally.low is not None and tally.low < 0:
        count = (
            looks.count(tensor.entry, lambda values: (values < 0) & np.isfinite(values))
            if looks.can(tensor.entry)
            else None
        )
        first = looks.first(tensor.entry, {"bad": lambda values: (values < 0) & np.isfinite(values)}).get("bad")
        evidence = counted(
            tensor, count=count, min=tally.low, absmax=tally.absmax, first_index=None if first is None else list(first)
        )
        many = share_of(count, tally.elements) if count is not None else "some elements"
        message = f"{state} is a mean of squares and negative in {many}, down to {tally.low:.4g}"
        yield tensor_finding(tensor, "negative-second-moment", "error", message, evidence)
    if tensor.entry.dtype in ("float16", "bfloat16"):
        second = state in SECOND_MOMENTS
        why = (
            "squares below 6e-8 become zero" if tensor.entry.dtype == "float16" and second else "small updates are lost"
        )
        evidence = counted(tensor, format=tensor.entry.dtype, absmax=tally.absmax)
        message = f"{state or 'this state'} is kept in {tensor.entry.dtype}, where {why}"
        yield tensor_finding(
            tensor, "dtype-mismatch", "warning", message, evidence, "keep the optimizer's moments in FP32"
        )


def judge_pairs(tensors: Sequence[Tensor], looks: Looks) -> Iterator[ScanFinding]:
    """Yield second moments that are zero where the first moment is not."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for tensor in tensors:
        if tensor.role.role == "moment":
            owner = tensor.name.rpartition(".")[0]
            groups.setdefault((tensor.entry.file, owner), {}).setdefault(tensor.role.state, tensor)
    for states in groups.values():
        for first_name, second_name in _PAIRS:
            first, second = states.get(first_name), states.get(second_name)
            if first is None or second is None or first.tally is None or second.tally is None:
                continue
            if not second.tally.zero or first.tally.zero == first.tally.elements:
                continue
            if first.entry.shape == second.entry.shape and looks.can(first.entry) and looks.can(second.entry):
                yield from _vanished(first, second, looks)


def _vanished(first: Tensor, second: Tensor, looks: Looks) -> Iterator[ScanFinding]:
    count = 0
    at: tuple[int, ...] | None = None
    for start, size in boxes(first.entry.shape):
        mask = (looks.read(second.entry, (start, size)) == 0) & (looks.read(first.entry, (start, size)) != 0)
        found = int(np.count_nonzero(mask))
        if found and at is None:
            inside = np.unravel_index(int(mask.reshape(-1).argmax()), size) if size else ()
            at = tuple(int(a) + int(b) for a, b in zip(start, inside, strict=True))
        count += found
    if count:
        evidence = counted(second, count=count, first_index=list(at or ()), absmax=second.tally and second.tally.absmax)
        message = (
            f"{second.role.state} is zero where {first.role.state} is not: {share_of(count, second.entry.elements)}; "
            "an update divides by eps alone there"
        )
        wide = second.entry.dtype in ("float32", "float64")
        remedy = "a larger eps bounds the update; or start this state afresh" if wide else None
        yield tensor_finding(second, "zero-second-moment", "warning", message, evidence, remedy)


def judge_steps(tensors: Sequence[Tensor], scalars: Sequence[Scalar]) -> Iterator[ScanFinding]:
    """Yield step counters that cannot count on, are zero beside moments that are not, or differ from the others."""
    moving = {
        (tensor.entry.file, tensor.name.rpartition(".")[0])
        for tensor in tensors
        if tensor.role.role == "moment" and tensor.tally and tensor.tally.zero < tensor.tally.elements
    }
    steps = [tensor for tensor in tensors if tensor.role.role == "step" and tensor.tally is not None]
    known: dict[str, Counter[float]] = {}
    for tensor in steps:
        value = _value(tensor)
        if value is not None:
            known.setdefault(tensor.entry.file, Counter())[value] += 1
    for tensor in steps:
        yield from _step(tensor, moving, known)
    yield from _plain_steps([scalar for scalar in scalars if scalar.role == "optimizer-step"], moving)


def _value(tensor: Tensor) -> float | None:
    """Return the number that a counter holds; one that counts for several elements holds the same in each."""
    tally = tensor.tally
    return tally.high if tally is not None and tally.low == tally.high and not tally.nonfinite else None


def _step(tensor: Tensor, moving: set[tuple[str, str]], known: dict[str, Counter[float]]) -> Iterator[ScanFinding]:
    tally = tensor.tally
    assert tally is not None
    if tally.nonfinite:
        evidence = counted(tensor, nan=tally.nan, posinf=tally.posinf, neginf=tally.neginf, count=tally.nonfinite)
        said = f"the step counter is {kinds_of(tally).split(' ')[-1]}"
        yield tensor_finding(tensor, "nonfinite-optimizer-state", "error", said, evidence)
        return
    value = _value(tensor)
    if value is None:
        return
    evidence = counted(tensor, value=value)
    form = by_dtype(tensor.entry.dtype)
    common = known[tensor.entry.file].most_common(1)[0][0]
    message: str | None = None
    if form is not None and value >= form.integer_limit:
        evidence["format"] = form.name
        message = f"the step counter has reached {value:g}, where {form.name} can no longer add 1"
    elif value < 0:
        message = f"the step counter is negative: {value:g}"
    elif value == 0 and (tensor.entry.file, tensor.name.rpartition(".")[0]) in moving:
        message = "the step counter is 0, but the moments beside it are not zero"
    elif value != common:
        evidence["others"] = common
        message = f"the step counter is {value:g}, that of most other parameters {common:g}"
    if message is not None:
        yield tensor_finding(tensor, "step-stalled", "warning", message, evidence)


def _plain_steps(scalars: Sequence[Scalar], moving: set[tuple[str, str]]) -> Iterator[ScanFinding]:
    """Judge counters that are plain numbers, as old PyTorch releases and other libraries save them."""
    numbers = [(scalar, float(scalar.value)) for scalar in scalars if isinstance(scalar.value, int | float)]
    common: dict[str, Counter[float]] = {}
    for scalar, value in numbers:
        common.setdefault(scalar.file, Counter())[value] += 1
    for scalar, value in numbers:
        usual = common[scalar.file].most_common(1)[0][0]
        owner = (scalar.file, scalar.of or scalar.name.rpartition(".")[0])
        message: str | None = None
        if not np.isfinite(value):
            yield file_finding(
                scalar.file,
                "nonfinite-scalar",
                "error",
                f"{scalar.name} is {value}",
                {"key": scalar.name, "value": value},
            )
        elif value == 0 and owner in moving:
            message = f"{scalar.name} is 0, but the moments beside it are not zero"
        elif value != usual:
            message = f"{scalar.name} is {value:g}, that of most other parameters {usual:g}"
        if message is not None:
            yield file_finding(
                scalar.file, "step-stalled", "warning", message, {"key": scalar.name, "value": value, "others": usual}
            )
