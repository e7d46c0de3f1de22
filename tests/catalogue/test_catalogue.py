"""The catalogue is complete: every name that a report can hold has an entry, and every entry has all its parts."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nanprobe.catalogue import ENTRIES, FAMILIES, KINDS, MECHANISMS, Entry
from nanprobe.scan.judge import RULES
from nanprobe.scan.rules.finding import REMEDIES
from tests.catalogue.emitted import constants, emitted, emitted_by, places_of

CATALOGUE = Path(__file__).resolve().parents[2] / "nanprobe" / "catalogue"

PROMISED = (
    "overflow", "underflow", "absorption", "cancellation", "unrepresentable-constant", "domain-error",
    "invalid-operation", "masked-row", "masked-gradient", "empty-reduction", "nonfinite-input", "nonfinite-parameter",
    "nonfinite-buffer", "uninitialized", "loss-scale-overflow", "gradient-underflow", "update-underflow",
    "optimizer-error", "routing-flip", "divergence",
)  # fmt: skip
"""The mechanisms, which are part of the report's format, in the order in which they are documented."""

ISSUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9][\w.-]*#[1-9]\d*")
CODE = re.compile(r"`[^`]+`")

every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))


def prose(entry: Entry) -> list[str]:
    """Every text of an entry."""
    says = [reference.says for reference in entry.references]
    paragraphs = [entry.meaning, entry.what, entry.why, entry.looks_like]
    return [*paragraphs, *entry.what_to_try, *entry.what_not_to_try, *says]


def test_the_mechanisms_are_those_that_were_promised() -> None:
    assert tuple(MECHANISMS) == PROMISED
    assert all(ENTRIES[name].meaning == meaning for name, meaning in MECHANISMS.items())


def test_no_name_is_used_twice() -> None:
    assert len(ENTRIES) == sum(len(family.entries) for family in FAMILIES)


def test_every_rule_of_a_scan_has_an_entry() -> None:
    assert set(RULES) - set(ENTRIES) == set()
    assert set(REMEDIES) - set(ENTRIES) == set()


def test_everything_that_a_report_can_name_has_an_entry() -> None:
    unknown = {
        name: files for name, files in emitted().items() if not any(fnmatchcase(entry, name) for entry in ENTRIES)
    }
    assert unknown == {}


def test_the_sources_are_read_well_enough() -> None:
    """What is known to be reported is found, so that a new name would be as well."""
    found = set(emitted())
    assert set(RULES) - found == set()
    assert {"raised", "nonfinite", "random-draws-differ", "routing-flip", "divergence", "overflow"} <= found


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('f(rule="new-rule")', "new-rule"),
        ('f(mechanism=a if b else "new-rule")', "new-rule"),
        ('f(rule=a or "new-rule")', "new-rule"),
        ('def g(x, rule, text): ...\ng(1, "new-rule", "t")', "new-rule"),
        ('class A:\n  def bad(self, rule, text): ...\nA().bad("new-rule", "t")', "new-rule"),
        ('mechanism = "new-rule"', "new-rule"),
        ('class A:\n  rule: str = "new-rule"', "new-rule"),
        ('x = ("new-rule", "warning", "text")', "new-rule"),
        ('def _mechanism(x) -> str | None:\n  return "new-rule"', "new-rule"),
        ('f(mechanism=f"new-{x}")', "new-*"),
    ],
)
def test_a_name_is_found_in_the_sources(source: str, name: str) -> None:
    tree = ast.parse(source)
    assert list(emitted_by(tree, places_of([tree]))) == [name]


@pytest.mark.parametrize(
    "source", ['f(kind="new-rule")', 'seen.add("new-rule")', 'x == "new-rule"', 'f(rule="A text.")']
)
def test_other_texts_are_no_names(source: str) -> None:
    tree = ast.parse(source)
    assert list(emitted_by(tree, places_of([tree, ast.parse("def add(self, rule, severity): ...")]))) == []
    assert list(constants(None)) == []


@every_entry
def test_an_entry_has_all_its_parts(entry: Entry) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", entry.name)
    assert entry.kind in KINDS
    assert entry.what_to_try
    assert entry.what_not_to_try
    assert entry.references
    assert entry.related
    assert all(text == " ".join(text.split()) and text for text in prose(entry))
    assert not entry.meaning.endswith(".")
    assert len(entry.meaning) <= 120
    sentences = [entry.what, entry.why, entry.looks_like, *entry.what_to_try, *entry.what_not_to_try]
    assert [text for text in sentences if not text.endswith(".")] == []
    assert [text for text in sentences if not (text[0].isupper() or text[0] in "`1-")] == []


@every_entry
def test_prose_is_markdown_that_needs_no_escaping(entry: Entry) -> None:
    for text in prose(entry):
        assert text.count("`") % 2 == 0
        assert not re.search(r"[*_<>|#\[\]\\]", CODE.sub("", text).replace("[0]", "")), text
        assert text.isprintable()


@every_entry
def test_references_look_like_references(entry: Entry) -> None:
    for reference in entry.references:
        assert ISSUE.fullmatch(reference.issue)
        owner, _, number = reference.issue.partition("#")
        assert reference.url == f"https://github.com/{owner}/issues/{number}"
        assert 15 <= len(reference.says) <= 120
        assert not reference.says.endswith(".")
    assert len({reference.issue for reference in entry.references}) == len(entry.references)


@every_entry
def test_related_entries_exist(entry: Entry) -> None:
    assert set(entry.related) <= set(ENTRIES)
    assert entry.name not in entry.related


def test_a_lower_learning_rate_is_no_cure_for_an_overflow() -> None:
    assert any("learning rate" in text for text in ENTRIES["overflow"].what_not_to_try)
    assert not any("learning rate" in text for entry in ENTRIES.values() for text in entry.what_to_try[:1]), (
        "a learning rate is never the first thing to change"
    )


def test_every_file_of_the_catalogue_is_shown() -> None:
    files = {path.stem.upper() for path in CATALOGUE.glob("*.py")} - {"__INIT__", "ENTRY"}
    assert len(files) == len(FAMILIES)
