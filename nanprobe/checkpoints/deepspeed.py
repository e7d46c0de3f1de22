"""Folders that DeepSpeed writes: ZeRO 1, 2 and 3 with their flat buffers, and universal checkpoints.

A root folder has a file ``latest`` with the name of the tag folder. There, ``*_model_states.pt`` hold the module (in
ZeRO-3 placeholders of no elements) and ``param_shapes``; ``*_optim_states.pt``, one for each process, hold flat fp32
buffers of master weights and moments. What each parameter owns of a buffer follows from ``param_slice_mappings``, or
from the order and the sizes in ``param_shapes``. Source: zero_to_fp32.py, runtime/zero/stage_1_and_2.py and
checkpoint/ds_to_universal.py of DeepSpeed 0.16 to 0.19.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nanprobe.checkpoints.flat import carve, is_flat
from nanprobe.checkpoints.listing import Listing, list_folder, natural
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.paths import inside
from nanprobe.checkpoints.records import Damage, FileIndex, Piece, TensorEntry
from nanprobe.checkpoints.trees import attribute, count, mapping, sizes
from nanprobe.checkpoints.window import Window

__all__ = ["is_deepspeed_tag", "is_universal", "read_deepspeed_root", "read_deepspeed_tag", "read_universal"]

Read = Callable[[str], FileIndex]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_OTHER = re.compile(r"(?:layer_|expp_rank_|expert_).*_(?:model|optim)_states\.pt|layer_.*-model_.*states\.pt")

_FLAT_GROUPS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat")
_FROZEN = ("frozen_param_fragments",)
_MAX_POINTER = 4096


def is_deepspeed_tag(listing: Listing) -> bool:
    """Return whether the folder holds the files of one DeepSpeed save."""
    return any(_OPTIM.fullmatch(name) or _MODEL.fullmatch(name) or _OTHER.fullmatch(name) for name in listing.files)


def is_universal(listing: Listing) -> bool:
    """Return whether the folder is a universal checkpoint: a folder ``zero`` beside the model states."""
    return "zero" in listing.folders


def read_deepspeed_root(listing: Listing, pointer: str, read: Read) -> Part:
    """Return the save that the file ``pointer`` ("latest") names; other saves are listed as not scanned."""
    part = Part(kind="deepspeed")
    path = listing.path(pointer)
    tag = _pointed(path)
    tags = [name for name in listing.folders if _is_tag(listing.path(name))]
    if tag is None or not inside(tag):
        part.problem("corrupt-file", "it should name the folder of the save, and does not", path, blocking=False)
    elif not os.path.isdir(listing.path(tag)):
        part.problem(
            "missing-shard", f"it names the save {tag[:200]!r}, whose folder is not there", path, blocking=False
        )
    chosen = tag if tag in tags else tags[-1] if tags else None
    for name in tags:
        if name != chosen:
            part.skip(listing.path(name), f"another save; {pointer} names {tag or 'none'}"[:300])
    if chosen is not None:
        inner = list_folder(listing.path(chosen))
        found = read_universal(inner, read) if is_universal(inner) else read_deepspeed_tag(inner, read)
        part.kind = found.kind
        part.merge(found)
    return part


def _pointed(path: str) -> str | None:
    try:
        with Window(path) as window:
            return window.head(_MAX_POINTER).decode("utf-8").strip() or None
    except (OSError, UnicodeDecodeError, Damage):
        return None


def _is_tag(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith("_states.pt") or entry.name == "zero" for entry in entries)
    except OSError:
        return False


@dataclass(slots=True)
class _Save:
    """The files of one save, read: model states and optimizer states by (data rank, model rank)."""

    models: dict[tuple[int, int], FileIndex] = field(default_factory=dict)
    optims: dict[tuple[int, int], FileIndex] = field(default_factory=dict)


def read_deepspeed_tag(listing: Listing, read: Read) -> Part:
    """Return what one save holds, its flat buffers attributed to parameters."""
    part = Part(kind="deepspeed")
    save = _Save()
    for name in listing.files:
        model, optim, path = _MODEL.fullmatch(name), _OPTIM.fullmatch(name), listing.path(name)
        if model is None and optim is None:
            if _OTHER.fullmatch(name):
                _take(part, path, read)
            elif name.endswith(".py"):
                part.skip(path, "a conversion script")
            else:
                part.skip(path, "it is not part of DeepSpeed's layout")
            continue
        try:
            index = read(path)
        except Damage as damage:
            part.note_file(path, "torch-zip")
            part.problems.append(damage.problem)
            continue
        if model is not None:
            save.models[int(model[1] or 0), int(model[2])] = index
        elif optim is not None:
            save.optims[int(optim[1]), int(optim[2])] = index
    for (rank, _), index in sorted(save.models.items()):
        stage3 = _zero_stage(save) == 3
        placeholders = _placeholders(index) if stage3 else frozenset()
        tensors = tuple(
            replace(entry, layout="placeholder") if entry.path in placeholders else entry
            for entry in index.tensors
            if not (stage3 and entry.path[:1] == _FROZEN)
        )
        part.add_file(replace(index, tensors=tensors), rank=rank)
    for model_rank in sorted({key[1] for key in save.models}) if _zero_stage(save) == 3 else ():
        _join_frozen(part, {key[0]: index for key, index in save.models.items() if key[1] == model_rank})
    if save.optims:
        _check_ranks(listing, part, save)
        for model_rank in sorted({key[1] for key in save.optims}):
            _attribute(part, save, model_rank)
    elif any(_placeholders(index) for index in save.models.values()):
        part.problem(
            "missing-shard",
            "a ZeRO-3 save keeps its weights in *_optim_states.pt files, and none is there: only placeholders are left",
            listing.path("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        )
    _check_model_files(listing, part, save)
    return part


def _take(part: Part, path: str, read: Read) -> None:
    try:
        part.add_file(read(path))
    except Damage as damage:
        part.note_file(path, "torch-zip")
        part.problems.append(damage.problem)


def _zero_stage(save: _Save) -> int | None:
    for index in save.optims.values():
        stage = attribute(index.tree, "optimizer_state_dict", "zero_stage")
        if type(stage) is int:
            return stage
        args = getattr(stage, "args", None)
        if isinstance(args, tuple) and args and type(args[0]) is int:
            return args[0]
    return None


def _shapes(index: FileIndex) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters by name, one dictionary for each parameter group."""
    groups = attribute(index.tree, "param_shapes")
    made: list[dict[str, tuple[int, ...]]] = []
    for group in groups if isinstance(groups, (list, tuple)) else [groups]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in mapping(group).items():
            found = sizes(shape)
            if isinstance(name, str) and found is not None:
                shapes[name] = found
        if shapes:
            made.append(shapes)
    return made


def _placeholders(index: FileIndex) -> frozenset[tuple[Any, ...]]:
    """Return the paths of the tensors of no elements that stand for parameters of ``param_shapes``."""
    named = {name for group in _shapes(index) for name in group}
    frozen = mapping(attribute(index.tree, "frozen_param_shapes"))
    return frozenset(
        entry.path
        for entry in index.tensors
        if entry.elements == 0
        and len(entry.path) >= 2
        and entry.path[0] == "module"
        and (entry.path[-1] in named or entry.path[-1] in frozen)
    )


def _join_frozen(part: Part, models: dict[int, FileIndex]) -> None:
    """Put the parts together into which ZeRO-3 cuts parameters that are not trained."""
    shapes = {
        name: shape
        for index in models.values()
        for name, given in mapping(attribute(index.tree, "frozen_param_shapes")).items()
        if isinstance(name, str) and (shape := sizes(given)) is not None
    }
    world = max(models) + 1
    parts: dict[str, dict[int, TensorEntry]] = {}
    for rank, index in models.items():
        for entry in index.tensors:
            if entry.path[:1] != _FROZEN:
                continue
            if len(entry.path) == 2 and entry.path[1] in shapes and is_flat(entry):
                parts.setdefault(entry.path[1], {})[rank] = entry
            else:
                part.tensors.append(replace(entry, rank=rank))
    for name, own in parts.items():
        shape = shapes[name]
        total = math.prod(shape)
        share = -(-total // world)
        pieces: list[Piece] = []
        for rank, entry in sorted(own.items()):
            begin = min(rank * share, total)
            pieces.extend(carve(entry, 0, min(share, total - begin, entry.shape[0]), shape, begin))
        first = own[min(own)]
        held = sum(math.prod(piece.shape) for piece in pieces)
        part.tensors.append(
            replace(first, name=name, key=first.name, shape=shape, pieces=tuple(pieces), missing=total - held)
        )


def _check_ranks(listing: Listing, part: Part, save: _Save) -> None:
    """Compare the number of processes that the files declare with the files there are."""
    for model_rank in sorted({key[1] for key in save.optims}):
        present = {key[0]: index for key, index in save.optims.items() if key[1] == model_rank}
        declared = max((_world(index) for index in present.values()), default=0)
        wanted = max(declared, max(present) + 1)
        absent = [rank for rank in range(min(wanted, 1 << 20)) if rank not in present]
        if absent:
            some = next(iter(present.values()))
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{absent[0]}", os.path.basename(some.file))
            more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
            part.problem(
                "missing-shard",
                f"the optimizer state was saved by {wanted:,} processes; that of rank {absent[0]}{more} is missing",
                listing.path(name),
                count=len(absent),
            )


def _world(index: FileIndex) -> int:
    value = attribute(index.tree, "optimizer_state_dict", "partition_count")
    values = value if isinstance(value, (list, tuple)) else [value]
    return min(max((count(item) or 0 for item in values), default=0), 1 << 20)


def _check_model_files(listing: Listing, part: Part, save: _Save) -> None:
    model_ranks = {key[1] for key in save.models}
    wanted = {key[1] for key in save.optims} | model_ranks
    size = max((count(attribute(index.tree, "mp_world_size")) or 0 for index in save.models.values()), default=0)
    wanted |= set(range(min(size, 4096)))
    for rank in sorted(wanted - model_ranks):
        part.problem(
            "missing-shard",
            f"the model states of model-parallel rank {rank} are missing",
            listing.path(f"mp_rank_{rank:02d}_model_states.pt"),
        )
    sharded = {key[0] for key in save.models} - {0}
    if sharded:
        for data_rank, model_rank in sorted(save.optims):
            if (data_rank, model_rank) not in save.models:
                part.problem(
                    "missing-shard",
                    f"the model states of rank {data_rank} are missing",
                    listing.path(f"zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_model_states.pt"),
                    severity="warning",
                    blocking=False,
                )


@dataclass(slots=True)
class _Buffer:
    """A flat buffer of one process: which group it belongs to, what it holds ("fp32" or a state's name)."""

    rank: int
    group: int
    what: str
    entry: TensorEntry
    index: FileIndex


def _buffers(rank: int, index: FileIndex) -> Iterator[_Buffer]:
    """Yield the flat buffers of an optimizer file: master weights, then the states of each group."""
    for entry in index.tensors:
        path = entry.path
        if not path or path[0] != "optimizer_state_dict" or not is_flat(entry):
            continue
        if len(path) == 3 and path[1] in _FLAT_GROUPS and type(path[2]) is int:
            yield _Buffer(rank, path[2], "fp32", entry, index)
        elif len(path) == 5 and path[2] == "state" and type(path[3]) is int and isinstance(path[4], str):
            yield _Buffer(rank, path[3], path[4], entry, index)
        elif len(path) == 4 and path[1] == "base_optimizer_state" and type(path[2]) is int and isinstance(path[3], str):
            yield _Buffer(rank, path[2], path[3], entry, index)


def _attribute(part: Part, save: _Save, model_rank: int) -> None:
    """Cut the flat buffers of all data ranks of one model rank into parameters."""
    optims = {key[0]: index for key, index in sorted(save.optims.items()) if key[1] == model_rank}
    model = save.models.get((0, model_rank)) or next(
        (index for key, index in sorted(save.models.items()) if key[1] == model_rank), None
    )
    shapes = _shapes(model) if model is not None else []
    buffers = [buffer for rank, index in optims.items() for buffer in _buffers(rank, index)]
    stage3 = any("fp32_flat_groups" in buffer.entry.path for buffer in buffers)
    cutter = _Cutter(part, shapes, optims)
    used: set[tuple[str, tuple[Any, ...]]] = set()
    for what in dict.fromkeys(buffer.what for buffer in buffers):
        chosen = [buffer for buffer in buffers if buffer.what == what]
        cut = cutter.stage3(what, chosen) if stage3 else cutter.stage12(what, chosen)
        if cut:
            used.update((buffer.index.file, buffer.entry.path) for buffer in chosen)
    for rank, index in optims.items():
        rest = tuple(entry for entry in index.tensors if (index.file, entry.path) not in used)
        part.add_file(replace(index, tensors=rest), rank=rank)


class _Cutter:
    """Cuts the buffers of one kind into parameters; makes an entry for each parameter."""

    def __init__(self, part: Part, groups: list[dict[str, tuple[int, ...]]], optims: dict[int, FileIndex]) -> None:
        self.part = part
        self.groups = groups
        self.optims = optims
        self.world = max(max((_world(index) for index in optims.values()), default=1), max(optims) + 1)

    def stage12(self, what: str, buffers: list[_Buffer]) -> bool:
        """Cut by the slices that each process notes, else by the order of the parameters."""
        mapped = all(isinstance(self._slices(buffer), dict) for buffer in buffers)
        if not self.groups or any(buffer.group >= len(self.groups) for buffer in buffers):
            self._unattributed(what, buffers)
            return False
        for group in sorted({buffer.group for buffer in buffers}):
            chosen = [buffer for buffer in buffers if buffer.group == group]
            made = self._by_slices(group, chosen) if mapped else self._by_order(group, chosen)
            if made is None:
                self._unattributed(what, chosen)
                return False
            self._emit(what, group, made, chosen)
        return True

    def stage3(self, what: str, buffers: list[_Buffer]) -> bool:
        """Cut every parameter into as many equal parts as there are processes; the groups follow each other."""
        shapes = {name: shape for group in self.groups for name, shape in group.items()}
        if not shapes:
            self._unattributed(what, buffers)
            return False
        pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
        for rank in self.optims:
            own = sorted((buffer for buffer in buffers if buffer.rank == rank), key=lambda buffer: buffer.group)
            spans = [(buffer.entry, buffer.entry.shape[0]) for buffer in own]
            position = 0
            for name, shape in shapes.items():
                total = math.prod(shape)
                share = -(-total // self.world)
                begin = min(rank * share, total)
                size = min(share, total - begin)
                for entry, at, length, shift in _overlaps(spans, position, size):
                    pieces[name].extend(carve(entry, at, length, shape, begin + shift))
                position += share
            held = sum(size for _, size in spans)
            if own and not 0 <= held - position < 2 * self.world * max(len(own), 1) + 1:
                self._misfit(what, own[0], position, held)
                return False
        self._emit(what, 0, {name: (shapes[name], pieces[name]) for name in shapes}, buffers)
        return True

    def _slices(self, buffer: _Buffer) -> Any:
        return attribute(buffer.index.tree, "optimizer_state_dict", "param_slice_mappings", buffer.group)

    def _by_slices(self, group: int, buffers: list[_Buffer]) -> dict[str, tuple[tuple[int, ...], list[Piece]]] | None:
        shapes = self.groups[group]
        owned: dict[str, dict[int, tuple[TensorEntry, int, int]]] = {}
        for buffer in sorted(buffers, key=lambda buffer: buffer.rank):
            for name, place in mapping(self._slices(buffer)).items():
                start, size = count(attribute(place, "start")), count(attribute(place, "numel"))
                if name not in shapes or start is None or size is None or start + size > buffer.entry.shape[0]:
                    return None
                owned.setdefault(name, {})[buffer.rank] = (buffer.entry, start, size)
        made: dict[str, tuple[tuple[int, ...], list[Piece]]] = {}
        absent = [rank for rank in range(self.world) if rank not in self.optims]
        for name, shape in shapes.items():
            pieces: list[Piece] = []
            total = math.prod(shape)
            parts = owned.get(name, {})
            held = sum(size for _, _, size in parts.values())
            if held > total:
                return None
            begin = 0
            for rank in sorted(parts):
                if held < total and absent and rank > absent[0]:
                    begin = max(begin, total - sum(size for at, (_, _, size) in parts.items() if at >= rank))
                entry, start, size = parts[rank]
                pieces.extend(carve(entry, start, size, shape, begin))
                begin += size
            made[name] = (shape, pieces)
        return made

    def _by_order(self, group: int, buffers: list[_Buffer]) -> dict[str, tuple[tuple[int, ...], list[Piece]]] | None:
        own = {buffer.rank: buffer for buffer in buffers}
        if set(own) != set(range(self.world)):
            return None
        spans = [(own[rank].entry, own[rank].entry.shape[0]) for rank in sorted(own)]
        paddings = attribute(
            buffers[0].index.tree, "optimizer_state_dict", "param_alignment_paddings", buffers[0].group
        )
        shapes = self.groups[group]
        gaps = list(paddings) if isinstance(paddings, (list, tuple)) and len(paddings) == len(shapes) else []
        position = 0
        made: dict[str, tuple[tuple[int, ...], list[Piece]]] = {}
        for number, (name, shape) in enumerate(shapes.items()):
            total = math.prod(shape)
            pieces: list[Piece] = []
            for entry, at, length, shift in _overlaps(spans, position, total):
                pieces.extend(carve(entry, at, length, shape, shift))
            made[name] = (shape, pieces)
            position += total + (count(gaps[number]) or 0 if gaps else 0)
        held = sum(size for _, size in spans)
        if not -2 * self.world < held - position < 4 * self.world:
            self._misfit("fp32", buffers[0], position, held)
            return None
        return made

    def _emit(
        self,
        what: str,
        group: int,
        made: dict[str, tuple[tuple[int, ...], list[Piece]]],
        buffers: list[_Buffer],
    ) -> None:
        first = buffers[0].entry
        for buffer in buffers:
            self.part.storages.update(buffer.index.storages)
        by_storage = {buffer.entry.pieces[0].storage: buffer.entry for buffer in buffers}
        for name, (shape, pieces) in made.items():
            entry = by_storage[pieces[0].storage] if pieces else first
            elements = math.prod(shape)
            held = sum(math.prod(piece.shape) for piece in pieces)
            self.part.tensors.append(
                TensorEntry(
                    name=name if what == "fp32" else f"{name}.{what}",
                    path=entry.path,
                    file=entry.file,
                    dtype=entry.dtype,
                    shape=shape,
                    pieces=tuple(pieces),
                    role="weight" if what == "fp32" else what,
                    key=entry.name,
                    of=name,
                    missing=elements - held,
                    unreadable="none of its parts is there" if not pieces and elements else None,
                )
            )

    def _unattributed(self, what: str, buffers: list[_Buffer]) -> None:
        self.part.problem(
            "not-scanned",
            f"its flat buffers of {what} are scanned, but which parameter owns what of them cannot be told: "
            "the slices or shapes that say so are missing or do not fit",
            buffers[0].entry.file,
            severity="warning",
            blocking=False,
        )

    def _misfit(self, what: str, buffer: _Buffer, wanted: int, held: int) -> None:
        self.part.problem(
            "shape-mismatch",
            f"the parameters need {wanted:,} elements of its flat buffers of {what}, which hold {held:,}",
            buffer.entry.file,
            blocking=False,
        )


def _overlaps(
    spans: list[tuple[TensorEntry, int]], position: int, size: int
) -> Iterator[tuple[TensorEntry, int, int, int]]:
    """Yield (buffer, position in it, length, shift) of the parts of a range of the buffers laid end to end."""
    begin = 0
    for entry, length in spans:
        low, high = max(position, begin), min(position + size, begin + length)
        if low < high:
            yield entry, low - begin, high - low, low - position
        begin += length


def read_universal(listing: Listing, read: Read) -> Part:
    """Return what a universal checkpoint holds: one folder for each parameter, one file for each of its states."""
    part = Part(kind="deepspeed-universal")
    for name in listing.files:
        if _MODEL.fullmatch(name) or _OTHER.fullmatch(name) or name.endswith(".pt"):
            _take(part, listing.path(name), read)
        else:
            part.skip(listing.path(name), "it is not part of DeepSpeed's layout")
    zero = list_folder(listing.path("zero"))
    for name in zero.files:
        _take(part, zero.path(name), read)
    for parameter in sorted(zero.folders, key=natural):
        inner = list_folder(zero.path(parameter))
        if "fp32.pt" not in inner.files:
            part.problem(
                "missing-shard", f"the weights of {parameter[:200]} are missing", inner.path("fp32.pt"), blocking=True
            )
        for name in inner.files:
            _take_state(part, inner.path(name), parameter, name.removesuffix(".pt"), read)
    return part


def _take_state(part: Part, path: str, parameter: str, what: str, read: Read) -> None:
    try:
        index = read(path)
    except Damage as damage:
        part.note_file(path, "torch-zip")
        part.problems.append(replace(damage.problem, tensor=parameter if what == "fp32" else f"{parameter}.{what}"))
        return
    named = [entry for entry in index.tensors if entry.path in ((), ("param",))]
    tensors = tuple(
        replace(
            entry,
            name=parameter if what == "fp32" else f"{parameter}.{what}",
            key=f"zero.{parameter}.{what}" + (f".{entry.name}" if entry.name else ""),
            role="weight" if what == "fp32" else what,
            of=parameter,
        )
        if entry in named
        else entry
        for entry in index.tensors
    )
    part.add_file(replace(index, tensors=tensors), tree=what not in ("fp32", "exp_avg", "exp_avg_sq"))
