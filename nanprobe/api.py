"""The Python interface: what the commands do, on a live module and batch, as functions that return a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nanprobe.config import OptimizerSpec, Settings
from nanprobe.config.checks import CALLS
from nanprobe.errors import UsageError
from nanprobe.formats import LOW_PRECISIONS, by_dtype
from nanprobe.inputs.batch import check_tensors
from nanprobe.inputs.loss import checked_loss
from nanprobe.inputs.model import unfinished_class
from nanprobe.nearest import suggestion
from nanprobe.pipeline import Subject, run_replay, step_of
from nanprobe.progress import SILENT, Progress
from nanprobe.report import Report

__all__ = ["compare_precisions", "replay"]

_PRECISIONS = ("fp32", *LOW_PRECISIONS)


def replay(
    model: nn.Module,
    batch: Any,
    *,
    dtype: str | torch.dtype = "fp16",
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    call: str = "auto",
    local_error: bool = True,
    operations: bool = True,
    progress: Progress = SILENT,
    **settings: Any,
) -> Report:
    """Replay ``batch`` through ``model`` in one low precision beside the FP32 reference.

    ``dtype`` is "fp16", "bf16", "tf32", "fp8-e4m3", "fp8-e5m2" or "fp32" (which is judged against FP64), or the torch
    dtype. ``loss`` is called as loss(output, batch) and returns a scalar tensor. ``call`` says how the batch becomes
    arguments ("auto", "kwargs", "args", "single"). ``settings`` are the fields of :class:`nanprobe.config.Settings`:
    ``mode``, ``train``, ``backward``, ``loss_scale``, ``keep_fp32``, ``tolerances``, ``ignore``, ``seed``, ``device``,
    ...

    The model, its mode, buffers, gradients and hooks and all random state are as before when this returns or raises.
    Raises UsageError when the batch does not fit the model or a setting makes no sense, IncompleteError when the
    reference itself cannot be run.

    >>> import torch, nanprobe
    >>> report = nanprobe.replay(torch.nn.Linear(4, 4), torch.ones(2, 4), dtype="bf16")
    >>> report.verdict
    'clean'
    """
    return _run("replay", model, batch, (_name(dtype),), loss, call, local_error, operations, progress, settings)


def compare_precisions(
    model: nn.Module,
    batch: Any,
    *,
    dtypes: Iterable[str | torch.dtype] | str | torch.dtype = ("fp32", "fp16", "bf16"),
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    call: str = "auto",
    local_error: bool = True,
    operations: bool = True,
    progress: Progress = SILENT,
    **settings: Any,
) -> Report:
    """Replay ``batch`` through ``model`` in several precisions side by side; see :func:`replay`."""
    several = (dtypes,) if isinstance(dtypes, (str, torch.dtype)) else dtypes
    if not isinstance(several, Iterable):
        raise UsageError(f"dtypes: expected the names of precisions, got {several!r}")
    names = tuple(dict.fromkeys(_name(dtype) for dtype in several))
    if not names:
        raise UsageError(f"dtypes: there is no precision to replay; {suggestion('', _PRECISIONS)}")
    return _run("compare-precisions", model, batch, names, loss, call, local_error, operations, progress, settings)


def _run(
    command: str,
    model: nn.Module,
    batch: Any,
    precisions: tuple[str, ...],
    loss: Callable[[Any, Any], torch.Tensor] | None,
    call: str,
    local_error: bool,
    operations: bool,
    progress: Progress,
    settings: Mapping[str, Any],
) -> Report:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, got a {type(model).__name__}")
    unfinished = unfinished_class(model)
    if unfinished is not None:
        raise UsageError(f"model: its class {unfinished} does not call super().__init__() in its __init__")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss: expected a function of (output, batch), got a {type(loss).__name__}")
    if call not in CALLS:
        raise UsageError(f"call: no such way {call!r}; {suggestion(str(call), CALLS)}")
    unknown = [name for name in settings if name not in Settings.__slots__]
    if unknown:
        raise UsageError(f"no such setting '{unknown[0]}'; {suggestion(unknown[0], Settings.__slots__)}")
    live = settings.get("optimizer")
    chosen = Settings(**{**settings, "optimizer": _optimizer(live)})
    check_tensors(batch, chosen.batch_dim, "batch")
    subject = Subject(
        model=model,
        batch=batch,
        call=call,
        loss=checked_loss(loss, "loss") if loss is not None else None,
        step=step_of(chosen, model, live=live if isinstance(live, torch.optim.Optimizer) else None)[0],
        described={"config": None, "checkpoint": None, "batch": None, "model": type(model).__qualname__},
    )
    record = run_replay(
        subject,
        chosen,
        command=command,
        precisions=precisions,
        local_error=local_error,
        operations=operations,
        progress=progress,
    )
    return Report(record)


def _optimizer(given: Any) -> OptimizerSpec | None:
    """Return the optimizer that was meant: a spec, a mapping {name, kwargs}, a name, or a live one."""
    if given is None or isinstance(given, OptimizerSpec):
        return given
    if isinstance(given, torch.optim.Optimizer):
        return OptimizerSpec(name=type(given).__name__)
    if isinstance(given, str):
        return OptimizerSpec(name=given)
    if isinstance(given, Mapping) and set(given) <= {"name", "kwargs"} and "name" in given:
        return OptimizerSpec(**given)
    raise UsageError(
        "optimizer: expected a torch.optim.Optimizer, the name of its class, or {'name': ..., 'kwargs': {...}}, got a "
        f"{type(given).__name__}"
    )


def _name(dtype: str | torch.dtype) -> str:
    if isinstance(dtype, torch.dtype):
        fmt = by_dtype(str(dtype))
        name = fmt.name if fmt is not None and fmt.name in _PRECISIONS else str(dtype)
    else:
        name = str(dtype)
    if name not in _PRECISIONS:
        raise UsageError(f"dtype: no such precision '{name}'; {suggestion(name, _PRECISIONS, limit=len(_PRECISIONS))}")
    return name
