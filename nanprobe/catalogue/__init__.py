"""What every name in a report means: mechanisms, by which numbers go bad, and rules, by which findings are called.

A mechanism answers "why"; the module and the operation answer "where". The names are part of the report's format and
never change. Each entry also says what to try and, as important, what not to: most advice that people are given treats
another fault than the one they have. ``nanprobe explain`` shows the entries, and ``docs/catalogue.md`` is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanprobe.catalogue.batch import BATCH
from nanprobe.catalogue.checkpoint_files import CHECKPOINT_FILES
from nanprobe.catalogue.checkpoint_model import CHECKPOINT_MODEL
from nanprobe.catalogue.checkpoint_state import CHECKPOINT_STATE
from nanprobe.catalogue.checkpoint_values import CHECKPOINT_VALUES
from nanprobe.catalogue.comparison import COMPARISON
from nanprobe.catalogue.entry import KINDS, Entry, Family, Reference
from nanprobe.catalogue.operations import OPERATIONS
from nanprobe.catalogue.representation import REPRESENTATION
from nanprobe.catalogue.stored import STORED
from nanprobe.catalogue.training import TRAINING

__all__ = ["ENTRIES", "FAMILIES", "KINDS", "MECHANISMS", "Entry", "Family", "Reference"]

FAMILIES: tuple[Family, ...] = (
    REPRESENTATION,
    OPERATIONS,
    STORED,
    BATCH,
    TRAINING,
    COMPARISON,
    CHECKPOINT_VALUES,
    CHECKPOINT_STATE,
    CHECKPOINT_FILES,
    CHECKPOINT_MODEL,
)
"""Every family in the order in which they are shown."""

ENTRIES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for family in FAMILIES for entry in family.entries})
"""Every entry by its name, in the order in which they are shown."""

MECHANISMS: Mapping[str, str] = MappingProxyType(
    {entry.name: entry.meaning for entry in ENTRIES.values() if entry.kind == "mechanism"}
)
"""Name of each mechanism and what it means, in a clause."""
