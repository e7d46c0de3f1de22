"""Findings that are known: a file that lists them, so that a build fails only on what is new.

A finding is known by its rule, its file (relative to the path that was scanned), its tensor, and its format or key;
counts are left out, so that a known finding may change its numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace

from nanprobe.errors import UsageError
from nanprobe.scan_records import ScanFinding
from nanprobe.special_file import special_file

__all__ = ["baseline_text", "marked", "read_baseline"]

_VERSION = 1

_MOST_BYTES = 64 << 20
"""Bytes of a baseline that are read: some hundred thousand findings."""

Identity = tuple[str, str, str, str]


def _identity(finding: ScanFinding, roots: Iterable[str]) -> Identity:
    file = finding.file or ""
    for root in roots:
        if file == root:
            file = os.path.basename(os.path.normpath(root))
            break
        inside = os.path.relpath(file, root) if file else ".."
        if not inside.startswith(".."):
            file = inside
            break
    detail = finding.evidence.get("format") or finding.evidence.get("key") or finding.evidence.get("name") or ""
    return finding.rule, file.replace(os.sep, "/"), finding.tensor or "", str(detail)


def read_baseline(path: str) -> set[Identity]:
    """Return the findings that a baseline file lists; UsageError when it cannot be read or is none."""
    special = special_file(path)
    if special is not None:
        raise UsageError(f"baseline {path} is {special}, where a file that --update-baseline wrote is expected")
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"baseline {path} does not exist; --update-baseline writes it") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"baseline {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(f"baseline {path} has more than {_MOST_BYTES:,} bytes, which is more than one is read of")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise UsageError(f"baseline {path} is no JSON; --update-baseline writes one that is") from None
    entries = document.get("findings") if isinstance(document, dict) else None
    if not isinstance(document, dict) or document.get("nanprobe_baseline") != _VERSION or not isinstance(entries, list):
        raise UsageError(f"{path} is no nanprobe baseline of version {_VERSION}; --update-baseline writes one")
    known: set[Identity] = set()
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("rule"), str):
            raise UsageError(f"baseline {path} is damaged: an entry names no rule")
        known.add(
            (entry["rule"], str(entry.get("file", "")), str(entry.get("tensor", "")), str(entry.get("detail", "")))
        )
    return known


def baseline_text(findings: Iterable[ScanFinding], roots: Iterable[str]) -> str:
    """Return the text of a baseline file that lists these findings; notes are left out, since they never count."""
    roots = list(roots)
    identities = sorted({_identity(finding, roots) for finding in findings if finding.severity != "note"})
    entries = [
        {name: part for name, part in zip(("rule", "file", "tensor", "detail"), identity, strict=True) if part}
        for identity in identities
    ]
    return json.dumps({"nanprobe_baseline": _VERSION, "findings": entries}, indent=2) + "\n"


def marked(findings: Iterable[ScanFinding], known: set[Identity], roots: Iterable[str]) -> list[ScanFinding]:
    """Return the findings, those that the baseline lists marked as known."""
    roots = list(roots)
    return [replace(finding, known=True) if _identity(finding, roots) in known else finding for finding in findings]
