"""What a replay leaves behind: facts about visits, measures and endings, without a tensor or a module in them.

The diagnosis is a pure function of these records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanprobe.lanes.step_facts import ScaleWindow, StepFact
from nanprobe.records import Gradient, Measure

__all__ = [
    "HEALTHY",
    "IN_LOSS",
    "BackwardOrigin",
    "BadDetail",
    "Flip",
    "Health",
    "LaneTrace",
    "OperationFact",
    "OperationRecord",
    "Operations",
    "Place",
    "Raised",
    "SampleDetail",
    "SaturationFact",
    "Trace",
    "UnwrittenFact",
    "UnwrittenRun",
    "VisitFact",
]

Place = tuple[str, str, int]
"""(phase, module path, visit): the key by which lanes are matched."""


IN_LOSS = ("", -1)
"""The place of the loss function, beside the (module path, visit) of visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Counts of non-finite elements among a visit's input or output tensors.

    ``lost`` counts -Inf elements, finite in the reference, in rows that keep no finite element.
    """

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    lost: int = 0

    def __add__(self, other: Health) -> Health:
        """Return the health of both tensors taken together."""
        if other == HEALTHY:
            return self
        return Health(
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            lost=self.lost + other.lost,
        )

    @property
    def hard(self) -> bool:
        """Whether something is there that no mask puts there on purpose: NaN, +Inf, or a row lost to -Inf."""
        return bool(self.nan or self.posinf or self.lost)

    @property
    def soft(self) -> bool:
        """Whether -Inf is the only non-finite value, as in a mask."""
        return bool(self.neginf) and not self.hard


HEALTHY = Health()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDetail:
    """The bad elements of one sample: how many, where the first is, and what the reference has in their place."""

    sample: int
    count: int
    index: tuple[int, ...]
    reference_absmax: float | None = None
    reference_bad: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BadDetail:
    """Where the bad elements of one tensor are, and what the reference has in their place.

    ``reference_bad`` counts those that are bad in the reference as well. ``by_sample`` tells the samples apart, those
    of a visit's other tensors included; it is empty where no dimension can be tied to the batch. ``only_masked`` says
    that there is nothing but -Inf that a mask may have put there.
    """

    path: str
    dtype: str
    count: int
    elements: int
    index: tuple[int, ...] | None
    samples: tuple[int, ...] | None
    reference_absmax: float | None = None
    reference_bad: int = 0
    input_absmax: float | None = None
    by_sample: tuple[SampleDetail, ...] = ()
    only_masked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitFact:
    """One forward visit in one lane: where it stood, when, and whether what went in and came out was good.

    ``entered`` and ``left`` count module entries and exits of the lane; ``left`` is -1 for a visit that never ended.
    ``previous`` is the sibling that finished last before this visit began, ``last_child`` the child that finished last
    inside it. ``input_error`` and ``output_error`` are relative errors against the reference, None where there is
    nothing to compare.
    """

    module: str
    visit: int
    class_: str
    depth: int
    leaf: bool
    parent: tuple[str, int] | None
    previous: str | None
    last_child: str | None
    entered: int
    left: int
    inputs: Health
    outputs: Health
    input_error: float | None = None
    output_error: float | None = None
    bad_input: BadDetail | None = None
    bad_output: BadDetail | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A choice that differs from the reference's: ``changed`` of ``total`` choices, or a visit made or not made."""

    module: str | None
    visit: int | None
    op: str | None
    order: int
    changed: int
    total: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOrigin:
    """The first autograd node whose incoming gradient was good and whose outgoing gradient was not.

    ``op`` is the forward operation that the node is the derivative of, None for a function of the model's own.
    ``masked`` says that the incoming gradient is zero wherever the outgoing one is bad. ``fits_unscaled`` tells whether
    all gradients are finite at loss scale 1; None when the scale is 1 already. ``kernel`` is the
    kernel of the node that made the first bad value of good operands, None when none did; ``backward_op`` names the
    last that made a bad value, which is what the node hands on, whatever its operands.
    """

    module: str | None
    visit: int | None
    class_: str | None
    node: str
    health: Health
    detail: BadDetail | None
    op: str | None = None
    masked: bool = False
    fits_unscaled: bool | None = None
    kernel: OperationFact | None = None
    backward_op: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFact:
    """A dispatched operation that made something non-finite of operands without NaN and +Inf.

    ``module`` and ``visit`` are those of the innermost visit that ran it (None in a loss function). ``op`` has no
    overload. ``count`` of ``elements`` are non-finite in its result, which is of format ``dtype``. ``exact_absmax``
    is the largest finite magnitude among what FP64 makes of the same operands in their place, None when that is
    non-finite too, or (``exact_known`` false) when it could not be evaluated. ``operand_inf`` says that an operand
    holds -Inf or that a number given is infinite. ``constant`` is the largest finite number among its arguments.
    ``masked_rows`` counts rows of an operand that are -Inf throughout; ``parameter`` is
    the parameter that a cast was applied to; ``of_mask`` says that one holds zeros and
    ones only. ``phase`` is "forward", "loss" or "backward"; in backward ``sequence`` is the number of the autograd node
    that ran it. ``inside`` are the visits around it, outermost first, the loss function as ``IN_LOSS``. ``call`` is the
    public function behind it when it has another name. ``made_zero`` is the operation that flushed an operand to zero.
    ``absorbed_by`` is the module and the operation in which what came of it first turned finite again. ``index`` is the
    first counted element's, ``samples`` those that the counted elements belong to, None where the result does not
    derive from the batch or no sample can be told. ``nan``, ``posinf`` and ``neginf`` count all of the result; -Inf
    that a mask may have put there is in ``neginf`` and not in ``count``. ``on_purpose`` says that the
    operation only put a literal +Inf somewhere, ``cause`` is the position of the fact that made the -Inf it was given.
    ``record`` is the number of its record, None outside the shadows. ``literal`` is the number of the code's own that
    its exact result is, None where it is a result of others.
    """

    module: str | None
    visit: int | None
    class_: str | None
    op: str
    dtype: str
    count: int
    elements: int
    input_absmax: float | None
    exact_absmax: float | None
    exact_known: bool
    operand_zero: bool
    operand_inf: bool
    masked_rows: int
    of_mask: bool
    no_elements: bool
    constant: float | None
    parameter: str | None = None
    phase: str = "forward"
    inside: tuple[tuple[str, int], ...] = ()
    sequence: int | None = None
    call: str | None = None
    made_zero: str | None = None
    absorbed_by: tuple[str | None, str] | None = None
    index: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    on_purpose: bool = False
    cause: int | None = None
    record: int | None = None
    literal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One floating result of one dispatched operation: where it was made, of what, and how far off it is.

    ``phase`` is "forward", "loss" or "backward"; or, for a tensor that was there before and that a cast rounded,
    "parameter", "buffer" or "input", and ``parameter`` is its name. ``module``, ``visit`` and ``class_`` are those of
    the innermost visit that ran it, in backward of the visit whose derivative it is part of; None outside every module.
    ``inside`` are all visits around it, outermost first. ``op`` is the operation as dispatched without the overload;
    in backward that of forward, and ``backward_op`` the kernel that ran. ``operands`` are the numbers of the records
    that made its operands.

    ``size``, ``error`` and ``local`` are 2-norms: of the FP64 shadow, of the distance from it (the accumulated error),
    and of the distance from what the operation gives on its actual operands. ``error`` is infinite where the result is
    non-finite and the shadow is not. None where no shadow could be had: ``note`` says why. ``flushed`` elements are
    zero here and not in the shadow, ``underflowed`` ones zero here and not exactly on the actual operands; ``wrong``
    ones are off by no less than their shadow, as a zero or a wrong sign is. ``absorbed`` is the share of the smaller
    operand of a sum, by 2-norm, that the result lacks; ``rounded`` pairs constants among the arguments with what the
    format holds of them.
    """

    order: int
    phase: str
    module: str | None
    visit: int | None
    class_: str | None
    op: str
    dtype: str
    elements: int
    call: str | None = None
    backward_op: str | None = None
    parameter: str | None = None
    inside: tuple[tuple[str, int], ...] = ()
    operands: tuple[int, ...] = ()
    size: float | None = None
    error: float | None = None
    local: float | None = None
    flushed: int = 0
    underflowed: int = 0
    wrong: int = 0
    bad: int = 0
    absorbed: float | None = None
    of_integers: bool = False
    rounded: tuple[tuple[float, float], ...] = ()
    note: str | None = None

    @property
    def rel_error(self) -> float | None:
        """The accumulated error as a ratio of 2-norms: 0/0 is 0, x/0 is infinite."""
        return _ratio(self.error, self.size)

    @property
    def local_error(self) -> float | None:
        """The operation's own error on its actual operands, as a ratio of 2-norms."""
        return _ratio(self.local, self.size)


def _ratio(error: float | None, size: float | None) -> float | None:
    if error is None or size is None:
        return None
    return error / size if size else (math.inf if error else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What the operation trace of one lane saw: origins of non-finite values, and a record per result.

    ``facts`` and ``records`` are in execution order; a record's ``order`` is its position. ``whole`` says that every
    operation was shadowed, not only a stretch of them. ``constants`` names, by the number of a failed record, the
    record whose rounded constant makes its shadow fail as well. ``notes`` say what could not be looked into, with
    counts.
    """

    facts: tuple[OperationFact, ...] = ()
    records: tuple[OperationRecord, ...] = ()
    constants: Mapping[int, int] = field(default_factory=dict)
    whole: bool = True
    notes: tuple[str, ...] = ()

    def first_in(self, place: tuple[str, int]) -> OperationFact | None:
        """Return the first origin inside a visit (or the loss function), None when there is none.

        One that failed on good operands goes before one that put +Inf there on purpose.
        """
        inside = [fact for fact in self.facts if place in fact.inside]
        return next((fact for fact in inside if not fact.on_purpose), inside[0] if inside else None)

    def first_failing_on_inf(self) -> OperationFact | None:
        """Return the first origin in forward or the loss that was given an Inf of nobody's making, None without one."""
        return next((f for f in self.facts if f.operand_inf and not f.on_purpose and f.phase != "backward"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationFact:
    """An operand of a product with finite values beyond the format that it was quantised to: they saturated.

    ``operand`` is "input", "weight" or "gradient"; ``count`` of its ``elements`` are beyond ``format``, and ``absmax``
    is the largest magnitude among them. ``lost`` is what saturation cuts off, relative to the operand (2-norms).
    ``module`` is None outside the model; in backward it is where the forward
    product ran. ``time`` is the lane's clock.
    """

    phase: str
    module: str | None
    visit: int | None
    class_: str | None
    op: str
    operand: str
    format: str
    count: int
    elements: int
    index: tuple[int, ...] | None
    samples: tuple[int, ...] | None
    absmax: float
    lost: float
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenFact:
    """The operation that first read memory which nothing wrote; ``count`` of its result's ``elements`` depend on it."""

    phase: str
    module: str | None
    visit: int | None
    class_: str | None
    op: str
    count: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwrittenRun:
    """How a lane ended whose new memory was filled: whether badly, and who read what it ended badly for."""

    bad: bool
    reader: UnwrittenFact | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that ended a lane: type and message in one line, and the innermost module that was running."""

    text: str
    module: str | None
    visit: int | None
    class_: str | None
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTrace:
    """Everything one lane left behind. ``order`` maps a place to the position at which the lane reached it.

    ``emulated`` counts, by what was done, the operations that were run in another way than PyTorch would have.
    ``bad_only_where_masked`` says, of a lane without a loss, that the NaN and Inf in the model's output all stand where
    a mask of the batch excludes them. ``step`` is what clipping and the optimizer made of the gradients, None when
    neither was asked for. ``scale_window`` are the loss scales that would serve, None when that was not looked for.
    ``unwritten`` says that memory was allocated in forward or the loss that the next operation did not write whole.
    """

    precision: str
    completed: bool
    raised: Raised | None
    loss: float | None
    loss_found: bool
    loss_scale: float
    visits: tuple[VisitFact, ...]
    measures: Mapping[Place, Measure]
    order: Mapping[Place, int]
    gradients: Mapping[str, Gradient]
    gradient_elements: Mapping[str, int]
    gradient_norm: float | None
    gradient_rel_error: float | None
    backward_ran: bool
    backward_origin: BackwardOrigin | None
    poisoned_buffers: tuple[str, ...]
    flips: tuple[Flip, ...]
    uninspected: tuple[str, ...]
    ops_outside_modules: int
    drawn: int
    emulated: Mapping[str, Mapping[str, int]]
    dropout_differs: tuple[str, ...]
    seconds: float
    measuring_seconds: float
    output_rel_error: float | None
    bad_only_where_masked: bool = False
    step: StepFact | None = None
    scale_window: ScaleWindow | None = None
    notes: tuple[str, ...] = ()
    saturated: tuple[SaturationFact, ...] = ()
    unwritten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole replay: the reference's lane, the others by precision, and the model's modules by path and class."""

    reference: LaneTrace
    lanes: Mapping[str, LaneTrace]
    modules: Mapping[str, str]
    not_callable: tuple[str, ...]
    parameters: Mapping[str, tuple[str, tuple[int, ...]]]
    conditions: Mapping[str, Any] = field(default_factory=dict)
