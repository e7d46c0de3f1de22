"""Reading a saved batch: what ``torch.save`` wrote, ``.safetensors``, ``.npz``, or a bundle.

A file is judged by its content; its name only breaks ties. Nothing in it is executed: pickles are read with
``weights_only=True``, and one that needs more is refused unless the user trusts it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanprobe.config import BatchSpec
from nanprobe.errors import UsageError
from nanprobe.inputs.bundle import Bundle, is_bundle, open_bundle
from nanprobe.inputs.factories import import_folder, one_line
from nanprobe.nearest import suggestion
from nanprobe.numerics.tree import named_tensors
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.special_file import special_file

__all__ = ["LoadedBatch", "check_tensors", "load_batch"]

_HEAD = 4096
"""Bytes looked at to tell what a file is."""

_CLASS = re.compile(r"(?:GLOBAL|unsupported class) ([A-Za-z_][\w.]*\w)")
"""How PyTorch's messages about a refused pickle name what was refused."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedBatch:
    """A batch as it was saved, on the CPU, and the bundle it came in, None when it was saved by itself."""

    value: Any
    bundle: Bundle | None = None


def load_batch(spec: BatchSpec, *, trust_pickle: bool = False, folder: Path | None = None) -> LoadedBatch:
    """Read the batch that ``spec`` names.

    ``trust_pickle`` lets the file run code of its own; classes are then looked for in ``folder`` first. UsageError,
    naming the file, when it is missing, empty, damaged, of no known format, needs trust, or lacks the key.
    """
    path = spec.path
    value: Any
    if os.path.isdir(path):
        path = _inside_bundle(path)
    special = special_file(path)
    if special is not None:
        raise UsageError(f"batch: {path}: {special}, where a file is expected")
    value = _read(path, trust_pickle, folder)
    bundle = None
    if is_bundle(value):
        bundle, value = open_bundle(value, path)
    if spec.key is not None:
        value = _pick(value, spec.key, path)
    check_tensors(value, spec.dim, f"batch: {path}")
    return LoadedBatch(value=value, bundle=bundle)


def check_tensors(value: Any, dim: int, name_of_batch: str) -> None:
    """Refuse a batch without values, and a batch dimension that it does not have: UsageError."""
    ranks = []
    for name, tensor in named_tensors(value):
        if tensor.is_meta:
            what = f"`{name}`" if name else "the tensor"
            raise UsageError(
                f"{name_of_batch}: {what} is on the meta device and holds no values; take it from a real one"
            )
        ranks.append(tensor.dim())
    if dim == 0 or not ranks:
        return
    # Counted from the end a dimension must be there in every tensor, else it would mean another one in each.
    reach = max(ranks) - 1 if dim > 0 else min(ranks)
    if dim > reach if dim > 0 else -dim > reach:
        raise UsageError(
            f"{name_of_batch}: `dim: {dim}` is beyond its tensors: "
            + (f"the largest has {max(ranks)} dimensions" if dim > 0 else f"the smallest has {min(ranks)} dimensions")
        )


def _inside_bundle(folder: Path) -> Path:
    """Return the file of a bundle's folder that holds the batch."""
    named = folder / "bundle.pt"
    if named.is_file():
        return named
    alone = sorted(folder.glob("*.pt"))
    if len(alone) == 1:
        return alone[0]
    raise UsageError(f"batch: {folder} is a folder without a bundle.pt; name a batch file, or the folder of a bundle")


def _read(path: Path, trust_pickle: bool, folder: Path | None) -> Any:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        raise UsageError(f"batch: {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"batch: {path}: cannot be read: {error.strerror or error}") from None
    other = _not_a_batch(head)
    if other is not None:
        raise UsageError(f"batch: {path} {other}")
    if _is_safetensors(head, path):
        return _read_safetensors(path)
    if head.startswith(b"PK") and _is_npz(path):
        return _read_npz(path)
    if head.startswith((b"PK", b"\x80")) or _is_tar(head):
        return _read_pickle(path, trust_pickle, folder)
    raise UsageError(
        f"batch: {path} has no known format; a batch is what torch.save wrote, .safetensors, .npz, or a bundle"
    )


def _not_a_batch(head: bytes) -> str | None:
    """Say what a file is that is certainly no batch, None when it may be one."""
    if not head:
        return "is empty"
    if not head.strip(b"\0"):
        return "starts with zeros only; it was never written, or its disk was full"
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page; the download went wrong"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer and not the file itself; run `git lfs pull`"
    return None


def _is_safetensors(head: bytes, path: Path) -> bool:
    return path.suffix == ".safetensors" or (len(head) > 8 and head[8:9] == b"{" and not any(head[6:8]))


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_npz(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError):
        return path.suffix == ".npz"
    return path.suffix == ".npz" or (bool(names) and all(name.endswith(".npy") for name in names))


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise UsageError(f"batch: {path} is no readable .safetensors file: {one_line(error)}") from None


def _read_npz(path: Path) -> Any:
    import numpy as np

    values: dict[str, torch.Tensor] = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                values[name] = _from_numpy(archive[name], name)
    except UsageError as error:
        raise UsageError(f"batch: {path}: {error}") from None
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise UsageError(
                f"batch: {path}: `{name}` holds Python objects, which only a pickle can store; save plain arrays"
            ) from None
        raise UsageError(f"batch: {path} is truncated or damaged: {one_line(error)}") from None
    except (OSError, EOFError, zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise UsageError(f"batch: {path} is truncated or damaged: {one_line(error)}") from None
    # np.savez names arrays that were given no name arr_0, arr_1, ...: they were positional, and stay so.
    if values and set(values) == {f"arr_{position}" for position in range(len(values))}:
        return tuple(values[f"arr_{position}"] for position in range(len(values)))
    return values


def _from_numpy(array: Any, name: str) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise UsageError(f"`{name}` has the type {array.dtype}, for which PyTorch has no tensor") from None


def _read_pickle(path: Path, trust_pickle: bool, folder: Path | None) -> Any:
    try:
        with warnings.catch_warnings():
            # PyTorch warns about pickle protocols and storages of old files; neither concerns who replays a batch.
            warnings.simplefilter("ignore", UserWarning)
            if not trust_pickle:
                return torch.load(path, map_location="cpu", weights_only=True)
            with import_folder(folder or path.parent):
                return torch.load(path, map_location="cpu", weights_only=False)
    except (ModuleNotFoundError, AttributeError, ImportError) as error:
        raise UsageError(f"batch: {path} needs a class that cannot be imported: {one_line(error)}") from error
    except pickle.UnpicklingError as error:
        text = _damaged(path, error) if trust_pickle else _refused(path, error)
        raise UsageError(f"batch: {path} {text}") from error
    except Exception as error:
        # torch.load lets through whatever a damaged file makes it stumble over: RuntimeError, EOFError, KeyError, ...
        if is_out_of_memory(error):
            raise
        raise UsageError(f"batch: {path} {_damaged(path, error)}") from error


def _damaged(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        plain = file.read(1) == b"\x80"
    origin = ", or was not written by torch.save" if plain else ""
    return f"is truncated or damaged{origin}: {one_line(error, 160)}"


def _refused(path: Path, error: pickle.UnpicklingError) -> str:
    """Say what PyTorch's safe reader did not accept: a class, a pickle protocol of its own, or a damaged file."""
    names = _CLASS.findall(str(error))
    if names:
        # The error stops at the first one, which may be a helper of the class that matters.
        with contextlib.suppress(Exception):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) or names
        what = "the class" if len(names) == 1 else "the classes"
        return (
            f"needs {what} {', '.join(names)}, and loading it may run code of the file; "
            "use --trust-pickle if you trust the file"
        )
    if "Unsupported operand" in str(error) and zipfile.is_zipfile(path):
        return (
            "uses a pickle protocol that PyTorch's safe reader does not know; save it with the default protocol, "
            "or use --trust-pickle if you trust the file"
        )
    return "is truncated or damaged, or was not written by torch.save"


def _pick(value: Any, key: str, path: Path) -> Any:
    """Return what stands under ``key``: a key as it is, or keys and positions joined with dots."""
    if isinstance(value, Mapping) and key in value:
        return value[key]
    walked: list[str] = []
    for part in key.split("."):
        where = f" in `{'.'.join(walked)}`" if walked else ""
        if isinstance(value, Mapping):
            if part not in value:
                raise UsageError(f"batch: {path}: no key `{part}`{where}; {suggestion(part, map(str, value))}")
            value = value[part]
        elif isinstance(value, list | tuple):
            if not part.isdigit() or int(part) >= len(value):
                raise UsageError(f"batch: {path}: no position `{part}`{where}; it has {len(value)} entries from 0")
            value = value[int(part)]
        else:
            raise UsageError(f"batch: {path}: no key `{part}`{where}; it holds a {type(value).__name__}")
        walked.append(part)
    return value
