"""docs/report.md lists every record and every key with its type, and nothing else."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from nanprobe.records import SCHEMA_VERSION, ReplayReport

PAGE = (Path(__file__).parent.parent / "docs" / "report.md").read_text(encoding="utf-8")
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", Any: "object"}


def described(hint: Any) -> str:
    """A type hint in the page's words."""
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [described(option) for option in get_args(hint) if option is not type(None)]
        return " or ".join([*options, "null"])
    if origin is tuple:
        items = get_args(hint)
        return (
            f"list of {described(items[0])}"
            if items[1] is Ellipsis
            else f"list of {len(items)} ({described(items[0])})"
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = get_args(hint)[1]
        return "object" if inner is Any else f"object of {described(inner)}"
    return SCALARS[hint]


def records(hint: Any) -> set[type]:
    """Every record that a report can hold."""
    found = {hint} if dataclasses.is_dataclass(hint) else set()
    inner = get_type_hints(hint).values() if dataclasses.is_dataclass(hint) else get_args(hint)
    return found.union(*(records(part) for part in inner if part is not Ellipsis))


RECORDS = {record.__name__: record for record in records(ReplayReport)}


def section(name: str) -> dict[str, str]:
    """The keys of one record as the page has them, with their types."""
    text = re.split(r"^## ", PAGE.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, flags=re.MULTILINE))


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_page_lists_every_key_in_order_with_its_type(name: str) -> None:
    hints = get_type_hints(RECORDS[name])
    expected = {item.name.removesuffix("_"): described(hints[item.name]) for item in dataclasses.fields(RECORDS[name])}
    assert list(section(name).items()) == list(expected.items())


def test_the_page_has_no_other_record() -> None:
    assert set(re.findall(r"^## (\w+)$", PAGE, flags=re.MULTILINE)) == {*RECORDS, "Rules"}


def test_the_page_states_the_version() -> None:
    assert f"`schema_version` is {SCHEMA_VERSION}." in PAGE
