"""Remembering what was found out about a tensor for as long as that very tensor lives unchanged."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageWeakRef", "TensorMemo", "storage_of", "version_of"]

V = TypeVar("V")
_weak: Any = StorageWeakRef


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes of a tensor; -1 for inference tensors, which keep none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class TensorMemo(Generic[V]):
    """A value by the identity of a tensor, or of two; forgotten when one of them dies or is changed in place."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], tuple[int, ...], V]] = {}

    def get(self, *tensors: torch.Tensor) -> V | None:
        """Return what is remembered of these tensors, None when there is nothing or they have changed."""
        entry = self._kept.get(tuple(map(id, tensors)))
        if entry is None or any(ref() is not tensor for ref, tensor in zip(entry[0], tensors, strict=True)):
            return None
        return entry[2] if entry[1] == tuple(map(version_of, tensors)) else None

    def put(self, value: V, *tensors: torch.Tensor) -> None:
        """Remember ``value`` of these tensors."""
        key = tuple(map(id, tensors))
        refs = tuple(weakref.ref(tensor, lambda _: self._kept.pop(key, None)) for tensor in tensors)
        self._kept[key] = (refs, tuple(map(version_of, tensors)), value)


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what identifies a tensor's memory: its ``cdata`` stays its own as long as the reference is held."""
    reference: StorageWeakRef = _weak(tensor.untyped_storage())
    return reference
