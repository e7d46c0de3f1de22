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
    "NoCheckpoint",
    "Piece",
    "Problem",
    "Scalar",
    "Skipped",
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


class NoCheckpoint(Damage):
    """The file is sound, or may be, but it is something else than a checkpoint: an archive of other things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes in a file: ``length`` bytes from ``offset``, which decode to ``size`` bytes.

    ``encoding`` is "stored" (then size equals length), "deflated" (raw DEFLATE, RFC 1951), "latin1" (UTF-8 text whose
    characters are the bytes, as old pickle protocols write them) or "inline" (``data`` holds the bytes, nothing is read
    from the file). ``stream_extent`` decodes all of them. ``crc32`` is of the decoded bytes, None where the file has
    none.
    """

    file: str
    offset: int
    length: int
    size: int
    encoding: str = "stored"
    crc32: int | None = None
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of element bytes: the decoded extents, one after the other, ``size`` bytes in all.

    ``id`` is unique in a checkpoint. ``dtype`` is the declared element type ("uint8" when untyped); of a block format
    ("q4_0") it is that format's name, and ``size`` counts the bytes of whole blocks (see ``dtypes.BLOCKS``).
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

    ``name`` is what a report calls it: the parameter's own name where the checkpoint lets it be known (``fc.weight``
    for ``model.fc.weight``, ``fc.weight.exp_avg`` for ``optimizer.state.0.exp_avg``), else the keys of ``path``, from
    the file's root, joined with dots. ``key`` is the joined path where it differs from ``name``, else None. ``of`` is
    the name of the parameter that a state or a copy (EMA) belongs to, None where it is not known.

    ``dtype`` is PyTorch's name where it has one, else that of the format ("q4_0"). ``layout`` is "strided",
    "quantized" (integers that a scale belongs to), "blocks" (a block format of GGUF, see ``blocks.decode_blocks``),
    "placeholder" (of no elements on purpose: the values lie elsewhere) or "meta" (no data). ``conjugate`` and
    ``negate`` say that the values are the conjugates or the negatives of the bytes (PyTorch saves such lazy views as
    they are). ``persistent`` is false for a buffer that its module would not save.

    ``role`` is set where the format or the place in the tree decides it: "weight" (a master copy), the state's name
    ("exp_avg", "step") for optimizer state, "optimizer" (other tensors of an optimizer), "ema", "loss-scale",
    "scaler", "rng", "callback", "scheduler"; None leaves the decision to whoever looks at the names. ``rank`` is that
    of the process that wrote it, where every process writes its own.

    ``pieces`` may lie in several files; ``file`` is that of the first. ``missing`` counts the elements that no piece
    covers since a shard is not there: the pieces that are can be read. ``unreadable`` says why none can, else None.
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
    key: str | None = None
    of: str | None = None
    rank: int | None = None
    missing: int = 0

    @property
    def elements(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A plain number, truth value or text of a checkpoint that says something about the training's state.

    ``name`` joins ``path`` with dots; ``file`` holds it. ``role`` is one of

    - "loss-scale": the current loss scale; "scaler": the other fields of a loss scaler (growth tracker, factors);
    - "lr": a learning rate of a parameter group; "param-group": the group's other numbers (eps, weight_decay);
    - "scheduler": fields of a learning rate scheduler;
    - "step", "epoch": counters of the run;
    - "optimizer-step": the step counter of one parameter, stored as a plain number (``of`` names the parameter);
    - "log": an entry of the training log (loss, grad_norm, learning_rate), with ``step``;
    - "config": fields of the model's configuration (tie_word_embeddings, torch_dtype);
    - "training-args": arguments of the run (fp16, bf16); "callback": states of callbacks (a best score);
    - "rng", "other".

    ``value`` is what the file says; floats may be NaN or infinite. ``step`` is the run's step that it belongs to.
    """

    name: str
    path: tuple[Any, ...]
    file: str
    value: bool | int | float | str
    role: str
    step: int | None = None
    of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A file of the checkpoint's folder that was not scanned, and why, as a phrase ("a tokenizer file")."""

    file: str
    reason: str


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

    ``kind`` is that of the whole ("dcp", "deepspeed", "sharded", "torch-zip"), each file has its own. ``trees`` and
    ``metadata`` are by file path. ``others`` names files of the same folder that were left aside. ``skipped`` are the
    files that hold no tensors or cannot be scanned, with the reason. ``scalars`` are the plain values that rules look
    at.
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
    skipped: tuple[Skipped, ...] = ()
    scalars: tuple[Scalar, ...] = ()
