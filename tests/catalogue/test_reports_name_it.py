"""A report names the command that explains what went wrong, and only where there is something to explain."""

from __future__ import annotations

import dataclasses
import re

import pytest

from nanprobe.catalogue import ENTRIES
from nanprobe.records import Finding, ReplayReport
from nanprobe.render import render
from tests.render.reports import STORIES, clean, fp16_overflow

COMMAND = re.compile(r"`nanprobe explain ([^`]+)`")


def explained_in(report: ReplayReport, format: str = "table") -> list[str]:
    """The names that a rendered report says can be explained."""
    return COMMAND.findall(render(report, format, width=200))


def with_findings(report: ReplayReport, *findings: Finding) -> ReplayReport:
    """The report with these findings and no others."""
    return dataclasses.replace(report, findings=findings)


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_an_overflow_is_explained(format: str) -> None:
    assert explained_in(fp16_overflow(), format) == ["overflow"]


def test_nothing_is_explained_where_nothing_was_found() -> None:
    assert explained_in(with_findings(clean())) == []


@pytest.mark.parametrize("name", STORIES)
def test_only_what_the_catalogue_knows_is_offered(name: str) -> None:
    found = explained_in(STORIES[name]())
    assert set(found) <= set(ENTRIES)
    assert len(found) == len(set(found)) <= 3


def test_errors_come_first_and_the_first_three_are_enough() -> None:
    rules = ("routing-flip", "gradient-underflow", "random-draws-differ")
    warnings = [Finding(rule=rule, severity="warning", message="m") for rule in rules]
    report = with_findings(clean(), *warnings, Finding(rule="raised", severity="error", message="m"))
    assert explained_in(report) == ["raised", "routing-flip", "gradient-underflow"]


def test_what_is_unknown_ignored_or_a_note_is_not_offered() -> None:
    report = with_findings(
        clean(),
        Finding(rule="of-a-later-release", severity="error", message="m"),
        Finding(rule="overflow`; rm -rf", severity="error", message="m"),
        Finding(rule="overflow", severity="error", message="m", ignored=True),
        Finding(rule="underflow", severity="note", message="m"),
    )
    assert explained_in(report) == []


def test_a_mechanism_says_more_than_the_rule() -> None:
    finding = Finding(rule="divergence", severity="warning", message="m", mechanism="routing-flip")
    assert explained_in(with_findings(clean(), finding)) == ["routing-flip"]
