"""Random draws that agree between lanes: drawn in FP32, rounded to the lane's format.

PyTorch consumes the generator differently for each dtype, so a half-precision ``randn`` is not the rounded FP32 one and
two lanes would differ by their noise. Operations that draw into a half-precision tensor are therefore run in FP32 and
rounded. A uniform draw that would round up to its open upper end becomes the largest value below it, since ``rand``
never returns 1 in any format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DRAWS", "draw_rounded"]

_HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten

_IN_PLACE = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
}
_FACTORIES = {
    aten.rand.default,
    aten.rand.generator,
    aten.randn.default,
    aten.randn.generator,
    aten.normal.float_float,
}
_LIKE = {aten.rand_like.default, aten.randn_like.default}
_FROM_TENSOR = {
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
    aten.poisson.default,
}
_CHOICES_FROM_TENSOR = {aten.multinomial.default}

DRAWS = frozenset(_IN_PLACE | _FACTORIES | _LIKE | _FROM_TENSOR | _CHOICES_FROM_TENSOR)
"""Every operation that :func:`draw_rounded` may run in another way."""


def _round_below(drawn: torch.Tensor, dtype: torch.dtype, upper: float | None) -> torch.Tensor:
    rounded = drawn.to(dtype)
    if upper is None:
        return rounded
    bound = torch.tensor(upper, dtype=dtype, device=drawn.device)
    below = torch.nextafter(bound, torch.full_like(bound, -torch.inf))
    return torch.where(rounded >= bound, below, rounded)


def _widen(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def draw_rounded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Run one dispatched operation with FP32 draws when it draws in half precision.

    Returns (True, result) when it did, (False, None) when ``func`` is no such draw and has to be run as it is.
    """
    if func in _IN_PLACE:
        target = args[0]
        if target.dtype not in _HALF:
            return False, None
        wide = torch.empty_like(target, dtype=torch.float32)
        func(wide, *(_widen(a) for a in args[1:]), **kwargs)
        upper = None
        if func is aten.uniform_.default:
            upper = float(kwargs.get("to", args[2] if len(args) > 2 else 1.0))
        return True, target.copy_(_round_below(wide, target.dtype, upper))
    if func in _FACTORIES or func in _LIKE:
        dtype = kwargs.get("dtype") or (args[0].dtype if func in _LIKE else torch.get_default_dtype())
        if dtype not in _HALF:
            return False, None
        drawn = func(*args, **{**kwargs, "dtype": torch.float32})
        uniform = func in (aten.rand.default, aten.rand.generator, aten.rand_like.default)
        return True, _round_below(drawn, dtype, 1.0 if uniform else None)
    if func in _FROM_TENSOR or func in _CHOICES_FROM_TENSOR:
        half = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in _HALF]
        if not half:
            return False, None
        drawn = func(*(_widen(a) for a in args), **kwargs)
        return True, drawn if func in _CHOICES_FROM_TENSOR else drawn.to(half[0])
    return False, None
