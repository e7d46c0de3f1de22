"""What a format is told besides the report: facts about the reader, passed in as values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``width`` is in characters, ``color`` allows terminal escapes, ``verbose`` shows every row and the timings."""

    width: int = 100
    color: bool = False
    verbose: bool = False
