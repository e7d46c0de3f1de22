"""A lane's settings, and a module visit in progress."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanprobe.lanes.arithmetic import Arithmetic
from nanprobe.lanes.conductor import Key
from nanprobe.lanes.local import LocalTwin
from nanprobe.lanes.memo import version_of
from nanprobe.lanes.trace import HEALTHY, Health

__all__ = ["Frame", "LaneSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """How a lane runs: its precision, whether by cast or autocast, and what is measured.

    ``dtype`` is None for a lane that runs the model as it is. ``batch_size`` and ``batch_dim`` tie rows to samples.
    """

    precision: str
    dtype: torch.dtype | None
    mode: str
    device: torch.device
    grad: bool
    loss_scale: float = 1.0
    local_error: bool = True
    batch_size: int | None = None
    batch_dim: int = 0
    arithmetic: Arithmetic = field(default_factory=Arithmetic)


@dataclass(slots=True, eq=False)
class Frame:
    """A module visit in progress.

    ``inputs`` lists (path, tensor, version) of everything the module was called with, ``arguments`` is the call itself.
    ``children`` counts the visits made inside; ``previous`` is the sibling that finished last before this visit and
    ``last_child`` the child that finished last inside it.
    """

    path: str
    visit: int
    module: nn.Module
    depth: int
    parent: Frame | None
    entered: int
    sequence: int
    previous: str | None
    inputs: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    health: Health = HEALTHY
    input_error: float | None = None
    output_error: float | None = None
    children: int = 0
    last_child: str | None = None
    twin: LocalTwin | None = None
    choices: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> Key:
        """The key under which the lanes meet when this visit ends."""
        return ("forward", self.path, self.visit, "")

    def chain(self) -> tuple[Key, ...]:
        """Return the keys of the visits around this one, outermost first."""
        keys: list[Key] = []
        frame = self.parent
        while frame is not None:
            keys.append(frame.key)
            frame = frame.parent
        return tuple(reversed(keys))

    def unchanged(self) -> bool:
        """Whether nothing wrote to the inputs since the visit began."""
        return all(version_of(tensor) == version for _, tensor, version in self.inputs)
