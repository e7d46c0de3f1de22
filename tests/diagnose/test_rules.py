"""The rules themselves, on records made by hand: the search for origins, tolerances, gradients lost to underflow."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nanprobe.config import Tolerance
from nanprobe.diagnose.search import find_origins
from nanprobe.diagnose.tolerances import BASE_MULTIPLE, FREE_VISITS, KINK_MULTIPLE, LARGEST_BACKWARD, Tolerances
from nanprobe.diagnose.underflow import FLUSHED_SHARE, without_cancellation
from nanprobe.lanes.trace import HEALTHY, Health, VisitFact
from nanprobe.records import Gradient

BAD = Health(nan=1)


def visit(
    module: str,
    entered: int,
    left: int,
    *,
    parent: str | None = "",
    leaf: bool = True,
    bad_in: bool = False,
    bad_out: bool = False,
    previous: str | None = None,
    last_child: str | None = None,
) -> VisitFact:
    return VisitFact(
        module=module,
        visit=0,
        class_="Linear",
        depth=0 if parent is None else 1,
        leaf=leaf,
        parent=None if parent is None else (parent, 0),
        previous=previous,
        last_child=last_child,
        entered=entered,
        left=left,
        inputs=BAD if bad_in else HEALTHY,
        outputs=BAD if bad_out else HEALTHY,
    )


def origins(*facts: VisitFact) -> list[tuple[str | None, bool, tuple[str | None, str | None] | None]]:
    found = find_origins(facts, lambda f: f.inputs.hard, lambda f: f.outputs.hard)
    return [(o.fact.module if o.fact is not None else None, o.own_code, o.between) for o in found]


def test_nothing_is_bad() -> None:
    assert origins(visit("", 0, 3, parent=None, leaf=False), visit("a", 1, 2)) == []


def test_a_leaf_and_what_follows_it() -> None:
    facts = (
        visit("", 0, 7, parent=None, leaf=False, bad_out=True, last_child="c"),
        visit("a", 1, 2),
        visit("b", 3, 4, bad_out=True, previous="a"),
        visit("c", 5, 6, bad_in=True, bad_out=True, previous="b"),
    )
    assert origins(*facts) == [("b", False, None)]


def test_own_code_between_two_children() -> None:
    facts = (
        visit("", 0, 5, parent=None, leaf=False, bad_out=True, last_child="b"),
        visit("a", 1, 2),
        visit("b", 3, 4, bad_in=True, bad_out=True, previous="a"),
    )
    assert origins(*facts) == [("", True, ("a", "b"))]


def test_own_code_after_the_last_child() -> None:
    facts = (visit("", 0, 3, parent=None, leaf=False, bad_out=True, last_child="a"), visit("a", 1, 2))
    assert origins(*facts) == [("", True, ("a", None))]


def test_own_code_of_the_innermost_visit_with_good_inputs() -> None:
    facts = (
        visit("", 0, 7, parent=None, leaf=False, bad_out=True),
        visit("outer", 1, 6, leaf=False, bad_out=True, last_child="outer.inner"),
        visit("outer.inner", 2, 5, parent="outer", leaf=False, bad_in=True, bad_out=True),
        visit("outer.inner.leaf", 3, 4, parent="outer.inner", bad_in=True, bad_out=True),
    )
    assert origins(*facts) == [("outer", True, (None, "outer.inner"))]


def test_bad_from_outside() -> None:
    facts = (visit("", 0, 3, parent=None, leaf=False, bad_in=True, bad_out=True), visit("a", 1, 2, bad_in=True))
    assert origins(*facts) == [(None, False, None)]


def test_two_branches_and_a_visit_that_never_ended() -> None:
    facts = (
        visit("", 0, -1, parent=None, leaf=False),
        visit("a", 1, 2, bad_out=True),
        visit("b", 3, 4, bad_out=True, previous="a"),
        visit("c", 5, -1, bad_in=True, previous="b"),
    )
    assert origins(*facts) == [("a", False, None), ("b", False, None)]


def test_tolerances_grow_with_the_root_of_the_visits() -> None:
    unit = 2.0**-8
    rule = Tolerances(precision="bf16")
    assert rule.at("forward", "a", 0) == rule.at("forward", "a", FREE_VISITS) == BASE_MULTIPLE * unit
    assert rule.at("forward", "a", 4 * FREE_VISITS) == 2 * BASE_MULTIPLE * unit
    assert rule.at("backward", "a", 0) == KINK_MULTIPLE * math.sqrt(unit)
    assert rule.at("backward", "a", 4 * FREE_VISITS) == KINK_MULTIPLE * math.sqrt(2 * unit)
    assert rule.at("backward", "a", 10**6) == LARGEST_BACKWARD
    assert Tolerances(precision="fp16").at("forward", "a", 0) == rule.at("forward", "a", 0) / 8


def test_the_last_tolerance_that_fits_wins() -> None:
    given = (
        Tolerance(format="bf16", multiple=64.0),
        Tolerance(module="head*", format="bf16", multiple=4.0),
        Tolerance(module="head*", format="fp16", multiple=2.0),
    )
    rule = Tolerances(precision="bf16", given=given)
    assert rule.at("forward", "body", 1000) == 64 * 2.0**-8
    assert rule.at("backward", "head.out", 0) == 4 * 2.0**-8
    assert rule.at("forward", None, 0) == 64 * 2.0**-8


@pytest.mark.parametrize(
    ("flushed", "elements", "precision", "kept"),
    [(1, 4, "fp16", 0), (3, 100, "fp16", 0), (6, 100, "fp16", 6), (60, 100, "bf16", 0), (0, 100, "fp16", 0)],
)
def test_flushed_elements_that_merely_cancel(flushed: int, elements: int, precision: str, kept: int) -> None:
    gradient = Gradient(norm=1.0, absmax=1.0, zero=flushed, flushed=flushed)
    assert without_cancellation(gradient, elements, precision) == dataclasses.replace(gradient, flushed=kept)
    assert FLUSHED_SHARE == 0.05
