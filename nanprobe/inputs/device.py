"""The device a replay runs on, checked before anything is built, and moving nested structures to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanprobe.errors import UsageError
from nanprobe.numerics.tree import map_tensors, named_tensors

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
    """Return a structure with its tensors on ``device``; tensors that are there already are not copied.

    The batch sizes of a PackedSequence stay on the CPU, where PyTorch wants them.
    """
    stay = _batch_sizes(dict(named_tensors(value)))
    return map_tensors(lambda tensor: tensor if id(tensor) in stay else tensor.to(device), value)


def _batch_sizes(tensors: Mapping[str, Tensor]) -> set[int]:
    """Return the identities of the tensors that are the batch sizes of a PackedSequence.

    They are told by their name and by what makes them batch sizes: they add up to the rows of the data beside them.
    """
    found = set()
    for path, sizes in tensors.items():
        around, _, name = path.rpartition(".")
        data = tensors.get(f"{around}.data" if around else "data")
        if name != "batch_sizes" or data is None or data.ndim == 0 or sizes.dtype != torch.int64:
            continue
        if int(sizes.sum()) == data.shape[0]:
            found.add(id(sizes))
    return found
