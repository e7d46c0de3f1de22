"""Tensors in a pickle that ``torch.save`` did not write: each storage is a small legacy file in a byte string.

``pickle.dump`` of a tensor calls ``torch.storage._load_from_bytes`` with the bytes of such a file, and a trusting
loader unpickles those too. Here they are read like every other legacy file, and the names in them are noted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.inert import Foreign, Global, Span, StorageRef
from nanprobe.checkpoints.records import Damage, Extent, Storage
from nanprobe.checkpoints.torch_legacy import legacy_storages
from nanprobe.checkpoints.window import BytesWindow, Window

__all__ = ["NAME", "PickledStorages"]

NAME = "torch.storage._load_from_bytes"

_MAX_TEXT = 64 << 20
"""Bytes of text that are decoded into memory for one pickle."""


class PickledStorages:
    """Reads the byte strings of one pickle; each once, however often the pickle refers to it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.storages: dict[str, Storage] = {}
        self.foreign: dict[str, None] = {}
        self._spent = 0
        self._known: dict[int, tuple[Any, StorageRef | None]] = {}

    def builder(self) -> Callable[[tuple[Any, ...]], Any]:
        """Return the builder for the pickle machine."""

        def build(args: tuple[Any, ...]) -> Any:
            raw = args[0] if len(args) == 1 else None
            if isinstance(raw, (bytes, Span, Foreign)):
                if id(raw) not in self._known:
                    # The bytes are kept with the answer, so that their id stays theirs.
                    self._known[id(raw)] = (raw, self._read(raw))
                found = self._known[id(raw)][1]
                if found is not None:
                    return found
            return Foreign(Global("torch.storage", "_load_from_bytes"), args)

        return build

    def _read(self, raw: bytes | Span | Foreign) -> StorageRef | None:
        data = _bytes(raw)
        try:
            if data is not None:
                inner: Window = BytesWindow(self.window.path, data)
            elif isinstance(raw, Span) and not raw.text:
                inner = self.window.part(raw.offset, raw.length)
            elif isinstance(raw, Span) or (isinstance(raw, Foreign) and _text(raw) is not None):
                span = raw if isinstance(raw, Span) else _text(raw)
                assert span is not None
                data = self._decoded(span)
                inner = BytesWindow(self.window.path, data)
            else:
                return None
            reference, storages, foreign = legacy_storages(inner)
        except Damage:
            return None
        self.foreign.update(dict.fromkeys(foreign))
        storage = storages.get(reference.key)
        if storage is None:
            return None
        key = f"pickled {len(self.storages)}"
        extents = tuple(_inline(extent, data) for extent in storage.extents) if data is not None else storage.extents
        self.storages[key] = replace(storage, id=f"{self.window.path}@{self.window.base}:{key}", extents=extents)
        return replace(reference, key=key)

    def _decoded(self, span: Span) -> bytes:
        """Return the bytes of a long text of one character for each; Damage when that is none, or too much."""
        self._spent += span.length
        if self._spent > _MAX_TEXT:
            raise self.window.damage("not-scanned", "its storages are too long to be decoded", "warning")
        try:
            return self.window.read(span.offset, span.length).decode("utf-8").encode("latin-1")
        except UnicodeError:
            raise self.window.damage("corrupt-file", "its bytes are no text of single-byte characters") from None


def _text(raw: Foreign) -> Span | None:
    """Return the long text that the call decodes, None when it has none."""
    if raw.class_name == "_codecs.encode" and isinstance(raw.args, tuple) and raw.args:
        return raw.args[0] if isinstance(raw.args[0], Span) else None
    return None


def _bytes(raw: bytes | Span | Foreign) -> bytes | None:
    """Return bytes that are in memory, those included that protocols before 3 write as text; None for all else."""
    if isinstance(raw, Foreign) and raw.class_name == "_codecs.encode" and isinstance(raw.args, tuple) and raw.args:
        text = raw.args[0]
        try:
            return text.encode("latin-1") if isinstance(text, str) else None
        except UnicodeEncodeError:
            return None
    return raw if isinstance(raw, bytes) else None


def _inline(extent: Extent, data: bytes) -> Extent:
    """Return the extent with its bytes, which lie in memory."""
    part = data[extent.offset : extent.offset + extent.length]
    return replace(extent, encoding="inline", data=part)
