"""What an optimizer step leaves behind: figures of the norm, the scale and every parameter, without a tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["ParameterStep", "ScaleWindow", "StepFact", "StepOrigin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """The first operation of clipping or of the step that made something non-finite of finite operands.

    ``operands`` are the values at the first bad ``index``, of those operands that have the result's shape.
    ``parameter`` is the one that was written; None for the total norm and for temporaries.
    """

    op: str
    parameter: str | None
    dtype: str
    count: int
    elements: int
    index: tuple[int, ...]
    operands: tuple[float, ...]
    input_absmax: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStep:
    """What the step did to one parameter, in elements.

    ``moved`` are those that the exact update (FP64) changes in FP32, ``lost`` those among them that are the same as
    before; ``update_absmax`` is the largest exact update, ``weight_absmax`` the largest weight. ``op`` wrote the
    parameter last. ``by_itself`` is false when FP32's update is another than FP64's of this parameter alone: the
    optimizer then mixes parameters, and ``moved`` and ``lost`` mean nothing.
    """

    parameter: str
    dtype: str
    elements: int
    nan: int
    posinf: int
    neginf: int
    index: tuple[int, ...] | None
    changed: int
    moved: int
    lost: int
    update_absmax: float | None
    weight_absmax: float | None
    op: str | None
    by_itself: bool = True

    @property
    def bad(self) -> int:
        """The number of non-finite elements."""
        return self.nan + self.posinf + self.neginf


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """One lane's way from the gradients to the changed parameters.

    ``gradient_norm`` is the 2-norm of the unscaled gradients in FP64, ``total_norm`` what clipping computed in the
    gradients' own dtype. ``skipped`` says that a gradient scaler skips the step for non-finite gradients; ``cleared``
    that a non-finite norm made every gradient zero. ``refused`` are FP16 parameters whose gradients a gradient scaler
    does not unscale. ``loss_scale`` and ``next_scale`` are None without a scaler. ``error`` is what clipping or the
    step raised.
    """

    gradient_norm: float | None
    zero_share: float
    finite: bool
    skipped: bool
    loss_scale: float | None = None
    next_scale: float | None = None
    refused: tuple[str, ...] = ()
    total_norm: float | None = None
    clip_coefficient: float | None = None
    norm_origin: StepOrigin | None = None
    cleared: bool = False
    stepped: bool = False
    origin: StepOrigin | None = None
    parameters: tuple[ParameterStep, ...] = ()
    error: str | None = None

    def changed(self, **fields: Any) -> StepFact:
        """Return the fact with some fields replaced."""
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWindow:
    """The powers of two that serve as a loss scale: no gradient overflows, and few enough elements flush to zero.

    ``largest`` keeps every gradient finite, None when no tried scale does. ``smallest`` loses at most ``share`` of the
    elements that FP32 has, None when every scale up to the largest tried loses more.
    """

    largest: float | None
    smallest: float | None
    share: float

    @property
    def is_open(self) -> bool:
        """Whether some scale neither overflows nor flushes too much."""
        return self.largest is not None and self.smallest is not None and self.smallest <= self.largest
