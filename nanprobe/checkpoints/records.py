"""What a checkpoint holds, as data: tensors and where their bytes lie, and what is wrong with the files.

Every reader, whatever the format, gives these records and nothing else, so that loading a model, scanning values and
comparing two checkpoints never see a format. A *storage* is a block of element bytes; a tensor is one or more *pieces*,
each a strided view of a storage. Tensors that share memory name the same storage, and a storage is read once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CheckpointFile",
    "CheckpointIndex",
    "Damage",
    "Extent",
    "FileIndex",
    "Piece",
    "Problem",
    "Storage",
    "TensorEntry",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a file, found before any value was looked at.

    ``rule`` and ``severity`` are those of the scan's findings ("truncated-file", "error"). ``message`` is one sentence
    without the file's name: what is wrong and, where it helps, what to do. ``blocking`` is true when the data of the
    file, or of ``tensor`` when that is given, cannot be used.
    """

    rule: str
    severity: str
    message: str
    file: str
    tensor: str | None = None
    blocking: bool = True
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Damage(Exception):
    """Reading cannot go on; ``problem`` says why. Raised inside this room, never out of it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes in a file: ``length`` bytes from ``offset``, which decode to ``size`` bytes.

    ``encoding`` is "stored" (then size equals length) or "deflated" (raw DEFLATE, RFC 1951). ``crc32`` is of the
    decoded bytes, None where the file has none.
    """

    file: str
    offset: int
    length: int
    size: int
    encoding: str = "stored"
    crc32: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of element bytes: the decoded extents, one after the other, ``size`` bytes in all.

    ``id`` is unique in a checkpoint. ``dtype`` is the declared element type ("uint8" when untyped).
    """

    id: str
    dtype: str
    size: int
    extents: tuple[Extent, ...]
    byteorder: str = "little"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A strided view of a storage that fills a block of a tensor.

    ``start`` is where the block begins in the tensor, ``shape`` its extent; ``strides`` and ``offset`` are in elements
    of the storage, counted from its first.
    """

    storage: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint under one name.

    ``name`` joins ``path``, the keys from the file's root, with dots. ``dtype`` is PyTorch's name where it has one.
    ``layout`` is "strided", "quantized" (integers that a scale belongs to) or "meta" (no data). ``conjugate`` and
    ``negate`` say that the values are the conjugates or the negatives of the bytes (PyTorch saves such lazy views as
    they are). ``persistent`` is false for a buffer that its module would not save. ``unreadable`` says why the bytes
    cannot be read, None when they can. ``role`` is decided later, from the names ("weight", "exp_avg").
    """

    name: str
    path: tuple[Any, ...]
    file: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    layout: str = "strided"
    conjugate: bool = False
    negate: bool = False
    parameter: bool = False
    requires_grad: bool = False
    persistent: bool = True
    unreadable: str | None = None
    role: str | None = None

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """What one file, or one window of a file, holds.

    ``tree`` is the file's object tree with inert stand-ins for everything that is not plain data, ``metadata`` the
    strings that a safetensors header carries, ``foreign`` the dotted names of classes and functions that the file
    mentions.
    """

    kind: str
    file: str
    size: int
    tensors: tuple[TensorEntry, ...] = ()
    storages: Mapping[str, Storage] = field(default_factory=dict)
    tree: Any = field(default=None, repr=False, compare=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: path, what it is, and its size in bytes (0 when it is missing)."""

    path: str
    kind: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """A checkpoint without its data: every tensor, every storage, every problem, over all files.

    ``trees`` and ``metadata`` are by file path. ``others`` names files of the same folder that were left aside.
    """

    path: str
    kind: str
    files: tuple[CheckpointFile, ...]
    tensors: tuple[TensorEntry, ...]
    storages: Mapping[str, Storage] = field(repr=False)
    problems: tuple[Problem, ...] = ()
    trees: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
