"""Files that ``torch.save`` wrote before PyTorch 1.6, or writes with ``_use_new_zipfile_serialization=False``.

Five pickles back to back (a magic number, the protocol version, facts about the system, the objects, the list of
storage keys), then for each key an element count (8 bytes) and the elements.
"""

from __future__ import annotations

from typing import Any

from nanprobe.checkpoints.describe import describe_tree
from nanprobe.checkpoints.dtypes import nbytes
from nanprobe.checkpoints.inert import Span, StorageRef
from nanprobe.checkpoints.pickle_machine import Limits, Loaded, PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.records import Damage, Extent, FileIndex, Storage
from nanprobe.checkpoints.torch_objects import BUILDERS, persistent_value
from nanprobe.checkpoints.window import Window

__all__ = ["index_torch_legacy", "is_torch_legacy", "legacy_storages"]

_MAGIC = 0x1950A86A20F9469CFC6C


def is_torch_legacy(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` (64 bytes are enough) is of this kind."""
    try:
        return bool(load_pickle(PickleSource(None, head), limits=Limits(operations=8)).value == _MAGIC)
    except PickleDamage:
        return False


def index_torch_legacy(window: Window) -> FileIndex:
    """Return what the file holds; Damage when its objects cannot be read."""
    objects, storages, failure, foreign = _read(window)

    def storage_of(reference: StorageRef) -> Storage:
        storage = storages.get(reference.key)
        if storage is None:
            raise failure or window.damage("corrupt-file", "its storage is not among those of the file")
        return storage

    def place(span: Span) -> Extent:
        return Extent(file=window.path, offset=window.base + span.offset, length=span.length, size=span.length)

    return describe_tree(window, "torch-legacy", objects, foreign, storage_of, place)


def legacy_storages(window: Window) -> tuple[StorageRef, dict[str, Storage], dict[str, None]]:
    """Return the one storage that a file of a single storage holds, all by key, and the names in its pickles.

    Damage when the file holds something else.
    """
    objects, storages, failure, foreign = _read(window)
    if not isinstance(objects, StorageRef):
        raise failure or window.damage("corrupt-file", "it holds no storage")
    return objects, storages, foreign


def _read(window: Window) -> tuple[Any, dict[str, Storage], Damage | None, dict[str, None]]:
    """Return the objects, the storages by key, what is wrong with those that are missing, and the names."""
    references: dict[str, StorageRef] = {}

    def persistent(identifier: Any) -> Any:
        value = persistent_value(identifier)
        if isinstance(value, StorageRef):
            references.setdefault(value.key, value)
        return value

    foreign: dict[str, None] = {}
    position = 0
    for _ in range(2):
        start = _pickle(window, position)
        foreign.update(start.foreign)
        position = start.end
    system = _pickle(window, position)
    objects = _pickle(window, system.end, persistent)
    keys = _pickle(window, objects.end)
    for loaded in (system, objects, keys):
        foreign.update(loaded.foreign)
    if not isinstance(keys.value, list) or not all(isinstance(key, str) for key in keys.value):
        raise window.damage("corrupt-file", "its list of storages is damaged")
    little = not isinstance(system.value, dict) or system.value.get("little_endian") is not False
    storages, failure = _locate_storages(window, keys.value, keys.end, references, "little" if little else "big")
    return objects.value, storages, failure, foreign


def _pickle(window: Window, position: int, persistent: Any = None) -> Loaded:
    source = PickleSource(window, start=position, end=window.size)
    try:
        return load_pickle(source, persistent=persistent, builders=BUILDERS if persistent else None)
    except PickleDamage as error:
        raise window.damage("truncated-file" if error.truncated else "corrupt-file", str(error)) from None


def _locate_storages(
    window: Window, keys: list[str], position: int, references: dict[str, StorageRef], byteorder: str
) -> tuple[dict[str, Storage], Damage | None]:
    """Return the storages up to the first that is not all there, and what is wrong from there on."""
    storages: dict[str, Storage] = {}
    for key in keys:
        reference = references.get(key)
        if reference is None:
            return storages, window.damage("corrupt-file", f"nothing refers to its storage {key[:100]!r}")
        declared = nbytes(reference.numel, reference.dtype)
        if position + 8 + declared > window.size:
            short = position + 8 + declared - window.size
            return storages, window.damage(
                "truncated-file", f"the file ends {short:,} bytes before the end of its storage {key[:100]!r}"
            )
        count = int.from_bytes(window.read(position, 8), "big" if byteorder == "big" else "little", signed=True)
        if count != reference.numel:
            return storages, window.damage(
                "corrupt-file",
                f"its storage {key[:100]!r} has {count:,} elements where {reference.numel:,} are declared",
            )
        extent = Extent(file=window.path, offset=window.base + position + 8, length=declared, size=declared)
        storages[key] = Storage(
            id=f"{window.path}@{window.base}:{key}",
            dtype=reference.dtype,
            size=declared,
            extents=(extent,) if declared else (),
            byteorder=byteorder,
        )
        position += 8 + declared
    return storages, None
