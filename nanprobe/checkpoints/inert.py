"""Stand-ins for the objects of a pickle: they hold what the file says and can do nothing.

No object of the file is ever constructed, imported or called. A class or function that the file names is a
:class:`Global`, the result of "calling" it a :class:`Foreign`. Stand-ins compare by identity, so that using one as a
dictionary key runs no comparison over nested data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Foreign", "Global", "InertDict", "Span", "StorageRef", "TensorValue"]


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file mentions: ``module`` and ``name`` exactly as written there."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Foreign:
    """What calling ``callee`` with ``args`` would have made, with the state and the items it was given afterwards."""

    callee: Any
    args: Any = ()
    state: Any = None
    items: list[Any] | None = None
    pairs: dict[Any, Any] | None = None

    @property
    def class_name(self) -> str:
        """Dotted name of the class or function, "?" when the file computes it."""
        return self.callee.dotted if isinstance(self.callee, Global) else "?"


class InertDict(dict[Any, Any]):
    """A dictionary that keeps the attributes it was given (an OrderedDict's ``_metadata``)."""

    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state: Any = None


@dataclass(slots=True, eq=False)
class Span:
    """A string or byte string too long to keep: ``length`` bytes at ``offset`` of the pickle it stands in."""

    offset: int
    length: int
    text: bool


@dataclass(slots=True, eq=False)
class StorageRef:
    """A storage that the file refers to by ``key``: element type and count as declared.

    ``view`` is (offset, count) in elements when only a part of the keyed storage is meant. ``raw`` are the bytes of a
    numpy array that stand in the pickle itself: bytes, text of one character for each, or the span that holds them.
    """

    key: str
    dtype: str
    numel: int
    location: str = "cpu"
    view: tuple[int, int] | None = None
    raw: Any = None
    byteorder: str = "little"


@dataclass(slots=True, eq=False)
class TensorValue:
    """A tensor as the file describes it: a strided view of a storage; nothing about it has been checked."""

    dtype: str | None
    storage: StorageRef | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layout: str = "strided"
    conjugate: bool = False
    negate: bool = False
    parameter: bool = False
    requires_grad: bool = False
