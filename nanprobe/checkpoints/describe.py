"""From the tensors of an object tree to checked records: does every view lie inside its storage, is the type known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.inert import Span, StorageRef, TensorValue
from nanprobe.checkpoints.records import Damage, Extent, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.unsafe import dangerous
from nanprobe.checkpoints.walk import Found, walk
from nanprobe.checkpoints.window import Window

__all__ = ["MAX_LISTED", "describe_tree", "limit_problems", "unsafe_problems"]

MAX_LISTED = 20
"""Problems of one rule that are listed for one file; the rest are counted."""


def describe_tree(
    window: Window,
    kind: str,
    tree: Any,
    foreign: Iterable[str],
    storage_of: Callable[[StorageRef], Storage],
    place: Callable[[Span], Extent],
) -> FileIndex:
    """Return the index of a file whose object tree is ``tree``.

    ``storage_of`` gives the storage behind a reference and raises Damage when its bytes are not there; ``place`` says
    where a long string of the pickle lies.
    """
    walked = walk(tree)
    arrays = _Arrays(window, place)

    def find(reference: StorageRef) -> Storage:
        return storage_of(reference) if reference.raw is None else arrays.storage(reference)

    storages: dict[str, Storage] = {}
    failures: dict[str, Problem] = {}
    problems: list[Problem] = []
    tensors: list[TensorEntry] = []
    for found in walked.tensors:
        entry, problem = _entry(window, found, find, storages, failures)
        tensors.append(entry)
        if problem is not None:
            problems.append(problem)
    if walked.incomplete:
        problems.append(
            Problem(
                rule="not-scanned",
                severity="warning",
                message=f"not every tensor is listed: {walked.incomplete}",
                file=window.path,
                blocking=False,
            )
        )
    names = tuple(foreign)
    problems.extend(unsafe_problems(window.path, names))
    return FileIndex(
        kind=kind,
        file=window.path,
        size=window.size,
        tensors=tuple(tensors),
        storages=storages,
        tree=tree,
        foreign=names,
        problems=limit_problems(problems),
    )


def _entry(
    window: Window,
    found: Found,
    storage_of: Callable[[StorageRef], Storage],
    storages: dict[str, Storage],
    failures: dict[str, Problem],
) -> tuple[TensorEntry, Problem | None]:
    value = found.value
    entry = TensorEntry(
        name=found.name,
        path=found.path,
        file=window.path,
        dtype=value.dtype or "?",
        shape=value.shape,
        layout=value.layout,
        conjugate=value.conjugate,
        negate=value.negate,
        parameter=value.parameter,
        requires_grad=value.requires_grad,
        persistent=found.persistent,
    )
    reference = value.storage
    if reference is None:
        meta = value.layout == "meta"
        reason = "it was saved without data (a meta tensor)" if meta else "its storage is of a kind that is not read"
        return replace(entry, unreadable=reason), None
    problem = failures.get(reference.key)
    storage = None
    if problem is None:
        try:
            storage = storage_of(reference)
        except Damage as damage:
            problem = failures[reference.key] = damage.problem
    if problem is None and storage is not None:
        problem = _view_problem(window, value, storage)
    if problem is not None:
        problem = replace(problem, tensor=found.name)
        return replace(entry, unreadable=problem.message), problem
    assert storage is not None
    storages[storage.id] = storage
    offset = value.offset + (reference.view[0] if reference.view else 0)
    piece = Piece(
        storage=storage.id,
        shape=value.shape,
        strides=value.strides,
        offset=offset,
        start=(0,) * len(value.shape),
    )
    return replace(entry, pieces=(piece,)), None


class _Arrays:
    """Storages of numpy arrays whose bytes stand in the pickle; bytes shared by arrays are decoded once."""

    def __init__(self, window: Window, place: Callable[[Span], Extent]) -> None:
        self.window = window
        self.place = place
        self.extents: dict[int, Extent] = {}

    def storage(self, reference: StorageRef) -> Storage:
        """Return the storage of one array; Damage when its bytes are not as many as its shape needs."""
        declared = nbytes(reference.numel, reference.dtype)
        extent = self._extent(reference.raw, declared)
        if extent.size != declared:
            raise self.window.damage(
                "corrupt-file", f"its shape needs {declared:,} bytes, its pickle holds {extent.size:,}"
            )
        return Storage(
            id=f"{self.window.path}@{self.window.base}:{reference.key}",
            dtype=reference.dtype,
            size=declared,
            extents=(extent,) if declared else (),
            byteorder=reference.byteorder,
        )

    def _extent(self, raw: bytes | str | Span, declared: int) -> Extent:
        known = self.extents.get(id(raw))
        if known is None:
            known = self.extents[id(raw)] = self._new_extent(raw)
        # Text of one character for each byte has more bytes than characters, so its size is taken on trust until read.
        return replace(known, size=declared) if known.encoding == "latin1" else known

    def _new_extent(self, raw: bytes | str | Span) -> Extent:
        if isinstance(raw, Span):
            extent = self.place(raw)
            return replace(extent, encoding="latin1") if raw.text and extent.data is None else extent
        if isinstance(raw, str):
            try:
                raw = raw.encode("latin-1")
            except UnicodeEncodeError:
                raise self.window.damage("corrupt-file", "its bytes are no text of single-byte characters") from None
        return Extent(
            file=self.window.path,
            offset=self.window.base,
            length=len(raw),
            size=len(raw),
            encoding="inline",
            data=raw,
        )


def _view_problem(window: Window, value: TensorValue, storage: Storage) -> Problem | None:
    if value.dtype is None or value.dtype not in BITS:
        return Problem(
            rule="not-scanned",
            severity="warning",
            message="its element type is not known to this version of nanprobe",
            file=window.path,
        )
    if 0 in value.shape:
        return None
    start = value.offset + (value.storage.view[0] if value.storage and value.storage.view else 0)
    last = start + sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
    needed = nbytes(last + 1, value.dtype)
    if needed > storage.size:
        return Problem(
            rule="corrupt-file",
            severity="error",
            message=f"it reaches {needed:,} bytes into a storage of {storage.size:,} bytes",
            file=window.path,
        )
    return None


def unsafe_problems(file: str, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each of the names that means running code or touching files."""
    return [
        Problem(
            rule="unsafe-pickle",
            severity="error",
            message=f"its pickle names {name[:200]}, which runs code or touches files when a trusting loader reads it; "
            "nanprobe ran nothing",
            file=file,
            blocking=False,
            evidence={"name": name[:1000]},
        )
        for name in names
        if dangerous(name)
    ]


def limit_problems(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the problems with those beyond ``MAX_LISTED`` of one rule and file replaced by one that counts them."""
    kept: list[Problem] = []
    counts: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        key = (problem.file, problem.rule)
        counts[key] = counts.get(key, 0) + 1
        last[key] = problem
        if counts[key] <= MAX_LISTED:
            kept.append(problem)
    for key, count in counts.items():
        if count > MAX_LISTED:
            kept.append(
                replace(
                    last[key],
                    message=f"the same goes for {count - MAX_LISTED:,} more: {last[key].message}",
                    evidence={"count": count - MAX_LISTED},
                )
            )
    return tuple(kept)
