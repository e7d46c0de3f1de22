"""Files that ``torch.save`` writes since PyTorch 1.6, and TorchScript files: a zip with ``data.pkl`` and storages.

One root folder holds ``data.pkl`` (the objects, with references to storages), ``data/<key>`` (the bytes of each) and
``byteorder``. The folder's name is that of the file when it was saved and does not matter.
"""

from __future__ import annotations

from dataclasses import replace

from nanprobe.checkpoints.describe import describe_tree
from nanprobe.checkpoints.dtypes import nbytes
from nanprobe.checkpoints.inert import Span, StorageRef
from nanprobe.checkpoints.numpy_file import index_npz
from nanprobe.checkpoints.pickle_machine import Loaded, PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.records import Extent, FileIndex, NoCheckpoint, Storage
from nanprobe.checkpoints.torch_objects import BUILDERS, persistent_value
from nanprobe.checkpoints.window import Window
from nanprobe.checkpoints.zip_directory import Member, read_directory, read_member, resolve

__all__ = ["index_torch_zip"]

_MAX_KNOWN = 4096
_MAX_PICKLE = 1 << 28
"""Largest compressed or CRC-checked object pickle, in bytes; it is held in memory while it is read."""


def index_torch_zip(window: Window, known: dict[bytes, Loaded] | None = None) -> FileIndex:
    """Return what the file holds; Damage when its objects cannot be read.

    ``known`` are pickles that were read before, by their bytes: a distributed checkpoint holds thousands of small files
    with few different ones.
    """
    members = read_directory(window)
    if members and all(name.endswith(".npy") for name in members):
        return index_npz(window, members)
    roots = sorted((name for name in members if name.endswith("/data.pkl") or name == "data.pkl"), key=len)
    if not roots:
        damage = window.damage(
            "corrupt-file",
            "it is a zip but no torch.save file: it has no data.pkl; unpack it, or give the file that is inside",
        )
        raise NoCheckpoint(damage.problem)
    root = roots[0].removesuffix("data.pkl")
    checked = any(member.crc32 for member in members.values() if member.size)
    pickle = read_member(window, members[roots[0]], _MAX_PICKLE, check=checked)
    loaded = known.get(pickle) if known is not None else None
    if loaded is None:
        try:
            loaded = load_pickle(PickleSource(None, pickle), persistent=persistent_value, builders=BUILDERS)
        except PickleDamage as error:
            raise window.damage("corrupt-file", str(error)) from None
        if known is not None and len(pickle) <= _MAX_KNOWN and len(known) < _MAX_KNOWN:
            known[pickle] = loaded
    order = members.get(f"{root}byteorder")
    byteorder = "big" if order and read_member(window, order, 64, check=False) == b"big" else "little"
    storages: dict[str, Storage] = {}

    def storage_of(reference: StorageRef) -> Storage:
        known = storages.get(reference.key)
        if known is None:
            known = _storage(window, members, root, reference, byteorder, checked=checked)
            storages[reference.key] = known
        return known

    where = resolve(window, members[roots[0]])

    def place(span: Span) -> Extent:
        if where.encoding == "stored":
            return Extent(file=window.path, offset=where.offset + span.offset, length=span.length, size=span.length)
        return inline_extent(window, pickle, span)

    kind = "torchscript" if f"{root}constants.pkl" in members else "torch-zip"
    if isinstance(loaded.value, dict) and "pytorch-lightning_version" in loaded.value:
        kind = "lightning"
    return describe_tree(window, kind, loaded.value, loaded.foreign, storage_of, place)


def inline_extent(window: Window, pickle: bytes, span: Span) -> Extent:
    """Return the bytes of a string of a pickle that lies in memory; Damage when it is no text of single bytes."""
    data = pickle[span.offset : span.offset + span.length]
    if span.text:
        try:
            data = data.decode("utf-8").encode("latin-1")
        except UnicodeError:
            raise window.damage("corrupt-file", "its bytes are no text of single-byte characters") from None
    return Extent(file=window.path, offset=window.base, length=len(data), size=len(data), encoding="inline", data=data)


def _storage(
    window: Window, members: dict[str, Member], root: str, reference: StorageRef, byteorder: str, *, checked: bool
) -> Storage:
    name = f"{root}data/{reference.key}"
    member = members.get(name)
    declared = nbytes(reference.numel, reference.dtype)
    if member is None:
        if declared == 0:
            return Storage(id=f"{window.path}@{window.base}:{name}", dtype=reference.dtype, size=0, extents=())
        raise window.damage("corrupt-file", f"the zip has no member {name[:200]!r} for its data")
    if member.size != declared:
        raise window.damage(
            "corrupt-file",
            f"its storage is declared with {declared:,} bytes, but the member {name[:200]!r} holds {member.size:,}",
        )
    extent = resolve(window, member)
    if not checked:
        extent = replace(extent, crc32=None)
    return Storage(
        id=f"{window.path}@{window.base}:{name}",
        dtype=reference.dtype,
        size=member.size,
        extents=(extent,),
        byteorder=byteorder,
    )
