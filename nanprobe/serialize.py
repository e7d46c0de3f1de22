"""Reports to and from JSON, driven by the fields and type hints of the records.

A saved report is the whole truth: everything a format can show is read back from it, without torch. Writing walks the
record; reading walks its type hints and checks every value against them, so a field that is added to a record needs
nothing here. Three rules make the text strict JSON and keep it stable:

- A field called ``class_`` is the key ``class``; every other key is the field's name.
- Non-finite numbers are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. In free-form mappings (evidence, conditions)
  these three strings are therefore always numbers.
- Keys that are not known are ignored and keys with a default may be missing, so that a report of a later release with
  the same ``schema_version`` can still be read.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from nanprobe.errors import UsageError
from nanprobe.records import SCHEMA_VERSION, SEVERITIES, VERDICTS, ReplayReport
from nanprobe.scan_records import DiffReport, ScanReport
from nanprobe.special_file import special_file

__all__ = ["AnyReport", "from_dict", "load_report", "to_dict", "to_json"]

AnyReport = ReplayReport | ScanReport | DiffReport

_RECORDS: dict[str, type] = {"scan-checkpoint": ScanReport, "diff-checkpoints": DiffReport}
"""The record that a command's report is made of; every other command writes a ReplayReport."""

_EXIT_CODES = (0, 1, 2, 3)
"""What a command can have ended with that wrote a report."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_NUMBER = r"-?\d[\d.eE+-]*"
_NUMBER_LIST = re.compile(rf"\[\s*\n\s*({_NUMBER}(?:,\s*\n\s*{_NUMBER})*)\s*\n\s*\]")
"""A list of plain numbers that was spread over several lines; a JSON string holds no line break, so it cannot match."""


def to_dict(report: AnyReport) -> dict[str, Any]:
    """Return ``report`` as plain dicts, lists, strings and numbers that strict JSON can hold.

    Raises TypeError, naming the key, when a free-form mapping holds something that JSON has no word for.
    """
    return cast("dict[str, Any]", _encode(report, ""))


def to_json(report: AnyReport, indent: int | None = 2) -> str:
    """Return ``report`` as strict JSON text in ASCII; lists of numbers stand on one line. Raises as :func:`to_dict`."""
    text = json.dumps(to_dict(report), indent=indent, allow_nan=False)
    return _NUMBER_LIST.sub(lambda match: "[" + re.sub(r"\s*\n\s*", " ", match.group(1)) + "]", text)


def from_dict(document: Any, where: str = "the report") -> AnyReport:
    """Return the report that :func:`to_dict` wrote; ``where`` names its place in messages.

    Raises UsageError when ``document`` is not a report, has another ``schema_version``, misses a key or holds a value
    of the wrong type.
    """
    if not isinstance(document, dict) or "schema_version" not in document:
        raise UsageError(f"{where} is not a nanprobe report: it has no key `schema_version`. {_HOW_TO_WRITE_ONE}")
    version = document["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise UsageError(
            f"{where} has schema_version {_shown(version)}, and this nanprobe reads {SCHEMA_VERSION}: "
            "render it with the release that wrote it, or replay again."
        )
    try:
        record = _RECORDS.get(str(document.get("command")), ReplayReport)
        report = cast("AnyReport", _decode(record, document, ""))
        if isinstance(report, ReplayReport):
            _check_references(report)
        _check_words(report)
    except _Unreadable as error:
        raise UsageError(f"{where} is damaged: {error}. Replay again to write another.") from None
    except RecursionError:
        raise UsageError(f"{where} is damaged: it is nested too deeply. Replay again to write another.") from None
    return report


def load_report(path: str | Path) -> AnyReport:
    """Return the report saved in the JSON file ``path``.

    Raises UsageError when the file is missing, unreadable, not JSON, or not a report of this ``schema_version``.
    """
    where = str(path)
    special = special_file(path)
    if special is not None:
        raise UsageError(f"{where} is {special}, where a report is expected. {_HOW_TO_WRITE_ONE}")
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{where} does not exist. {_HOW_TO_WRITE_ONE}") from None
    except IsADirectoryError:
        raise UsageError(f"{where} is a folder; name the report's JSON file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not JSON: it is not UTF-8 text. {_HOW_TO_WRITE_ONE}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not text.strip():
        raise UsageError(f"{where} is empty. {_HOW_TO_WRITE_ONE}")
    try:
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. {_HOW_TO_WRITE_ONE}"
        ) from None
    except _Unreadable as error:
        raise UsageError(f"{where} is damaged: {error}. Replay again to write another.") from None
    except RecursionError:
        raise UsageError(f"{where} is not a nanprobe report: it is nested too deeply. {_HOW_TO_WRITE_ONE}") from None
    except ValueError as error:
        raise UsageError(f"{where} is not strict JSON: {error}. {_HOW_TO_WRITE_ONE}") from None
    return from_dict(document, where)


_HOW_TO_WRITE_ONE = "A report is written by `nanprobe replay -o report.json`."


class _Unreadable(Exception):
    """A value does not fit its record; the message names the key."""


def key_of(field_name: str) -> str:
    """Return the JSON key of a record's field."""
    return field_name.removesuffix("_")


def _encode(value: Any, at: str) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if is_dataclass(value):
        return {
            key_of(field.name): _encode(getattr(value, field.name), _join(at, field.name)) for field in fields(value)
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of `{at}` is not a string")
        return {key: _encode(item, _join(at, key)) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item, f"{at}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"`{at}` holds a {type(value).__name__}, which JSON has no word for")


def _decode(hint: Any, value: Any, at: str) -> Any:
    if hint is Any:
        return _decode_free(value)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(hint), value, at)
    if origin is tuple:
        return _decode_tuple(get_args(hint), value, at)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _wrong("an object", value, at)
        inner = get_args(hint)[1]
        return {key: _decode(inner, item, _join(at, key)) for key, item in value.items()}
    if is_dataclass(hint):
        return _decode_record(cast(type, hint), value, at)
    return _decode_scalar(hint, value, at)


def _decode_record(record: type, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong("an object", value, at)
    arguments: dict[str, Any] = {}
    for name, hint, required in _plan(record):
        key = key_of(name)
        if key in value:
            arguments[name] = _decode(hint, value[key], _join(at, key))
        elif required:
            raise _Unreadable(f"the key `{_neutral(_join(at, key))}` is missing")
    return record(**arguments)


@cache
def _plan(record: type) -> tuple[tuple[str, Any, bool], ...]:
    """Return (field, type hint, whether it must be there) of a record; resolving hints is the slow part of reading."""
    hints = get_type_hints(record)
    return tuple(
        (item.name, hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(record)
    )


def _decode_union(options: tuple[Any, ...], value: Any, at: str) -> Any:
    if value is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if int in rest and isinstance(value, int) and not isinstance(value, bool):
        return value if float in rest else _decode_scalar(int, value, at)
    for option in rest[:-1]:
        try:
            return _decode(option, value, at)
        except _Unreadable:
            continue  # the next alternative may fit; the last one's complaint is the one that is raised
    return _decode(rest[-1], value, at)


def _decode_tuple(items: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong("a list", value, at)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], item, f"{at}[{index}]") for index, item in enumerate(value))
    if len(value) != len(items):
        raise _wrong(f"a list of {len(items)}", value, at)
    return tuple(
        _decode(hint, item, f"{at}[{index}]") for index, (hint, item) in enumerate(zip(items, value, strict=True))
    )


def _decode_scalar(hint: Any, value: Any, at: str) -> Any:
    if hint is float:
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise _Unreadable(f"`{_neutral(at)}` is a number beyond the range of a double") from None
        raise _wrong('a number or one of "nan", "inf", "-inf"', value, at)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        # Every integer of a report is a count, a position or a code.
        if value < 0:
            raise _wrong("an integer from 0", value, at)
        return value
    if hint is str and isinstance(value, str):
        return value
    raise _wrong({bool: "true or false", int: "an integer", str: "text"}.get(hint, str(hint)), value, at)


def _decode_free(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_decode_free(item) for item in value]
    if isinstance(value, dict):
        return {key: _decode_free(item) for key, item in value.items()}
    return value


def _check_references(report: ReplayReport) -> None:
    """Refuse a report whose parts name a precision that it does not hold."""
    if report.reference not in report.precisions:
        raise _Unreadable(f"`reference` is {_shown(report.reference)}, which `precisions` does not hold")


def _check_words(report: AnyReport) -> None:
    """Refuse a report with an exit code, a verdict or a severity that there is not: what it says cannot be trusted."""
    if report.exit_code not in _EXIT_CODES:
        raise _Unreadable(f"`exit_code` should be one of {', '.join(map(str, _EXIT_CODES))} and is {report.exit_code}")
    for index, severity in enumerate(finding.severity for finding in report.findings):
        if severity not in SEVERITIES:
            raise _unknown(f"findings[{index}].severity", SEVERITIES, severity)
    if isinstance(report, ReplayReport):
        for at, verdict in (
            ("verdict", report.verdict),
            *((f"precisions.{name}.verdict", result.verdict) for name, result in report.precisions.items()),
        ):
            if verdict not in VERDICTS:
                raise _unknown(at, VERDICTS, verdict)


def _unknown(at: str, legal: tuple[str, ...], value: str) -> _Unreadable:
    return _Unreadable(f"`{_neutral(at)}` should be one of {', '.join(legal)} and is {_shown(value)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; of a key that stands there twice nobody knows which value was meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unreadable(f"the key `{_neutral(twice)[:100]}` stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds a bare {name}")


def _wrong(expected: str, value: Any, at: str) -> _Unreadable:
    return _Unreadable(f"`{_neutral(at)}` should be {expected} and is {_shown(value)}")


def _shown(value: Any) -> str:
    """Return ``value`` as it stands in JSON, shortened to fit into a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:36] + " ..."


def _neutral(at: str) -> str:
    """Return a key's path without characters that a terminal would obey: keys come from a file."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in at)


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key
