"""What a tool answers to one case, in words that the answers of different tools share."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_ANSWER", "Answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The place and the cause that a tool names; None where it names none.

    ``found`` is false when it calls the run clean. ``module`` is a path, "" for the root, and None for code outside the
    model. ``errors`` counts findings that would fail a check.
    A tool with its own words for operations gives ``ops``, all that its word can stand for; ``places`` is false for one
    that has no word for modules.
    """

    found: bool
    phase: str | None = None
    module: str | None = None
    op: str | None = None
    mechanism: str | None = None
    precision_related: bool | None = None
    samples: tuple[int, ...] | None = None
    ops: frozenset[str] = frozenset()
    places: bool = True
    errors: int = 0
    note: str = ""


NO_ANSWER = Answer(found=False)
