"""A fingerprint of a checkpoint's bytes, so that a report can say which one it is about."""

from __future__ import annotations

import hashlib
import os

from nanprobe.checkpoints.index import index_weights
from nanprobe.checkpoints.locate import look
from nanprobe.errors import UsageError

__all__ = ["content_digest"]


def content_digest(path: str | os.PathLike[str]) -> str:
    """Return "sha256:" and the hexadecimal digest of the file's bytes.

    For an index of shards or a folder it is over the checkpoint's files, or over all files of a folder that holds no
    checkpoint, sorted by name: name, a zero byte and the file's digest each. UsageError when something cannot be read.
    """
    text = os.fspath(path)
    if os.path.isfile(text) and look(text).kind != "shard-index":
        return f"sha256:{_file_digest(text)}"
    paths = _files_of(text)
    if len(paths) == 1:
        return f"sha256:{_file_digest(paths[0])}"
    total = hashlib.sha256()
    for path in sorted(paths, key=os.path.basename):
        total.update(os.path.basename(path).encode("utf-8", "surrogateescape") + b"\0")
        total.update(_file_digest(path).encode("ascii"))
    return f"sha256:{total.hexdigest()}"


def _files_of(path: str) -> list[str]:
    """Return the files of a checkpoint; of a folder that holds none (a bundle) its regular files."""
    try:
        return [file.path for file in index_weights(path).files]
    except UsageError:
        if not os.path.isdir(path):
            raise
    files = [entry.path for entry in os.scandir(path) if entry.is_file()]
    if not files:
        raise UsageError(f"folder {path} holds no files")
    return files


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
