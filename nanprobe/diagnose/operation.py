"""Naming the operation behind an origin, and the mechanism that it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from nanprobe.diagnose.explain import shown
from nanprobe.diagnose.lane import LaneDiagnosis, Traced
from nanprobe.diagnose.saturation import is_saturation
from nanprobe.formats import by_dtype, carrier_of
from nanprobe.lanes.trace import IN_LOSS, BackwardOrigin, DriftFact, OperationFact
from nanprobe.records import FirstBad, Remedy

__all__ = ["diverging_place", "needs_earlier", "places_to_trace", "with_drift", "with_operations"]

Operations = Mapping[tuple[str, int], OperationFact]


_REDUCTIONS = ("mean", "std", "var", "std_mean", "var_mean", "nll_loss_forward", "nll_loss2d_forward")
"""Operations that divide by a number of elements, which may be none."""

_WITH_DOMAINS = ("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "div", "reciprocal", "pow", "acos", "asin", "atanh")
"""Operations whose derivative leaves its domain where their own argument reaches its edge."""


def places_to_trace(diagnosis: LaneDiagnosis) -> Iterator[tuple[str, int]]:
    """Yield the places whose operations are worth looking at: origins in forward and the loss, and a divergence.

    A divergence may be an overflow that the same code turned finite again, as a normalisation by an infinite norm does.
    """
    for fault in diagnosis.faults:
        place = _place(fault.first_bad)
        if place is not None and fault.stored is None and not is_saturation(fault.first_bad):
            yield place
    hidden = diverging_place(diagnosis)
    if hidden is not None:
        yield hidden


def diverging_place(diagnosis: LaneDiagnosis) -> tuple[str, int] | None:
    """Return the (module, visit) whose code a divergence is to be looked for in, None when there is none."""
    found = diagnosis.divergence
    if found is None or diagnosis.after_flip or found.phase != "forward":
        return None
    return (found.module, found.visit) if found.module is not None and found.visit is not None else None


def needs_earlier(diagnosis: LaneDiagnosis, operations: Operations) -> bool:
    """Whether an operation failed on -Inf that is no row of a mask, so that what made the -Inf is to be looked for."""
    facts = (operations.get(place) for place in places_to_trace(diagnosis))
    return any(fact is not None and fact.operand_inf and not fact.masked_rows for fact in facts)


def _place(bad: FirstBad) -> tuple[str, int] | None:
    if bad.phase == "loss":
        return IN_LOSS
    if bad.phase == "forward" and bad.module is not None and bad.visit is not None:
        return bad.module, bad.visit
    return None


def with_operations(
    diagnosis: LaneDiagnosis, operations: Operations, *, earlier: OperationFact | None, backward: BackwardOrigin | None
) -> LaneDiagnosis:
    """Return the diagnosis with the operation and its mechanism at every origin where one was found.

    ``earlier`` is the first operation of the whole forward that made -Inf of finite operands by arithmetic; an origin
    that merely failed on that -Inf moves there. ``backward`` is where a good gradient turned bad.
    """

    def named(bad: FirstBad) -> FirstBad:
        if is_saturation(bad):
            return bad
        if bad.phase == "backward":
            return _in_backward(bad, backward)
        place = _place(bad)
        fact = operations.get(place) if place is not None else None
        if fact is None:
            return bad
        if fact.operand_inf and not fact.masked_rows and earlier is not None:
            return _refined(_moved(bad, earlier), earlier)
        return _refined(bad, fact)

    faults = tuple(dataclasses.replace(fault, first_bad=named(fault.first_bad)) for fault in diagnosis.faults)
    hidden = _hidden_overflow(diagnosis, operations)
    return dataclasses.replace(diagnosis, faults=(*faults, hidden) if hidden is not None else faults)


def with_drift(diagnosis: LaneDiagnosis, drift: DriftFact | None) -> LaneDiagnosis:
    """Return the diagnosis with the operation that its divergence comes from."""
    divergence = diagnosis.divergence
    if divergence is None or drift is None:
        return diagnosis
    text = f"It comes from {drift.op}"
    if drift.seen_in != drift.op:
        text += f", whose rounding {drift.seen_in} turns into a relative error of {drift.rel_error:.3g}"
    elif drift.local_error is not None:
        text += f", whose own error on its operands is {drift.local_error:.3g}"
    explained = f"{divergence.explanation} {text}.".strip()
    mechanism = _drift_mechanism(drift) or divergence.mechanism
    named = dataclasses.replace(divergence, op=drift.op, mechanism=mechanism, explanation=explained)
    return dataclasses.replace(diagnosis, divergence=named)


def _drift_mechanism(drift: DriftFact) -> str | None:
    """Tell a bound that rounds, and a sum whose low digits a later difference brings out; None for any other drift."""
    op, seen = drift.op.removeprefix("aten.").rstrip("_"), drift.seen_in.removeprefix("aten.").rstrip("_")
    if op in ("clamp", "clamp_min", "clamp_max", "hardtanh"):
        return "unrepresentable-constant"
    sums = ("add", "sub", "rsub", "sum", "cumsum")
    return "cancellation" if op in sums and seen in ("sub", "rsub", "add") and op != seen else None


def _hidden_overflow(diagnosis: LaneDiagnosis, operations: Operations) -> Traced | None:
    """Return the overflow that the code of a diverging visit made and turned finite again, None when there is none."""
    place, divergence = diverging_place(diagnosis), diagnosis.divergence
    fact = operations.get(place) if place is not None else None
    if fact is None or divergence is None or fact.exact_absmax is None or fact.operand_inf:
        return None
    if any(_place(fault.first_bad) == place for fault in diagnosis.faults):
        return None
    fmt = by_dtype(fact.dtype)
    bad = FirstBad(
        precision=divergence.precision,
        phase="forward",
        module=fact.module if fact.module is not None else divergence.module,
        visit=fact.visit if fact.module is not None else divergence.visit,
        class_=fact.class_ if fact.module is not None else divergence.class_,
        precision_related=True,
        count=fact.count,
        elements=fact.elements,
        limit=fmt.max if fmt is not None else None,
        absorbed_by=divergence.module,
        explanation=(
            f"Nothing non-finite leaves {divergence.module or 'the model'}: its own code turns the Inf finite again, "
            f"and what comes out is wrong (relative error {divergence.rel_error:.3g})."
        ),
    )
    return Traced(first_bad=_refined(bad, fact), fatal=True)


def _moved(bad: FirstBad, earlier: OperationFact) -> FirstBad:
    """Return the origin at the operation that made the -Inf which the module named so far only failed on."""
    if (bad.module, bad.visit) == (earlier.module, earlier.visit):
        return bad
    return dataclasses.replace(
        bad,
        phase="forward" if earlier.module is not None else "loss",
        module=earlier.module,
        visit=earlier.visit,
        class_=earlier.class_,
        mechanism=None,
        count=earlier.count,
        elements=earlier.elements,
        index=None,
        between=None,
        input_absmax=earlier.input_absmax,
        explanation=f"The -Inf made here is what {bad.module or 'the model'} ({bad.class_}) fails on.",
        remedies=(),
    )


def _in_backward(bad: FirstBad, origin: BackwardOrigin | None) -> FirstBad:
    if origin is None or origin.op is None:
        return bad
    mechanism = bad.mechanism
    if mechanism is None and origin.op.removeprefix("aten.") in _WITH_DOMAINS:
        mechanism = "domain-error"
    if origin.op == "aten.sqrt" and bad.precision_related and mechanism in (None, "overflow", "domain-error"):
        # Even at the smallest subnormal the derivative of a root is small; Inf means that the root itself was zero.
        mechanism = "underflow"
    name = carrier_of(bad.precision)
    text = bad.explanation
    if mechanism == "underflow":
        text += (
            f" The root was taken of a value that is zero in {bad.precision} and not in FP32: it, or the eps added to "
            f"it, is below {name.smallest_subnormal:.2g}."
        )
    return _offered(dataclasses.replace(bad, op=origin.op, mechanism=mechanism, explanation=text))


def _cast_parameter(bad: FirstBad, fact: OperationFact) -> FirstBad:
    """Return the fault of a weight that autocast turns into Inf on its way into a product."""
    assert fact.parameter is not None
    limit = f", {bad.precision} ends at {shown(bad.limit)}" if bad.limit is not None else ""
    return dataclasses.replace(
        bad,
        phase="parameter",
        parameter=fact.parameter,
        module=fact.parameter.rpartition(".")[0],
        op=fact.op,
        mechanism="overflow",
        count=fact.count,
        elements=fact.elements,
        index=None,
        samples=None,
        between=None,
        input_absmax=None,
        reference_absmax=fact.exact_absmax,
        explanation=(
            f"The weight itself is beyond the format: cast for the product, {fact.count:,} of {fact.elements:,} "
            f"elements of {fact.parameter} become Inf; it reaches {shown(fact.exact_absmax or 0.0)}{limit}."
        ),
    )


_ADVICE: Mapping[str, tuple[str, str]] = {
    "masked-gradient": (
        "rewrite",
        "Give the branch that is not taken a safe input before it is computed, as in where(ok, f(where(ok, x, 1)), 0)",
    ),
    "domain-error": ("rewrite", "Keep the argument away from the edge of the domain: clamp it, or add an eps inside"),
    "underflow": ("raise-eps", "Use an eps that the format can hold, and put it where the value is still in FP32"),
    "masked-row": ("fix-mask", "Leave every row of the mask an unmasked entry, or zero those rows after the softmax"),
    "empty-reduction": ("rewrite", "Guard the reduction: clamp the number of elements that it divides by to 1"),
    "unrepresentable-constant": ("rewrite", "Take the literal from torch.finfo(x.dtype), or mask with masked_fill"),
    "invalid-operation": ("rewrite", "Select with where or masked_fill instead of multiplying or adding an Inf"),
}
"""What usually helps against a mechanism whatever the module: the kind of remedy and its text."""


def _offered(bad: FirstBad) -> FirstBad:
    advice = _ADVICE.get(bad.mechanism or "")
    if advice is None or any(remedy.kind == advice[0] for remedy in bad.remedies):
        return bad
    remedies = [Remedy(kind=advice[0], text=advice[1]), *bad.remedies]
    if bad.precision_related and bad.module is not None and not any(r.kind == "keep-fp32" for r in remedies):
        text = f'Keep {bad.module or "the model"} in FP32 (keep_fp32: ["{bad.module}"])'
        remedies.append(Remedy(kind="keep-fp32", modules=(bad.module,), text=text))
    return dataclasses.replace(bad, remedies=tuple(remedies))


def _refined(bad: FirstBad, fact: OperationFact) -> FirstBad:
    if fact.parameter is not None and bad.precision_related and fact.exact_absmax is not None:
        return _cast_parameter(bad, fact)
    refined = dataclasses.replace(
        bad,
        op=fact.op,
        mechanism=_mechanism(bad, fact) or bad.mechanism,
        input_absmax=fact.input_absmax if bad.input_absmax is None else bad.input_absmax,
        reference_absmax=fact.exact_absmax if bad.reference_absmax is None else bad.reference_absmax,
        explanation=f"{bad.explanation} {_sentence(fact)}".strip(),
    )
    return _offered(refined)


def _mechanism(bad: FirstBad, fact: OperationFact) -> str | None:
    """Tell the mechanism from the operands and from what FP64 makes of them; None where these do not tell."""
    fmt = by_dtype(fact.dtype)
    if fact.masked_rows:
        return "masked-row"
    if fact.operand_inf:
        return "invalid-operation"
    if fact.no_elements:
        return "empty-reduction"
    if fact.exact_absmax is not None and fmt is not None:
        added = fact.op.removeprefix("aten.").rstrip("_") in ("add", "sub", "rsub") or fact.of_mask
        if added and fact.constant is not None and fact.constant >= fmt.overflow_threshold:
            return "unrepresentable-constant"
        return "overflow"
    if not fact.exact_known:
        return None
    if fact.op.removeprefix("aten.") in _REDUCTIONS:
        return "empty-reduction"
    # FP64 cannot do it on these operands either. If FP32 did, an operand had already become zero on the way here.
    if bad.precision_related and fact.operand_zero:
        return "underflow"
    return None if bad.precision_related else "domain-error"


def _sentence(fact: OperationFact) -> str:
    text = f"The operation is {fact.op}"
    if fact.input_absmax is not None:
        text += f", on operands up to {shown(fact.input_absmax)}"
    if fact.masked_rows:
        return f"{text}; {fact.masked_rows:,} rows are masked throughout."
    if fact.exact_absmax is not None:
        return f"{text}; exactly it gives up to {shown(fact.exact_absmax)}."
    if fact.exact_known:
        return f"{text}; FP64 gives no finite result on them either."
    return f"{text}."
