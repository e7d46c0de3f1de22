"""Half-precision products as tensor cores compute them: operands in half, sums in FP32, one rounding at the end.

CPUs without half arithmetic fall back to scalar loops that are slower than FP32 by a factor of ten and more, and where
they have half arithmetic a kernel need not sum in FP32. Inside a low-precision lane, in forward and backward, every
matrix product, convolution and scaled-dot-product attention is therefore run on FP32 copies of its operands and the
result rounded once. A product of two halves is exact in FP32, so this differs from a tensor core in the order of the
sum alone.

The same is done for operations that have a half kernel on a GPU and none on a CPU, such as 3-d pooling. What has none
on a GPU either, as most of linear algebra, raises here as it does there.

A product runs natively where the processor has tile arithmetic (AMX) for the dtype and a trial of products passes:
see :func:`runs_natively`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["LACKING", "PRODUCTS", "Products", "Way", "operation_name", "runs_natively"]

LACKING = "operations without a half kernel on this CPU, run in FP32 and rounded once"
PRODUCTS = "half products summed in FP32 and rounded once"

Way = Callable[..., Any]
"""Runs a product: called with the operation, the half dtype, the arguments and the keyword arguments."""

HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten

_PLAIN = (
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.baddbmm,
    aten.addbmm,
    aten.mv,
    aten.addmv,
    aten.dot,
    aten.vdot,
    aten._addmm_activation,
    aten._trilinear,
    aten.convolution,
    aten.convolution_backward,
    aten.conv_tbc,
)
"""Operations whose floating operands are all of one dtype, and so is the result."""

_WRITING = {
    aten.addmm_.default: aten.addmm.default,
    aten.baddbmm_.default: aten.baddbmm.default,
    aten.addbmm_.default: aten.addbmm.default,
    aten.addmv_.default: aten.addmv.default,
    aten.mm.out: aten.mm.default,
    aten.bmm.out: aten.bmm.default,
    aten.addmm.out: aten.addmm.default,
    aten.baddbmm.out: aten.baddbmm.default,
    aten.addbmm.out: aten.addbmm.default,
    aten.mv.out: aten.mv.default,
    aten.addmv.out: aten.addmv.default,
    aten.dot.out: aten.dot.default,
}
"""Operations that write into an operand, and the one that computes what is written."""

_INTO = {
    id(aten.mm.default): aten.mm.out,
    id(aten.bmm.default): aten.bmm.out,
    id(aten.addmm.default): aten.addmm.out,
    id(aten.baddbmm.default): aten.baddbmm.out,
}
"""Products of the last two operands, and the form of each that writes its result into given memory."""

_ATTENTION = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_ATTENTION_BACKWARD = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

_ONLY_ON_A_GPU = frozenset(
    f"{name}{backward}"
    for name in (
        *("avg_pool3d", "adaptive_avg_pool3d", "_adaptive_avg_pool3d", "grid_sampler_2d", "grid_sampler_3d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "multi_margin_loss", "multilabel_margin_loss"),
        *("multilabel_margin_loss_forward", "polygamma", "round"),
    )
    for backward in ("", "_backward")
)
"""Operations with a half kernel on a GPU and, in some PyTorch, none on a CPU: PyTorch's operator tests list, for each
operation, the dtypes of either. FFTs of halves, which a GPU has for lengths that are powers of two, are left out."""

_LACKS = re.compile(r"not implemented for '(Half|BFloat16)'|not (?:supported|implemented) for (?:Half|BFloat16)")
"""How PyTorch says that an operation has no kernel for a dtype."""


@functools.cache
def is_product(func: Any) -> bool:
    """Whether a dispatched operation is a matrix product, a convolution or attention, or the backward of one."""
    return func in dict(_ways())


class Products:
    """Runs the products of one low-precision lane, and counts them by operation."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.emulated: dict[str, Counter[str]] = {}
        self._dtype = dtype
        self._on_cpu = device.type == "cpu"
        self._ways: dict[Any, Way] = {}
        self._lacking: dict[int, bool] = {}
        self._scratch: dict[int, torch.Tensor] = {}
        if self._on_cpu and not runs_natively(dtype):
            self._ways = dict(_ways())

    @property
    def active(self) -> bool:
        """Whether operations of this lane are to be handed to :meth:`run`."""
        return self._on_cpu

    def way_of(self, func: Any) -> Way | None:
        """Return how to run an operation that is a product, None for others."""
        return self._ways.get(func)

    def run(self, func: Any, way: Way | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, counting: bool) -> Any:
        """Run one dispatched operation, in FP32 with one rounding where it is a product or has no half kernel."""
        if way is not None:
            dtype = _common_half(func, args, kwargs)
            if dtype is not None:
                if counting:
                    self._count(PRODUCTS, func)
                if way is _rounded:
                    return self._rounded(func, dtype, args, kwargs)
                return way(func, dtype, args, kwargs)
        if not self.lacks(func):
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if _LACKS.search(str(error)) is None:
                raise
            dtype = _first_half(args, kwargs)
            if dtype is None:
                raise
            if counting:
                self._count(LACKING, func)
            return _narrow(func(*_wide(args), **_wide(kwargs)), dtype)

    def _rounded(self, func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do as :func:`_rounded` does, in memory that is used again: fresh pages cost as much as the copy itself."""
        wide = [self._widened(i, a) if isinstance(a, torch.Tensor) else _wide(a) for i, a in enumerate(args)]
        into = _INTO.get(id(func))
        if into is not None:
            left, right = wide[-2:]
            if left.dim() == right.dim() > 1 and left.shape[-1] == right.shape[-2]:
                shape = (*left.shape[:-1], right.shape[-1])
                return into(*wide, **kwargs, out=self._buffer(-1, math.prod(shape)).view(shape)).to(dtype)
        return _narrow(func(*wide, **{name: _wide(a) for name, a in kwargs.items()}), dtype)

    def _widened(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in HALF:
            return tensor
        if tensor.is_contiguous():
            return self._buffer(slot, tensor.numel()).view(tensor.shape).copy_(tensor)
        if tensor.dim() > 1 and tensor.mT.is_contiguous():
            return self._buffer(slot, tensor.numel()).view(tensor.mT.shape).mT.copy_(tensor)
        return tensor.float()

    def _buffer(self, slot: int, elements: int) -> torch.Tensor:
        held = self._scratch.get(slot)
        if held is None or held.numel() < elements:
            held = self._scratch[slot] = torch.empty(elements, dtype=torch.float32)
        return held[:elements]

    def lacks(self, func: Any) -> bool:
        """Whether an operation may have no half kernel on a CPU though a GPU has one."""
        lacks = self._lacking.get(id(func))
        if lacks is None:
            lacks = self._lacking[id(func)] = func._schema.name.removeprefix("aten::") in _ONLY_ON_A_GPU
        return lacks

    def _count(self, why: str, func: Any) -> None:
        counter = self.emulated.get(why)
        if counter is None:
            counter = self.emulated[why] = Counter()
        counter[operation_name(func)] += 1


def operation_name(func: Any) -> str:
    """Return an operation's name as reports count it: without namespace, overload and leading underscore."""
    name = str(func._schema.name).removeprefix("aten::").removeprefix("_")
    return name.replace("scaled_dot_product_flash_attention_for_cpu", "attention")


def _ways() -> Iterator[tuple[Any, Way]]:
    for packet in _PLAIN:
        yield packet.default, _rounded
    for func in _WRITING:
        yield func, _written
    if _ATTENTION is not None:
        yield _ATTENTION.default, _attention
    if _ATTENTION_BACKWARD is not None:
        yield _ATTENTION_BACKWARD.default, _rounded


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _common_half(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the half dtype that all floating operands have, None when there is no such: PyTorch then has its say.

    The log-sum-exp that attention's backward gets is FP32 in either case.
    """
    if _ATTENTION_BACKWARD is not None and func is _ATTENTION_BACKWARD.default:
        args = args[:5]
    common = None
    for tensor in _tensors((*args, *kwargs.values())):
        dtype = tensor.dtype
        if dtype in HALF and common in (None, dtype):
            common = dtype
        elif dtype.is_floating_point or dtype.is_complex:
            return None
    return common


def _first_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    return next((t.dtype for t in _tensors((*args, *kwargs.values())) if t.dtype in HALF), None)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, (list, tuple)):
        return type(value)([_wide(item) for item in value])
    if isinstance(value, dict):
        return {key: _wide(item) for key, item in value.items()}
    return torch.float32 if value in HALF else value


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value
    if isinstance(value, (list, tuple)):
        return type(value)([_narrow(item, dtype) for item in value])
    return value


def _rounded(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _narrow(func(*[_wide(a) for a in args], **{name: _wide(a) for name, a in kwargs.items()}), dtype)


def _written(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(kwargs)
    target = given.pop("out", None)
    made = _rounded(_WRITING[func], dtype, args, given)
    if target is None:
        return args[0].copy_(made)
    if target.shape != made.shape:
        target.resize_(made.shape)
    return target.copy_(made)


def _attention(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output, logsumexp = func(*_wide(args), **_wide(kwargs))
    return output.to(dtype), logsumexp


# -- native half arithmetic -------------------------------------------------------------------------------------------


@functools.cache
def runs_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU's own half products are the same to rounding, so that nothing need be emulated.

    Asked of processors with tile arithmetic for the dtype only (AMX), which is where native products are faster than
    FP32 ones; whether to believe it is decided by a trial: products of each kind, small and large, with sums that lose
    half their terms when kept in half precision, must be within one spacing of the double-precision product rounded
    once, and equal to it in nine of ten elements. The outcome is kept for the process.
    """
    return _has_tiles(dtype) and all(_same_to_rounding(native, exact) for native, exact in _trials(dtype))


def _has_tiles(dtype: torch.dtype) -> bool:
    asks = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}
    ask = getattr(torch.cpu, asks.get(dtype, ""), None)
    return ask is not None and bool(ask())


def _trials(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def trial(act: Callable[..., torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return act(*operands), act(*(operand.double() for operand in operands)).to(dtype)

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for rows, inner, columns in ((3, 5, 7), (16, 64, 48), (96, 384, 128)):
            yield trial(torch.mm, draw(rows, inner), draw(inner, columns))
            yield trial(torch.addmm, draw(columns), draw(rows, inner), draw(inner, columns))
            yield trial(torch.bmm, draw(2, rows, inner), draw(2, inner, columns))
            yield trial(torch.mv, draw(rows, inner), draw(inner))
        yield trial(torch.mm, torch.ones(4, 5000, dtype=dtype), torch.ones(5000, 4, dtype=dtype))
        yield trial(torch.conv2d, draw(2, 8, 9, 9), draw(16, 8, 3, 3), draw(16))
        yield trial(torch.conv_transpose2d, draw(2, 8, 9, 9), draw(8, 16, 3, 3), draw(16))


def _same_to_rounding(native: torch.Tensor, exact: torch.Tensor) -> bool:
    up = torch.nextafter(exact, torch.full_like(exact, torch.inf))
    down = torch.nextafter(exact, torch.full_like(exact, -torch.inf))
    # Where terms cancel, FP32's own rounding of the sum is more than a spacing of the small result.
    slack = exact.float().abs().mean() * 2.0**-16
    near = (native.float() <= up.float() + slack) & (native.float() >= down.float() - slack)
    return bool(near.all()) and float((native == exact).float().mean()) >= 0.9
