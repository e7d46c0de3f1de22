"""Writing a report to a file: whole or not at all, and never over something the report was made from."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanprobe.errors import UsageError
from nanprobe.special_file import special_file

__all__ = ["check_target", "exists", "write_atomically"]

_CODE = (".py", ".pyi", ".pyc", ".ipynb", ".so")
"""Suffixes of files that a report never replaces, whichever link leads there: the model may import any of them."""


def exists(target: Path) -> bool:
    """Tell whether there is a file for ``target`` to replace."""
    try:
        return os.path.exists(target)
    except (OSError, ValueError):
        return False


def check_target(target: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError when a report cannot be written to ``target``, or would replace one of the ``inputs``.

    Links are followed on both sides, and of two names of one file (hard links) each stands for the other.
    """
    real = _real(target)
    for path in inputs:
        with contextlib.suppress(OSError, ValueError):
            if real == Path(os.path.realpath(path)) or (real.exists() and os.path.samefile(real, path)):
                raise UsageError(f"-o {target}: this file is an input of the same command; name another")
            if path.is_dir() and real.exists() and real.is_relative_to(os.path.realpath(path)):
                raise UsageError(
                    f"-o {target}: this file belongs to {path}, an input of the same command; name another"
                )
    if real.is_dir():
        raise UsageError(f"-o {target}: is a folder; name a file in it")
    if real.suffix.lower() in _CODE and real.exists():
        raise UsageError(f"-o {target}: is a link to {real}, which is no report; name another file")
    folder = real.parent
    if not folder.is_dir():
        raise UsageError(f"-o {target}: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"-o {target}: no permission to write into {folder}")


def _real(target: Path) -> Path:
    """Return where a report is written to in the end; UsageError when that is no place for a regular file."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        status = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file can have this name"
        raise UsageError(f"-o {target}: cannot be written: {reason}") from None
    special = special_file(target)
    if special is not None:
        raise UsageError(f"-o {target}: is {special} and no file that can be replaced; use -o - for stdout")
    if status is not None and _is_stream(status):
        raise UsageError(f"-o {target}: is the file that stdout or stderr goes to already; use -o - for stdout")
    try:
        return Path(os.path.realpath(target))
    except (OSError, ValueError) as error:
        raise UsageError(f"-o {target}: cannot be written: {error}") from None


def _is_stream(status: os.stat_result) -> bool:
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), status):
                return True
    return False


def write_atomically(target: Path, text: str) -> None:
    """Write ``text`` in UTF-8 under a temporary name beside ``target`` and rename it; UsageError when that fails.

    A symbolic link is followed; permissions of a file that is replaced are kept.
    """
    real = _real(target)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=".nanprobe.", suffix=".part", dir=real.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(real))
        temporary.replace(real)
        temporary = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"-o {target}: cannot be written: {reason}") from None
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
