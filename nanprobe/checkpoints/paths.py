"""File names that a file gives: whether they stay in the checkpoint's folder."""

from __future__ import annotations

__all__ = ["inside"]


def inside(name: str) -> bool:
    """Return whether a relative file name stays under the folder it is relative to, on any system."""
    if not name or "\0" in name or "\\" in name or ":" in name or name.startswith("/"):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
