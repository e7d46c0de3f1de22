"""safetensors files in which each process wrote its own blocks (``HuggingFaceStorageWriter`` of PyTorch).

The header of every file says where its blocks begin in the whole tensors; put together they are one tensor each.
Source: torch/distributed/checkpoint/_hf_utils.py of PyTorch 2.8 to 2.13.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.blockwise import layout_fault
from nanprobe.checkpoints.json_text import parse_json
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import TensorEntry
from nanprobe.checkpoints.strides import impossible
from nanprobe.checkpoints.trees import sizes

__all__ = ["KEY", "join_blocks"]

KEY = "DCP_SHARDING_INFO"
"""The key of the header's metadata."""


def join_blocks(part: Part) -> None:
    """Replace the blocks of one tensor by the tensor; a problem when they do not fill it."""
    offsets: dict[str, Any] = {}
    for file, metadata in part.metadata.items():
        if KEY in metadata:
            try:
                offsets[file] = parse_json(metadata[KEY].encode("utf-8", "replace"))
            except ValueError:
                part.problem("corrupt-file", "its header does not say where its blocks belong", file, blocking=False)
    if not offsets:
        return
    blocks: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]] = {}
    kept: list[TensorEntry] = []
    for entry in part.tensors:
        start = _start(offsets.get(entry.file), entry)
        if start is None:
            kept.append(entry)
        else:
            blocks.setdefault(entry.name, []).append((entry, start))
    part.tensors[:] = kept + [_joined(part, name, found) for name, found in blocks.items()]


def _start(known: Any, entry: TensorEntry) -> tuple[int, ...] | None:
    """Return where a block begins in its tensor, None when the file does not say or the block cannot be read."""
    item = known.get(entry.name) if isinstance(known, dict) else None
    start = sizes(item.get("saved_offsets")) if isinstance(item, dict) else None
    if start is None or len(start) != len(entry.shape) or len(entry.pieces) != 1:
        return None
    return None if impossible(tuple(a + b for a, b in zip(start, entry.shape, strict=True))) else start


def _joined(part: Part, name: str, found: list[tuple[TensorEntry, tuple[int, ...]]]) -> TensorEntry:
    first = found[0][0]
    alike = [(entry, start) for entry, start in found if len(start) == len(first.shape) and entry.dtype == first.dtype]
    shape = tuple(max(start[axis] + entry.shape[axis] for entry, start in alike) for axis in range(len(first.shape)))
    fault = layout_fault(shape, [(start, entry.shape) for entry, start in alike])
    if fault is not None or len(alike) < len(found):
        message = f"the blocks of the files do not fit together: {fault or 'their types or dimensions differ'}"
        part.problem("corrupt-file", message, first.file, tensor=name)
    pieces = tuple(replace(entry.pieces[0], start=start) for entry, start in alike)
    held = sum(math.prod(piece.shape) for piece in pieces)
    return replace(first, shape=shape, pieces=pieces, missing=max(math.prod(shape) - held, 0))
