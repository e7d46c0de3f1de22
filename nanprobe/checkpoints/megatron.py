"""Folders that Megatron-LM and megatron-core write: ``torch_dist`` (a distributed checkpoint) and one file per rank.

A root folder has ``latest_checkpointed_iteration.txt``; a save lies in ``iter_0000500`` or ``release``. With
``torch_dist`` the file ``metadata.json`` is written last, so that its absence says that the save did not finish.
Source: megatron/core/dist_checkpointing and megatron/training/checkpointing.py of megatron-core 0.10 to 0.16.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from nanprobe.checkpoints.json_text import parse_json
from nanprobe.checkpoints.listing import Listing, list_folder
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import Damage, FileIndex
from nanprobe.checkpoints.trees import attribute, count
from nanprobe.checkpoints.window import Window

__all__ = [
    "POINTER",
    "finish_torch_dist",
    "is_legacy_megatron",
    "is_torch_dist",
    "read_legacy_megatron",
    "read_megatron_root",
]

POINTER = "latest_checkpointed_iteration.txt"

_ITERATION = re.compile(r"iter_\d{1,12}|release")
_RANK = re.compile(r"mp_rank_(\d{1,5})(?:_(\d{1,5}))?(?:_(\d{1,5}))?")
_MAX_JSON = 1 << 24


def is_torch_dist(listing: Listing) -> bool:
    """Return whether a distributed checkpoint was written by megatron-core."""
    name = os.path.basename(os.path.normpath(listing.folder))
    return listing.has("common.pt") or listing.has("metadata.json") or _ITERATION.fullmatch(name) is not None


def finish_torch_dist(listing: Listing, part: Part) -> None:
    """Add to a distributed checkpoint what is Megatron's own: the file that is written last."""
    part.kind = "megatron"
    path = listing.path("metadata.json")
    if not listing.has("metadata.json"):
        part.problem(
            "missing-shard",
            "the file that Megatron writes last is missing: the save may not have finished",
            path,
            severity="warning",
            blocking=False,
        )
        return
    part.note_file(path, "json")
    data = _json(path)
    backend = data.get("sharded_backend") if isinstance(data, dict) else None
    if not isinstance(backend, str):
        part.problem(
            "corrupt-file",
            "it should name the format of the save, and does not",
            path,
            severity="error",
            blocking=False,
        )
    elif backend != "torch_dist":
        part.problem(
            "not-scanned", f"it names the format {backend[:60]!r}, which is not read", path, severity="warning"
        )


def _json(path: str) -> Any:
    try:
        with Window(path) as window:
            return parse_json(window.head(_MAX_JSON))
    except (OSError, ValueError, Damage):
        return None


def read_megatron_root(listing: Listing, read_folder: Callable[[str], Part]) -> Part:
    """Return the save that ``latest_checkpointed_iteration.txt`` names; others are listed as not scanned."""
    part = Part(kind="megatron")
    path = listing.path(POINTER)
    saves = [name for name in listing.folders if _ITERATION.fullmatch(name)]
    wanted = _wanted(path)
    if wanted is None:
        part.problem("corrupt-file", "it should name an iteration, and does not", path, blocking=False)
    elif wanted not in saves:
        part.problem("missing-shard", f"it names the save {wanted}, whose folder is not there", path, blocking=False)
    chosen = wanted if wanted in saves else saves[-1] if saves else None
    for name in listing.folders:
        if name != chosen:
            part.skip(listing.path(name), "another save" if name in saves else "a folder outside Megatron's layout")
    if chosen is not None:
        found = read_folder(listing.path(chosen))
        part.kind = found.kind or part.kind
        part.merge(found)
    return part


def _wanted(path: str) -> str | None:
    try:
        with Window(path) as window:
            text = window.head(64).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, Damage):
        return None
    if text == "release":
        return text
    return f"iter_{int(text):07d}" if text.isdigit() and len(text) <= 12 else None


def is_legacy_megatron(listing: Listing) -> bool:
    """Return whether the folder holds one folder for each model-parallel rank, with Megatron's files."""
    return any(
        _RANK.fullmatch(name) and os.path.isfile(os.path.join(listing.path(name), file))
        for name in listing.folders
        for file in ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")
    )


def read_legacy_megatron(listing: Listing, read: Callable[[str], FileIndex]) -> Part:
    """Return what the files of all ranks hold, and which ranks are missing."""
    part = Part(kind="megatron-legacy")
    ranks: dict[tuple[int, ...], str] = {}
    for name in listing.folders:
        found = _RANK.fullmatch(name)
        if found is None:
            part.skip(listing.path(name), "a folder outside Megatron's layout")
        else:
            ranks[tuple(int(number) for number in found.groups() if number is not None)] = name
    tensor_parallel = pipeline_parallel = 1
    for number, name in enumerate(ranks.values()):
        inner = list_folder(listing.path(name))
        if not any(file.startswith(("model", "distrib_optim", "optim")) for file in inner.files):
            part.problem("missing-shard", "the folder of this rank is empty", listing.path(name))
        for file in inner.files:
            path = inner.path(file)
            if not file.endswith(".pt"):
                part.skip(path, "it is not part of Megatron's layout")
                continue
            try:
                index = read(path)
            except Damage as damage:
                part.note_file(path, "torch-zip")
                part.problems.append(damage.problem)
                continue
            part.add_file(index, rank=number)
            args = attribute(index.tree, "args")
            tensor_parallel = max(tensor_parallel, count(attribute(args, "tensor_model_parallel_size")) or 1)
            pipeline_parallel = max(pipeline_parallel, count(attribute(args, "pipeline_model_parallel_size")) or 1)
    _missing_ranks(listing, part, set(ranks), min(tensor_parallel, 4096), min(pipeline_parallel, 4096))
    return part


def _missing_ranks(
    listing: Listing, part: Part, present: set[tuple[int, ...]], tensor_parallel: int, pipeline_parallel: int
) -> None:
    tensor_parallel = max(tensor_parallel, *(rank[0] + 1 for rank in present), 1)
    width = max(len(rank) for rank in present)
    wanted: set[tuple[int, ...]]
    if width == 1:
        wanted = {(number,) for number in range(tensor_parallel)}
    else:
        pipeline_parallel = max(pipeline_parallel, *(rank[1] + 1 for rank in present if len(rank) > 1), 1)
        tails = {rank[2:] for rank in present}
        wanted = {
            (first, second, *tail)
            for first in range(tensor_parallel)
            for second in range(pipeline_parallel)
            for tail in tails
        }
    absent = sorted(wanted - present)
    if absent:
        name = "_".join(["mp_rank", f"{absent[0][0]:02d}", *(f"{number:03d}" for number in absent[0][1:])])
        more = f", and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        part.problem(
            "missing-shard",
            f"the folder of this model-parallel rank is missing{more}",
            listing.path(name),
            count=len(absent),
        )
