"""A second look at single tensors: any box of a tensor's elements, decoded, however its bytes are spread.

Counting needs no order. The index of the first bad element, dead rows, quantiles and comparisons of two tensors do, and
they are needed for few tensors only. A box is a block of the logical tensor (start and size in each dimension); boxes
come in row-major order and are small enough for memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.records import Damage, Piece, Problem, Storage, TensorEntry
from nanprobe.checkpoints.stream import read_storage
from nanprobe.numerics.stored import COUNTABLE, PACKED, decoded
from nanprobe.scan.plan import Block, blocks_dtype, memory_order, simplified
from nanprobe.scan.reading import Files, is_random_access, read_range
from nanprobe.scan.strided import strided_chunks

__all__ = ["Box", "Looker", "boxes"]

BOX = 1 << 20
"""Elements of a box."""

_MAX_HELD = 1 << 27
"""Bytes of a compressed storage up to which it is decoded into memory for a second look."""

_MOST_REPEATED, _ALWAYS = 16, 1 << 22
"""Elements for each byte of storage, and elements in any case, up to which a tensor is looked at again."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size in each dimension."""

_GROUPS = {"float4_e2m1": 2, "float6_e2m3": 4, "float6_e3m2": 4}
"""Elements that whole bytes hold together, of packed types."""


def boxes(shape: tuple[int, ...], limit: int = BOX) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements that cover ``shape`` in row-major order."""
    if math.prod(shape) <= limit:
        if 0 not in shape:
            yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    if inner > limit:
        for at in range(shape[0]):
            for start, size in boxes(shape[1:], limit):
                yield (at, *start), (1, *size)
        return
    rows = max(limit // inner, 1)
    for at in range(0, shape[0], rows):
        yield (at, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - at), *shape[1:])


class Looker:
    """Reads boxes of tensors; Damage when their bytes are not there. Use it as a context: it keeps files open."""

    def __init__(self, storages: Mapping[str, Storage]) -> None:
        self._storages = storages
        self._files = Files()
        self._held: tuple[str, Any] | None = None

    def __enter__(self) -> Looker:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def can(self, entry: TensorEntry) -> bool:
        """Return whether the tensor's values can be looked at element by element."""
        if entry.unreadable is not None or entry.dtype == "float4_e2m1fn_x2" or 0 in entry.shape:
            return False
        if not all(self._reachable(piece) for piece in entry.pieces):
            return False
        # A stride of zero makes any number of elements of a few bytes; a loop over all of them would never end.
        held = sum(self._storages[piece.storage].size for piece in entry.pieces)
        if entry.elements > _MOST_REPEATED * held + _ALWAYS:
            return False
        return bool(entry.pieces) and (blocks_dtype(entry) or entry.dtype in COUNTABLE)

    def _reachable(self, piece: Piece) -> bool:
        storage = self._storages[piece.storage]
        return is_random_access(storage) or storage.size <= _MAX_HELD

    def read(self, entry: TensorEntry, box: Box) -> Any:
        """Return the elements of ``box`` as an array of its size, in a type that NumPy computes with.

        Elements that no piece holds are zero.
        """
        start, size = box
        if len(entry.pieces) == 1 and entry.pieces[0].shape == entry.shape:
            values = self._part(entry, entry.pieces[0], start, size).reshape(size)
        else:
            values = self._assembled(entry, start, size)
        return -values if entry.negate else values

    def _assembled(self, entry: TensorEntry, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
        whole: Any = None
        for piece in entry.pieces:
            at = piece.start or (0,) * len(piece.shape)
            low = tuple(max(a, b) for a, b in zip(start, at, strict=True))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, at, piece.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = tuple(b - a for a, b in zip(low, high, strict=True))
            part = self._part(entry, piece, tuple(a - b for a, b in zip(low, at, strict=True)), inside)
            if whole is None:
                whole = np.zeros(size, part.dtype.newbyteorder("="))
            place = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, start, inside, strict=True))
            whole[place] = part.reshape(inside)
        if whole is None:
            return np.zeros(size)
        return whole

    def _part(self, entry: TensorEntry, piece: Piece, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
        """Return elements of one piece; ``start`` counts from the piece's first element in each dimension."""
        storage = self._storages[piece.storage]
        if blocks_dtype(entry):
            return self._blocks(entry, storage, start, size)
        offset = piece.offset + sum(at * stride for at, stride in zip(start, piece.strides, strict=True))
        sizes, strides, times = simplified(size, piece.strides)
        count = math.prod(sizes)
        step = 1
        contiguous = True
        for length, stride in zip(reversed(sizes), reversed(strides), strict=True):
            contiguous = contiguous and stride == step
            step *= length
        if contiguous:
            values = self._run(entry.dtype, storage, offset, count)
        else:
            # Read as the elements lie in memory: row by row, a transposed view costs its whole storage for each row.
            axes = memory_order(strides)
            lying = tuple(sizes[at] for at in axes)
            block = Block(piece.storage, entry.dtype, offset, lying, tuple(strides[at] for at in axes))
            raw = np.concatenate(list(strided_chunks(self._files, storage, block)))
            values = decoded(raw.view(np.uint8), entry.dtype, storage.byteorder)
            values = values.reshape(lying).transpose(np.argsort(axes)).reshape(-1)
        if times > 1:
            kept = tuple(1 if stride == 0 else length for length, stride in zip(size, piece.strides, strict=True))
            values = np.broadcast_to(values.reshape(kept), size)
        return values

    def _run(self, dtype: str, storage: Storage, offset: int, count: int) -> Any:
        group = _GROUPS.get(dtype, 1) if dtype in PACKED else 1
        first = offset // group * group
        begin = first * BITS[dtype] // 8
        length = nbytes(offset - first + count, dtype)
        if dtype in PACKED:
            length = min(-(-(offset - first + count) // group) * group * BITS[dtype] // 8, storage.size - begin)
        values = decoded(self._bytes(storage, begin, length), dtype, storage.byteorder)
        return values[offset - first : offset - first + count]

    def _bytes(self, storage: Storage, begin: int, length: int) -> Any:
        if is_random_access(storage):
            raw = np.empty(length, np.uint8)
            read_range(self._files, storage, begin, raw)
            return raw
        if self._held is None or self._held[0] != storage.id:
            self._held = None
            self._held = (storage.id, np.frombuffer(read_storage(storage, check=False), np.uint8))
        raw = self._held[1][begin : begin + length]
        if raw.size < length:
            file = storage.extents[0].file if storage.extents else "?"
            raise Damage(
                Problem(rule="truncated-file", severity="error", message="its data is not all there", file=file)
            )
        return raw

    def _blocks(self, entry: TensorEntry, storage: Storage, start: tuple[int, ...], size: tuple[int, ...]) -> Any:
        from nanprobe.checkpoints.blocks import block_layout, decode_blocks

        elements, block = block_layout(entry.dtype)
        first = _flat(start, entry.shape)
        count = math.prod(size)
        begin, end = first // elements, -(-(first + count) // elements)
        values = np.asarray(decode_blocks(self._bytes(storage, begin * block, (end - begin) * block), entry.dtype))
        return values.reshape(-1)[first - begin * elements : first - begin * elements + count]

    def first(self, entry: TensorEntry, wanted: Mapping[str, Callable[[Any], Any]]) -> dict[str, tuple[int, ...]]:
        """Return, for each predicate, the index of the first element for which it holds; those found nowhere miss.

        A predicate takes an array of decoded elements and returns a mask of its shape.
        """
        found: dict[str, tuple[int, ...]] = {}
        if not self.can(entry):
            return found
        with np.errstate(all="ignore"):
            for start, size in boxes(entry.shape):
                values = self.read(entry, (start, size))
                for name, predicate in wanted.items():
                    if name in found:
                        continue
                    mask = np.asarray(predicate(values)).reshape(-1)
                    at = int(mask.argmax()) if mask.size else 0
                    if mask.size and mask[at]:
                        inside = np.unravel_index(at, size) if size else ()
                        found[name] = tuple(int(a) + int(b) for a, b in zip(start, inside, strict=True))
                if len(found) == len(wanted):
                    break
        return found

    def count(self, entry: TensorEntry, predicate: Callable[[Any], Any]) -> int:
        """Return how many elements a predicate holds for."""
        with np.errstate(all="ignore"):
            return sum(int(np.count_nonzero(predicate(self.read(entry, box)))) for box in boxes(entry.shape))

    def quantile(self, entry: TensorEntry, share: float) -> float:
        """Return a magnitude that at least ``share`` of the finite elements do not exceed, to within 0.4 per cent.

        The elements are counted by the upper 16 bits of their FP32 magnitude: exponent and eight bits of mantissa.
        """
        bins = np.zeros(1 << 16, np.int64)
        with np.errstate(all="ignore"):
            for box in boxes(entry.shape):
                values = np.abs(self.read(entry, box)).astype(np.float32).reshape(-1)
                bits = values[np.isfinite(values)].view(np.uint32)
                bins += np.bincount(bits >> 15, minlength=1 << 16)
        total = int(bins.sum())
        if not total:
            return math.nan
        at = int(np.searchsorted(np.cumsum(bins), math.ceil(share * total)))
        return float(np.array([(at << 15) | 0x7FFF if at else 0], np.uint32).view(np.float32)[0])

    def dead(self, entry: TensorEntry) -> tuple[list[int], list[int]]:
        """Return the rows and the columns (dimension 0, and all others flattened) that are zero throughout."""
        rows = np.zeros(entry.shape[0], bool)
        width = math.prod(entry.shape[1:])
        columns = np.zeros(width, bool)
        for start, size in boxes(entry.shape):
            used = self.read(entry, (start, size)) != 0
            first = start[0]
            if size[1:] == entry.shape[1:]:
                flat = used.reshape(size[0], -1)
                rows[first : first + size[0]] |= flat.any(axis=1)
                columns |= flat.any(axis=0)
            else:
                # One row in several boxes: each is a run of the flattened row.
                at = _flat(start[1:], entry.shape[1:])
                flat = used.reshape(-1)
                rows[first] |= bool(flat.any())
                columns[at : at + flat.size] |= flat
        return np.flatnonzero(~rows).tolist(), np.flatnonzero(~columns).tolist()


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    at = 0
    for position, size in zip(index, shape, strict=True):
        at = at * size + position
    return at
