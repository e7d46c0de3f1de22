"""Pickles that ``torch.save`` did not write: random states of accelerate, scripts that used ``pickle.dump``."""

from __future__ import annotations

from nanprobe.checkpoints.describe import describe_tree
from nanprobe.checkpoints.inert import Span, StorageRef
from nanprobe.checkpoints.pickle_machine import PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.pickled_storage import NAME, PickledStorages
from nanprobe.checkpoints.records import Extent, FileIndex, Storage
from nanprobe.checkpoints.torch_objects import BUILDERS, persistent_value
from nanprobe.checkpoints.window import Window

__all__ = ["index_pickle"]


def index_pickle(window: Window) -> FileIndex:
    """Return what the pickle describes; Damage when it is none."""
    pickled = PickledStorages(window)
    builders = {**BUILDERS, NAME: pickled.builder()}
    try:
        loaded = load_pickle(PickleSource(window, end=window.size), persistent=persistent_value, builders=builders)
    except PickleDamage as error:
        raise window.damage("truncated-file" if error.truncated else "corrupt-file", str(error)) from None

    def storage_of(reference: StorageRef) -> Storage:
        storage = pickled.storages.get(reference.key)
        if storage is None:
            raise window.damage("corrupt-file", "it refers to a storage that it does not hold")
        return storage

    def place(span: Span) -> Extent:
        return Extent(file=window.path, offset=window.base + span.offset, length=span.length, size=span.length)

    return describe_tree(window, "pickle", loaded.value, {**loaded.foreign, **pickled.foreign}, storage_of, place)
