"""Statistics of one tensor, and the distance of two, in wide arithmetic and one pass each.

On the CPU, compiled loops read FP32 and FP64 tensors where they are; FP16 and BF16 are widened a piece at a time that
stays in the cache, other dtypes as a whole. Sums are kept in FP64. Non-finite elements are counted and left out of
every other figure. On a GPU the same figures are reduced on the device, and the scalars of a tensor travel together,
so that a measurement costs one synchronisation.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nanprobe.formats import NumberFormat, by_dtype, by_name
from nanprobe.numerics import kernels

__all__ = [
    "Difference",
    "TensorStats",
    "difference",
    "format_of",
    "is_finite",
    "mask_fill",
    "measure",
    "measure_against",
    "plain_values",
    "total_difference",
]

_DIRECT = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_CHUNK = 1 << 17
_local = threading.local()


class TensorStats(NamedTuple):
    """Counts and extremes of one tensor; ``total`` and ``squares`` are sums over finite elements, in FP64."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    floating: bool
    low: float | None = None
    high: float | None = None
    total: float = 0.0
    squares: float = 0.0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.elements - self.nan - self.posinf - self.neginf

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude, None when there is no finite element."""
        if self.low is None or self.high is None:
            return None
        return max(abs(self.low), abs(self.high))

    @property
    def bad(self) -> int:
        """Number of elements that are NaN or Inf."""
        return self.nan + self.posinf + self.neginf


class Difference(NamedTuple):
    """Squared 2-norms of (value - reference) and of the reference, over elements finite in both.

    ``compared`` counts those elements. ``new_neginf`` counts elements that are -Inf here only, ``lost`` those among
    them that are no harmless effect of a mask. ``flushed`` counts elements that are zero here and not in the reference,
    ``wrong`` those that are off by no less than the reference, which is not zero (by :func:`measure_against` only).
    """

    error_squares: float
    reference_squares: float
    compared: int
    new_neginf: int = 0
    lost: int = 0
    flushed: int = 0
    wrong: int = 0

    @property
    def rel_error(self) -> float | None:
        """||value - reference|| / ||reference||: 0/0 is 0, x/0 is infinite, None when nothing could be compared."""
        if self.compared == 0:
            return None
        if self.error_squares == 0:
            return 0.0
        if self.reference_squares == 0:
            return math.inf
        return math.sqrt(self.error_squares / self.reference_squares)


@functools.cache
def format_of(dtype: torch.dtype) -> NumberFormat | None:
    """Return the number format of a floating dtype (of the parts, for a complex one), None for other dtypes."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return by_dtype(str(dtype)) if dtype.is_floating_point else None


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as one dense, real, one-dimensional tensor without gradient.

    Complex tensors become their real and imaginary parts, nested and sparse ones their stored values, quantised ones
    what they stand for.
    """
    values = tensor.detach()
    if values.is_nested:
        parts = [plain_values(part) for part in values.unbind()]
        return torch.cat(parts) if parts else torch.zeros(0)
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.to_dense()
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_neg():
        values = values.resolve_neg()
    return values.reshape(-1)


def _scratch(length: int) -> torch.Tensor:
    """Return a reused FP32 buffer; each thread has its own."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = torch.empty(_CHUNK, dtype=torch.float32)
    piece: torch.Tensor = buffer[:length]
    return piece


def _array(values: torch.Tensor) -> Any:
    """Return the values as an array of float32 or float64: shared memory where the dtype allows, else a wider copy."""
    if values.dtype not in _DIRECT:
        values = values.to(torch.float64 if values.dtype in (torch.int32, torch.int64) else torch.float32)
    return values.contiguous().numpy()


def _pieces(values: torch.Tensor) -> Iterator[tuple[Any, slice]]:
    """Yield (array, where it lies): halves are widened a piece at a time that stays in the cache, others are whole."""
    if values.dtype not in _HALF or values.numel() <= _CHUNK:
        yield _array(values), slice(0, values.numel())
        return
    for start in range(0, values.numel(), _CHUNK):
        chunk = values[start : start + _CHUNK]
        yield _scratch(chunk.numel()).copy_(chunk).numpy(), slice(start, start + chunk.numel())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf; true for integers. One read of the tensor, one synchronisation."""
    if tensor.numel() == 0 or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    values = plain_values(tensor)
    if values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)
    low, high = torch.aminmax(values)
    if values.device.type != "cpu":
        return bool(torch.isfinite(torch.stack((low, high))).all())
    return math.isfinite(float(high)) and math.isfinite(float(low))


def measure(tensor: torch.Tensor) -> TensorStats:
    """Count and measure every element of ``tensor`` (any shape, any dtype, any device).

    Subnormals are counted by the dtype of the tensor itself: non-zero magnitudes below its smallest normal value.
    """
    values = plain_values(tensor)
    tiny = _tiny(tensor.dtype)
    if values.device.type != "cpu":
        return _stats(tensor, values, _on_device(values, tiny, None, 1.0)[0])
    parts = [kernels.summarise(array, tiny)[0] for array, _ in _pieces(values)]
    return _stats(tensor, values, _joined(parts))


def measure_against(
    tensor: torch.Tensor, reference: torch.Tensor, *, scale: float = 1.0
) -> tuple[TensorStats, Difference | None]:
    """Do :func:`measure` and :func:`difference` in one pass where that is possible."""
    values, exact = plain_values(tensor), plain_values(reference)
    on_cpu = values.device.type == "cpu" and exact.device.type == "cpu"
    comparable = _same_shape(tensor, reference) and values.numel() == exact.numel()
    if comparable and not on_cpu and values.device == exact.device:
        summary, distance = _on_device(values, _tiny(tensor.dtype), exact, 1.0 / scale)
        return _stats(tensor, values, summary), _judge(tensor, reference, values, exact, distance, scale)
    if not on_cpu or not comparable:
        return measure(tensor), difference(tensor, reference, scale=scale)
    tiny, other = _tiny(tensor.dtype), _array(exact)
    parts = [
        kernels.summarise(array, tiny, reference=other[where], factor=1.0 / scale) for array, where in _pieces(values)
    ]
    distance = kernels.Distance(*(sum(column) for column in zip(*(d for _, d in parts), strict=True)))
    summary = _joined([part for part, _ in parts])
    return _stats(tensor, values, summary), _judge(tensor, reference, values, exact, distance, scale)


def _joined(parts: list[kernels.Summary]) -> kernels.Summary:
    if len(parts) == 1:
        return parts[0]
    summary = kernels.Summary()
    for part in parts:
        summary = summary | part
    return summary


@functools.cache
def _tiny(dtype: torch.dtype) -> float:
    fmt = format_of(dtype)
    return fmt.smallest_normal if fmt is not None else by_name("fp32").smallest_normal


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stats(tensor: torch.Tensor, values: torch.Tensor, summary: kernels.Summary) -> TensorStats:
    return TensorStats(
        dtype=_name(tensor.dtype),
        shape=(tensor.size(0), -1) if tensor.is_nested else tuple(tensor.shape),
        elements=values.numel(),
        floating=tensor.dtype.is_floating_point or tensor.dtype.is_complex,
        low=summary.low if summary.low != math.inf else None,
        high=summary.high if summary.high != -math.inf else None,
        total=summary.total,
        squares=summary.squares,
        nan=summary.nan,
        posinf=summary.posinf,
        neginf=summary.neginf,
        zero=summary.zero,
        subnormal=summary.subnormal,
    )


def _on_device(
    values: torch.Tensor, tiny: float, reference: torch.Tensor | None, factor: float
) -> tuple[kernels.Summary, kernels.Distance]:
    """Do what :func:`nanprobe.numerics.kernels.summarise` does on another device; the scalars travel together."""
    if values.numel() == 0:
        return kernels.Summary(), kernels.Distance(0.0, 0.0)
    integers = values.dtype in (torch.int32, torch.int64)
    wide = values.to(torch.float64 if integers or values.dtype is torch.float64 else torch.float32)
    finite = torch.isfinite(wide)
    safe = torch.where(finite, wide, 0).to(torch.float64)
    counts = torch.stack(
        [
            torch.isnan(wide).sum(),
            (wide == math.inf).sum(),
            (wide == -math.inf).sum(),
            (wide == 0).sum(),
            ((wide.abs() < tiny) & (wide != 0)).sum(),
        ]
    ).to(torch.float64)
    extremes = torch.stack(
        [
            torch.where(finite, wide, math.inf).min().to(torch.float64),
            torch.where(finite, wide, -math.inf).max().to(torch.float64),
            safe.sum(),
            safe.square().sum(),
        ]
    )
    parts = [counts, extremes]
    if reference is not None:
        exact = reference.to(torch.float64)
        error = wide.to(torch.float64) * factor - exact
        flushed = ((wide == 0) & (exact != 0)).sum().to(torch.float64)
        wrong = ((error.abs() >= exact.abs()) & (exact != 0)).sum().to(torch.float64)
        parts.append(torch.stack([error.square().sum(), exact.square().sum(), flushed, wrong]))
    nan, posinf, neginf, zero, subnormal, low, high, total, squares, *rest = torch.cat(parts).tolist()
    distance = kernels.Distance(*rest[:2], *map(int, rest[2:])) if rest else kernels.Distance(math.nan, math.nan)
    summary = kernels.Summary(int(nan), int(posinf), int(neginf), int(zero), int(subnormal), low, high, total, squares)
    return summary, distance


@functools.cache
def mask_fill(dtype: torch.dtype) -> float:
    """Return the value below which an element counts as a mask's fill in this dtype: half its most negative value."""
    fmt = format_of(dtype)
    return -math.inf if fmt is None else -0.5 * fmt.max


def _careful(value: torch.Tensor, reference: torch.Tensor, floor: float, reference_floor: float) -> Difference:
    """Compare FP64 values that may hold non-finite elements or the fills of a mask."""
    masked = (value <= floor) & (reference <= reference_floor)
    both = torch.isfinite(value) & torch.isfinite(reference) & ~masked
    kept = reference[both]
    error = value[both] - kept
    new_neginf = torch.isneginf(value) & ~torch.isneginf(reference)
    return Difference(
        error_squares=float(torch.dot(error, error)),
        reference_squares=float(torch.dot(kept, kept)),
        compared=int(torch.count_nonzero(both)) + int(torch.count_nonzero(masked)),
        new_neginf=int(torch.count_nonzero(new_neginf)),
    )


def difference(tensor: torch.Tensor, reference: torch.Tensor, *, scale: float = 1.0) -> Difference | None:
    """Compare ``tensor / scale`` with ``reference`` element by element; None when their shapes differ.

    Both of the same shape, any real or complex dtypes. ``scale`` is the loss scale of a scaled gradient. Elements that
    are non-finite in either are left out. Where both hold the fill of a mask (at or below half the most negative value
    of their own dtype, the usual ``finfo(dtype).min``), the element counts as equal.
    """
    if not _same_shape(tensor, reference):
        return None
    values, exact = plain_values(tensor), plain_values(reference)
    if values.numel() != exact.numel():
        return None
    if values.device.type != "cpu":
        distance = _on_device(values, _tiny(tensor.dtype), exact.to(values.device), 1.0 / scale)[1]
    else:
        other = _array(exact)
        parts = [kernels.compare(array, other[where], factor=1.0 / scale) for array, where in _pieces(values)]
        distance = kernels.Distance(*(sum(column) for column in zip(*parts, strict=True)))
    return _judge(tensor, reference, values, exact, distance, scale)


def _same_shape(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    if tensor.is_nested or reference.is_nested:
        return tensor.is_nested and reference.is_nested
    return tensor.shape == reference.shape


def _judge(
    tensor: torch.Tensor,
    reference: torch.Tensor,
    values: torch.Tensor,
    exact: torch.Tensor,
    distance: kernels.Distance,
    scale: float,
) -> Difference:
    """Turn a distance into a difference; only non-finite values or a mask's fill make a second look necessary."""
    floor = mask_fill(exact.dtype)
    plain = math.isfinite(distance.error_squares) and math.isfinite(distance.reference_squares)
    if plain and not distance.reference_squares >= floor * floor:
        return Difference(
            error_squares=distance.error_squares,
            reference_squares=distance.reference_squares,
            compared=values.numel(),
            flushed=distance.flushed,
            wrong=distance.wrong,
        )
    wide = values.to(torch.float64) / scale
    result = _careful(wide, exact.to(torch.float64), mask_fill(values.dtype), floor)
    result = result._replace(flushed=distance.flushed, wrong=distance.wrong)
    if result.new_neginf and not tensor.is_nested and tensor.dim() > 0:
        result = result._replace(lost=_lost(tensor, reference))
    return result


def total_difference(parts: Iterable[Difference]) -> Difference:
    """Return the difference of several tensors taken as one."""
    parts = list(parts)
    return Difference(
        error_squares=sum(part.error_squares for part in parts),
        reference_squares=sum(part.reference_squares for part in parts),
        compared=sum(part.compared for part in parts),
        new_neginf=sum(part.new_neginf for part in parts),
        lost=sum(part.lost for part in parts),
        flushed=sum(part.flushed for part in parts),
        wrong=sum(part.wrong for part in parts),
    )


def _lost(tensor: torch.Tensor, reference: torch.Tensor) -> int:
    """Count elements that are -Inf here, finite in the reference, and no harmless effect of a mask.

    A mask's fill that rounds to -Inf is harmless as long as its row (last dimension) keeps a finite element. Such fills
    are told from an overflow by the reference: their exact values all lie within 1 % of one large negative value, and
    everything else is at least ten times smaller.
    """
    value, exact = tensor.detach(), reference.detach()
    if value.is_complex() or exact.is_complex():
        return 0
    gone = torch.isneginf(value) & torch.isfinite(exact)
    fills = exact[gone].to(torch.float64)
    if fills.numel() == 0:
        return 0
    centre = float(fills.mean())
    alike = fills.numel() > 1 and centre < -1e3 and bool(((fills - centre).abs() <= 0.01 * abs(centre)).all())
    rest = exact[~gone & torch.isfinite(exact)].to(torch.float64)
    apart = rest.numel() == 0 or 10.0 * float(rest.abs().max()) <= abs(centre)
    if not (alike and apart):
        return fills.numel()
    empty = ~torch.isfinite(value).any(dim=-1, keepdim=True)
    return int(torch.count_nonzero(gone & empty))
