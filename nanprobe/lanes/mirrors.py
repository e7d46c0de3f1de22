"""The FP64 shadow of a lane's memory: for each storage a mirror that holds what its elements would be exactly.

A shadow belongs to a storage and not to a tensor. Whatever is a view of a storage (a slice, a transpose, a detached or
saved tensor, the target of ``out=`` or of an in-place operation) finds its shadow by its own size, stride and offset in
the mirror, so views need no work at all and a write through one of them is seen by all.

A storage without a mirror is exact as it is: inputs, parameters, masks, fresh random draws. What was cast from such a
tensor borrows the tensor itself as its mirror, so that cast weights take no memory in FP64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Mirrors", "weakly"]

_FIRST_SWEEP = 1 << 20
"""Elements mirrored before the mirrors of storages that are gone are looked for."""


@dataclass(slots=True, eq=False)
class _Mirror:
    """``values`` is one-dimensional, an element for each of the storage's; ``maker`` is who wrote there last.

    A borrowed mirror is somebody else's memory: it counts as long as nobody writes to it (``version``). One that is
    ``lent`` to another storage is copied before it is written to.
    """

    storage: Any
    dtype: torch.dtype
    values: torch.Tensor
    maker: int | None
    version: int | None = None
    lent: bool = False

    @property
    def stands(self) -> bool:
        """Whether the values are still what they were: always, but for a borrowed mirror."""
        return self.version is None or self.version == _version(self.values)


class Mirrors:
    """Mirrors by storage. A storage that is gone keeps its key taken until its mirror is swept, so keys are unique."""

    def __init__(self) -> None:
        self._mirrors: dict[int, _Mirror] = {}
        self._elements = 0
        self._sweep_at = _FIRST_SWEEP

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the shadow of a strided tensor (same shape, FP64 or the borrowed source's dtype), None without one."""
        mirror = self._find(tensor)
        return _seen_as(mirror, tensor) if mirror is not None else None

    def maker(self, tensor: torch.Tensor) -> int | None:
        """Return who wrote to the tensor's storage last, None when it has no mirror."""
        mirror = self._find(tensor)
        return mirror.maker if mirror is not None else None

    def put(self, tensor: torch.Tensor, shadow: torch.Tensor, maker: int | None) -> None:
        """Make ``shadow`` (same shape, FP64) what the elements of ``tensor`` would be exactly."""
        if shadow is tensor or not _is_plain(tensor):
            return
        elements = _elements(tensor)
        covers = tensor.numel() == elements and tensor.storage_offset() == 0
        if covers and shadow.stride() == tensor.stride() and _owns(shadow):
            self._store(tensor, shadow.as_strided((elements,), (1,), shadow.storage_offset()), maker)
            return
        target = self.writable(tensor, maker, keep=not covers)
        if target is not None:
            target.copy_(shadow)

    def borrow(self, tensor: torch.Tensor, source: torch.Tensor, maker: int | None) -> bool:
        """Let ``source``, of the same shape and wider dtype, be the mirror of ``tensor``; False when it cannot be."""
        elements = _elements(tensor)
        dense = tensor.numel() == elements and tensor.storage_offset() == 0 and tensor.stride() == source.stride()
        if not dense or not _is_plain(source) or source.dtype not in (torch.float32, torch.float64):
            return False
        values = source.detach().as_strided((elements,), (1,), source.storage_offset())
        self._store(tensor, values, maker, version=_version(values))
        return True

    def share(self, tensor: torch.Tensor, source: torch.Tensor, maker: int | None) -> bool:
        """Let ``tensor`` have the mirror of ``source``, which it is a cast copy of; False when they lie differently."""
        mirror = self._find(source)
        whole = all(t.numel() == _elements(t) and t.storage_offset() == 0 for t in (tensor, source))
        if mirror is None or not whole or tensor.stride() != source.stride() or mirror.values.numel() != tensor.numel():
            return False
        mirror.lent = True
        values = mirror.values
        self._store(tensor, values, maker, version=_version(values))
        return True

    def writable(self, tensor: torch.Tensor, maker: int | None, *, keep: bool = True) -> torch.Tensor | None:
        """Return the tensor's place in a mirror of FP64 that may be written to; one is made where there is none.

        ``keep=False`` leaves elements that are not written undefined. None for a tensor that cannot be mirrored.
        """
        if not _is_plain(tensor):
            return None
        mirror = self._find(tensor)
        if mirror is None or mirror.version is not None or mirror.values.dtype not in _WIDE:
            wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
            known = mirror.values if mirror is not None else _whole(tensor)
            values = known.to(wide, copy=True) if keep else torch.empty_like(known, dtype=wide)
            mirror = self._store(tensor, values, maker)
        elif mirror.lent:
            mirror.values, mirror.lent = mirror.values.clone(), False
        mirror.maker = maker
        return _seen_as(mirror, tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Take the tensor's storage as exact from here on."""
        if _is_plain(tensor):
            dropped = self._mirrors.pop(tensor.untyped_storage()._cdata, None)
            if dropped is not None and dropped.version is None:
                self._elements -= dropped.values.numel()

    def clear(self) -> None:
        """Let every mirror go."""
        self._mirrors.clear()
        self._elements = 0

    def _find(self, tensor: torch.Tensor) -> _Mirror | None:
        if not _is_plain(tensor):
            return None
        mirror = self._mirrors.get(tensor.untyped_storage()._cdata)
        if mirror is None or not mirror.stands:
            return None
        if mirror.dtype is not tensor.dtype and mirror.dtype not in (_parts(tensor.dtype), _whole_of(tensor.dtype)):
            return None
        nbytes = mirror.values.numel() * mirror.dtype.itemsize
        return mirror if nbytes == tensor.untyped_storage().nbytes() else None

    def _store(
        self, tensor: torch.Tensor, values: torch.Tensor, maker: int | None, version: int | None = None
    ) -> _Mirror:
        self.forget(tensor)
        storage = tensor.untyped_storage()
        mirror = _Mirror(weakly(tensor), tensor.dtype, values, maker, version)
        self._mirrors[storage._cdata] = mirror
        if version is None:
            self._elements += values.numel()
        if self._elements > self._sweep_at:
            self._sweep()
        return mirror

    def _sweep(self) -> None:
        """Drop the mirrors of storages that are gone; the next sweep is due when a thirtieth has come on top."""
        gone = [key for key, mirror in self._mirrors.items() if mirror.storage.expired()]
        for key in gone:
            dropped = self._mirrors.pop(key)
            if dropped.version is None:
                self._elements -= dropped.values.numel()
        self._sweep_at = max(_FIRST_SWEEP, self._elements + self._elements // 32)


_WIDE = (torch.float64, torch.complex128)


def weakly(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a tensor's storage, whose ``expired()`` tells whether that is gone.

    As long as the reference lives, no other storage gets the same address.
    """
    reference: Any = StorageWeakRef
    return reference(tensor.untyped_storage())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of numbers whose shadow can be kept."""
    return (
        (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype.itemsize > 1
    )


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.dtype.itemsize


def _parts(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of a complex dtype's parts, None for a real one."""
    return dtype.to_real() if dtype.is_complex else None


def _whole_of(dtype: torch.dtype) -> torch.dtype | None:
    """Return the complex dtype with parts of a real dtype, None for a complex one."""
    return None if dtype.is_complex or dtype is torch.bfloat16 else dtype.to_complex()


def _seen_as(mirror: _Mirror, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a mirror that a tensor covers, complex numbers seen as their parts and the reverse."""
    values = mirror.values
    if tensor.dtype.is_complex and not values.is_complex():
        values = torch.view_as_complex(values.view(-1, 2))
    elif values.is_complex() and not tensor.dtype.is_complex:
        values = torch.view_as_real(values).view(-1)
    return values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _owns(shadow: torch.Tensor) -> bool:
    """Whether a shadow is all of its storage, so that it can be the mirror without a copy."""
    return shadow.dtype in _WIDE and shadow.numel() == _elements(shadow) and shadow.storage_offset() == 0


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a tensor's storage, as one dimension."""
    return tensor.detach().as_strided((_elements(tensor),), (1,), 0)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
