"""Which loss scales would serve: neither so large that a gradient overflows nor so small that gradients vanish."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from nanprobe.lanes.step_facts import ScaleWindow

__all__ = ["HIGHEST", "TOLERATED_SHARE", "window_of"]

HIGHEST = 24
"""Exponent of the largest power of two that is tried: gradient scalers grow their scale to about that in practice."""

TOLERATED_SHARE = 0.01
"""Share of gradient elements that may be flushed to zero at a scale that still serves."""


def window_of(run: Callable[[float], tuple[bool, int]], zeros: int, elements: int) -> ScaleWindow:
    """Return the window of the powers of two from 1 to 2^24, found by bisection with about ten backward passes.

    ``run`` runs backward at a scale and returns whether every gradient is finite and how many elements are zero;
    ``zeros`` of ``elements`` are zero in the reference. Overflow only grows with the scale and flushing only shrinks.
    """

    @cache
    def at(exponent: int) -> tuple[bool, int]:
        return run(2.0**exponent)

    def fits(exponent: int) -> bool:
        return at(exponent)[0]

    def keeps(exponent: int) -> bool:
        return max(0, at(exponent)[1] - zeros) <= TOLERATED_SHARE * elements

    largest = _last(fits, 0, HIGHEST)
    highest = HIGHEST if largest is None else largest
    lost = _last(lambda exponent: not keeps(exponent), 0, highest)
    smallest = 0 if lost is None else lost + 1
    return ScaleWindow(
        largest=2.0**largest if largest is not None else None,
        smallest=2.0**smallest if smallest <= highest else None,
        share=TOLERATED_SHARE,
    )


def _last(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the last of ``low`` to ``high`` for which ``holds``, which turns false once; None when it never does."""
    if not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
