"""Every case of the suite, the families imported in the order in which they are printed."""

from __future__ import annotations

from benchmarks.diagnosis import (  # noqa: F401  # importing a family registers its cases
    activations,
    attention,
    backward_only,
    controls,
    losses,
    masks,
    normalisation,
    optimizer,
    positions,
    reductions,
    storage,
)
from benchmarks.diagnosis.case import CONTROLS, FAULTS

__all__ = ["CONTROLS", "FAULTS"]
