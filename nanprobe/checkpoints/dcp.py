"""Folders that ``torch.distributed.checkpoint`` writes (FSDP, torchtitan, DTensor, Megatron's ``torch_dist``).

``.metadata`` is a pickle that names every tensor, the blocks it was cut into and where each block lies: a range of a
``*.distcp`` file, which holds a small ``torch.save`` zip of the block (or one safetensors file for all blocks).
PyTorch reads ``.metadata`` with the plain unpickler, which runs what it names; here it is read like every other pickle.
Source of the layout: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py of PyTorch 2.6 to 2.13.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.blockwise import layout_fault
from nanprobe.checkpoints.describe import limit_problems, unsafe_problems
from nanprobe.checkpoints.dtypes import torch_dtype_name
from nanprobe.checkpoints.inert import Foreign, Global
from nanprobe.checkpoints.listing import Listing
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.paths import inside
from nanprobe.checkpoints.pickle_machine import Loaded, PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.records import Damage, FileIndex, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.safetensors_file import index_safetensors
from nanprobe.checkpoints.sniff import HEAD, impostor
from nanprobe.checkpoints.torch_objects import BUILDERS
from nanprobe.checkpoints.torch_zip import index_torch_zip
from nanprobe.checkpoints.trees import attribute, class_of, count, mapping, sizes, text
from nanprobe.checkpoints.walk import join_name
from nanprobe.checkpoints.window import Window

__all__ = ["METADATA", "read_dcp"]

METADATA = ".metadata"

_PREFETCH = 2048
"""Bytes at both ends of a block's small file that hold its objects and its directory."""


def read_dcp(listing: Listing) -> Part:
    """Return what the folder holds. Damage when ``.metadata`` cannot be read."""
    part = Part(kind="dcp")
    path = listing.path(METADATA)
    with Window(path) as window:
        found = impostor(window.head(HEAD), window.size)
        if found is not None:
            raise window.damage(found.rule, found.message)
        try:
            loaded = load_pickle(PickleSource(window, end=window.size), builders=BUILDERS)
        except PickleDamage as error:
            raise window.damage("truncated-file" if error.truncated else "corrupt-file", str(error)) from None
        part.note_file(path, "dcp-metadata", window.size)
    part.foreign.update(loaded.foreign)
    part.problems.extend(unsafe_problems(path, loaded.foreign))
    reader = _Reader(listing, part, path)
    try:
        reader.read(loaded.value)
    finally:
        reader.close()
    _unnamed_files(listing, part, reader.named)
    part.problems[:] = limit_problems(part.problems)
    return part


class _Reader:
    """State of one reading: open windows, by file, and what was found wrong with whole files."""

    def __init__(self, listing: Listing, part: Part, metadata: str) -> None:
        self.listing = listing
        self.part = part
        self.metadata = metadata
        self.windows: dict[str, Window | None] = {}
        self.named: dict[str, int] = {}
        self.safetensors: dict[tuple[str, int], FileIndex | None] = {}
        self.objects: dict[str, Any] = {}
        self.known: dict[bytes, Loaded] = {}

    def close(self) -> None:
        """Close every file."""
        for window in self.windows.values():
            if window is not None:
                window.close()

    def read(self, root: Any) -> None:
        """Go through all that the metadata names."""
        names = attribute(root, "state_dict_metadata")
        if not isinstance(names, dict):
            raise Damage(_corrupt(self.metadata, "it names no tensors: it is no metadata of a distributed checkpoint"))
        places = self._places(attribute(root, "storage_data"))
        paths = attribute(root, "planner_data")
        paths = paths if isinstance(paths, dict) else {}
        self._count_files(places)
        for name, description in names.items():
            if not isinstance(name, str):
                continue
            where = _path(name, paths.get(name))
            found = places.get(name, {})
            if class_of(description) == "BytesStorageMetadata":
                self._object(name, where, found)
            else:
                self._tensor(name, where, description, found)
        if self.objects:
            self.part.trees[self.metadata] = _nested(self.objects.values())

    def _places(self, data: Any) -> dict[str, dict[tuple[int, ...] | None, Any]]:
        places: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, place in mapping(data).items():
            name = attribute(index, "fqn")
            if isinstance(name, str):
                offset = attribute(index, "offset")
                places.setdefault(name, {})[None if offset is None else sizes(offset)] = place
        return places

    def _count_files(self, places: dict[str, dict[tuple[int, ...] | None, Any]]) -> None:
        """Count the items of each file, so that a missing one can say what went with it."""
        for found in places.values():
            for place in found.values():
                name = text(attribute(place, "relative_path"))
                if name is not None:
                    self.named[name] = self.named.get(name, 0) + 1

    def _window(self, place: Any, tensor: str) -> tuple[Window, int]:
        """Return the window of an item's bytes, and where it begins in its file; Damage when it cannot be had."""
        name = text(attribute(place, "relative_path"))
        offset, length = count(attribute(place, "offset")), count(attribute(place, "length"))
        if name is None or offset is None or length is None:
            raise Damage(_corrupt(self.metadata, "its metadata does not say where it lies", tensor))
        if not inside(name):
            raise Damage(
                _corrupt(
                    self.metadata,
                    f"its metadata places it in {name[:200]!r}, which is outside the checkpoint; that was not read",
                    tensor,
                )
            )
        if name not in self.windows:
            self.windows[name] = self._open(name)
        whole = self.windows[name]
        path = self.listing.path(name)
        if whole is None:
            raise Damage(_missing(path, name, self.named.get(name, 1)))
        if offset + length > whole.size:
            raise Damage(
                Problem(
                    rule="truncated-file",
                    severity="error",
                    message=f"the file has {whole.size:,} bytes, but its data lies up to byte {offset + length:,}: "
                    "the copy or the save did not finish",
                    file=path,
                    tensor=tensor,
                )
            )
        return whole.part(offset, length), offset

    def _open(self, name: str) -> Window | None:
        path = self.listing.path(name)
        if not os.path.isfile(path):
            self.part.problems.append(_missing(path, name, self.named.get(name, 1)))
            return None
        if sum(window is not None for window in self.windows.values()) >= 200:
            self.close()
            self.windows = {known: window for known, window in self.windows.items() if window is None}
        try:
            window = Window(path)
        except OSError as error:
            self.part.problems.append(
                _corrupt(path, f"it cannot be read: {error.strerror or error}"),
            )
            return None
        self.part.note_file(path, "dcp-shard", window.size)
        found = impostor(window.head(HEAD), window.size)
        if found is not None:
            self.part.problems.append(Problem(rule=found.rule, severity="error", message=found.message, file=path))
            window.close()
            return None
        return window

    def _object(self, name: str, where: tuple[Any, ...], found: dict[tuple[int, ...] | None, Any]) -> None:
        """Read an item that is no tensor: a number, a list, a scheduler's state."""
        place = next(iter(found.values()), None)
        if place is None:
            return
        try:
            index = self._nested_file(place, name)
        except Damage as damage:
            if damage.problem.rule != "missing-shard":
                self.part.problems.append(replace(damage.problem, tensor=name, blocking=False))
            return
        if index is None:
            return
        self.part.foreign.update(dict.fromkeys(index.foreign))
        self.part.problems.extend(replace(problem, tensor=problem.tensor or name) for problem in index.problems)
        self.objects[name] = (where, index.tree)
        for entry in index.tensors:
            inner = replace(entry, name=".".join((name, entry.name)).rstrip("."), path=(*where, *entry.path))
            self.part.tensors.append(inner)
            self.part.storages.update(_used(inner, index))

    def _nested_file(self, place: Any, name: str) -> FileIndex | None:
        """Return the index of the file that an item is; None when it is of no known kind."""
        if attribute(place, "transform_descriptors"):
            raise Damage(_unread(self.metadata, "it was compressed by an extension of the writer", name))
        window, _ = self._window(place, name)
        window.prefetch(_PREFETCH)
        if window.head(2) == b"PK":
            return index_torch_zip(window, self.known)
        return None

    def _tensor(
        self, name: str, where: tuple[Any, ...], description: Any, found: dict[tuple[int, ...] | None, Any]
    ) -> None:
        """Read the blocks of a tensor and put them together."""
        shape = sizes(attribute(description, "size"))
        properties = attribute(description, "properties")
        dtype = _dtype(properties)
        chunks = attribute(description, "chunks")
        entry = TensorEntry(
            name=join_name(where), path=where, file=self.metadata, dtype=dtype or "?", shape=shape or (), rank=None
        )
        problems: list[Problem] = []
        pieces: list[Piece] = []
        storages: dict[str, Storage] = {}
        files: list[str] = []
        if shape is None or dtype is None or not isinstance(chunks, (list, tuple)):
            problems.append(_corrupt(self.metadata, "its description in the metadata is damaged", entry.name))
        else:
            blocks = [(sizes(attribute(chunk, "offsets")), sizes(attribute(chunk, "sizes"))) for chunk in chunks]
            fault = layout_fault(shape, blocks)
            if fault is not None:
                problems.append(_corrupt(self.metadata, fault, entry.name))
            for start, extent in blocks:
                if start is None or extent is None or len(start) != len(extent) or len(start) != len(shape):
                    continue
                try:
                    piece, block_storages, file = self._block(entry, name, dtype, start, extent, found)
                except Damage as damage:
                    problems.append(replace(damage.problem, tensor=entry.name))
                    continue
                pieces.append(piece)
                storages.update(block_storages)
                files.append(file)
        blocking = next((problem for problem in problems if problem.blocking), None)
        held = sum(math.prod(piece.shape) for piece in pieces)
        self.part.problems.extend(problem for problem in problems if problem.rule != "missing-shard")
        self.part.storages.update(storages)
        self.part.tensors.append(
            replace(
                entry,
                pieces=tuple(pieces),
                file=files[0] if files else self.metadata,
                unreadable=blocking.message if blocking and not pieces else None,
                missing=max(entry.elements - held, 0),
            )
        )

    def _block(
        self,
        entry: TensorEntry,
        name: str,
        dtype: str,
        start: tuple[int, ...],
        extent: tuple[int, ...],
        found: dict[tuple[int, ...] | None, Any],
    ) -> tuple[Piece, dict[str, Storage], str]:
        """Return one block as a piece, with the storage it is a view of and the file; Damage when it is not there."""
        place = found.get(start)
        if place is None and len(found) == 1:
            place = found.get(None)
        if place is None:
            raise Damage(
                Problem(
                    rule="missing-shard",
                    severity="error",
                    message=f"the metadata does not say where its block at {list(start)} lies",
                    file=self.metadata,
                )
            )
        inner, index = self._block_index(name, place)
        if inner.unreadable is not None:
            raise Damage(next(iter(index.problems), _corrupt(inner.file, inner.unreadable)))
        if inner.shape != extent or inner.dtype != dtype or len(inner.pieces) != 1:
            raise Damage(
                Problem(
                    rule="shape-mismatch",
                    severity="error",
                    message=f"the metadata declares its block at {list(start)} as {dtype} {list(extent)}, "
                    f"the file holds {inner.dtype} {list(inner.shape)}",
                    file=inner.file,
                )
            )
        for problem in index.problems:
            if not problem.blocking:
                self.part.problems.append(replace(problem, tensor=entry.name))
        self.part.foreign.update(dict.fromkeys(index.foreign))
        return replace(inner.pieces[0], start=start), _used(inner, index), inner.file

    def _block_index(self, name: str, place: Any) -> tuple[TensorEntry, FileIndex]:
        """Return the tensor that an item holds and the index it is from; Damage when it holds none."""
        nested = self._nested_file(place, name)
        if nested is not None:
            if len(nested.tensors) != 1:
                blocking = next((problem for problem in nested.problems if problem.blocking), None)
                raise Damage(blocking or _corrupt(nested.file, "its block in the file holds no tensor", name))
            return nested.tensors[0], nested
        window, offset = self._window(place, name)
        key = (window.path, offset)
        if key not in self.safetensors:
            whole = Window(window.path, offset)
            try:
                self.safetensors[key] = index_safetensors(whole)
            except Damage:
                self.safetensors[key] = None
            finally:
                whole.close()
        index = self.safetensors[key]
        entry = next((entry for entry in index.tensors if entry.name == name), None) if index else None
        if index is None or entry is None:
            raise Damage(_corrupt(window.path, f"there is no tensor at byte {offset:,}, where the metadata places it"))
        return entry, replace(index, problems=())


def _used(entry: TensorEntry, index: FileIndex) -> dict[str, Storage]:
    return {piece.storage: index.storages[piece.storage] for piece in entry.pieces}


def _path(name: str, given: Any) -> tuple[Any, ...]:
    """Return the keys that lead to an item before the writer joined them with dots."""
    if isinstance(given, tuple) and given and all(type(part) in (str, int) for part in given):
        return given if join_name(given) == name else (name,)
    return (name,)


def _nested(items: Iterable[tuple[tuple[Any, ...], Any]]) -> dict[Any, Any]:
    """Return the objects as one tree, under the keys that lead to them."""
    root: dict[Any, Any] = {}
    for path, value in items:
        node = root
        for key in path[:-1]:
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                break
            node = inner
        else:
            node[path[-1]] = value
    return root


def _dtype(properties: Any) -> str | None:
    """Return the element type from the properties, which are a tuple or attributes, by version."""
    state = properties.state if isinstance(properties, Foreign) else None
    given = state[0] if isinstance(state, tuple) and state else attribute(properties, "dtype")
    return torch_dtype_name(given.name) if isinstance(given, Global) and given.module == "torch" else None


def _unnamed_files(listing: Listing, part: Part, named: dict[str, int]) -> None:
    for name in listing.files:
        if name.endswith(".distcp") and name not in named:
            part.problem(
                "index-mismatch",
                "the metadata names nothing in it: it may be left over from another save",
                listing.path(name),
                severity="warning",
                blocking=False,
            )


def _corrupt(file: str, message: str, tensor: str | None = None) -> Problem:
    return Problem(rule="corrupt-file", severity="error", message=message, file=file, tensor=tensor)


def _unread(file: str, message: str, tensor: str | None = None) -> Problem:
    return Problem(rule="not-scanned", severity="warning", message=message, file=file, tensor=tensor)


def _missing(path: str, name: str, items: int) -> Problem:
    return Problem(
        rule="missing-shard",
        severity="error",
        message=f"the shard {name[:200]} is missing, and with it {items:,} items",
        file=path,
        evidence={"count": items},
    )
