"""Modules that stay in FP32 inside a low-precision lane.

A kept module gets its floating inputs in FP32, runs with autocast off, and hands FP32 on. In cast mode the next low-
precision module converts the tensors that come from a kept one, also through residual additions and other functional
code; a ``.float()`` of the model's own is left alone. To tell them apart, tensors that come from a kept module are
marked, and the mark is handed on by every operation that stays in FP32 (:func:`Placement.follow`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from nanprobe.lanes.lane_model import LaneModel
from nanprobe.numerics.tree import map_tensors, named_tensors

__all__ = ["Placement"]

_MARK = "_nanprobe_from_kept"


class Placement:
    """Decides, visit by visit, which tensors change dtype at a module's door."""

    def __init__(self, copied: LaneModel, mode: str, dtype: torch.dtype | None, device: torch.device) -> None:
        self.active = bool(copied.kept) and dtype is not None
        self._kept = frozenset(copied.kept)
        self._cast = mode == "cast"
        self._dtype = dtype
        self._device = device
        self._inside = 0
        self._nodes: list[tuple[int, int]] = []

    @property
    def exempt(self) -> bool:
        """Whether what runs now is a kept module's, in forward or backward: its products are FP32 and nothing less."""
        if self._inside or not self._nodes:
            return self._inside > 0
        node = torch._C._current_autograd_node()
        return node is not None and any(first <= node._sequence_nr() < stop for first, stop in self._nodes)

    def enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the module is to be called with."""
        if not self.active or self._inside:
            return args, kwargs
        if path in self._kept:
            convert = _to_fp32
        elif self._cast and any(hasattr(t, _MARK) for _, t in named_tensors((args, kwargs))):
            convert = self._to_low
        else:
            return args, kwargs
        converted = map_tensors(convert, (args, kwargs))
        return converted[0], converted[1]

    @contextlib.contextmanager
    def around(self, path: str) -> Iterator[None]:
        """Run a kept module with autocast off; nothing for the others."""
        if not self.active or path not in self._kept:
            yield
            return
        self._inside += 1
        first = torch._C._autograd._get_sequence_nr()
        try:
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self._inside -= 1
            self._nodes.append((first, torch._C._autograd._get_sequence_nr()))

    def leave(self, path: str, output: Any) -> None:
        """Mark what a kept module hands on."""
        if self.active and self._cast and path in self._kept and not self._inside:
            for _, tensor in named_tensors(output):
                _mark(tensor)

    def follow(self, inputs: Any, output: Any) -> None:
        """Hand the mark on through one dispatched operation: FP32 results of marked operands are marked."""
        if any(hasattr(t, _MARK) for _, t in named_tensors(inputs)):
            for _, tensor in named_tensors(output):
                _mark(tensor)

    def _to_low(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if hasattr(tensor, _MARK) and tensor.dtype == torch.float32 else tensor


def _mark(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float32:
        setattr(tensor, _MARK, True)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
