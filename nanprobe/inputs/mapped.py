"""Tensors over a checkpoint's bytes: mapped privately from the file where that is possible, read where it is not.

A private mapping shares its pages with the file until something writes to them, so that weights cost no memory of
their own and nothing that a replay does can reach the file. Compressed members, other byte orders and data that is not
aligned to its element size are read into memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from nanprobe.checkpoints import CheckpointIndex, Damage, Storage, TensorEntry, read_storage
from nanprobe.checkpoints.dtypes import BITS
from nanprobe.errors import IncompleteError, UsageError

__all__ = ["TensorSource", "torch_dtype"]


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the PyTorch type called ``name``, None when the installed version has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


class TensorSource:
    """Makes tensors of one checkpoint; every instance maps the files anew, tensors of one share what the file shares.

    ``mapped`` holds the address and the size in bytes of every storage that is mapped and not read.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._files: dict[str, torch.UntypedStorage] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self.mapped: dict[int, int] = {}

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of ``entry``; UsageError when its data cannot be had as a plain tensor."""
        dtype = torch_dtype(entry.dtype)
        if entry.unreadable is not None:
            raise UsageError(f"checkpoint {entry.file} cannot be used: tensor {entry.name!r}: {entry.unreadable}")
        if dtype is None or entry.layout != "strided":
            what = entry.dtype if dtype is None else entry.layout
            raise UsageError(
                f"checkpoint {entry.file}: tensor {entry.name!r} is {what}, which cannot be loaded as a plain tensor "
                f"by torch {torch.__version__}"
            )
        try:
            if len(entry.pieces) == 1:
                view = self._view(entry, 0, dtype)
                view = view.conj() if entry.conjugate else view
                return torch._neg_view(view) if entry.negate else view
            whole = torch.empty(entry.shape, dtype=dtype)
            for number, piece in enumerate(entry.pieces):
                block = tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape, strict=True))
                whole[block] = self._view(entry, number, dtype)
            return whole
        except Damage as damage:
            raise UsageError(f"checkpoint {damage.problem.file} cannot be used: {damage.problem.message}") from None
        except OSError as error:
            raise UsageError(f"checkpoint {entry.file} cannot be read: {error.strerror or error}") from None
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"checkpoint {entry.file}: tensor {entry.name!r} cannot be made: {reason}") from None

    def _view(self, entry: TensorEntry, number: int, dtype: torch.dtype) -> torch.Tensor:
        piece = entry.pieces[number]
        storage = self._storage(self._index.storages[piece.storage], dtype)
        return torch.empty(0, dtype=dtype).set_(storage, piece.offset, piece.shape, piece.strides)

    def _storage(self, storage: Storage, dtype: torch.dtype) -> torch.UntypedStorage:
        known = self._storages.get(storage.id)
        if known is None:
            known = self._mapped(storage) if self._can_map(storage, dtype) else _read(storage, dtype)
            self._storages[storage.id] = known
        return known

    def _can_map(self, storage: Storage, dtype: torch.dtype) -> bool:
        if len(storage.extents) != 1 or storage.byteorder != "little":
            return False
        extent = storage.extents[0]
        return extent.encoding == "stored" and extent.length > 0 and extent.offset % dtype.itemsize == 0

    def _mapped(self, storage: Storage) -> torch.UntypedStorage:
        extent = storage.extents[0]
        whole = self._files.get(extent.file)
        if whole is None:
            # Data may lie in a file beside the checkpoint's own, or in a decompressed copy.
            known = (file.size for file in self._index.files if file.path == extent.file)
            size = next(known, None) or os.path.getsize(extent.file)
            try:
                # The stubs leave out that from_file is a static method of UntypedStorage that returns one.
                make: Any = torch.UntypedStorage.from_file
                whole = make(extent.file, False, size)
            except RuntimeError as error:
                raise UsageError(f"checkpoint {extent.file} cannot be mapped: {str(error).splitlines()[0]}") from None
            assert whole is not None
            self._files[extent.file] = whole
        part = whole[extent.offset : extent.offset + extent.length]
        assert isinstance(part, torch.UntypedStorage)
        self.mapped[part.data_ptr()] = part.nbytes()
        return part


def _read(storage: Storage, dtype: torch.dtype) -> torch.UntypedStorage:
    try:
        buffer = read_storage(storage)
    except MemoryError:
        raise IncompleteError(f"no memory for {storage.size:,} bytes of the checkpoint {storage.id}") from None
    if not buffer:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    result = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    if storage.byteorder == "big" and BITS[storage.dtype] > 8:
        # byteswap has no annotations in torch.
        swap: Any = result.byteswap
        swap(dtype)
    return result
