"""Gradients at module boundaries, seen by tensor hooks on a visit's outputs.

Unlike full backward hooks, tensor hooks see modules that return dicts and lists, forbid no later in-place operation, and
do not change the order in which gradients add up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanprobe.lanes.conductor import Key, Posted, Request
from nanprobe.lanes.measures import MeasureBuilder, bad_detail
from nanprobe.lanes.memo import TensorMemo
from nanprobe.lanes.trace import Place
from nanprobe.numerics.stats import Difference, TensorStats, difference, measure

if TYPE_CHECKING:
    from nanprobe.lanes.lane import Lane

__all__ = ["GradientRecorder"]


class GradientRecorder:
    """Hooks the outputs of visits and records the gradient that arrives at each."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._unwatched: set[tuple[str, int]] = set()
        self._stats: TensorMemo[TensorStats] = TensorMemo()
        self._differences: TensorMemo[Difference] = TensorMemo()

    def watch(self, path: str, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hook the outputs of a visit; remember the visit when it has none that takes a gradient."""
        if not self._lane.settings.grad:
            return
        watched = False
        for part, tensor in tensors.items():
            if tensor.requires_grad and tensor.grad_fn is not None and not tensor.is_nested:
                hook: Any = tensor.register_hook
                hook(partial(self._arrived, path, visit, part))
                watched = True
        if watched:
            self._unwatched.discard((path, visit))
        else:
            self._unwatched.add((path, visit))

    def watch_again(self, path: str, visit: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hook the outputs of a recomputed visit, unless the gradients go through its first run."""
        if (path, visit) in self._unwatched:
            self.watch(path, visit, tensors)

    def _arrived(self, path: str, visit: int, part: str, gradient: torch.Tensor) -> None:
        lane = self._lane
        scale = lane.settings.loss_scale
        began = time.perf_counter()
        place: Place = ("backward", path, visit)
        stats = self._stats.get(gradient)
        if stats is None:
            stats = measure(gradient)
            self._stats.put(stats, gradient)
        lane.order.setdefault(place, lane.tick())
        builder = lane.measures.setdefault(place, MeasureBuilder(scale=scale))
        lane.measuring_seconds += time.perf_counter() - began
        key: Key = ("backward", path, visit, part)
        diff = None
        if lane.is_reference:
            lane.post(Posted(key=key, tensors={part: gradient}, stats={part: stats}))
        else:
            counterpart = lane.meet(Request(key))
            began = time.perf_counter()
            if counterpart is None:
                builder.note = "no gradient arrived here in the reference"
            else:
                diff = self._difference(gradient, counterpart.tensors[part], scale)
            lane.measuring_seconds += time.perf_counter() - began
        builder.add(part, gradient, stats, diff)
        if stats.bad and builder.detail is None:
            builder.detail = bad_detail(
                part, gradient, batch_size=lane.settings.batch_size, batch_dim=lane.settings.batch_dim
            )

    def _difference(self, gradient: torch.Tensor, reference: torch.Tensor, scale: float) -> Difference | None:
        diff = self._differences.get(gradient, reference)
        if diff is None:
            diff = difference(gradient, reference, scale=scale)
            if diff is not None:
                self._differences.put(diff, gradient, reference)
        return diff
