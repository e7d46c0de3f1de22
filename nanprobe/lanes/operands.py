"""Products whose operands are rounded to a format of their own: TF32 and 8-bit floats; and sums kept in half.

*TF32* (8 exponent bits, 10 stored mantissa bits): the operands of FP32 matrix products, convolutions and fused
attention are rounded, products are exact in FP32 and summed there. Products of a matrix and a vector take FP32
throughout, as cuBLAS does them without tensor cores.

*8-bit floats* follow the recipes of Transformer Engine (``Float8CurrentScaling``) and torchao: in linear layers, which
are the products of two matrices, inputs and weights are quantised to the lane's format and in backward the incoming
gradients to E5M2; sums are FP32 and the result is rounded once to BF16. Attention (batched products), convolutions and
everything else stay in BF16. Scaled per tensor, the largest magnitude is mapped to the format's largest value.
Conversions saturate, Inf included; a tensor whose largest magnitude is zero or Inf is not scaled.

*Reduced-precision reductions*: cuBLAS may split a sum into slices and add up their results in half. Here each slice of
``SLICE`` terms is summed in FP32 and rounded, and the running total is rounded after each addition. cuBLAS chooses the
number of slices by shape and GPU, so this shows what such a sum can do and not the exact figure of one GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from nanprobe.formats import NumberFormat, by_dtype, by_name
from nanprobe.lanes.arithmetic import Arithmetic
from nanprobe.lanes.measures import bad_detail
from nanprobe.lanes.memo import StorageWeakRef, storage_of
from nanprobe.lanes.products import HALF, operation_name
from nanprobe.lanes.trace import SaturationFact
from nanprobe.numerics.rounding import flush_to_zero, round_to
from nanprobe.numerics.tree import named_tensors

if TYPE_CHECKING:
    from nanprobe.lanes.lane import Lane

__all__ = ["FLUSHED", "PARTIAL_SUMS", "SLICE", "TF32", "OperandFormats", "quantised"]

TF32 = "FP32 products with operands rounded to TF32"
PARTIAL_SUMS = "half products whose partial sums were rounded to half"
FLUSHED = "results whose subnormals were flushed to zero"

SLICE = 256
"""Terms of a partial sum that is rounded to half."""

aten = torch.ops.aten

_MATRICES: dict[Any, slice] = {
    aten.mm.default: slice(0, 2),
    aten.bmm.default: slice(0, 2),
    aten.addmm.default: slice(1, 3),
    aten.baddbmm.default: slice(1, 3),
    aten.addbmm.default: slice(1, 3),
    aten.addmm_.default: slice(1, 3),
    aten.baddbmm_.default: slice(1, 3),
    aten.mm.out: slice(0, 2),
    aten.bmm.out: slice(0, 2),
    aten.addmm.out: slice(1, 3),
    aten.baddbmm.out: slice(1, 3),
    aten._addmm_activation.default: slice(1, 3),
    aten.convolution.default: slice(0, 2),
    aten.convolution_backward.default: slice(0, 3),
}
"""Products, and which of their arguments are multiplied."""

for _name, _operands in (
    ("_scaled_dot_product_flash_attention_for_cpu", slice(0, 3)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", slice(0, 4)),
    ("_scaled_dot_product_efficient_attention", slice(0, 3)),
    ("_scaled_dot_product_efficient_attention_backward", slice(0, 4)),
):
    if hasattr(aten, _name):
        _MATRICES[getattr(aten, _name).default] = _operands

_LINEAR = frozenset({aten.mm.default, aten.addmm.default})
_SLICED = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})


def quantised(wide: torch.Tensor, fmt: NumberFormat, *, scaled: bool) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Return FP32 values on the format's grid, and what to divide by to have the values that they stand for.

    ``wide`` is FP32. ``scaled`` maps its largest magnitude to the format's largest value; the scale is a scalar tensor
    then, so that a GPU is not waited for.
    """
    if not scaled:
        return round_to(wide, fmt, saturate=True), 1.0
    largest = wide.abs().amax() if wide.numel() else wide.new_zeros(())
    usable = (largest > 0) & torch.isfinite(largest)
    scale = torch.where(usable, fmt.max / torch.where(usable, largest, 1.0), 1.0)
    # The reciprocal of a subnormal is beyond FP32.
    scale = scale.clamp(max=by_name("fp32").max)
    return round_to(wide * scale, fmt, saturate=True), scale


class OperandFormats:
    """Runs the products of one lane whose arithmetic is not that of its dtype, and notes what saturated."""

    def __init__(self, lane: Lane, arithmetic: Arithmetic) -> None:
        self.active = arithmetic.any
        self.emulated: dict[str, Counter[str]] = {}
        self.saturated: list[SaturationFact] = []
        self.tight: dict[int, StorageWeakRef] = {}
        self._lane = lane
        self._arithmetic = arithmetic
        self._dtype = lane.settings.dtype
        self._forward: dict[int, tuple[StorageWeakRef, tuple[str, int, str] | None]] = {}
        self._casts: dict[int, tuple[StorageWeakRef, StorageWeakRef]] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._noted: set[tuple[str, str | None, str]] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one dispatched operation; NotImplemented when its arithmetic is that of its dtype."""
        where = _MATRICES.get(func)
        if where is None:
            return NotImplemented
        operands = args[where]
        dtypes = {t.dtype for t in operands if isinstance(t, torch.Tensor)}
        if len(dtypes) != 1:
            return NotImplemented
        dtype = dtypes.pop()
        arithmetic = self._arithmetic
        if arithmetic.tf32 and dtype is torch.float32 and not self._lane.placement.exempt:
            self._count(TF32, func)
            fmt = by_name("tf32")
            rounded = [round_to(t, fmt) if isinstance(t, torch.Tensor) else t for t in operands]
            made = func(*args[: where.start], *rounded, *args[where.stop :], **kwargs)
            return _with_exact_bias(args, made) if func is aten.convolution_backward.default else made
        if dtype not in HALF or dtype is not self._dtype:
            return NotImplemented
        if arithmetic.operands is not None and func in _LINEAR:
            return self._in_8_bits(func, args, kwargs, where)
        if arithmetic.partial_sums and func in _SLICED:
            return self._in_slices(func, args, kwargs, where)
        return NotImplemented

    def after(self, func: Any, result: Any) -> None:
        """Flush the subnormals of half results where that is asked for, and remember what backward makes.

        Subnormals of FP32 are the processor's business.
        """
        if self._arithmetic.operands is not None and not func.is_view and self._in_backward:
            for _, tensor in named_tensors(result):
                if tensor.dtype in HALF and tensor.layout is torch.strided:
                    key, reference = _storage(tensor)
                    self._made[key] = reference
        if not self._arithmetic.flush or func.is_view or not func._schema.name.startswith("aten::"):
            return
        for _, tensor in named_tensors(result):
            fmt = by_dtype(str(tensor.dtype)) if tensor.dtype in HALF else None
            if fmt is not None and tensor.layout is torch.strided:
                flush_to_zero(tensor, fmt)
                self._count(FLUSHED, func)

    @property
    def _in_backward(self) -> bool:
        """Whether a derivative runs, and not forward code that is recomputed: that runs with gradients enabled."""
        return self._lane.phase == "backward" and not torch.is_grad_enabled()

    def cast(self, source: torch.Tensor, made: torch.Tensor) -> None:
        """Remember that ``made`` is ``source`` in another dtype, so that a product's operand is known by either."""
        if self._arithmetic.operands is not None:
            key, reference = _storage(made)
            self._casts[key] = (reference, _storage(source)[1])

    # -- 8-bit floats ----------------------------------------------------------------------------------------------

    def _in_8_bits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: slice) -> torch.Tensor:
        arithmetic, lane = self._arithmetic, self._lane
        assert arithmetic.operands is not None
        assert arithmetic.gradients is not None
        backward = self._in_backward
        left, right = args[where]
        keys = [_storage(t) for t in (left, right)]
        known = [self._forward.get(key) for key, _ in keys]
        place = self._place() if not backward else next((k[1] for k in known if k is not None), None)
        wide: list[torch.Tensor] = []
        unscale: float | torch.Tensor = 1.0
        for number, (operand, (key, reference)) in enumerate(zip((left, right), keys, strict=True)):
            # A recomputation that stops early never gets to the product that it was made for.
            is_gradient = backward and known[number] is None and (key in self._made or known[1 - number] is not None)
            fmt = arithmetic.gradients if is_gradient else arithmetic.operands
            values = operand.float()
            grid, scale = quantised(values, fmt, scaled=arithmetic.scaled)
            if lane.observing:
                what = "gradient" if is_gradient else ("weight" if number == 1 and not backward else "input")
                self._note_saturation(func, values, fmt, scale, what, place, backward=backward)
                if not backward and not arithmetic.scaled:
                    self._note_operand(key, reference)
            if not backward and not lane.in_twin:
                self._forward.setdefault(key, (reference, place))
            wide.append(grid)
            unscale = unscale * scale
        self._count(self._title(), func)
        product = torch.mm(*wide).div_(unscale) if isinstance(unscale, torch.Tensor) else torch.mm(*wide)
        if func is aten.addmm.default:
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            product = product if alpha == 1 else product * alpha
            product = product if beta == 0 else product + args[0].float() * beta
        return product.to(left.dtype)

    def _title(self) -> str:
        fmt = self._arithmetic.operands
        assert fmt is not None
        gradients = "" if fmt == self._arithmetic.gradients else ", gradients in fp8-e5m2"
        scaling = "scaled per tensor" if self._arithmetic.scaled else "without scaling"
        return f"linear products with operands in {fmt.name}{gradients}, {scaling}, summed in FP32"

    def _place(self) -> tuple[str, int, str] | None:
        frame = self._lane.frame
        return (frame.path, frame.visit, type(frame.module).__name__) if frame is not None else None

    def _note_operand(self, key: int, reference: StorageWeakRef) -> None:
        self.tight[key] = reference
        source = self._casts.get(key)
        if source is not None:
            self.tight[source[1].cdata] = source[1]

    def _note_saturation(
        self,
        func: Any,
        values: torch.Tensor,
        fmt: NumberFormat,
        scale: float | torch.Tensor,
        what: str,
        place: tuple[str, int, str] | None,
        *,
        backward: bool,
    ) -> None:
        if self._arithmetic.scaled:
            return  # nothing finite is beyond the range that it was scaled to
        beyond = (values.abs() >= fmt.overflow_threshold) & torch.isfinite(values)
        key = ("backward" if backward else self._lane.phase, place[0] if place else None, what)
        if key in self._noted or not bool(beyond.any()):
            return
        self._noted.add(key)
        settings = self._lane.settings
        finite = torch.where(torch.isfinite(values), values, 0.0)
        lost = torch.linalg.vector_norm(finite - finite.clamp(-fmt.max, fmt.max)) / torch.linalg.vector_norm(finite)
        detail = bad_detail(
            "",
            torch.where(beyond, torch.nan, 0.0),
            batch_size=settings.batch_size if what == "input" and not backward else None,
            batch_dim=settings.batch_dim,
        )
        assert detail is not None
        op = str(func._schema.name).replace("::", ".")
        self.saturated.append(
            SaturationFact(
                phase=key[0],
                module=place[0] if place else None,
                visit=place[1] if place else None,
                class_=place[2] if place else None,
                op=op,
                operand=what,
                format=fmt.name,
                count=detail.count,
                elements=detail.elements,
                index=detail.index,
                samples=detail.samples,
                absmax=float(finite.abs().max()),
                lost=float(lost),
                time=self._lane.clock,
            )
        )

    # -- sums in half ----------------------------------------------------------------------------------------------

    def _in_slices(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: slice) -> torch.Tensor:
        left, right = args[where]
        dtype, terms = left.dtype, left.shape[-1]
        total: torch.Tensor | None = None
        for start in range(0, max(terms, 1), SLICE):
            part = torch.matmul(
                left[..., start : start + SLICE].float(), right[..., start : start + SLICE, :].float()
            ).to(dtype)
            total = part if total is None else (total.float() + part.float()).to(dtype)
        assert total is not None
        self._count(PARTIAL_SUMS, func)
        if where.start == 0:
            return total
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        wide = total.float() * alpha
        made: torch.Tensor = (wide if beta == 0 else wide + args[0].float() * beta).to(dtype)
        return made

    def _count(self, why: str, func: Any) -> None:
        if self._lane.observing:
            self.emulated.setdefault(why, Counter())[operation_name(func)] += 1


def _with_exact_bias(args: tuple[Any, ...], made: Any) -> Any:
    """Return what a convolution's backward gave, with the gradient of its bias: a sum, of what was not rounded."""
    gradient, bias = args[0], made[2]
    if bias is None:
        return made
    return made[0], made[1], gradient.sum(dim=[0, *range(2, gradient.dim())])


def _storage(tensor: torch.Tensor) -> tuple[int, StorageWeakRef]:
    reference = storage_of(tensor)
    return reference.cdata, reference
