"""How far a low precision may be from the reference before it counts as a divergence.

Rounding errors of a healthy model add up roughly like a random walk, so the tolerance grows with the square root of the
number of visits behind it. In backward a kink (ReLU, max, clamp) passes a gradient in one lane and none in the other
wherever its argument changes sign by rounding; the share of such elements is proportional to the error in forward, and
the 2-norm of the difference to its square root. ``docs/tolerances.md`` says on which models the constants were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from nanprobe.config import Tolerance
from nanprobe.formats import by_name

__all__ = [
    "BASE_MULTIPLE",
    "COARSE_FREE_VISITS",
    "COARSE_MULTIPLE",
    "FREE_VISITS",
    "KINK_MULTIPLE",
    "LARGEST_BACKWARD",
    "LARGEST_COARSE",
    "Tolerances",
]

BASE_MULTIPLE = 16.0
"""Forward tolerance at the start of a model, in multiples of u."""

FREE_VISITS = 32
"""Number of visits over which the forward tolerance does not grow yet."""

COARSE_MULTIPLE = 4.0
"""The same for 8-bit formats, whose errors are near their worst case after few layers."""

COARSE_FREE_VISITS = 8
"""Number of visits over which the forward tolerance of an 8-bit format does not grow yet."""

LARGEST_COARSE = 0.75
"""Largest forward tolerance of an 8-bit format: an error of 1 leaves nothing of the value."""

KINK_MULTIPLE = 8.0
"""Backward tolerance at the start of a model, in multiples of the square root of u."""

LARGEST_BACKWARD = 1.0
"""Largest backward tolerance: an error as large as the gradient itself leaves nothing of it."""


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
        fmt = by_name(self.precision)
        unit = fmt.unit_roundoff
        chosen = self._set_by_user(module)
        if chosen is not None:
            return chosen * unit
        coarse = fmt.bits == 8
        growth = math.sqrt(max(1.0, position / (COARSE_FREE_VISITS if coarse else FREE_VISITS)))
        forward = (COARSE_MULTIPLE if coarse else BASE_MULTIPLE) * unit * growth
        if coarse:
            forward = min(forward, LARGEST_COARSE)
        if phase == "forward":
            return forward
        return min(max(2.0 * forward, KINK_MULTIPLE * math.sqrt(unit * growth)), LARGEST_BACKWARD)
