"""Discrete choices that differ from the reference's, and the divergence that follows from one.

Once a top-k, an argmax or a bucket differs, everything after it computes something else: where the values first leave
their tolerance is then chance, and the choice is what there is to know.
"""

from __future__ import annotations

import dataclasses

from nanprobe.lanes.trace import Flip, LaneTrace
from nanprobe.records import Divergence

__all__ = ["attributed"]


def attributed(divergence: Divergence, lane: LaneTrace) -> Divergence:
    """Return a divergence that a flipped choice came before, at the place of the first choice that flipped.

    The relative error and the tolerance stay those of the visit that showed it, which the explanation names.
    """
    if not lane.flips:
        return divergence
    first = min(lane.flips, key=lambda flip: flip.order)
    seen = "outside the model" if divergence.module is None else f"in {divergence.module or 'the model itself'}"
    return dataclasses.replace(
        divergence,
        phase="forward",
        module=first.module,
        visit=first.visit,
        class_=_class_of(first, lane),
        op=first.op,
        mechanism="routing-flip",
        local_error=None,
        between=None,
        parameter=None,
        explanation=f"A discrete choice differs from the reference's: {first.text}. It shows {seen}.",
    )


def _class_of(flip: Flip, lane: LaneTrace) -> str | None:
    return next((f.class_ for f in lane.visits if (f.module, f.visit) == (flip.module, flip.visit)), None)
