"""The words of nanprobe as data: what was measured, what was decided, what is reported.

Every record is frozen and holds no tensor and no module, so it can be compared with ``==``, written to JSON and read
back without torch. Measuring makes records, deciding turns records into records, rendering turns records into text.

Vocabulary: a *lane* is one precision's run of the model; the *reference* is the FP32 lane; a *visit* is the nth call
of a module; a *boundary* is where lanes meet and are compared (a visit's outputs, or the gradient with respect to
them); the *origin* is where bad values arise; what is downstream of it is *propagated*; where it turns finite again it
is *absorbed*; a *divergence* is a finite value too far from the reference's.

Units: counts are elements, ``headroom_bits`` is bits, ``seconds`` is seconds, relative errors are dimensionless
2-norm ratios. None means "not measured or not applicable", never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SCHEMA_VERSION",
    "SEVERITIES",
    "STATES",
    "VERDICTS",
    "Coverage",
    "Divergence",
    "Finding",
    "FirstBad",
    "Gradient",
    "GradientRow",
    "Measure",
    "OutputMeasure",
    "PrecisionResult",
    "Remedy",
    "ReplayReport",
    "Step",
    "Tool",
    "Visit",
    "VisitRow",
]

SCHEMA_VERSION = 1

VERDICTS: tuple[str, ...] = ("precision", "not-precision", "inconclusive", "clean")
"""Verdicts, worst first; of several precisions the report takes the worst."""

SEVERITIES: tuple[str, ...] = ("error", "warning", "note")
"""Severities, worst first; a note never changes the exit code."""

STATES: tuple[str, ...] = ("clean", "origin", "propagated", "absorbed", "diverged")
"""What one precision's values are at one visit."""

Number = float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The program that wrote a report."""

    name: str = "nanprobe"
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMeasure:
    """One tensor of a visit that has several: where it sits in the output (``path``) and what it holds."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    absmax: float | None = None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    rel_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One precision's values at one visit, or its gradient there (after unscaling), summed over the visit's tensors.

    ``dtype`` and ``shape`` are those of the first floating tensor. ``absmax``, ``min``, ``max``, ``mean`` and ``rms``
    are over finite elements and None when there are none. ``headroom_bits`` is log2(largest finite value of the
    format / absmax). ``rel_error`` is the accumulated error ||value - reference|| / ||reference||, ``local_error`` the
    same for the module run on the reference's own inputs. ``first_index`` is the index of the first bad element in the
    first tensor that has one, ``samples`` the positions along the batch dimension that hold bad elements. ``note``
    gives the reason when something could not be measured.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: int
    absmax: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    headroom_bits: float | None = None
    rel_error: float | None = None
    local_error: float | None = None
    state: str = "clean"
    first_index: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None
    outputs: tuple[OutputMeasure, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Which visit is meant: module path as in ``named_modules()`` ("" is the root), nth call, phase."""

    module: str
    visit: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitRow:
    """One visit, or the gradient that arrived there, in every precision that went through it.

    ``phase`` is "forward" or "backward"; ``order`` counts rows in execution order from 0 within the whole replay;
    ``depth`` is the number of modules around it (0 for the root); ``leaf`` is true when no other module was called
    inside. A precision that is missing from ``precisions`` did not come by.
    """

    module: str
    visit: int
    class_: str
    phase: str
    order: int
    depth: int
    leaf: bool
    precisions: Mapping[str, Measure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """One precision's gradient of one parameter, after unscaling; counts are of non-finite scaled elements.

    ``flushed`` counts elements that are zero here and not zero in the reference; in a report, only where the format is
    narrower than FP32 and they are a share of the gradient, so that sums that cancel are not counted. ``norm`` is the
    2-norm over finite elements.
    """

    norm: float | None
    absmax: float | None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    flushed: int = 0
    rel_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRow:
    """The gradient of one parameter in every precision; a precision is missing where it has no gradient."""

    parameter: str
    module: str
    shape: tuple[int, ...]
    elements: int
    precisions: Mapping[str, Gradient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something to try. ``verified`` is true only when a replay with it ran, was finite and stayed within tolerance."""

    kind: str
    text: str
    modules: tuple[str, ...] = ()
    verified: bool = False
    rel_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBad:
    """The origin of one precision's bad values; the fields are those of the report's ``first_bad``.

    ``between`` names the children that the parent's own code lies between when no leaf is to blame: the last module
    that finished before the bad value and the one that received it (None at either end).
    """

    precision: str
    phase: str
    module: str | None
    visit: int | None
    class_: str | None
    op: str | None = None
    call: str | None = None
    backward_op: str | None = None
    mechanism: str | None = None
    precision_related: bool | None = None
    count: int = 0
    elements: int = 0
    index: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None
    input_absmax: float | None = None
    reference_absmax: float | None = None
    limit: float | None = None
    absorbed_by: str | None = None
    absorbed_op: str | None = None
    parameter: str | None = None
    between: tuple[str | None, str | None] | None = None
    explanation: str = ""
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first visit whose finite values are further from the reference than ``tolerance`` (relative, 2-norm).

    ``parameter`` is the parameter, the buffer or the path of the batch field whose rounding it comes from. ``op`` is
    the operation that lost the digits and ``module`` where that ran; ``seen_in`` is the module in which the error is
    beyond the tolerance first, where that is another one.
    """

    precision: str
    phase: str
    module: str | None
    visit: int | None
    class_: str | None
    op: str | None = None
    backward_op: str | None = None
    mechanism: str | None = None
    rel_error: float | None = None
    local_error: float | None = None
    tolerance: float | None = None
    seen_in: str | None = None
    between: tuple[str | None, str | None] | None = None
    parameter: str | None = None
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing, with its severity and the numbers that show it."""

    rule: str
    severity: str
    message: str
    precision: str | None = None
    phase: str | None = None
    module: str | None = None
    op: str | None = None
    mechanism: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedies: tuple[Remedy, ...] = ()
    ignored: bool = False
    ignored_why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one precision made of its gradients: the figures that training logs.

    ``gradient_norm`` is the 2-norm of the unscaled gradients (FP64), ``total_norm`` what clipping computed in the
    gradients' own dtype, ``clip_coefficient`` what it multiplied them by. ``zero_share`` is the share of gradient
    elements that are zero. ``taken`` says whether the optimizer stepped, ``skipped`` that a gradient scaler keeps it
    from that, because gradients are non-finite. ``elements`` are those of the parameters that have a gradient;
    ``changed`` are different afterwards, ``moved`` should be in FP32, ``lost`` should be and are not. ``loss_scale``
    and ``next_scale`` are the gradient scaler's before and after, None without one; ``scale_window`` is [smallest,
    largest] of the powers of two that neither lose more than ``window_share`` of the elements nor overflow, [] when
    there is none, None when it was not looked for. ``error`` is what clipping or the step raised.
    """

    gradient_norm: float | None = None
    total_norm: float | None = None
    clip_coefficient: float | None = None
    zero_share: float = 0.0
    taken: bool = False
    skipped: bool = False
    elements: int = 0
    changed: int = 0
    moved: int = 0
    lost: int = 0
    loss_scale: float | None = None
    next_scale: float | None = None
    scale_window: tuple[float, ...] | None = None
    window_share: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionResult:
    """How one precision's lane ended: ``error`` is what it raised, ``loss_error`` |loss - reference| / |reference|."""

    completed: bool
    verdict: str
    error: str | None = None
    loss: float | None = None
    loss_error: float | None = None
    loss_scale: float | None = None
    gradient_norm: float | None = None
    first_bad: FirstBad | None = None
    first_divergence: Divergence | None = None
    step: Step | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much was observed: counts include the root; the lists hold module paths.

    ``not_callable`` are those among ``never_visited`` that have no forward of their own (lists of modules), so that
    nothing was missed there.
    """

    modules: int
    visited: int
    never_visited: tuple[str, ...] = ()
    not_callable: tuple[str, ...] = ()
    outputs_not_inspected: tuple[str, ...] = ()
    ops_outside_modules: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Everything that ``replay`` and ``compare-precisions`` found; rendering needs nothing else.

    ``precisions`` is in the order asked for, the reference first. ``conditions`` says what was replayed and what was
    emulated rather than run natively; ``timings`` is in seconds by stage.
    """

    schema_version: int = SCHEMA_VERSION
    tool: Tool
    command: str
    exit_code: int
    verdict: str
    subject: Mapping[str, Any]
    environment: Mapping[str, Any]
    conditions: Mapping[str, Any]
    precisions: Mapping[str, PrecisionResult]
    reference: str
    first_bad: FirstBad | None
    modules: tuple[VisitRow, ...]
    gradients: tuple[GradientRow, ...]
    timings: Mapping[str, float]
    findings: tuple[Finding, ...]
    coverage: Coverage
