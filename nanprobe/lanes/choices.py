"""Discrete choices, compared as choices: top-k, argmax, buckets, rounding to integers, and visits made or not made."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from nanprobe.lanes.conductor import Key, Posted, Request
from nanprobe.lanes.frames import Frame
from nanprobe.lanes.trace import Flip

if TYPE_CHECKING:
    from nanprobe.lanes.lane import Lane

__all__ = ["ChoiceRecorder"]


class ChoiceRecorder:
    """Keeps the choices of one lane that differ from the reference's."""

    def __init__(self, lane: Lane) -> None:
        self.flips: list[Flip] = []
        self._lane = lane
        self._outside: Counter[str] = Counter()

    def chosen(self, op: str, choice: torch.Tensor) -> None:
        """An operation made a choice (an integer tensor of any shape); compare it with the reference's."""
        lane = self._lane
        if lane.phase not in ("forward", "loss") or not lane.observing:
            return
        frame = lane.frame
        counter = frame.choices if frame is not None else self._outside
        number = counter[op]
        counter[op] += 1
        part = f"{op}#{number}" if frame is not None else f"outside {op}#{number}"
        key: Key = (lane.phase, frame.path if frame else "", frame.visit if frame else 0, part)
        if lane.is_reference:
            lane.post(Posted(key=key, tensors={"": choice}, stats={}))
            return
        counterpart = lane.meet(Request(key, (*frame.chain(), frame.key) if frame is not None else ()))
        if counterpart is None:
            return
        reference = counterpart.tensors[""]
        if reference.shape != choice.shape:
            self.shape_differs(frame, choice, reference, op)
            return
        changed = int(torch.count_nonzero(reference != choice))
        if changed:
            self.flip(frame, op, changed, choice.numel(), f"{changed:,} of {choice.numel():,} choices differ")

    def shape_differs(
        self, frame: Frame | None, tensor: torch.Tensor, reference: torch.Tensor, op: str | None = None
    ) -> None:
        """A tensor has another shape than the reference's: something upstream was chosen differently."""
        self.flip(frame, op, 1, 1, f"shape {list(tensor.shape)} where the reference has {list(reference.shape)}")

    def flip(self, frame: Frame | None, op: str | None, changed: int, total: int, text: str) -> None:
        """Record that ``changed`` of ``total`` choices differ."""
        self.flips.append(
            Flip(
                module=frame.path if frame is not None else None,
                visit=frame.visit if frame is not None else None,
                op=op,
                order=self._lane.clock,
                changed=changed,
                total=total,
                text=text,
            )
        )
