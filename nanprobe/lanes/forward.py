"""What is written down of each forward visit: statistics, errors against the reference, and facts for the diagnosis."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanprobe.lanes.conductor import Posted, Request
from nanprobe.lanes.frames import Frame
from nanprobe.lanes.local import LocalTwin
from nanprobe.lanes.measures import MeasureBuilder, bad_detail, health_of
from nanprobe.lanes.memo import TensorMemo, storage_of, version_of
from nanprobe.lanes.trace import HEALTHY, BadDetail, Health, VisitFact
from nanprobe.numerics.stats import (
    Difference,
    TensorStats,
    difference,
    format_of,
    is_finite,
    measure,
    measure_against,
    total_difference,
)
from nanprobe.numerics.tree import named_tensors, uninspected

if TYPE_CHECKING:
    from nanprobe.lanes.lane import Lane

__all__ = ["ForwardRecorder"]


class ForwardRecorder:
    """Looks at a visit's inputs when it begins and at its outputs when it ends.

    A tensor that passes several boundaries is measured and compared once.
    """

    def __init__(self, lane: Lane) -> None:
        self.facts: list[VisitFact] = []
        self.uninspected: dict[str, None] = {}
        self.dropout_differs: dict[str, None] = {}
        self._lane = lane
        self._health: TensorMemo[Health] = TensorMemo()
        self._stats: TensorMemo[TensorStats] = TensorMemo()
        self._differences: TensorMemo[Difference] = TensorMemo()

    # -- beginning -------------------------------------------------------------------------------------------------

    def enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A visit begins: note what it was called with, whether that is good, and get ready for its local error."""
        with torch._C._DisableTorchDispatch():
            self._enter(frame, args, kwargs)

    def _enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = time.perf_counter()
        frame.inputs = [(name, t, version_of(t)) for name, t in named_tensors((args, kwargs))]
        frame.arguments = (args, kwargs)
        frame.health = self._health_of_all(t for _, t, _ in frame.inputs)
        if self._lane.settings.local_error:
            if not self._lane.is_reference:
                frame.twin = LocalTwin.prepare(frame.module)
            elif getattr(frame.module, "inplace", False):
                frame.arguments = LocalTwin.keep_inputs(args, kwargs)
        self._lane.measuring_seconds += time.perf_counter() - began

    def _health_of_all(self, tensors: Iterable[torch.Tensor]) -> Health:
        """Sum the health of tensors, looking only at those that no earlier boundary has looked at."""
        total = HEALTHY
        for tensor in tensors:
            if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                continue
            health = self._health.get(tensor)
            if health is None:
                health = HEALTHY if is_finite(tensor) else health_of([measure(tensor)])
                self._health.put(health, tensor)
            total = total + health
        return total

    def broken_off(self, frame: Frame) -> None:
        """A visit raised: only its beginning is known."""
        self._add_fact(frame, HEALTHY, left=-1)

    # -- end -------------------------------------------------------------------------------------------------------

    def leave(self, frame: Frame, output: Any, left: int) -> dict[str, torch.Tensor]:
        """A visit has ended: meet the other lanes, measure, compare and record; return the outputs by path."""
        with torch._C._DisableTorchDispatch():
            tensors, counterpart, builder = self._leave(frame, output, left)
        lane = self._lane
        if counterpart is not None and frame.children == 0 and lane.settings.local_error:
            began = time.perf_counter()
            self._local_error(frame, counterpart, builder)
            lane.measuring_seconds += time.perf_counter() - began
        return tensors

    def _leave(
        self, frame: Frame, output: Any, left: int
    ) -> tuple[dict[str, torch.Tensor], Posted | None, MeasureBuilder]:
        lane = self._lane
        began = time.perf_counter()
        hidden = uninspected(output)
        if hidden is not None:
            self.uninspected[f"{frame.path} ({hidden})".strip()] = None
        tensors = dict(named_tensors(output))
        lane.measuring_seconds += time.perf_counter() - began
        counterpart = None if lane.is_reference else lane.meet(Request(frame.key, frame.chain()))
        began = time.perf_counter()
        stats = self._measure(tensors, counterpart)
        builder = lane.measures[("forward", frame.path, frame.visit)] = MeasureBuilder()
        lane.order[("forward", frame.path, frame.visit)] = left
        lost = 0
        diffs: dict[str, Difference | None] = {}
        if counterpart is not None:
            diffs = self._compare(frame, tensors, stats, counterpart)
            lost = sum(d.lost for path, d in diffs.items() if d is not None and stats[path].floating)
            self._compare_inputs(frame, counterpart)
            if isinstance(frame.module, nn.modules.dropout._DropoutNd) and frame.module.training:
                self._check_dropout(frame, tensors, counterpart)
        elif not lane.is_reference:
            builder.note = "the reference did not come by"
            lane.choices.flip(frame, None, 1, 1, "this visit is not made by the reference")
        # Headroom is that of the operand's format where a product takes the value as it is; which one is seen later.
        keeps_storages = lane.settings.arithmetic.operands is not None and not lane.settings.arithmetic.scaled
        for path, tensor in tensors.items():
            builder.add(path, tensor, stats[path], diffs.get(path))
            if keeps_storages and tensor.layout is torch.strided:
                builder.storages.append(storage_of(tensor))
        self._record(frame, tensors, stats, counterpart, lost, left, builder)
        lane.measuring_seconds += time.perf_counter() - began
        if lane.is_reference:
            keeps_inputs = frame.unchanged() or getattr(frame.module, "inplace", False)
            inputs = frame.arguments if keeps_inputs else None
            lane.post(Posted(key=frame.key, tensors=tensors, stats=stats, inputs=inputs))
        return tensors, counterpart, builder

    def _measure(self, tensors: Mapping[str, torch.Tensor], counterpart: Posted | None) -> dict[str, TensorStats]:
        """Measure a visit's outputs; those with a counterpart are compared in the same pass."""
        for path, tensor in tensors.items():
            reference = counterpart.tensors.get(path) if counterpart is not None else None
            if reference is not None and self._stats.get(tensor) is None:
                stats, diff = measure_against(tensor, reference)
                self._stats.put(stats, tensor)
                if diff is not None:
                    self._differences.put(diff, tensor, reference)
        return {path: self._measured(tensor) for path, tensor in tensors.items()}

    def _measured(self, tensor: torch.Tensor) -> TensorStats:
        stats = self._stats.get(tensor)
        if stats is None:
            stats = measure(tensor)
            self._stats.put(stats, tensor)
        return stats

    def _difference(self, tensor: torch.Tensor, reference: torch.Tensor) -> Difference | None:
        diff = self._differences.get(tensor, reference)
        if diff is None:
            diff = difference(tensor, reference)
            if diff is not None:
                self._differences.put(diff, tensor, reference)
        return diff

    def _compare(
        self,
        frame: Frame,
        tensors: Mapping[str, torch.Tensor],
        stats: Mapping[str, TensorStats],
        counterpart: Posted,
    ) -> dict[str, Difference | None]:
        diffs: dict[str, Difference | None] = {}
        for path, tensor in tensors.items():
            reference = counterpart.tensors.get(path)
            if reference is None:
                continue
            diffs[path] = diff = self._difference(tensor, reference)
            if diff is None and not tensor.is_nested:
                self._lane.choices.shape_differs(frame, tensor, reference)
        frame.output_error = total_difference(
            _beyond_spacing(d, tensors[path]) for path, d in diffs.items() if d is not None and stats[path].floating
        ).rel_error
        return diffs

    def _compare_inputs(self, frame: Frame, counterpart: Posted) -> None:
        """Compare the inputs with the reference's, and tell a mask's -Inf among them from one the reference lacks."""
        if counterpart.inputs is None or not frame.unchanged():
            return
        references = dict(named_tensors(counterpart.inputs))
        diffs: list[Difference] = []
        for path, tensor, _ in frame.inputs:
            reference = references.get(path)
            if reference is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                diff = self._difference(tensor, reference)
                if diff is not None:
                    diffs.append(_beyond_spacing(diff, tensor))
        total = total_difference(diffs)
        frame.input_error = total.rel_error
        if frame.health.soft and total.lost:
            frame.health = dataclasses.replace(frame.health, lost=total.lost)

    def _local_error(self, frame: Frame, counterpart: Posted, builder: MeasureBuilder) -> None:
        """Run the leaf once more, its operations in the same way as in the lane, and compare with the reference."""
        outputs, note = self._lane.run_twin(frame, counterpart)
        if note is not None:
            builder.note = note
        with torch._C._DisableTorchDispatch():
            for path, tensor in outputs.items():
                reference = counterpart.tensors.get(path)
                if reference is not None and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                    diff = difference(tensor, reference)
                    if diff is not None:
                        builder.local.append(diff)

    def _check_dropout(self, frame: Frame, tensors: Mapping[str, torch.Tensor], counterpart: Posted) -> None:
        """Note a dropout that keeps elements which the reference's drops: the lanes drew different masks."""
        for path, tensor in tensors.items():
            reference = counterpart.tensors.get(path)
            if reference is None or reference.shape != tensor.shape:
                continue
            here = tensor.detach()
            kept = (reference.detach() == 0) & torch.isfinite(here) & (here != 0)
            if int(torch.count_nonzero(kept)) > _DROPPED_APART * tensor.numel():
                self.dropout_differs[frame.path] = None

    def _record(
        self,
        frame: Frame,
        tensors: Mapping[str, torch.Tensor],
        stats: Mapping[str, TensorStats],
        counterpart: Posted | None,
        lost: int,
        left: int,
        builder: MeasureBuilder,
    ) -> None:
        health = health_of([s for s in stats.values() if s.floating], lost)
        for path, tensor in tensors.items():
            if stats[path].floating:
                self._health.put(health_of([stats[path]], lost), tensor)
        bad_output = bad_input = None
        if health.hard or health.soft:
            builder.detail = self._detail(
                tensors.items(),
                counterpart.tensors if counterpart is not None else {},
                self._absmax([t for _, t, _ in frame.inputs]) if health.hard and frame.unchanged() else None,
            )
            bad_output = builder.detail
        if frame.health.hard and frame.unchanged():
            given = counterpart.inputs if counterpart is not None else None
            references = dict(named_tensors(given)) if given is not None else {}
            bad_input = self._detail([(name, t) for name, t, _ in frame.inputs], references, None)
        self._add_fact(frame, health, left=left, bad_output=bad_output, bad_input=bad_input)

    def _absmax(self, tensors: Iterable[torch.Tensor]) -> float | None:
        stats = [self._measured(t) for t in tensors if t.dtype.is_floating_point]
        return max((s.absmax for s in stats if s.absmax is not None), default=None)

    def _detail(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        references: Mapping[str, torch.Tensor],
        input_absmax: float | None,
    ) -> BadDetail | None:
        settings = self._lane.settings
        details = [
            bad_detail(
                path,
                tensor,
                reference=references.get(path),
                batch_size=settings.batch_size,
                batch_dim=settings.batch_dim,
                input_absmax=input_absmax,
            )
            for path, tensor in tensors
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex
        ]
        found = [detail for detail in details if detail is not None]
        return _with_samples([d for d in found if not d.only_masked] or found)

    def _add_fact(
        self,
        frame: Frame,
        outputs: Health,
        *,
        left: int,
        bad_output: BadDetail | None = None,
        bad_input: BadDetail | None = None,
    ) -> None:
        parent = frame.parent
        self.facts.append(
            VisitFact(
                module=frame.path,
                visit=frame.visit,
                class_=type(frame.module).__name__,
                depth=frame.depth,
                leaf=frame.children == 0,
                parent=(parent.path, parent.visit) if parent is not None else None,
                previous=frame.previous,
                last_child=frame.last_child,
                entered=frame.entered,
                left=left,
                inputs=frame.health,
                outputs=outputs,
                input_error=frame.input_error,
                output_error=frame.output_error,
                bad_input=bad_input,
                bad_output=bad_output,
            )
        )


def _with_samples(details: list[BadDetail]) -> BadDetail | None:
    """Return the first tensor's detail with the bad samples of all; without any when one cannot be told apart."""
    if len(details) < 2:
        return details[0] if details else None
    parts = {part.sample: part for detail in reversed(details) for part in detail.by_sample}
    known = all(detail.by_sample for detail in details)
    return dataclasses.replace(
        details[0],
        samples=tuple(sorted(parts)) if known else details[0].samples,
        by_sample=tuple(parts[sample] for sample in sorted(parts)) if known else (),
    )


def _beyond_spacing(diff: Difference, tensor: torch.Tensor) -> Difference:
    """Return a difference as the diagnosis judges it: none where the format's spacing near zero explains all of it.

    Values of the size of the smallest subnormal have no correct digit and no weight either, unless something divides by
    them; then it shows in what comes out there.
    """
    fmt = format_of(tensor.dtype)
    if fmt is None or diff.error_squares > diff.compared * fmt.smallest_subnormal**2:
        return diff
    return diff._replace(error_squares=0.0)


_DROPPED_APART = 0.01
"""Share of elements that may survive dropout in one lane only before the masks count as different."""
