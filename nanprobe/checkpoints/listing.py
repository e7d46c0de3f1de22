"""The names in a folder: read once, bounded, told apart into files and folders; nothing is opened."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from nanprobe.errors import UsageError

__all__ = ["Listing", "list_folder", "natural"]

MAX_ENTRIES = 200_000
"""Names in one folder beyond which it is no checkpoint's; universal DeepSpeed folders hold some thousands."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Names of regular files, of folders, and of what is neither or cannot be reached, with the reason."""

    folder: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    strange: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> str:
        """Path of an entry."""
        return os.path.join(self.folder, name)

    def has(self, name: str) -> bool:
        """Whether a file of that name is there."""
        return name in self.files


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``layer.9`` comes before ``layer.10``."""
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part), "") if part.isascii() and part.isdigit() else (0, 0, part) for part in parts)


def list_folder(folder: str) -> Listing:
    """Return the names in ``folder``, in natural order; UsageError when it cannot be read or holds far too many."""
    files: list[str] = []
    folders: list[str] = []
    strange: dict[str, str] = {}
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_ENTRIES:
                    raise UsageError(f"folder {folder} holds more than {MAX_ENTRIES:,} entries: give a file in it")
                try:
                    if entry.is_file():
                        files.append(entry.name)
                    elif entry.is_dir():
                        folders.append(entry.name)
                    elif entry.is_symlink():
                        entry.stat()
                        strange[entry.name] = "it is neither a file nor a folder"
                    else:
                        strange[entry.name] = "it is neither a file nor a folder"
                except OSError as error:
                    strange[entry.name] = f"its link cannot be followed: {error.strerror or error}"
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be read: {error.strerror or error}") from None
    return Listing(
        folder, tuple(sorted(files, key=natural)), tuple(sorted(folders, key=natural)), dict(sorted(strange.items()))
    )
