"""The search for origins: the first visit, in execution order, that turns good into bad.

The same search serves non-finite values and divergence; only the meaning of "bad" differs. Walking through entries and
exits in order, a visit whose inputs are good and whose outputs are bad is an origin. A visit that *receives* something
bad which no earlier visit gave out got it from functional code around it: the origin is then the own code of the
innermost enclosing visit whose inputs were good, between the child that finished last and the one that received it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nanprobe.lanes.trace import VisitFact

__all__ = ["Origin", "find_origins"]

Predicate = Callable[[VisitFact], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where good turned bad: ``fact`` is the visit to blame.

    ``own_code`` says that no child but the visit's own code did it, between the children named by ``between``; ``seen``
    is then the visit that received the bad value (None when it left with the visit's own output). ``time`` is the
    lane's clock. ``fact`` is None when bad values came into the model from outside. ``samples`` are those in which this
    is the origin, None when it is that of all that are bad there. ``given_inf`` says that it failed on -Inf that came
    into the model with its arguments.
    """

    fact: VisitFact | None
    own_code: bool
    between: tuple[str | None, str | None] | None
    seen: VisitFact | None
    time: int
    samples: tuple[int, ...] | None = None
    given_inf: bool = False


def find_origins(facts: Iterable[VisitFact], bad_in: Predicate, bad_out: Predicate) -> tuple[Origin, ...]:
    """Return every independent origin in execution order; see the module's text for the rule."""
    visits = {(fact.module, fact.visit): fact for fact in facts}
    events = sorted(
        [(fact.entered, False, fact) for fact in visits.values()]
        + [(fact.left, True, fact) for fact in visits.values() if fact.left >= 0],
        key=lambda event: event[:2],
    )
    origins: list[Origin] = []
    for time, is_exit, fact in events:
        if not is_exit:
            if bad_in(fact) and not origins:
                origins.append(_outside(fact, visits, bad_in, time))
        elif bad_out(fact) and not bad_in(fact) and not any(fact.entered <= o.time <= fact.left for o in origins):
            origins.append(
                Origin(
                    fact=fact,
                    own_code=not fact.leaf,
                    between=None if fact.leaf else (fact.last_child, None),
                    seen=None,
                    time=time,
                )
            )
    return tuple(origins)


def _outside(fact: VisitFact, visits: dict[tuple[str, int], VisitFact], bad_in: Predicate, time: int) -> Origin:
    """Return the origin of something bad that ``fact`` received: the own code of the nearest visit with good inputs."""
    receiver = fact
    while receiver.parent is not None:
        parent = visits.get(receiver.parent)
        if parent is None:
            break
        if not bad_in(parent):
            return Origin(
                fact=parent, own_code=True, between=(receiver.previous, receiver.module), seen=receiver, time=time
            )
        receiver = parent
    return Origin(fact=None, own_code=False, between=None, seen=receiver, time=time)
