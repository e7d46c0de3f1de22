"""The catalogue as text: one entry, the list of all, or all of them in full, in every format that reports have."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from nanprobe.catalogue import ENTRIES, FAMILIES, Entry, Family
from nanprobe.errors import UsageError
from nanprobe.nearest import nearest, suggestion
from nanprobe.records import SCHEMA_VERSION
from nanprobe.render.names import one_line
from nanprobe.render.options import Options
from nanprobe.render.style import Style
from nanprobe.version import __version__

__all__ = ["explained", "named_entry"]

_NARROWEST = 40


def named_entry(name: str) -> Entry:
    """Return the entry called ``name``; UsageError, with the nearest names, when there is none."""
    entry = ENTRIES.get(name)
    if entry is not None:
        return entry
    asked = name.strip().lower().replace("_", "-").replace(" ", "-")
    close = asked if asked in ENTRIES else nearest(asked, ENTRIES)
    inside = [known for known in ENTRIES if asked and (asked in known or known in asked)]
    if close is None and inside:
        close = inside[0] if len(inside) == 1 else None
    if close is not None:
        hint = f"did you mean `{close}`?"
    elif inside:
        hint = f"names like it are {', '.join(f'`{known}`' for known in inside)}"
    else:
        hint = "`nanprobe explain` lists them all"
    raise UsageError(f"there is no mechanism or rule '{one_line(name)}'; {hint}")


def explained(
    name: str | None, format: str = "table", *, width: int = 100, color: bool = False, verbose: bool = False
) -> str:
    """Return the entry called ``name`` in ``format``, ending in one line break; without a name the list of all.

    With ``verbose`` the list shows every entry in full. ``width`` is the terminal's in characters, ``color`` allows
    terminal escapes; both matter to the table only. Raises UsageError when there is no such entry or format.
    """
    if format not in _FORMATS:
        raise UsageError(f"--format {format}: no such format; {suggestion(format, _FORMATS)}")
    entry = named_entry(name) if name is not None else None
    return _FORMATS[format](entry, Options(width=width, color=color, verbose=verbose))


def _table(entry: Entry | None, options: Options) -> str:
    width, style = max(options.width, _NARROWEST), Style(color=options.color)
    if entry is not None:
        blocks = [_table_entry(entry, width, style)]
    elif options.verbose:
        blocks = [_table_entry(each, width, style) for each in ENTRIES.values()]
    else:
        blocks = [_table_family(family, width, style) for family in FAMILIES]
        blocks.append("\n".join(_wrapped("`nanprobe explain NAME` says why, and what to try.", width)))
    return "\n\n".join(blocks) + "\n"


def _table_family(family: Family, width: int, style: Style) -> str:
    longest = max(len(name) for name in ENTRIES) + 4
    lines = [style.paint("title", family.title)]
    for entry in family.entries:
        if width < 2 * longest:
            lines += [f"  {entry.name}", *_wrapped(entry.meaning, width, "      ", "      ")]
        else:
            lines += _wrapped(entry.meaning, width, f"  {entry.name}".ljust(longest), " " * longest)
    return "\n".join(lines)


def _table_entry(entry: Entry, width: int, style: Style) -> str:
    head = _wrapped(f"{entry.name} ({entry.kind}): {entry.meaning}", width, "", "  ")
    blocks = [[style.paint("title", line) for line in head]]
    for title, body in _parts(entry):
        block = [style.paint("title", title)]
        if isinstance(body, str):
            block += _wrapped(body, width, "  ", "  ")
        else:
            block += [line for item in body for line in _wrapped(item, width, "  - ", "    ")]
        blocks.append(block)
    threads = [f"{reference.issue}: {reference.says}" for reference in entry.references]
    threads = [line for item in threads for line in _wrapped(item, width, "  - ", "    ")]
    blocks.append([style.paint("title", "Where people met it"), *threads])
    blocks.append(_wrapped(f"See also: {', '.join(entry.related)}", width, "", "  "))
    return "\n\n".join("\n".join(block) for block in blocks)


def _parts(entry: Entry) -> tuple[tuple[str, str | Sequence[str]], ...]:
    return (
        ("What it means", entry.what),
        ("Why it happens", entry.why),
        ("What it looks like in a report", entry.looks_like),
        ("What to try", entry.what_to_try),
        ("What not to try", entry.what_not_to_try),
    )


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return ``text`` in lines of at most ``width``; names are never broken, so that they can be copied."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _markdown(entry: Entry | None, options: Options) -> str:
    if entry is not None:
        return _markdown_entry(entry, "#", Options()) + "\n"
    blocks = ["# What the names in a report mean"]
    blocks.append(
        "Each name below is a mechanism (why a number went bad) or a rule (what a finding is called). "
        "`nanprobe explain NAME` prints its entry."
    )
    for family in FAMILIES:
        blocks.append(f"## {family.title}\n\n{family.about}")
        lines = [f"- {_link(each.name, options)}: {each.meaning}" for each in family.entries]
        blocks.append("\n".join(lines))
        if options.verbose:
            blocks += [_markdown_entry(each, "###", options) for each in family.entries]
    return "\n\n".join(blocks) + "\n"


def _link(name: str, options: Options) -> str:
    """Return a name, with a link to its entry where all entries stand on one page."""
    return f"[`{name}`](#{name})" if options.verbose else f"`{name}`"


def _markdown_entry(entry: Entry, level: str, options: Options) -> str:
    blocks = [f"{level} {entry.name}", f"*{entry.kind.capitalize()}*: {entry.meaning}."]
    for title, body in _parts(entry):
        if isinstance(body, str):
            blocks.append(f"**{title}.** {body}")
        else:
            blocks.append(f"**{title}**\n\n" + "\n".join(f"- {item}" for item in body))
    threads = "\n".join(f"- [{each.issue}]({each.url}): {each.says}" for each in entry.references)
    blocks.append(f"**Where people met it**\n\n{threads}")
    blocks.append(f"See also: {', '.join(_link(name, options) for name in entry.related)}")
    return "\n\n".join(blocks)


def _json(entry: Entry | None, options: Options) -> str:
    del options
    shown = list(ENTRIES.values()) if entry is None else [entry]
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "nanprobe", "version": __version__},
        "command": "explain",
        "exit_code": 0,
        "entries": [_json_entry(each) for each in shown],
    }
    return json.dumps(document, indent=2) + "\n"


def _json_entry(entry: Entry) -> dict[str, Any]:
    family = next(family.title for family in FAMILIES if entry in family.entries)
    fields = asdict(entry)
    references = [{"issue": each.issue, "url": each.url, "says": each.says} for each in entry.references]
    return {**fields, "family": family, "references": references}


_FORMATS: Mapping[str, Callable[[Entry | None, Options], str]] = MappingProxyType(
    {"table": _table, "json": _json, "markdown": _markdown}
)
