"""The record of one catalogue entry.

Text is plain prose with code in backticks, so that it reads in a terminal and is Markdown as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Entry", "Family", "Reference"]

KINDS: tuple[str, ...] = ("mechanism", "rule")
"""A mechanism says why a number went bad; a rule is anything else that a finding can be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A public thread in which somebody met this: ``issue`` is "owner/repository#number", ``says`` what is in it."""

    issue: str
    says: str

    @property
    def url(self) -> str:
        """Where the thread can be read; GitHub leads from an issue's address to a pull request's by itself."""
        repository, _, number = self.issue.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one name in a report means.

    ``meaning`` is a clause; ``what``, ``why`` and ``looks_like`` (what a report shows) are paragraphs; ``what_to_try``
    and ``what_not_to_try`` are lists, the most useful first; ``related`` names other entries.
    """

    name: str
    kind: str
    meaning: str
    what: str
    why: str
    looks_like: str
    what_to_try: tuple[str, ...]
    what_not_to_try: tuple[str, ...]
    references: tuple[Reference, ...]
    related: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Entries that belong together: ``title`` is a heading, ``about`` a sentence."""

    title: str
    about: str
    entries: tuple[Entry, ...]
