"""Whether bad values in a model's output stand only where the batch itself says that nothing is to be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nanprobe.numerics.tree import named_tensors

__all__ = ["bad_only_where_masked"]


def bad_only_where_masked(output: Any, batch: Any) -> bool:
    """Whether ``output`` holds NaN or +Inf, and all of them at positions that a mask of ``batch`` excludes.

    A mask is a boolean or integer field whose name ends in "mask", of two dimensions or more, and the first dimensions
    of the output tensor are its shape. Zero excludes, as in ``attention_mask``; in a mask of padding (``pad`` in its
    name) one does.
    """
    excluded = list(_excluded(batch))
    found = False
    for _, tensor in named_tensors(output):
        if not tensor.dtype.is_floating_point or tensor.is_nested or tensor.layout is not torch.strided:
            continue
        values = tensor.detach()
        bad = torch.isnan(values) | torch.isposinf(values)
        if not bool(bad.any()):
            continue
        found = True
        fitting = [mask for mask in excluded if bad.shape[: mask.dim()] == mask.shape]
        if not any(_within(bad, mask) for mask in fitting):
            return False
    return found


def _within(bad: torch.Tensor, excluded: torch.Tensor) -> bool:
    at = bad.reshape(*excluded.shape, -1).any(dim=-1)
    return bool((excluded | ~at).all())


def _excluded(batch: Any) -> Iterator[torch.Tensor]:
    """Yield each mask of the batch as a boolean tensor that is true where nothing is to be read."""
    for path, tensor in named_tensors(batch):
        name = path.rpartition(".")[2].lower()
        if not name.endswith("mask") or tensor.dim() < 2 or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            continue
        keep = tensor.detach() != 0
        yield keep if "pad" in name else ~keep
