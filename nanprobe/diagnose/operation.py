"""Naming the operation behind an origin, and the mechanism that it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from nanprobe.diagnose.cause import Cause, made_wrong_by
from nanprobe.diagnose.drift import Drift
from nanprobe.diagnose.explain import shown
from nanprobe.diagnose.keeping import keep_in_fp32
from nanprobe.diagnose.lane import LaneDiagnosis, Traced
from nanprobe.diagnose.saturation import is_saturation
from nanprobe.formats import by_dtype, carrier_of
from nanprobe.lanes.trace import IN_LOSS, BackwardOrigin, OperationFact, Operations
from nanprobe.records import FirstBad, Remedy

__all__ = ["diverging_place", "places_to_trace", "with_drift", "with_operations", "without_drift"]


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


def _place(bad: FirstBad) -> tuple[str, int] | None:
    if bad.phase == "loss":
        return IN_LOSS
    if bad.phase == "forward" and bad.module is not None and bad.visit is not None:
        return bad.module, bad.visit
    return None


def with_operations(
    diagnosis: LaneDiagnosis, operations: Operations, *, backward: BackwardOrigin | None, drift: Drift | None = None
) -> LaneDiagnosis:
    """Return the diagnosis with the operation and its mechanism at every origin where one was found.

    An origin that merely failed on -Inf, of which no row was masked, moves to the first operation of the forward pass
    that made -Inf of finite operands by arithmetic. ``backward`` is where a good gradient turned bad.
    ``drift`` is where the digits of a divergence were lost: an Inf that was made elsewhere and absorbed is not to
    blame.
    """
    earlier = operations.first_in(("", 0))

    def named(bad: FirstBad) -> FirstBad:
        if is_saturation(bad):
            return bad
        if bad.phase == "backward":
            return _in_backward(bad, backward)
        place = _place(bad)
        fact = operations.first_in(place) if place is not None else None
        if fact is None or fact.on_purpose:
            failing = operations.first_failing_on_inf() if place is not None else None
            if failing is not None and (fact is not None or bad.mechanism is None):
                return _refined(_failing(bad, failing), failing)
        if fact is None and bad.phase == "loss" and earlier is not None and earlier.absorbed_by is None:
            return _refined(_moved(bad, earlier), earlier)
        if fact is None:
            return bad
        if fact.cause is not None and operations.facts[fact.cause].phase in ("forward", "loss"):
            cause = operations.facts[fact.cause]
            return _refined(_moved(bad, cause), cause)
        if fact.operand_inf and not fact.masked_rows and earlier is not None:
            return _refined(_moved(bad, earlier), earlier)
        return _explained(_refined(bad, fact), fact, operations)

    faults = tuple(
        dataclasses.replace(fault, first_bad=named(fault.first_bad)) if fault.stored is None else fault
        for fault in diagnosis.faults
    )
    elsewhere = drift is not None and drift.origin is not None and drift.mechanism != "overflow"
    hidden = None if elsewhere else _hidden_overflow(diagnosis, operations)
    return dataclasses.replace(diagnosis, faults=(*faults, hidden) if hidden is not None else faults)


def with_drift(diagnosis: LaneDiagnosis, drift: Drift) -> LaneDiagnosis:
    """Return the diagnosis with the operation that its divergence comes from, and the figures that show it.

    The divergence moves to the module that lost the digits, where that is another one.
    """
    divergence = diagnosis.divergence
    if divergence is None:
        return diagnosis
    origin, seen = drift.origin, drift.seen
    explained = f"{divergence.explanation} {_drift_sentence(drift)}".strip()
    if origin is None:
        named = dataclasses.replace(divergence, explanation=explained)
        return dataclasses.replace(diagnosis, divergence=named, evidence=drift.evidence)
    lost = divergence.mechanism == "gradient-underflow"
    mechanism = divergence.mechanism if lost else drift.mechanism or divergence.mechanism
    where = divergence.module or "the model itself"
    named = dataclasses.replace(
        divergence, op=origin.op or None, backward_op=origin.backward_op, mechanism=mechanism, explanation=explained
    )
    if origin.parameter is not None:
        named = dataclasses.replace(named, parameter=origin.parameter)
    elif origin.phase == divergence.phase and origin.module is not None and origin.module != divergence.module:
        named = dataclasses.replace(
            named,
            module=origin.module,
            visit=origin.visit,
            class_=origin.class_,
            between=None,
            local_error=origin.local_error,
            seen_in=seen.module if seen.module not in (None, origin.module) else divergence.module,
            explanation=f"It shows in {where}: {explained[:1].lower()}{explained[1:]}",
        )
    return dataclasses.replace(diagnosis, divergence=named, evidence=drift.evidence)


def without_drift(diagnosis: LaneDiagnosis) -> LaneDiagnosis:
    """Return the diagnosis of a divergence that no operation brought about: each agrees with FP64 on its own way."""
    divergence = diagnosis.divergence
    if divergence is None:
        return diagnosis
    text = (
        f"{divergence.explanation} No operation there is further from FP64 than that is tolerated, on the way that "
        f"{divergence.precision} takes: the code does something else in this precision, or chooses otherwise."
    )
    return dataclasses.replace(diagnosis, divergence=dataclasses.replace(divergence, explanation=text.strip()))


def _drift_sentence(drift: Drift) -> str:
    """Return where the digits were lost, as far as that can be told."""
    origin, seen, evidence = drift.origin, drift.seen, drift.evidence
    if origin is None:
        return (
            f"No single operation is to blame: over {len(drift.path):,} operations the error grows step by step to "
            f"{seen.rel_error or 0.0:.3g}."
        )
    if origin.parameter is not None:
        rounded = origin.local_error or 0.0
        return f"It comes from {origin.phase} {origin.parameter}, which the cast rounds by {rounded:.3g}."
    together = origin.module == seen.module and origin.phase == seen.phase
    text = f"It comes from {origin.op if together else evidence['operation']}"
    if origin is not seen:
        turned_by = seen.op if together else evidence["seen_in"]
        text += f", whose rounding {turned_by} turns into a relative error of {seen.rel_error or 0.0:.3g}"
    elif origin.local_error is not None:
        text += f", whose own error on its operands is {origin.local_error:.3g}"
    return f"{text}.{_drift_reason(drift)}"


def _drift_reason(drift: Drift) -> str:
    """Return the figures that show the mechanism, as a sentence of its own; empty where there are none."""
    origin, mechanism = drift.origin, drift.mechanism
    assert origin is not None
    if mechanism == "absorption" and origin.absorbed is not None:
        return f" The sum lacks {min(origin.absorbed, 1.0):.0%} of its smaller operand, which lies below the spacing."
    if mechanism == "underflow":
        return f" {origin.flushed:,} of its {origin.elements:,} results are zero and exactly are not."
    if mechanism == "unrepresentable-constant" and origin.rounded:
        given, held = origin.rounded[-1]
        return f" {origin.dtype} holds its constant {given:.10g} as {held:.10g}."
    if mechanism == "unrepresentable-constant":
        return f" Integers are beyond what {origin.dtype} holds exactly."
    return ""


def _hidden_overflow(diagnosis: LaneDiagnosis, operations: Operations) -> Traced | None:
    """Return the overflow that the code of a diverging visit made and turned finite again, None when there is none."""
    place, divergence = diverging_place(diagnosis), diagnosis.divergence
    fact = operations.first_in(place) if place is not None else None
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
        index=fact.index,
        samples=fact.samples,
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


def _failing(bad: FirstBad, fact: OperationFact) -> FirstBad:
    """Return the origin at the operation that failed on an Inf which the module named so far put there on purpose."""
    where = f"{bad.module or 'the model'} ({bad.class_})" if bad.class_ is not None else "the code before it"
    return dataclasses.replace(
        bad,
        phase=fact.phase,
        module=fact.module,
        visit=fact.visit,
        class_=fact.class_,
        mechanism=None,
        between=None,
        absorbed_by=None,
        input_absmax=fact.input_absmax,
        reference_absmax=fact.exact_absmax,
        explanation=f"The Inf that {where} hands on is no result of arithmetic; this is what fails on it.",
        remedies=(),
    )


def _in_backward(bad: FirstBad, origin: BackwardOrigin | None) -> FirstBad:
    if origin is None:
        return bad
    kernel = origin.kernel
    bad = dataclasses.replace(bad, backward_op=origin.backward_op)
    if kernel is not None:
        bad = dataclasses.replace(
            bad,
            backward_op=kernel.op,
            input_absmax=kernel.input_absmax,
            reference_absmax=kernel.exact_absmax,
            explanation=f"{bad.explanation} {_kernel_sentence(kernel)}",
        )
    mechanism = bad.mechanism
    if mechanism is None and kernel is not None and kernel.exact_absmax is not None and bad.precision_related:
        mechanism = "overflow"
    if origin.op is None:
        return _offered(dataclasses.replace(bad, mechanism=mechanism))
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


def _kernel_sentence(kernel: OperationFact) -> str:
    """Return the kernel that ran, what it was given, and what it gives exactly."""
    text = f"The kernel that made it is {kernel.op}"
    if kernel.input_absmax is not None:
        text += f", on operands up to {shown(kernel.input_absmax)}"
    if kernel.exact_absmax is not None:
        return f"{text}; exactly it gives up to {shown(kernel.exact_absmax)}."
    return f"{text}; FP64 gives no finite result on them either." if kernel.exact_known else f"{text}."


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
    "cancellation": (
        "rewrite",
        "Compute the difference in FP32, or in a form that does not subtract near-equal values",
    ),
    "unrepresentable-constant": ("rewrite", "Take the literal from torch.finfo(x.dtype), or mask with masked_fill"),
    "invalid-operation": ("rewrite", "Select with where or masked_fill instead of multiplying or adding an Inf"),
}
"""What usually helps against a mechanism whatever the module: the kind of remedy and its text."""


_ADVISED = {kind for kind, _ in _ADVICE.values()}


def _offered(bad: FirstBad) -> FirstBad:
    advice = _ADVICE.get(bad.mechanism or "")
    if advice is None or any(remedy.kind == advice[0] for remedy in bad.remedies):
        return bad
    remedies = [Remedy(kind=advice[0], text=advice[1]), *bad.remedies]
    if bad.precision_related and bad.module is not None and not any(r.kind == "keep-fp32" for r in remedies):
        remedies.append(keep_in_fp32([bad.module]))
    return dataclasses.replace(bad, remedies=tuple(remedies))


def _refined(bad: FirstBad, fact: OperationFact) -> FirstBad:
    if fact.parameter is not None and bad.precision_related and fact.exact_absmax is not None:
        return _cast_parameter(bad, fact)
    # A visit's output of the same elements was compared with FP32's, and has the dimensions that the user knows.
    same = fact.elements == bad.elements and fact.samples == bad.samples
    refined = dataclasses.replace(
        bad,
        op=fact.op,
        call=fact.call,
        absorbed_op=fact.absorbed_by[1] if fact.absorbed_by is not None and bad.absorbed_by is not None else None,
        mechanism=_mechanism(bad, fact) or bad.mechanism,
        count=bad.count if same else fact.count,
        elements=bad.elements if same else fact.elements,
        index=bad.index if same else fact.index,
        samples=fact.samples,
        input_absmax=fact.input_absmax if bad.input_absmax is None else bad.input_absmax,
        reference_absmax=fact.exact_absmax if bad.reference_absmax is None else bad.reference_absmax,
        explanation=f"{bad.explanation} {_sentence(fact)}".strip(),
    )
    return _offered(refined)


def _explained(bad: FirstBad, fact: OperationFact, operations: Operations) -> FirstBad:
    """Return the fault with what made an operand wrong, where that can be told; FP64 all the way is then finite."""
    number = operations.constants.get(fact.record) if fact.record is not None else None
    if number is not None:
        record = operations.records[number]
        pairs = " and ".join(f"{given:.10g} as {held:.10g}" for given, held in record.rounded)
        gone = any(held == 0 for _, held in record.rounded)
        cause = Cause(record=record, mechanism="underflow" if gone else "unrepresentable-constant")
        why = f"{record.dtype} holds {pairs}, which {record.op} was given; FP64 with that fails too, without it not"
    else:
        found = made_wrong_by(operations, fact)
        if found is None:
            return bad
        cause, record = found, found.record
        why = (
            f"{record.wrong:,} of {record.elements:,} results of {record.op} are off by no less than their exact value"
        )
    where = f"{record.module or 'the model itself'}" if record.phase != "loss" else "the loss"
    inside = f" (in {where})" if record.module != fact.module or record.phase != fact.phase else ""
    remedies = tuple(r for r in bad.remedies if bad.mechanism == cause.mechanism or r.kind not in _ADVISED)
    text = f"{bad.explanation} The operand is wrong already: {why}{inside}."
    return _offered(dataclasses.replace(bad, mechanism=cause.mechanism, explanation=text, remedies=remedies))


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
        if fact.literal is not None and fact.literal >= fmt.overflow_threshold:
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
        text = f"{text}; FP64 gives no finite result on them either"
        return f"{text}: what it divides by, {fact.made_zero} had flushed to zero." if fact.made_zero else f"{text}."
    return f"{text}."
