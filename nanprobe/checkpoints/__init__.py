"""Checkpoints of any common format: what they hold and where it lies, without torch and without running anything.

``index_checkpoint`` gives every tensor's name, type, shape and place in the files, and what is wrong with them;
``stream_extent`` and ``read_storage`` give bytes. Each format has one reader (see ``index.READERS``) that turns a
window of a file into the same records.
"""

from __future__ import annotations

from nanprobe.checkpoints.digest import content_digest
from nanprobe.checkpoints.index import index_checkpoint, index_weights
from nanprobe.checkpoints.locate import Located, locate
from nanprobe.checkpoints.records import (
    CheckpointFile,
    CheckpointIndex,
    Damage,
    Extent,
    Piece,
    Problem,
    Scalar,
    Skipped,
    Storage,
    TensorEntry,
)
from nanprobe.checkpoints.stream import read_storage, stream_extent

__all__ = [
    "CheckpointFile",
    "CheckpointIndex",
    "Damage",
    "Extent",
    "Located",
    "Piece",
    "Problem",
    "Scalar",
    "Skipped",
    "Storage",
    "TensorEntry",
    "content_digest",
    "index_checkpoint",
    "index_weights",
    "locate",
    "read_storage",
    "stream_extent",
]
