"""The plain low-precision run that a peer watches: the conditions of the case, without nanprobe's lanes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import Control, Fault, built
from nanprobe.numerics.autocast_regions import as_on_cuda, emulate_cuda

__all__ = ["Missing", "Run", "low_precision"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Missing(Exception):
    """A peer's package is not installed; the message says which, and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model in its precision, and the steps of the run; ``backward`` does nothing where the case has no loss."""

    model: nn.Module
    forward: Callable[[], Any]
    loss: Callable[[Any], Tensor | None]
    backward: Callable[[Tensor | None], None]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value


@contextlib.contextmanager
def low_precision(case: Fault | Control) -> Iterator[Run]:
    """Set a case up as a user would: a converted model, or an FP32 model under autocast with CUDA's lists."""
    made, dtype = built(case), _DTYPES[case.dtype]
    cast = case.settings.get("mode", "autocast") == "cast"
    model, batch = (made.model.to(dtype), _cast(made.batch, dtype)) if cast else (made.model, made.batch)
    wanted = case.settings.get("backward", made.loss is not None)
    model.train(case.settings.get("train", made.loss is not None))

    def region() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if cast else torch.autocast("cpu", dtype)

    def forward() -> Any:
        with region():
            return model(**batch) if isinstance(batch, dict) else model(batch)

    def loss(output: Any) -> Tensor | None:
        if made.loss is not None:
            with region():
                return made.loss(output, batch)
        return output.get("loss") if isinstance(output, dict) else None

    def backward(value: Tensor | None) -> None:
        if value is not None and wanted and value.requires_grad:
            (value.float() * case.settings.get("loss_scale", 1.0)).backward()

    torch.manual_seed(0)
    with emulate_cuda(), as_on_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Run(model=model, forward=forward, loss=loss, backward=backward)
