"""What the readers of folders hand on: the same records as for one file, over as many files as there are."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from nanprobe.checkpoints.onnx_file import external_files
from nanprobe.checkpoints.records import (
    CheckpointFile,
    FileIndex,
    Problem,
    Scalar,
    Skipped,
    Storage,
    TensorEntry,
)

__all__ = ["Part"]


@dataclass(slots=True, kw_only=True)
class Part:
    """A checkpoint, or a part of one, while it is put together. Fields as in CheckpointIndex.

    ``ids`` are the parameters' names by the numbers of an optimizer's states, by file and place of the optimizer.
    """

    kind: str = ""
    files: list[CheckpointFile] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    storages: dict[str, Storage] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    foreign: dict[str, None] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    ids: dict[tuple[str, tuple[Any, ...]], dict[Any, str]] = field(default_factory=dict)

    def add_file(self, index: FileIndex, *, rank: int | None = None, tree: bool = True) -> None:
        """Take over all that one file holds; ``rank`` is noted on its tensors."""
        self.note_file(index.file, index.kind, index.size)
        if index.kind == "onnx":
            for path in external_files(index):
                self.note_file(path, "onnx-data")
        entries = index.tensors
        self.tensors.extend(entries if rank is None else (replace(entry, rank=rank) for entry in entries))
        self.storages.update(index.storages)
        if index.tree is not None and tree:
            self.trees[index.file] = index.tree
        if index.metadata:
            self.metadata[index.file] = dict(index.metadata)
        self.foreign.update(dict.fromkeys(index.foreign))
        self.problems.extend(index.problems)

    def note_file(self, path: str, kind: str, size: int | None = None) -> None:
        """List a file, once."""
        if any(known.path == path for known in self.files[-64:]):
            return
        if size is None:
            try:
                size = os.path.getsize(path)
            except OSError:
                size = 0
        self.files.append(CheckpointFile(path=path, kind=kind, size=size))

    def merge(self, other: Part) -> None:
        """Take over another part."""
        known = {file.path for file in self.files}
        self.files.extend(file for file in other.files if file.path not in known)
        self.tensors.extend(other.tensors)
        self.storages.update(other.storages)
        self.trees.update(other.trees)
        self.metadata.update(other.metadata)
        self.foreign.update(other.foreign)
        self.problems.extend(other.problems)
        self.skipped.extend(other.skipped)
        self.scalars.extend(other.scalars)

    def problem(
        self,
        rule: str,
        message: str,
        file: str,
        *,
        severity: str = "error",
        tensor: str | None = None,
        blocking: bool = True,
        **evidence: Any,
    ) -> None:
        """Note what is wrong."""
        self.problems.append(
            Problem(
                rule=rule,
                severity=severity,
                message=message,
                file=file,
                tensor=tensor,
                blocking=blocking,
                evidence=evidence,
            )
        )

    def skip(self, file: str, reason: str) -> None:
        """List a file that is not scanned."""
        self.skipped.append(Skipped(file=file, reason=reason))
