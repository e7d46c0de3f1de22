"""Which way scaled-dot-product attention takes: PyTorch's choice, its math back end, or written out with half scores.

Fused kernels keep the scores in FP32 and hide an overflow that written-out attention has, and PyTorch's math back end
has upcast them since 2.5. ``math-half`` runs each call as hand-written code and older versions do: scores in the lane's
own precision, multiplied by the scale after the product. A row that a mask covers whole gives zeros, as in PyTorch.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["written_out", "written_out_here"]


_sdpa: Any = F.scaled_dot_product_attention


class _Thread(threading.local):
    writes_out = False


_thread = _Thread()


@contextlib.contextmanager
def written_out(attention: str) -> Iterator[None]:
    """Set the back end for the whole process: PyTorch's math back end unless ``attention`` is "fused"."""
    if attention == "fused":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(F, "scaled_dot_product_attention", _either):
        yield


@contextlib.contextmanager
def written_out_here(attention: str) -> Iterator[None]:
    """For "math-half", write out every call that this thread makes; calls by PyTorch's own modules included.

    Those are reached inside :func:`written_out` only, because they look the function up where it is replaced there.
    """
    if attention != "math-half":
        yield
        return
    before, _thread.writes_out = _thread.writes_out, True
    try:
        with _WrittenOut():
            yield
    finally:
        _thread.writes_out = before


def _either(*args: Any, **kwargs: Any) -> Any:
    return (_attend if _thread.writes_out else _sdpa)(*args, **kwargs)


class _WrittenOut(TorchFunctionMode):
    """Catches the calls of code that imported the function by name."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_attend if func is _sdpa else func)(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention [..., length, width]; the arguments are those of ``F.scaled_dot_product_attention``."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
    allowed = None
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        allowed = attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
        allowed = attn_mask != -math.inf
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = F.softmax(scores, -1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return torch.matmul(weights.to(value.dtype), value)
