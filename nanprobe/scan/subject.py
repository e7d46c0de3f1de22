"""What the rules look at: every tensor with its role and counts, in plain records that hold no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanprobe.checkpoints.records import CheckpointIndex, Scalar, TensorEntry
from nanprobe.numerics.stored import Tally
from nanprobe.scan.roles import Role

__all__ = ["Looks", "Subject", "Tensor", "by_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor that was looked for: ``tally`` is None where it could not be counted, and ``note`` says why.

    ``bad_blocks`` counts blocks with non-finite elements in a block format.
    """

    entry: TensorEntry
    role: Role
    tally: Tally | None
    note: str | None = None
    bad_blocks: int = 0

    @property
    def name(self) -> str:
        """The name that reports use."""
        return self.entry.name


class Looks(Protocol):
    """A second look at single tensors, as :class:`nanprobe.scan.look.Looker` gives it; tests pass their own."""

    def can(self, entry: TensorEntry) -> bool:
        """Whether the values can be had element by element."""

    def first(self, entry: TensorEntry, wanted: Mapping[str, Callable[[Any], Any]]) -> dict[str, tuple[int, ...]]:
        """The index of the first element for which each predicate holds."""

    def count(self, entry: TensorEntry, predicate: Callable[[Any], Any]) -> int:
        """How many elements a predicate holds for."""

    def quantile(self, entry: TensorEntry, share: float) -> float:
        """A magnitude that this share of the finite elements does not exceed."""

    def dead(self, entry: TensorEntry) -> tuple[list[int], list[int]]:
        """Rows and columns that are zero throughout."""

    def read(self, entry: TensorEntry, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        """The elements of a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One checkpoint as the rules see it. ``casts`` are the names of the formats whose cast safety is judged."""

    index: CheckpointIndex
    tensors: Sequence[Tensor]
    casts: Sequence[str] = ()
    scalars: Sequence[Scalar] = field(default_factory=tuple)


def by_name(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name; of several of one name the first."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, tensor)
    return found
