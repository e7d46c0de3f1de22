"""A fingerprint of a checkpoint's bytes, so that a report can say which one it is about."""

from __future__ import annotations

import hashlib
import os

from nanprobe.checkpoints.index import index_checkpoint
from nanprobe.errors import UsageError

__all__ = ["content_digest"]


def content_digest(path: str | os.PathLike[str]) -> str:
    """Return "sha256:" and the hexadecimal digest of the file's bytes.

    For a folder or an index of shards it is over the checkpoint's files, sorted by name: name, a zero byte and the
    file's digest each. UsageError when something cannot be read.
    """
    text = os.fspath(path)
    if os.path.isfile(text) and not text.endswith(".json"):
        return f"sha256:{_file_digest(text)}"
    index = index_checkpoint(text)
    if len(index.files) == 1 and index.kind != "sharded":
        return f"sha256:{_file_digest(index.files[0].path)}"
    total = hashlib.sha256()
    for file in sorted(index.files, key=lambda file: os.path.basename(file.path)):
        total.update(os.path.basename(file.path).encode("utf-8", "surrogateescape") + b"\0")
        total.update(_file_digest(file.path).encode("ascii"))
    return f"sha256:{total.hexdigest()}"


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
