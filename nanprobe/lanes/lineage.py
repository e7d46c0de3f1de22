"""Which sample of the batch each element of a lane's memory belongs to.

The batch's own tensors are known; what an operation makes of them inherits the dimension that tells samples apart. As
shadows do, this belongs to a storage and not to a tensor (see :mod:`nanprobe.lanes.mirrors`): a transpose, a reshape
or a slice finds the samples of its elements by where they lie. What does not derive from the batch at all (a weight,
a constant) has no samples, whatever its shape; nor has what was reduced over the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nanprobe.lanes.exact import evaluated
from nanprobe.lanes.mirrors import weakly
from nanprobe.lanes.plans import Plan

__all__ = ["Lineage"]

_MOVES = frozenset(
    ("cat", "stack", "repeat", "index_select", "index", "gather", "flip", "roll", "masked_select", "take")
)
"""Operations that only move elements: run on the samples of their operand, they give those of their result."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1}
"""Products, and at which argument their left factor is."""

_MOST_MOVED = 1 << 24
"""Elements up to which a movement is followed element by element."""

_FIRST_SWEEP = 4096


@dataclass(slots=True, eq=False)
class _Samples:
    """The element at offset o of a storage belongs to sample ``table[o // stride % len(table)]``, -1 for none."""

    storage: Any
    table: torch.Tensor
    stride: int


class Lineage:
    """The samples of what derives from a batch of ``size`` samples along dimension ``dim``; None as size: of nothing.

    ``follow`` is called after each operation, outside every dispatch mode.
    """

    def __init__(self, size: int | None, dim: int) -> None:
        self._size = size
        self._dim = dim
        self._known: dict[int, _Samples] = {}
        self._sweep_at = _FIRST_SWEEP

    def given(self, tensor: torch.Tensor) -> None:
        """Take a tensor of the batch; where its dimension is k times as long, row r belongs to sample r // k."""
        size, dim = self._size, self._dim
        if size and tensor.dim() > dim and tensor.shape[dim] and tensor.shape[dim] % size == 0:
            rows = tensor.shape[dim]
            self._put(tensor, dim, torch.arange(rows) // (rows // size))

    def samples(self, tensor: torch.Tensor, where: torch.Tensor) -> tuple[int, ...] | None:
        """Return the samples that the elements ``where`` (bool, same shape) belong to, None where that is unknown."""
        known = self._of(tensor)
        if known is None:
            return None
        offsets = torch.tensor(int(tensor.storage_offset()))
        for index, stride in zip(torch.nonzero(where).unbind(1), tensor.stride(), strict=True):
            offsets = offsets + index.cpu() * stride
        found = set(known.table[offsets // known.stride % len(known.table)].tolist())
        return tuple(sorted(int(sample) for sample in found if sample >= 0)) or None

    def follow(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Hand the samples of an operation's operands on to what it made or wrote to."""
        if not self._known:
            return
        operands = [t for t in _tensors((args, kwargs)) if self._of(t) is not None]
        if not operands:
            return
        written = [*(args[n] for n in plan.written if n < len(args)), *(kwargs.get(key) for key in plan.outs)]
        given = {id(t) for t in operands}
        base = plan.name.rpartition(".")[2].rstrip("_")
        for output in _tensors(written if plan.writes else result):
            if output.layout is not torch.strided or (id(output) in given and len(operands) == 1):
                continue
            if base in _MOVES and not plan.writes and self._moved(func, args, kwargs, output):
                continue
            found = self._along(base, func, args, kwargs, operands, output)
            if found is not None:
                self._put(output, *found)
        if len(self._known) > self._sweep_at:
            self._known = {key: s for key, s in self._known.items() if not s.storage.expired()}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._known))

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> bool:
        """Run the movement on the samples of its elements; False where the source has none, or it cannot be run."""
        sources = list(_tensors(args[0]))
        if output.numel() > _MOST_MOVED or not any(self._of(t) is not None for t in sources):
            return False
        samples = {id(t): self._elementwise(t) for t in sources}
        results = evaluated(
            func, args, kwargs, lambda t: samples[id(t)] if id(t) in samples else t.detach(), torch.float32
        )
        if not results or results[0].shape != output.shape or not output.numel():
            return False
        moved = results[0].to("cpu", torch.int64)
        order = sorted(range(moved.dim()), key=lambda d: d != self._dim)
        for dim in order:
            line = moved.movedim(dim, 0).reshape(moved.shape[dim], -1)[:, 0]
            shape = [-1 if d == dim else 1 for d in range(moved.dim())]
            if bool((moved == line.reshape(shape)).all()):
                self._put(output, dim, line)
                return True
        if output.is_contiguous():
            self._known[_key(output)] = _Samples(weakly(output), moved.reshape(-1), 1)
        return True

    def _elementwise(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._of(tensor)
        if known is None:
            return torch.full(tensor.shape, -1.0, device=tensor.device)
        offsets = torch.tensor(int(tensor.storage_offset()))
        for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
            offsets = offsets + (torch.arange(length) * stride).reshape(shape)
        return known.table[offsets // known.stride % len(known.table)].float().to(tensor.device)

    def _along(
        self,
        base: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[torch.Tensor],
        output: torch.Tensor,
    ) -> tuple[int, torch.Tensor] | None:
        """Return the dimension of ``output`` that tells samples apart, and the sample of each index along it."""
        found: list[tuple[int, torch.Tensor]] = []
        for operand in operands:
            if operand is output:
                continue
            axis = self._axis(operand)
            if axis is None:
                continue
            dim, line = axis
            if base in _PRODUCTS:
                after = _in_product(dim, operand, args, _PRODUCTS[base], output)
            elif torch.Tag.pointwise in func.tags or base in ("copy", "masked_fill", "where", "fill"):
                after = dim + output.dim() - operand.dim()
            else:
                after = _kept(dim, operand, _reduced(func, args, kwargs, operand), output)
            if after is not None and 0 <= after < output.dim() and output.shape[after] == len(line):
                found.append((after, line))
        return min(found, key=lambda entry: entry[0] != self._dim, default=None)

    def _axis(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Return the one dimension along which the samples differ, and the sample of each index along it."""
        known = self._of(tensor)
        if known is None or not tensor.dim() or not tensor.numel():
            return None
        lines = [
            known.table[(tensor.storage_offset() + torch.arange(length) * stride) // known.stride % len(known.table)]
            for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        varying = [dim for dim, line in enumerate(lines) if bool((line != line[0]).any())]
        if len(varying) > 1:
            return None
        dim = varying[0] if varying else min(self._dim, tensor.dim() - 1)
        return dim, lines[dim]

    def _put(self, tensor: torch.Tensor, dim: int, line: torch.Tensor) -> None:
        """Write down the samples along a dimension of a tensor, which may be a part of its storage."""
        stride = tensor.stride(dim) if tensor.layout is torch.strided else 0
        elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize if stride else 0
        if not elements:
            return
        inner = any(s > stride and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        rows = len(line) if inner else max(len(line), -(-elements // stride))
        first = tensor.storage_offset() // stride % rows
        known = self._of(tensor)
        if known is not None and known.stride == stride and len(known.table) == rows:
            table = known.table.clone()
        else:
            table = torch.full((rows,), -1)
        table[(first + torch.arange(len(line))) % rows] = line
        self._known[_key(tensor)] = _Samples(weakly(tensor), table, stride)

    def _of(self, tensor: torch.Tensor) -> _Samples | None:
        if tensor.layout is not torch.strided:
            return None
        return self._known.get(_key(tensor))


def _in_product(dim: int, operand: torch.Tensor, args: tuple[Any, ...], left: int, output: torch.Tensor) -> int | None:
    """Return where a factor's dimension is in the product, None for the one that is summed over."""
    last = operand.dim() - 1
    if operand is args[left]:
        return dim if dim != last else None
    if operand is args[left + 1]:
        if dim == last and operand.dim() > 1:
            return output.dim() - 1
        return dim if dim < last - 1 else None
    return dim + output.dim() - operand.dim()


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operand: torch.Tensor) -> set[int]:
    """Return the dimensions that an operation is told to work along."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            dims = given if isinstance(given, (list, tuple)) else [given] if isinstance(given, int) else []
            return {d % operand.dim() for d in dims}
    return set()


def _kept(dim: int, operand: torch.Tensor, along: set[int], output: torch.Tensor) -> int | None:
    """Return where a dimension of an operand is in the result of a reduction or of any other operation."""
    if output.dim() < operand.dim() and along:
        return None if dim in along else dim - sum(d < dim for d in along)
    if dim < output.dim() and output.shape[dim] == operand.shape[dim]:
        return dim
    alike = [d for d, length in enumerate(output.shape) if length == operand.shape[dim]]
    return alike[0] if len(alike) == 1 and operand.shape[dim] > 1 else None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    """Yield the dense tensors in what an operation takes or returns, of every dtype."""
    if isinstance(node, torch.Tensor):
        if node.layout is torch.strided and not (node.is_nested or node.is_meta):
            yield node
    elif isinstance(node, (tuple, list)):
        for child in node:
            yield from _tensors(child)
    elif isinstance(node, dict):
        yield from _tensors(list(node.values()))
