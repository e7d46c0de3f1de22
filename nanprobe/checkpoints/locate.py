"""From a path to the files of a checkpoint. Nothing but names, sizes and the first bytes is looked at."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

from nanprobe.checkpoints.sniff import CHECKPOINT_SUFFIXES, HEAD, READABLE, Sniffed, sniff
from nanprobe.errors import UsageError

__all__ = ["SHARD_NAME", "Located", "locate", "look"]

_PREFERRED = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
    "consolidated.safetensors.index.json",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""Names of weights in a folder, best first; what Hugging Face libraries write."""

_COMPANIONS = (
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
    "training_args",
    "sampler",
    "dl_state_dict",
    "tokenizer",
    "random_states",
    "custom_checkpoint",
)
"""Beginnings of the names of files that lie beside the weights in a training folder."""


SHARD_NAME = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.[^.]+)")
"""Names of numbered shards: stem, number, count, suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a checkpoint's weights are.

    ``kind`` is that of the one file, or "sharded"; then ``file`` is the index that names the shards. ``problem`` says
    what the file is instead of a checkpoint, None when it is one. ``others`` are checkpoint files left aside.
    """

    path: str
    kind: str
    file: str
    problem: Sniffed | None = None
    others: tuple[str, ...] = ()


def locate(path: str | os.PathLike[str]) -> Located:
    """Return where the weights of ``path`` (a file, an index file, a folder) are.

    UsageError when nothing is there, when it is no checkpoint by content nor by name, or when a folder holds none.
    """
    text = os.fspath(path)
    status = _status(text)
    if stat.S_ISDIR(status.st_mode):
        return _locate_in_folder(text)
    found = look(text)
    suffix = os.path.splitext(text)[1].lower()
    if found.kind in READABLE:
        return Located(path=text, kind=found.kind, file=text)
    if found.kind == "shard-index":
        return Located(path=text, kind="sharded", file=text)
    if suffix in CHECKPOINT_SUFFIXES or text.endswith(".index.json") or found.rule == "not-scanned":
        return Located(path=text, kind=found.kind or "unknown", file=text, problem=found)
    raise UsageError(f"{text} is no checkpoint: {found.message}")


def look(path: str) -> Sniffed:
    """Return what the regular file ``path`` is; UsageError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    return sniff(head, size, os.path.splitext(path)[1].lower())


def _status(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UsageError(f"checkpoint {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"checkpoint {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"checkpoint {path} is neither a file nor a folder")
    return status


def _locate_in_folder(folder: str) -> Located:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be read: {error.strerror or error}") from None
    _refuse_training_folder(folder, names)
    present = [name for name in _PREFERRED if name in names]
    if not present:
        present = [name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
    if not present:
        present = [
            name
            for name in names
            if os.path.splitext(name)[1].lower() in CHECKPOINT_SUFFIXES and not _is_companion(name)
        ]
        if len(present) > 1:
            if all(SHARD_NAME.fullmatch(name) for name in present):
                raise UsageError(
                    f"folder {folder} holds {len(present):,} numbered shards and no index of them (*.index.json): "
                    "fetch the index, or give the path of one shard"
                )
            shown = ", ".join(present[:5]) + (f" and {len(present) - 5} more" if len(present) > 5 else "")
            raise UsageError(f"folder {folder} holds several checkpoints ({shown}): give the path of one of them")
    if not present:
        inner = [name for name in ("model", "weights", "checkpoint") if os.path.isdir(os.path.join(folder, name))]
        hint = f"; look into {os.path.join(folder, inner[0])}" if inner else ""
        raise UsageError(f"folder {folder} holds no checkpoint (no .safetensors, .bin, .pt, .pth or .ckpt file){hint}")
    file = os.path.join(folder, present[0])
    found = locate(file)
    return Located(
        path=folder,
        kind=found.kind,
        file=file,
        problem=found.problem,
        others=tuple(os.path.join(folder, name) for name in present[1:]),
    )


def _is_companion(name: str) -> bool:
    return name.startswith(_COMPANIONS)


def _refuse_training_folder(folder: str, names: list[str]) -> None:
    """Name the kind of folder from which no model is loaded, since its weights lie in pieces of flat buffers."""
    if any(name.endswith("_optim_states.pt") for name in names):
        raise UsageError(
            f"folder {folder} holds a DeepSpeed checkpoint, from which no model is loaded: "
            "its zero_to_fp32.py converts it to a file that one is"
        )
