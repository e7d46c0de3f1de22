"""Reports survive JSON exactly, the JSON is strict, and a damaged report is one clear line."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanprobe.errors import UsageError
from nanprobe.records import SCHEMA_VERSION, SEVERITIES, VERDICTS, ReplayReport
from nanprobe.serialize import from_dict, load_report, to_dict, to_json
from tests.render.reports import fp16_overflow

NON_FINITE = ("nan", "inf", "-inf")

# `math.nan` itself is used throughout, since NaN equals only itself as an object inside tuples and dicts.
FLOATS = st.floats(allow_nan=False) | st.just(math.nan)
FREE_TEXT = st.text(max_size=6).filter(lambda text: text not in NON_FINITE)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | FREE_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a record's type hint; a kind of hint that records do not use yet raises, so that it gets a test."""
    if hint is Any:
        return FREE
    if hint is type(None):
        return st.none()
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([strategy_for(option) for option in get_args(hint)])
    if origin is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return st.lists(strategy_for(items[0]), max_size=2).map(tuple)
        return st.tuples(*(strategy_for(item) for item in items))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.text(max_size=6), strategy_for(get_args(hint)[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{item.name: field_of(item.name, hints) for item in dataclasses.fields(hint)})
    return {str: st.text(max_size=6), int: st.integers(min_value=0), float: FLOATS, bool: st.booleans()}[hint]


WORDS = {
    "verdict": st.sampled_from(VERDICTS),
    "severity": st.sampled_from(SEVERITIES),
    "exit_code": st.sampled_from((0, 1, 2, 3)),
}


def field_of(name: str, hints: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a field, which may have a few legal ones only."""
    return WORDS[name] if name in WORDS else strategy_for(hints[name])


@st.composite
def reports(draw: st.DrawFn) -> ReplayReport:
    hints = get_type_hints(ReplayReport)
    values = {item.name: draw(field_of(item.name, hints)) for item in dataclasses.fields(ReplayReport)}
    values["schema_version"] = SCHEMA_VERSION
    precision = draw(strategy_for(get_args(hints["precisions"])[1]))
    values["precisions"] = {**values["precisions"], values["reference"]: precision}
    return ReplayReport(**values)


SLOW_TO_DRAW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@SLOW_TO_DRAW
@given(reports())
def test_every_report_survives_json_exactly(report: ReplayReport) -> None:
    assert from_dict(json.loads(to_json(report))) == report


@SLOW_TO_DRAW
@given(reports())
def test_json_is_strict_ascii_and_says_what_to_dict_says(report: ReplayReport) -> None:
    text = to_json(report)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == to_dict(report)
    assert text.isascii()
    assert json.loads(to_json(report, indent=None)) == to_dict(report)


def test_keys_are_those_of_the_contract() -> None:
    document = to_dict(fp16_overflow())
    assert document["first_bad"]["class"] == "Linear"
    assert document["modules"][0]["class"] == "Embedding"
    assert "class_" not in to_json(fp16_overflow())
    assert document["schema_version"] == 1
    assert document["tool"]["name"] == "nanprobe"
    assert set(document["precisions"]) == {"fp32", "fp16", "bf16"}
    assert {"completed", "error", "loss", "loss_error", "verdict", "first_bad", "first_divergence"} <= set(
        document["precisions"]["fp16"]
    )
    assert document["precisions"]["fp16"]["loss"] == "nan"


def test_non_finite_numbers_are_strings_in_evidence_too_and_come_back_as_floats() -> None:
    report = fp16_overflow()
    finding = dataclasses.replace(
        report.findings[0], evidence={"worst": math.inf, "list": [-math.inf, 1.5], "deep": {"x": math.nan}}
    )
    report = dataclasses.replace(report, findings=(finding,))
    evidence = to_dict(report)["findings"][0]["evidence"]
    assert evidence == {"worst": "inf", "list": ["-inf", 1.5], "deep": {"x": "nan"}}
    back = from_dict(to_dict(report)).findings[0].evidence
    assert back["worst"] == math.inf
    assert back["list"] == [-math.inf, 1.5]
    assert math.isnan(back["deep"]["x"])


def test_text_that_reads_like_a_number_stays_text_where_text_belongs() -> None:
    report = dataclasses.replace(fp16_overflow(), command="nan")
    assert from_dict(to_dict(report)).command == "nan"


def test_lists_of_numbers_stand_on_one_line() -> None:
    assert '"shape": [4, 128, 312]' in to_json(fp16_overflow())


def test_a_value_without_a_word_in_json_is_refused_by_its_key() -> None:
    report = dataclasses.replace(fp16_overflow(), environment={"flags": {"tf32": object()}})
    with pytest.raises(TypeError, match=r"environment\.flags\.tf32"):
        to_json(report)
    with pytest.raises(TypeError, match=r"the key 3 of `environment`"):
        to_json(dataclasses.replace(report, environment={3: 4}))  # type: ignore[dict-item]  # the mistake under test


def test_unknown_keys_are_ignored_and_keys_with_a_default_may_be_missing() -> None:
    document = to_dict(fp16_overflow())
    document["later"] = {"more": 1}
    document["modules"][0]["precisions"]["fp32"]["later"] = 2
    del document["modules"][0]["precisions"]["fp32"]["note"]
    assert from_dict(document) == fp16_overflow()


def remove(*path: Any) -> Any:
    def change(document: Any) -> Any:
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
        return document

    return change


def put(value: Any, *path: Any) -> Any:
    def change(document: Any) -> Any:
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        return document

    return change


DAMAGE = {
    "a list": (lambda document: [document], "is not a nanprobe report"),
    "no version": (remove("schema_version"), "no key `schema_version`"),
    "later version": (put(2, "schema_version"), "has schema_version 2, and this nanprobe reads 1"),
    "version true": (put(True, "schema_version"), "has schema_version true"),
    "missing key": (remove("precisions", "fp16", "completed"), "`precisions.fp16.completed` is missing"),
    "text for a count": (
        put("many", "modules", 1, "precisions", "fp16", "nan"),
        r"`modules\[1\].precisions.fp16.nan` should be an integer and is \"many\"",
    ),
    "true for a count": (put(True, "modules", 1, "order"), "should be an integer and is true"),
    "fraction for a count": (put(1.5, "modules", 1, "order"), "should be an integer and is 1.5"),
    "text for a number": (
        put("NaN", "modules", 1, "precisions", "fp16", "absmax"),
        'should be a number or one of "nan", "inf", "-inf" and is "NaN"',
    ),
    "huge number": (put(10**400, "modules", 1, "precisions", "fp16", "absmax"), "beyond the range of a double"),
    "object for a list": (put({}, "modules"), "`modules` should be a list and is an object"),
    "list for an object": (put([1, 2], "conditions"), "`conditions` should be an object and is a list of 2"),
    "null record": (put(None, "coverage"), "`coverage` should be an object and is null"),
    "wrong length": (put(["a"], "first_bad", "between"), "should be a list of 2"),
    "no reference": (put("fp64", "reference"), '`reference` is "fp64", which `precisions` does not hold'),
    "exit code of no command": (put(999, "exit_code"), "`exit_code` should be one of 0, 1, 2, 3 and is 999"),
    "negative exit code": (put(-1, "exit_code"), "`exit_code` should be an integer from 0 and is -1"),
    "unknown verdict": (put("fine", "verdict"), '`verdict` should be one of precision, .* and is "fine"'),
    "unknown verdict of one": (
        put("fine", "precisions", "fp16", "verdict"),
        "`precisions.fp16.verdict` should be one of",
    ),
    "unknown severity": (put("fatal", "findings", 0, "severity"), r"`findings\[0\].severity` should be one of error"),
    "negative count": (put(-4, "modules", 1, "precisions", "fp16", "nan"), "should be an integer from 0 and is -4"),
    "negative visit": (put(-1, "first_bad", "visit"), "`first_bad.visit` should be an integer from 0"),
    "escape in a key": (put({"\x1b[31m": 1}, "precisions"), r"`precisions.\\x1b\[31m` should be an object"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_report_is_one_clear_line(name: str, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(change(to_dict(fp16_overflow()))))
    with pytest.raises(UsageError, match=message) as caught:
        load_report(path)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert str(path) in str(caught.value)


FILES = {
    "empty": (b" \n", "is empty"),
    "truncated": (b'{"schema_version": 1,', "is not JSON: .* at line 1, column"),
    "binary": (b"\x80\x02\xff", "not UTF-8 text"),
    "bare nan": (b'{"schema_version": NaN}', "is not strict JSON: it holds a bare NaN"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "long integer": (b"[" + b"9" * 10_000 + b"]", "is not strict JSON"),
    "another document": (b'{"version": "2.1.0", "runs": []}', "is not a nanprobe report"),
    "a number": (b"3", "is not a nanprobe report"),
    "a key twice": (b'{"schema_version": 1, "schema_version": 1}', "is damaged: the key `schema_version` stands twice"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_report_is_one_clear_line(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_report(path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_report(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="is a folder"):
        load_report(tmp_path)


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("\ufeff" + to_json(fp16_overflow()), encoding="utf-8")
    assert load_report(str(path)) == fp16_overflow()


@SLOW_TO_DRAW
@given(st.data())
def test_no_damage_is_ever_a_traceback(data: st.DataObject) -> None:
    document = json.loads(to_json(fp16_overflow()))
    holder: Any = document
    while True:
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key = data.draw(st.sampled_from(list(keys)))
        if isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.booleans()):
            holder = holder[key]
            continue
        holder[key] = data.draw(FREE)
        break
    try:
        report = from_dict(document)
    except UsageError:
        return
    assert from_dict(json.loads(to_json(report))) == report
