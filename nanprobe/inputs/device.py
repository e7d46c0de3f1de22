"""The device a replay runs on, checked before anything is built, and moving nested structures to it."""

from __future__ import annotations

from typing import Any

import torch

from nanprobe.errors import UsageError
from nanprobe.numerics.tree import map_tensors

__all__ = ["check_device", "move"]


def check_device(name: str) -> torch.device:
    """Return the device called ``name`` (cpu, cuda, cuda:N); UsageError when this machine has no such device."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device: expected cpu, cuda or cuda:N, got '{name}'") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"device: expected cpu, cuda or cuda:N, got '{name}'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UsageError(f"device `{name}`: PyTorch {torch.__version__} sees no CUDA device here; use --device cpu")
    if (device.index or 0) >= count:
        raise UsageError(f"device `{name}`: there are {count} CUDA devices, numbered from 0")
    return device


def move(value: Any, device: torch.device) -> Any:
    """Return a structure with its tensors on ``device``; tensors that are there already are not copied."""
    return map_tensors(lambda tensor: tensor.to(device), value)
