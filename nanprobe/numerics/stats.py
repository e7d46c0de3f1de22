"""Statistics of one tensor, and the distance of two, in wide arithmetic and few passes.

Values are widened to FP32 (FP64 stays FP64) a cache-sized chunk at a time, so that a tensor is read from memory once
and nothing of its size is allocated. Sums over chunks are kept in FP64. Non-finite elements are counted and left out of
every other figure. On a GPU a tensor is one chunk and its scalars travel together, so that a measurement costs one
synchronisation.

The 2-norm of a chunk is taken in FP32 where its largest magnitude is between 1e-15 and 1e15 (its squares then neither
overflow nor flush), else in FP64.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nanprobe.formats import NumberFormat, by_dtype

__all__ = [
    "Difference",
    "TensorStats",
    "difference",
    "format_of",
    "is_finite",
    "mask_fill",
    "measure",
    "plain_values",
    "total_difference",
]

_CHUNK = 1 << 17
_SAFE_SQUARES = (1e-15, 1e15)
_local = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Squared 2-norms of (value - reference) and of the reference, over elements finite in both.

    ``compared`` counts those elements. ``new_neginf`` counts elements that are -Inf here only, ``lost`` those among
    them that are no harmless effect of a mask.
    """

    error_squares: float
    reference_squares: float
    compared: int
    new_neginf: int = 0
    lost: int = 0

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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.int64, torch.int32) else torch.float32


def _chunk_size(values: torch.Tensor) -> int:
    return _CHUNK if values.device.type == "cpu" else max(values.numel(), 1)


def _scratch(like: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a reused buffer with the shape of ``like`` (one-dimensional); each thread has its own."""
    if like.device.type != "cpu" or like.numel() > _CHUNK:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    buffers: dict[tuple[str, torch.dtype], torch.Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((name, dtype))
    if buffer is None:
        buffer = buffers[name, dtype] = torch.empty(_CHUNK, dtype=dtype)
    return buffer[: like.numel()]


def _widen(chunk: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if chunk.dtype == dtype:
        return chunk
    return _scratch(chunk, name, dtype).copy_(chunk)


def _squares(chunk: torch.Tensor, absmax: float) -> float:
    if absmax == 0:
        return 0.0
    if chunk.dtype == torch.float64 or _SAFE_SQUARES[0] < absmax < _SAFE_SQUARES[1]:
        return float(torch.dot(chunk, chunk))
    wide = chunk.to(torch.float64)
    return float(torch.dot(wide, wide))


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
    return math.isfinite(float(high)) and math.isfinite(float(low))


def measure(tensor: torch.Tensor) -> TensorStats:
    """Count and measure every element of ``tensor`` (any shape, any dtype, any device).

    Subnormals are counted by the dtype of the tensor itself: non-zero magnitudes below its smallest normal value.
    """
    fmt = format_of(tensor.dtype)
    values = plain_values(tensor)
    shape = tuple(tensor.shape) if not tensor.is_nested else (tensor.size(0), -1)
    total_elements = values.numel()
    if values.dtype is torch.bool:
        values = values.to(torch.uint8)
    wide = _wide(values.dtype)
    tiny = fmt.smallest_normal if fmt else 0.0
    low = high = None
    total = squares = 0.0
    nan = posinf = neginf = zero = subnormal = 0
    step = _chunk_size(values)
    for start in range(0, total_elements, step):
        chunk = _widen(values[start : start + step], wide, "value")
        lowest, highest = (float(x) for x in torch.aminmax(chunk))
        count = chunk.numel()
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            is_nan, is_inf = torch.isnan(chunk), torch.isinf(chunk)
            chunk_nan = int(torch.count_nonzero(is_nan))
            chunk_posinf = int(torch.count_nonzero(is_inf & (chunk > 0)))
            chunk_neginf = int(torch.count_nonzero(is_inf)) - chunk_posinf
            nan, posinf, neginf = nan + chunk_nan, posinf + chunk_posinf, neginf + chunk_neginf
            chunk = chunk[~(is_nan | is_inf)]
            count = chunk.numel()
            if count == 0:
                continue
            lowest, highest = (float(x) for x in torch.aminmax(chunk))
        low = lowest if low is None else min(low, lowest)
        high = highest if high is None else max(high, highest)
        total += float(chunk.sum())
        squares += _squares(chunk, max(abs(lowest), abs(highest)))
        if lowest < tiny and highest > -tiny:
            magnitude = torch.abs(chunk, out=_scratch(chunk, "magnitude", wide))
            below = torch.lt(magnitude, tiny, out=_scratch(chunk, "below", torch.bool))
            small = int(torch.count_nonzero(below))
            if small:
                zeros = count - int(torch.count_nonzero(chunk))
                zero, subnormal = zero + zeros, subnormal + small - zeros
        elif fmt is None and lowest <= 0 <= highest:
            zero += count - int(torch.count_nonzero(chunk))
    return TensorStats(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        elements=total_elements,
        floating=fmt is not None,
        low=low,
        high=high,
        total=total,
        squares=squares,
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        zero=zero,
        subnormal=subnormal,
    )


def mask_fill(dtype: torch.dtype) -> float:
    """Return the value below which an element counts as a mask's fill in this dtype: half its most negative value."""
    fmt = format_of(dtype)
    return -math.inf if fmt is None else -0.5 * fmt.max


def _careful(value: torch.Tensor, reference: torch.Tensor, floor: float, reference_floor: float) -> Difference:
    """Compare two chunks that hold non-finite values, mask fills, or magnitudes whose squares leave FP32's range."""
    value, reference = value.to(torch.float64), reference.to(torch.float64)
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
    if tensor.is_nested != reference.is_nested or (not tensor.is_nested and tensor.shape != reference.shape):
        return None
    a, b = plain_values(tensor), plain_values(reference)
    if a.numel() != b.numel():
        return None
    if a.dtype is torch.bool:
        a = a.to(torch.uint8)
    if b.dtype is torch.bool:
        b = b.to(torch.uint8)
    wide = torch.float64 if torch.float64 in (_wide(a.dtype), _wide(b.dtype)) else torch.float32
    floor, reference_floor = mask_fill(a.dtype), mask_fill(b.dtype)
    parts: list[Difference] = []
    for start in range(0, a.numel(), _chunk_size(a)):
        stop = start + _chunk_size(a)
        left, right = _widen(a[start:stop], wide, "value"), _widen(b[start:stop], wide, "reference")
        if scale != 1.0:
            left = torch.mul(left, 1.0 / scale, out=_scratch(left, "unscaled", wide))
        extreme = max(abs(float(x)) for x in torch.aminmax(right))
        error = torch.sub(left, right, out=_scratch(left, "error", wide))
        error_absmax = max(abs(float(x)) for x in torch.aminmax(error))
        safe = wide is torch.float64 and extreme < 1e150
        if math.isfinite(error_absmax) and (
            safe or (extreme < _SAFE_SQUARES[1] and error_absmax < _SAFE_SQUARES[1] and right.dtype == wide)
        ):
            parts.append(
                Difference(
                    error_squares=_squares(error, error_absmax),
                    reference_squares=_squares(right, extreme),
                    compared=left.numel(),
                )
            )
        else:
            parts.append(_careful(left, right, floor, reference_floor))
    result = total_difference(parts)
    if result.new_neginf and not tensor.is_nested and tensor.dim() > 0:
        result = dataclasses.replace(result, lost=_lost(tensor, reference))
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
    )


def _lost(tensor: torch.Tensor, reference: torch.Tensor) -> int:
    """Count elements that are -Inf here, finite in the reference, and no harmless effect of a mask.

    A mask's fill that rounds to -Inf is harmless as long as its row (last dimension) keeps a finite element. Such fills
    are told from an overflow by the reference: their exact values all lie within 1 % of one large negative value.
    """
    value, exact = tensor.detach(), reference.detach()
    if value.is_complex() or exact.is_complex():
        return 0
    gone = torch.isneginf(value) & torch.isfinite(exact)
    fills = exact[gone].to(torch.float64)
    if fills.numel() == 0:
        return 0
    centre = float(fills.mean())
    like_a_mask = fills.numel() > 1 and centre < -1e3 and bool(((fills - centre).abs() <= 0.01 * abs(centre)).all())
    if not like_a_mask:
        return fills.numel()
    empty = ~torch.isfinite(value).any(dim=-1, keepdim=True)
    return int(torch.count_nonzero(gone & empty))
