"""How far a low precision may be from the reference before it counts as a divergence.

Rounding errors of a healthy model add up roughly like a random walk, so the tolerance grows with the square root of the
number of visits behind it. In backward a kink (ReLU, max, clamp) passes a gradient in one lane and none in the other
wherever its argument changes sign by rounding; the share of such elements is proportional to u, and the 2-norm of the
difference to its square root. ``docs/tolerances.md`` says on which models the constants were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nanprobe.config import Tolerance
from nanprobe.formats import by_name

__all__ = ["BASE_MULTIPLE", "KINK_MULTIPLE", "Tolerances"]

BASE_MULTIPLE = 16.0
"""Forward tolerance at the start of a model, in multiples of u."""

_FREE_VISITS = 64
"""Number of visits over which the forward tolerance does not grow yet."""

KINK_MULTIPLE = 8.0
"""Backward tolerance in multiples of the square root of u."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The tolerance at a place, by default or as the user set it (``given``; the last fitting entry wins)."""

    precision: str
    given: Sequence[Tolerance] = ()

    def _set_by_user(self, module: str | None) -> float | None:
        found = None
        for entry in self.given:
            fits = entry.module is None or (module is not None and fnmatchcase(module, entry.module))
            if entry.format == self.precision and fits:
                found = entry.multiple
        return found

    def at(self, phase: str, module: str | None, position: int) -> float:
        """Return the largest relative error that passes at a visit; ``position`` counts the visits before it."""
        unit = by_name(self.precision).unit_roundoff
        chosen = self._set_by_user(module)
        if chosen is not None:
            return chosen * unit
        forward = BASE_MULTIPLE * unit * math.sqrt(max(1.0, position / _FREE_VISITS))
        if phase == "forward":
            return forward
        return max(2.0 * forward, KINK_MULTIPLE * math.sqrt(unit))
