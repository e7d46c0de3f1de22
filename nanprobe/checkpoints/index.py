"""The one way in: a path to the index of the checkpoint there, whatever its format, without reading any tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from nanprobe.checkpoints.dcp import METADATA
from nanprobe.checkpoints.folder import folder_of, read_folder
from nanprobe.checkpoints.gguf_file import index_gguf
from nanprobe.checkpoints.locate import Located, locate, look
from nanprobe.checkpoints.names import name_tensors
from nanprobe.checkpoints.numpy_file import index_npy
from nanprobe.checkpoints.onnx_file import index_onnx
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.plain_pickle import index_pickle
from nanprobe.checkpoints.records import (
    CheckpointFile,
    CheckpointIndex,
    Damage,
    FileIndex,
    NoCheckpoint,
    Problem,
    Storage,
)
from nanprobe.checkpoints.safetensors_file import index_safetensors
from nanprobe.checkpoints.scalars import collect_scalars
from nanprobe.checkpoints.sharded import compare_index, read_shard_index, read_shards
from nanprobe.checkpoints.sniff import Sniffed, named_like_a_checkpoint, sniff
from nanprobe.checkpoints.tar_file import index_gzip, index_tar
from nanprobe.checkpoints.torch_legacy import index_torch_legacy
from nanprobe.checkpoints.torch_zip import index_torch_zip
from nanprobe.checkpoints.window import Window
from nanprobe.errors import UsageError

__all__ = ["READERS", "index_checkpoint", "index_file", "index_weights"]


def _inside_tar(window: Window, found: Sniffed) -> FileIndex | None:
    """Return what a member of an archive holds, None when it is no checkpoint."""
    reader = _PLAIN_READERS.get(found.kind)
    if reader is None or found.kind == "pickle":
        return None
    return reader(window)


def _tar(window: Window) -> FileIndex:
    return index_tar(window, _inside_tar)


def _inside_gzip(window: Window) -> FileIndex:
    found = sniff(window.head(4096), window.size, "")
    reader = _tar if found.kind == "tar" else _PLAIN_READERS.get(found.kind)
    if reader is None:
        message = "it is compressed with gzip, and what is inside is no checkpoint"
        raise NoCheckpoint(window.damage("corrupt-file", message).problem)
    return reader(window)


def _gzip(window: Window) -> FileIndex:
    return index_gzip(window, _inside_gzip)


_PLAIN_READERS: dict[str, Callable[[Window], FileIndex]] = {
    "torch-zip": index_torch_zip,
    "torch-legacy": index_torch_legacy,
    "safetensors": index_safetensors,
    "pickle": index_pickle,
    "npy": index_npy,
    "gguf": index_gguf,
    "onnx": index_onnx,
}

READERS: dict[str, Callable[[Window], FileIndex]] = {**_PLAIN_READERS, "tar": _tar, "gzip": _gzip}
"""One reader per kind of file: a window in, records out, Damage when nothing can be said."""


def index_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Return all that the checkpoint at ``path`` (a file, an index file or a folder) holds, optimizer and all.

    What is wrong with its files stands in ``problems``. UsageError when ``path`` is no checkpoint at all.
    """
    text = os.fspath(path)
    whole = folder_of(text)
    if os.path.isdir(whole):
        text = whole
        part = read_folder(text, _read_part)
        if not part.kind or not (part.files or part.problems):
            raise UsageError(_no_checkpoint(text, part))
    else:
        located = locate(text)
        part = _of_file(located)
    name_tensors(part)
    collect_scalars(part)
    return _finish(text, part)


def index_weights(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Return what the file of ``path`` that holds a model's weights holds: of a folder, the preferred file or index.

    Names are the joined keys of the file, as loading a model needs them. Of a distributed checkpoint it is all.
    Errors as in ``index_checkpoint``.
    """
    text = os.fspath(path)
    if os.path.isfile(os.path.join(text, METADATA)):
        return _finish(text, read_folder(text, _read_part))
    located = locate(text)
    if located.problem is not None:
        return _assemble(located, [], [_as_problem(located.file, located.problem)])
    try:
        if located.kind == "sharded":
            return _index_sharded(located)
        return _assemble(located, [index_file(located.file)], [])
    except Damage as damage:
        return _assemble(located, [], [damage.problem])


def index_file(path: str) -> FileIndex:
    """Return what one file holds, by its content; Damage when nothing can be said about it."""
    found = look(path)
    reader = READERS.get(found.kind)
    if reader is None:
        raise Damage(_as_problem(path, found))
    try:
        with Window(path) as window:
            return reader(window)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def _read_part(path: str) -> FileIndex:
    """Return what a file that belongs to a checkpoint holds; one that cannot be opened is as good as missing."""
    try:
        return index_file(path)
    except UsageError as error:
        message = str(error).removeprefix(f"{path} ")
        raise Damage(Problem(rule="missing-shard", severity="error", message=f"it {message}", file=path)) from None


def _of_file(located: Located) -> Part:
    """Return the part that one file, or the shards of one index file, make up."""
    part = Part(kind=located.kind)
    if located.problem is not None:
        part.note_file(located.file, located.kind)
        part.problems.append(_as_problem(located.file, located.problem))
        return part
    try:
        if located.kind == "sharded":
            part.note_file(located.file, "shard-index")
            found = _index_sharded(located)
            part.files.extend(found.files)
            part.tensors.extend(found.tensors)
            part.storages.update(found.storages)
            part.trees.update(found.trees)
            part.metadata.update({file: dict(text) for file, text in found.metadata.items()})
            part.foreign.update(dict.fromkeys(found.foreign))
            part.problems.extend(found.problems)
        else:
            index = index_file(located.file)
            part.add_file(index)
            part.kind = index.kind
    except Damage as damage:
        if isinstance(damage, NoCheckpoint) and not named_like_a_checkpoint(located.file):
            raise UsageError(f"{located.path} is no checkpoint: {damage.problem.message}") from None
        part.note_file(located.file, located.kind)
        part.problems.append(damage.problem)
    return part


def _no_checkpoint(folder: str, part: Part) -> str:
    listed = [os.path.relpath(item.file, folder) for item in part.skipped[:3]]
    there = f" (there: {', '.join(listed)}{', ...' if len(part.skipped) > 3 else ''})" if listed else ""
    return f"folder {folder} holds no checkpoint{there}: give a file or a folder that a trainer saved"


def _finish(path: str, part: Part) -> CheckpointIndex:
    return CheckpointIndex(
        path=path,
        kind=part.kind,
        files=tuple(part.files),
        tensors=tuple(part.tensors),
        storages=part.storages,
        problems=tuple(part.problems),
        trees=part.trees,
        metadata=part.metadata,
        foreign=tuple(part.foreign),
        others=tuple(item.file for item in part.skipped),
        skipped=tuple(part.skipped),
        scalars=tuple(part.scalars),
    )


def _index_sharded(located: Located) -> CheckpointIndex:
    try:
        index = read_shard_index(located.file)
    except OSError as error:
        raise UsageError(f"{located.file} cannot be read: {error.strerror or error}") from None
    files, problems = read_shards(index, _read_part)
    kept, mismatches = compare_index(index, files)
    return _assemble(located, kept, [*index.problems, *problems, *mismatches])


def _as_problem(file: str, found: Sniffed) -> Problem:
    severity = "warning" if found.rule == "not-scanned" else "error"
    return Problem(rule=found.rule, severity=severity, message=found.message, file=file)


def _assemble(located: Located, files: list[FileIndex], problems: Iterable[Problem]) -> CheckpointIndex:
    storages: dict[str, Storage] = {}
    for file in files:
        storages.update(file.storages)
    known = [CheckpointFile(path=file.file, kind=file.kind, size=file.size) for file in files]
    if not known and located.kind != "sharded":
        known = [CheckpointFile(path=located.file, kind=located.kind, size=os.path.getsize(located.file))]
    return CheckpointIndex(
        path=located.path,
        kind=located.kind if len(files) != 1 or located.kind == "sharded" else files[0].kind,
        files=tuple(known),
        tensors=tuple(entry for file in files for entry in file.tensors),
        storages=storages,
        problems=(*problems, *(problem for file in files for problem in file.problems)),
        trees={file.file: file.tree for file in files if file.tree is not None},
        metadata={file.file: file.metadata for file in files if file.metadata},
        foreign=tuple(dict.fromkeys(name for file in files for name in file.foreign)),
        others=located.others,
    )
