"""From a folder to all it holds: which layouts are in it, who reads each, and what is left over.

A folder may mix layouts: a Trainer's folder holds weights, an optimizer file and a folder that DeepSpeed wrote. Each
layout takes the names it knows; files that are left are read one by one by their content, and what holds no tensors is
listed with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from nanprobe.checkpoints.dcp import METADATA, read_dcp
from nanprobe.checkpoints.deepspeed import (
    is_deepspeed_tag,
    is_universal,
    read_deepspeed_root,
    read_deepspeed_tag,
    read_universal,
)
from nanprobe.checkpoints.distributed_safetensors import join_blocks
from nanprobe.checkpoints.listing import Listing, list_folder
from nanprobe.checkpoints.locate import SHARD_NAME, look
from nanprobe.checkpoints.megatron import (
    POINTER,
    finish_torch_dist,
    is_legacy_megatron,
    is_torch_dist,
    read_legacy_megatron,
    read_megatron_root,
)
from nanprobe.checkpoints.onnx_file import external_files
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import Damage, FileIndex, NoCheckpoint
from nanprobe.checkpoints.sharded import compare_index, read_shard_index, read_shards
from nanprobe.checkpoints.sniff import CHECKPOINT_SUFFIXES, READABLE, Sniffed
from nanprobe.checkpoints.trainer_files import is_json_state, read_json_state, text_reason
from nanprobe.errors import UsageError

__all__ = ["folder_of", "read_folder"]

Read = Callable[[str], FileIndex]

MAX_DEPTH = 4
"""Folders within folders that are followed; a pipeline of models has two."""

_STEP_FOLDER = re.compile(r"(.*?)(\d{1,12})")
"""Names of the folders of a run's saves: checkpoint-500, step-500, iter_0000500, global_step500, epoch_3."""

_STEP_STEMS = re.compile(r"(?i)(?:checkpoint|ckpt|step|iter|epoch|global_?step|save)[-_=]?")

_WEIGHTS = ("model", "pytorch_model", "adapter", "consolidated", "global_step", "tf_model", "flax_model", "diffusion")
"""Beginnings of the names of files and folders with a model's weights in a trainer's folder."""

_RANKED = re.compile(r"(rng_state_|random_states_|pytorch_model_fsdp_\d+_rank|pytorch_model_fsdp_rank)(\d{1,6})(\..+)")

_GUESSED = frozenset({"pickle", "onnx"})
"""Kinds that a few bytes suggest; what cannot be read as one and is not called one is something else."""

_MARKS = frozenset({METADATA, POINTER, "latest", "latest_universal", "trainer_state.json"})
"""Files that stand for the folder that they lie in."""

_IGNORED_FOLDERS = frozenset({".git", "__pycache__", ".cache", ".ipynb_checkpoints", "runs", "logs", "context"})


@dataclass(slots=True)
class _Folder:
    """A folder while it is read: what is in it, which names were taken by a layout."""

    listing: Listing
    read: Read
    part: Part = field(default_factory=Part)
    taken: set[str] = field(default_factory=set)
    kinds: list[str] = field(default_factory=list)
    layout: str = ""
    strays: set[str] = field(default_factory=set)

    def take(self, part: Part, *, whole: bool = False) -> None:
        """Take over what a layout's reader found; ``whole`` when the layout is that of the folder itself."""
        self.part.merge(part)
        self.kinds.append(part.kind)
        if whole and not self.layout:
            self.layout = part.kind


def folder_of(path: str) -> str:
    """Return the folder when ``path`` is a file that stands for it or is a part that says nothing alone."""
    folder, name = os.path.split(path)
    stands = name in _MARKS or name.endswith(".distcp")
    return (folder or ".") if stands and os.path.isfile(path) else path


def read_folder(path: str, read: Read, *, depth: int = 0, seen: frozenset[str] = frozenset()) -> Part:
    """Return what the folder holds; ``kind`` is "" when that is no checkpoint. UsageError when it cannot be read."""
    listing = list_folder(path)
    folder = _Folder(listing, read)
    try:
        _whole_layouts(folder)
    except Damage as damage:
        folder.part.problems.append(damage.problem)
        folder.kinds.append("damaged")
    if not folder.kinds:
        _sharded(folder)
        _numbered(folder)
    _single_files(folder)
    if depth < MAX_DEPTH:
        _inner_folders(folder, depth, seen | {os.path.realpath(path)})
    else:
        for name in listing.folders:
            folder.part.skip(listing.path(name), "it lies too deep in the folder")
    for name, reason in listing.strange.items():
        _strange(folder, name, reason)
    _weights_of_trainer(folder)
    join_blocks(folder.part)
    folder.part.kind = _kind(folder)
    return folder.part


def _kind(folder: _Folder) -> str:
    """Return the name of the whole: a run's folder by its marks, else the layout's."""
    listing = folder.listing
    if listing.has("trainer_state.json"):
        return "hf-trainer"
    if not folder.kinds:
        return ""
    if any(name.startswith("random_states_") for name in listing.files):
        return "accelerate"
    if listing.has("model_index.json"):
        return "diffusers"
    if "weights" in listing.folders and "context" in listing.folders:
        return "nemo"
    kinds = set(folder.kinds)
    if folder.layout or len(kinds) == 1:
        return folder.layout or kinds.pop()
    return "folder" if folder.part.files or folder.part.problems else ""


def _weights_of_trainer(folder: _Folder) -> None:
    """Note a trainer's folder that holds everything but weights."""
    listing = folder.listing
    names = (*listing.files, *listing.folders)
    if listing.has("trainer_state.json") and not any(name.startswith(_WEIGHTS) for name in names):
        folder.part.problem(
            "missing-shard",
            "the trainer's folder holds no file of the model's weights",
            listing.path("model.safetensors"),
        )


def _whole_layouts(folder: _Folder) -> None:
    """Let the layouts that own a whole folder read it."""
    listing, read = folder.listing, folder.read
    names = set(listing.files)
    if METADATA in names:
        part = read_dcp(listing)
        folder.taken.update(name for name in names if name.endswith(".distcp"))
        folder.taken.add(METADATA)
        if is_torch_dist(listing):
            finish_torch_dist(listing, part)
            folder.taken.add("metadata.json")
        folder.take(part, whole=True)
    elif any(name.endswith(".distcp") for name in names):
        part = Part(kind="dcp")
        part.problem(
            "missing-shard",
            "the file that names what the shards hold, which is written last, is missing: the save did not finish",
            listing.path(METADATA),
        )
        for name in names:
            if name.endswith(".distcp"):
                folder.taken.add(name)
                part.skip(listing.path(name), "without .metadata it cannot be told what it holds")
        folder.take(part, whole=True)
    if POINTER in names:
        folder.take(read_megatron_root(listing, lambda path: read_folder(path, read, depth=1)), whole=True)
        folder.taken.add(POINTER)
        folder.taken.update(listing.folders)
    elif is_legacy_megatron(listing):
        folder.take(read_legacy_megatron(listing, read), whole=True)
        folder.taken.update(listing.folders)
    if is_universal(listing) and _holds_parameters(listing):
        folder.take(read_universal(listing, read), whole=True)
        folder.taken.update(names)
        folder.taken.add("zero")
    elif is_deepspeed_tag(listing):
        folder.take(read_deepspeed_tag(listing, read), whole=True)
        folder.taken.update(names)
    for pointer in ("latest", "latest_universal"):
        if pointer in names and (pointer == "latest" or "latest" not in names):
            folder.take(read_deepspeed_root(listing, pointer, read), whole=True)
            folder.taken.update(name for name in listing.folders if name.startswith(("global_step", "step")))
            folder.taken.update(_tags(folder))
        if pointer in names:
            folder.taken.add(pointer)


def _tags(folder: _Folder) -> set[str]:
    """Return the folders that the DeepSpeed reader has read or listed."""
    prefix = folder.listing.path("")
    used = [file.path for file in folder.part.files] + [item.file for item in folder.part.skipped]
    return {path.removeprefix(prefix).split(os.sep)[0] for path in used if path.startswith(prefix)}


def _holds_parameters(listing: Listing) -> bool:
    """Return whether the folder ``zero`` holds a folder for each parameter."""
    zero = listing.path("zero")
    try:
        with os.scandir(zero) as entries:
            return any(
                entry.name == "optimizer_state.pt" or os.path.isfile(os.path.join(entry.path, "fp32.pt"))
                for entry in entries
            )
    except OSError:
        return False


def _sharded(folder: _Folder) -> None:
    """Read the shards that index files name, and compare both."""
    listing = folder.listing
    for name in listing.files:
        if not name.endswith(".index.json"):
            continue
        path = listing.path(name)
        try:
            index = read_shard_index(path)
        except (Damage, OSError) as error:
            if name.endswith((".safetensors.index.json", ".bin.index.json")) and isinstance(error, Damage):
                folder.taken.add(name)
                folder.part.note_file(path, "shard-index")
                folder.part.problems.append(error.problem)
                folder.kinds.append("sharded")
            continue
        folder.taken.add(name)
        files, problems = read_shards(index, folder.read)
        kept, mismatches = compare_index(index, files)
        part = Part(kind="sharded")
        part.note_file(path, "shard-index")
        for file in kept:
            part.add_file(file)
        part.problems.extend([*index.problems, *problems, *mismatches])
        folder.taken.update(index.shards)
        folder.take(part)
        _strays(folder, name, index.shards)


def _strays(folder: _Folder, index_name: str, shards: tuple[str, ...]) -> None:
    """Note shards of the same stem that the index does not name: left over from another save."""
    stem, suffix = os.path.splitext(index_name.removesuffix(".index.json"))
    for name in folder.listing.files:
        found = SHARD_NAME.fullmatch(name)
        same = (found is not None and found[1] == stem and found[4] == suffix) or name == stem + suffix
        if same and name not in shards:
            folder.strays.add(name)
            folder.part.problem(
                "index-mismatch",
                f"{index_name} does not name it: it may be left over from another save, and some loaders take it",
                folder.listing.path(name),
                severity="warning",
                blocking=False,
            )


def _numbered(folder: _Folder) -> None:
    """Note the gaps in numbered shards that no index names."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    for name in folder.listing.files:
        found = SHARD_NAME.fullmatch(name)
        if found and name not in folder.taken and name not in folder.strays:
            groups.setdefault((found[1], int(found[3]), found[4]), set()).add(int(found[2]))
    for (stem, total, suffix), numbers in groups.items():
        first = 0 if 0 in numbers else 1
        absent = [number for number in range(first, min(total, 100_000) + first) if number not in numbers]
        if absent:
            name = f"{stem}-{absent[0]:05d}-of-{total:05d}{suffix}"
            folder.part.problem(
                "missing-shard",
                f"{len(numbers):,} of {total:,} shards are there; {len(absent):,} are missing, and no index names them",
                folder.listing.path(name),
                count=len(absent),
            )
        folder.kinds.append("sharded")
        folder.layout = "sharded"


def _single_files(folder: _Folder) -> None:
    """Read what no layout took, file by file, by its content."""
    listing = folder.listing
    ranks: dict[tuple[str, str], set[int]] = {}
    # A model comes before its data beside it, so that the data is known as such.
    for name in sorted(listing.files, key=lambda name: not name.endswith(".onnx")):
        ranked = _RANKED.fullmatch(name)
        if ranked:
            ranks.setdefault((ranked[1], ranked[3]), set()).add(int(ranked[2]))
        if name not in folder.taken:
            _single_file(folder, name)
    for (stem, suffix), numbers in ranks.items():
        absent = sorted(set(range(max(numbers))) - numbers)
        if absent:
            weights = "fsdp" in stem
            folder.part.problem(
                "missing-shard",
                f"the file of rank {absent[0]} is missing, that of rank {max(numbers)} is there",
                listing.path(f"{stem}{absent[0]}{suffix}"),
                severity="error" if weights else "warning",
                blocking=weights,
                count=len(absent),
            )


def _single_file(folder: _Folder, name: str) -> None:
    path = folder.listing.path(name)
    suffix = os.path.splitext(name)[1].lower()
    if is_json_state(name):
        read_json_state(path, folder.part)
        return
    try:
        found = look(path)
    except UsageError:
        _unreadable(folder, path, suffix)
        return
    if found.kind in READABLE:
        try:
            index = folder.read(path)
            folder.part.add_file(index)
            folder.kinds.append(index.kind)
            if index.kind == "onnx":
                folder.taken.update(os.path.relpath(file, folder.listing.folder) for file in external_files(index))
        except Damage as damage:
            if suffix not in CHECKPOINT_SUFFIXES and (isinstance(damage, NoCheckpoint) or found.kind in _GUESSED):
                folder.part.skip(path, damage.problem.message)
                return
            folder.part.note_file(path, found.kind)
            folder.part.problems.append(damage.problem)
            folder.kinds.append(found.kind)
        except UsageError:
            _unreadable(folder, path, suffix)
        return
    _unscanned(folder, path, suffix, found)


def _unreadable(folder: _Folder, path: str, suffix: str) -> None:
    folder.part.note_file(path, "unreadable")
    folder.part.problem(
        "not-scanned",
        "it cannot be read: permission is missing, or it went away",
        path,
        severity="warning",
        blocking=suffix in CHECKPOINT_SUFFIXES,
    )


def _unscanned(folder: _Folder, path: str, suffix: str, found: Sniffed) -> None:
    """Report a file that is named like a checkpoint and is none; list all others with the reason."""
    if suffix in CHECKPOINT_SUFFIXES and found.rule != "not-scanned":
        folder.part.note_file(path, found.kind or "unknown")
        folder.part.problem(found.rule, found.message, path)
        folder.kinds.append(found.kind or "unknown")
    elif suffix in CHECKPOINT_SUFFIXES or found.rule == "not-scanned":
        folder.part.note_file(path, found.kind)
        folder.part.problem(found.rule, found.message, path, severity="warning")
        folder.kinds.append(found.kind)
    else:
        folder.part.skip(path, text_reason(os.path.basename(path)) or found.message or "of no checkpoint format")


def _strange(folder: _Folder, name: str, reason: str) -> None:
    path = folder.listing.path(name)
    if os.path.splitext(name)[1].lower() in CHECKPOINT_SUFFIXES | {".distcp"}:
        folder.part.problem("missing-shard", reason, path)
        folder.kinds.append("unknown")
    else:
        folder.part.skip(path, reason)


def _inner_folders(folder: _Folder, depth: int, seen: frozenset[str]) -> None:
    """Read the folders that belong to this checkpoint; of several saves of a run, the last."""
    listing = folder.listing
    rest = [name for name in listing.folders if name not in folder.taken]
    saves = sorted((number, name) for name in rest if (number := _step_of(name)) is not None)
    own = bool(folder.kinds)
    for name in rest:
        path = listing.path(name)
        if name in _IGNORED_FOLDERS:
            folder.part.skip(path, "a folder that holds no checkpoint files")
            continue
        if any(name == save for _, save in saves) and (own or name != saves[-1][1]):
            what = "a save of its own" if own else f"an earlier save than {saves[-1][1]}"
            folder.part.skip(path, f"{what}; give its path to scan it"[:300])
            continue
        real = os.path.realpath(path)
        if real in seen:
            folder.part.skip(path, "it links back to a folder that holds it")
            continue
        try:
            inner = read_folder(path, folder.read, depth=depth + 1, seen=seen)
        except UsageError as error:
            folder.part.skip(path, str(error))
            continue
        if inner.kind:
            folder.take(inner)
        else:
            folder.part.skip(path, "a folder that holds no checkpoint")


def _step_of(name: str) -> int | None:
    found = _STEP_FOLDER.fullmatch(name)
    return int(found[2]) if found and _STEP_STEMS.fullmatch(found[1]) else None
