"""The one way in: a path to the index of the checkpoint there, whatever its format, without reading any tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from nanprobe.checkpoints.locate import Located, locate, look
from nanprobe.checkpoints.records import CheckpointFile, CheckpointIndex, Damage, FileIndex, Problem, Storage
from nanprobe.checkpoints.safetensors_file import index_safetensors
from nanprobe.checkpoints.sharded import compare_index, read_shard_index, read_shards
from nanprobe.checkpoints.sniff import Sniffed
from nanprobe.checkpoints.torch_legacy import index_torch_legacy
from nanprobe.checkpoints.torch_zip import index_torch_zip
from nanprobe.checkpoints.window import Window
from nanprobe.errors import UsageError

__all__ = ["READERS", "index_checkpoint", "index_file"]

READERS: dict[str, Callable[[Window], FileIndex]] = {
    "torch-zip": index_torch_zip,
    "torch-legacy": index_torch_legacy,
    "safetensors": index_safetensors,
}
"""One reader per kind of file: a window in, records out, Damage when nothing can be said."""


def index_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Return what the checkpoint at ``path`` (a file, an index file or a folder) holds.

    What is wrong with its files stands in ``problems``. UsageError when ``path`` is no checkpoint at all.
    """
    located = locate(path)
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


def _index_sharded(located: Located) -> CheckpointIndex:
    try:
        index = read_shard_index(located.file)
    except OSError as error:
        raise UsageError(f"{located.file} cannot be read: {error.strerror or error}") from None
    files, problems = read_shards(index, index_file)
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
