"""Gradients at module boundaries, seen by tensor hooks on a visit's outputs.

Unlike full backward hooks, tensor hooks see modules that return dicts and lists, forbid no later in-place operation,
and do not change the order in which gradients add up.
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
from nanprobe.numerics.stats import Difference, TensorStats, measure, measure_against

if TYPE_CHECKING:
    from nanprobe.lanes.lane import Lane

__all__ = ["GradientRecorder"]


class GradientRecorder:
    """Hooks the outputs of visits and records the gradient that arrives at each."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._unwatched: set[tuple[str, int]] = set()
        self._memo: TensorMemo[tuple[TensorStats, Difference | None]] = TensorMemo()

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
        if self._lane.phase != "backward":
            return  # the model or the loss takes a derivative of its own, as a gradient penalty does
        with torch._C._DisableTorchDispatch():
            self._record(path, visit, part, gradient)

    def _record(self, path: str, visit: int, part: str, gradient: torch.Tensor) -> None:
        lane = self._lane
        scale = lane.settings.loss_scale
        place: Place = ("backward", path, visit)
        key: Key = ("backward", path, visit, part)
        lane.order.setdefault(place, lane.tick())
        counterpart = None if lane.is_reference else lane.meet(Request(key))
        began = time.perf_counter()
        builder = lane.measures.setdefault(place, MeasureBuilder(scale=scale))
        reference = counterpart.tensors[part] if counterpart is not None else None
        stats, diff = self._measured(gradient, reference, scale)
        if reference is None and not lane.is_reference:
            builder.note = "no gradient arrived here in the reference"
        builder.add(part, gradient, stats, diff)
        if stats.bad and builder.detail is None:
            builder.detail = bad_detail(
                part,
                gradient,
                batch_size=lane.settings.batch_size,
                batch_dim=lane.settings.batch_dim,
                gradient=True,
            )
        lane.measuring_seconds += time.perf_counter() - began
        if lane.is_reference:
            lane.post(Posted(key=key, tensors={part: gradient}, stats={part: stats}))

    def _measured(
        self, gradient: torch.Tensor, reference: torch.Tensor | None, scale: float
    ) -> tuple[TensorStats, Difference | None]:
        """Measure a gradient and compare it, once for all visits whose outputs are the same tensor."""
        pair = (gradient,) if reference is None else (gradient, reference)
        found = self._memo.get(*pair)
        if found is None:
            found = (
                (measure(gradient), None) if reference is None else measure_against(gradient, reference, scale=scale)
            )
            self._memo.put(found, *pair)
        return found
