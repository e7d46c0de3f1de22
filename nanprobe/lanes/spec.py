"""What a replay is asked to do, and how it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanprobe.errors import IncompleteError, UsageError
from nanprobe.formats import carrier_of
from nanprobe.inputs.factories import raised_in_user_code
from nanprobe.inputs.rng import RandomState
from nanprobe.lanes.lane_model import Weights
from nanprobe.lanes.step import StepSpec
from nanprobe.lanes.trace import Raised
from nanprobe.numerics.tree import named_tensors
from nanprobe.progress import SILENT, Progress

__all__ = [
    "HALF",
    "Bind",
    "LaneFailure",
    "LossFunction",
    "ReplaySpec",
    "batch_size_of",
    "find_loss",
    "torch_dtype",
]

LossFunction = Callable[[Any, Any], torch.Tensor]
Bind = Callable[[nn.Module, Any], tuple[tuple[Any, ...], dict[str, Any]]]

HALF = (torch.float16, torch.bfloat16)
"""The dtypes that autocast runs in."""


class LaneFailure(IncompleteError):
    """The reference raised ``error``.

    ``model``, ``args`` and ``kwargs`` are what was called, ``inputs`` what the module that was running was called with.
    """

    def __init__(
        self,
        error: BaseException,
        raised: Raised | None,
        model: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    ) -> None:
        self.error = error
        self.raised = raised
        self.model = model
        self.args_of_call, self.kwargs_of_call = call
        self.inputs = inputs
        where = ""
        if raised is not None and raised.module is not None:
            where = f" in {raised.module or 'the model itself'}"
        elif raised is not None and raised.phase == "loss":
            where = " in the loss function"
        message = (str(error).splitlines() or [""])[0]
        super().__init__(f"the reference raised {type(error).__name__}{where}: {message}{raised_in_user_code(error)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """What to replay. ``precisions`` are the low ones; ``reference`` is "fp32" (or "fp64" to judge FP32 itself).

    ``tf32``, ``reduced_precision_reduction`` and ``flush_subnormals`` are of the low precisions; None leaves it to the
    device's own flags. ``loss_scales`` gives the scale of each low precision; ``random`` is the random state that every
    lane starts from (None: the seed's). ``step`` is what is done with the gradients, None for nothing. ``weights`` maps
    the checkpoint afresh, so that lanes need not copy weights that live in a file.
    """

    model: nn.Module
    batch: Any
    bind: Bind
    precisions: tuple[str, ...]
    reference: str = "fp32"
    loss: LossFunction | None = None
    mode: str = "autocast"
    autocast_policy: str = "cuda"
    attention: str = "fused"
    fp8_scaling: str = "tensor"
    tf32: bool | None = None
    reduced_precision_reduction: bool | None = None
    flush_subnormals: bool = False
    train: bool = False
    backward: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    random: RandomState | None = None
    loss_scales: Mapping[str, float] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    local_error: bool = True
    batch_size: int | None = None
    batch_dim: int = 0
    weights: Weights | None = None
    step: StepSpec | None = None
    progress: Progress = SILENT

    @property
    def emulates_cuda(self) -> bool:
        """Whether CPU tensors are to be treated by autocast as CUDA tensors would be."""
        return self.autocast_policy == "cuda" and self.device.type == "cpu"


def torch_dtype(precision: str) -> torch.dtype:
    """Return PyTorch's dtype of the tensors in a lane of that precision; UsageError for one that has none."""
    name = carrier_of(precision).dtype
    if name is None:
        raise UsageError(f"{precision} cannot be replayed: PyTorch has no such dtype")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def find_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a model's output holds: ``output.loss``, ``output["loss"]``, or a scalar output."""
    candidate = output
    if not isinstance(output, torch.Tensor):
        candidate = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.is_floating_point():
        return candidate
    return None


def batch_size_of(batch: Any, dim: int) -> int | None:
    """Return the length that most of the batch's tensors have along ``dim``, None when none has that dimension."""
    sizes = [tensor.shape[dim] for _, tensor in named_tensors(batch) if tensor.dim() > dim]
    if not sizes:
        return None
    return max(set(sizes), key=sizes.count)
