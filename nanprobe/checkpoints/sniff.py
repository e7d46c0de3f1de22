"""What a file is, by its content; its name only decides whether foreign content is a damaged checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from nanprobe.checkpoints.onnx_file import looks_like_onnx
from nanprobe.checkpoints.torch_legacy import is_torch_legacy

__all__ = ["CHECKPOINT_SUFFIXES", "HEAD", "READABLE", "Sniffed", "impostor", "named_like_a_checkpoint", "sniff"]

HEAD = 4096
"""Bytes from the start of a file that :func:`sniff` wants."""

CHECKPOINT_SUFFIXES = frozenset(
    (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".tar", ".gguf", ".onnx", ".npz", ".npy", ".nemo")
)
"""Suffixes that say that a file is a checkpoint."""

READABLE = frozenset({"torch-zip", "torch-legacy", "safetensors", "pickle", "npy", "gguf", "onnx", "tar", "gzip"})
"""Kinds of single files that have a reader."""

_LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")


@dataclass(frozen=True, slots=True)
class Sniffed:
    """``kind`` is the format ("" when unknown); ``rule`` and ``message`` say what stands where a checkpoint should."""

    kind: str
    rule: str = "corrupt-file"
    message: str = ""


def named_like_a_checkpoint(path: str) -> bool:
    """Return whether the file's suffix says that it is a checkpoint."""
    return os.path.splitext(path)[1].lower() in CHECKPOINT_SUFFIXES


def impostor(head: bytes, size: int) -> Sniffed | None:
    """Return what stands in the place of a part of a checkpoint: a pointer, a web page, nothing; None for data."""
    if size == 0:
        return sniff(head, size, "")
    found = _foreign(head, size)
    return found if found is not None and found.kind in ("lfs-pointer", "html") else None


def sniff(head: bytes, size: int, suffix: str) -> Sniffed:
    """Return what the file is that begins with ``head``, is ``size`` bytes long and has the lower-case ``suffix``."""
    if size == 0:
        return Sniffed("empty", "truncated-file", "it is empty: the save or the download did not write anything")
    if _is_safetensors(head):
        return Sniffed("safetensors")
    foreign = _foreign(head, size)
    if foreign is not None:
        return foreign
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return Sniffed("torch-zip")
    if head.startswith(b"GGUF"):
        return Sniffed("gguf")
    if head.startswith(b"\x93NUMPY"):
        return Sniffed("npy")
    if head.startswith(b"\x89HDF\r\n"):
        return Sniffed("hdf5", "not-scanned", "it is an HDF5 file (Keras); save the weights as safetensors")
    if head.startswith(b"\x1f\x8b"):
        return Sniffed("gzip")
    if head[257:262] == b"ustar":
        return Sniffed("tar")
    if head.startswith(_LEGACY_MAGIC[: len(head)]) or is_torch_legacy(head[:128]):
        return Sniffed("torch-legacy")
    if suffix == ".onnx" or looks_like_onnx(head):
        return Sniffed("onnx") if head.strip(b"\0") else _zeros(head)
    if suffix == ".safetensors":
        return Sniffed("safetensors")
    if not head.strip(b"\0"):
        return _zeros(head)
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return Sniffed("pickle")
    if suffix in (".pkl", ".pickle") and head[:1] in b"(]}c\x80":
        return Sniffed("pickle")
    return Sniffed("", "corrupt-file", f"its content is of no known checkpoint format (it begins with {head[:8]!r})")


def _is_safetensors(head: bytes) -> bool:
    """Return whether a length of eight bytes and the brace of a header begin the file.

    Comes before the looks for texts: the length itself may read like one (0x7b20 is a space and a brace).
    """
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40


def _zeros(head: bytes) -> Sniffed:
    return Sniffed(
        "zeros", "corrupt-file", f"its first {len(head):,} bytes are zero: it was never written, or overwritten"
    )


def _foreign(head: bytes, size: int) -> Sniffed | None:
    """Return what a text file is that often stands in a checkpoint's place, None when it is not such a text."""
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return Sniffed(
            "lfs-pointer", "corrupt-file", "it is a Git LFS pointer and not the file itself; run `git lfs pull`"
        )
    start = head.lstrip()[:256].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head", b"<body")):
        return Sniffed(
            "html",
            "corrupt-file",
            "it is a web page, such as a login or an error page saved as the download; fetch it again",
        )
    if start.startswith(b"{"):
        if b'"weight_map"' in head or _is_index(head, size):
            return Sniffed("shard-index")
        return Sniffed("json", "corrupt-file", "it is a JSON text and no checkpoint")
    return None


def _is_index(head: bytes, size: int) -> bool:
    """Return whether a short JSON text is a shard index; in a long one "metadata" stands before "weight_map"."""
    if size > len(head):
        return b'"metadata"' in head and b'"total_size"' in head
    try:
        return "weight_map" in json.loads(head)
    except (ValueError, RecursionError):
        return False
