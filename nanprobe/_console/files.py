"""Writing a report to a file: whole or not at all, and never over something the report was made from."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanprobe.errors import UsageError

__all__ = ["check_target", "write_atomically"]


def check_target(target: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError when a report cannot be written to ``target``, or would replace one of the ``inputs``."""
    for path in inputs:
        with contextlib.suppress(OSError):
            if target.resolve() == path.resolve() or (target.exists() and os.path.samefile(target, path)):
                raise UsageError(f"-o {target}: this file is an input of the same command; name another")
            if path.is_dir() and target.exists() and target.resolve().is_relative_to(path.resolve()):
                raise UsageError(
                    f"-o {target}: this file belongs to {path}, an input of the same command; name another"
                )
    if target.is_dir():
        raise UsageError(f"-o {target}: is a folder; name a file in it")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"-o {target}: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"-o {target}: no permission to write into {folder}")


def write_atomically(target: Path, text: str) -> None:
    """Write ``text`` in UTF-8 under a temporary name beside ``target`` and rename it; UsageError when that fails.

    A symbolic link is followed; permissions of a file that is replaced are kept.
    """
    real = target.resolve()
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{real.name}.", suffix=".part", dir=real.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(real))
        temporary.replace(real)
        temporary = None
    except OSError as error:
        raise UsageError(f"-o {target}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    """Return the permissions a written file gets: its present ones, else what the process gives to any file."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
