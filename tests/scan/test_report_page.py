"""docs/scan-report.md lists every record and key of the reports with its type, docs/scan-checkpoint.md the rules."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from nanprobe import scan_records
from nanprobe.scan.judge import RULES
from nanprobe.scan.rules.finding import REMEDIES
from tests.test_report_docs import described

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "scan-report.md").read_text("utf-8")
RECORDS = [name for name in scan_records.__all__ if isinstance(getattr(scan_records, name), type)]


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_lists_every_key_in_order_with_its_type(name: str) -> None:
    record = getattr(scan_records, name)
    hints = get_type_hints(record)
    expected = {
        item.name: described(hints[item.name]).replace("(#tool)", "(report.md#tool)")
        for item in dataclasses.fields(record)
    }
    text = re.split(r"^## ", PAGE.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, flags=re.MULTILINE) == list(expected.items())


def test_the_page_has_no_other_record() -> None:
    assert set(re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE)) == set(RECORDS)


def test_every_rule_is_explained() -> None:
    page = (DOCS / "scan-checkpoint.md").read_text("utf-8")
    table = page.partition("## Rules")[2].partition("## In CI")[0]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+|subnormal|constant|outlier)`", re.sub(r"--\w[\w-]*", "", table)))
    assert set(RULES) <= named
    assert set(REMEDIES) <= set(RULES)
