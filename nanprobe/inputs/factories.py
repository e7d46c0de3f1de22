"""Importing what a config names: ``package.module:callable`` or ``path/to/file.py:callable``.

The config's folder comes first on ``sys.path`` while a factory is imported and called, and goes again afterwards. One
process may replay configs from several folders whose modules share names (every sample run has a ``model.py``): modules
that came from another config's folder are forgotten before the next one is imported from.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nanprobe.errors import NanprobeError, UsageError, text_of
from nanprobe.nearest import suggestion
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.special_file import special_file

__all__ = ["call_factory", "import_folder", "one_line", "raised_in_user_code", "resolve"]

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

_from_folder: dict[str, Path] = {}
"""Names of modules that were imported from a config's folder, and that folder."""

_file_stamps: dict[str, tuple[int, int]] = {}
"""Modification time and size of each file that was imported by its path, to import it again when it has changed."""


@contextlib.contextmanager
def import_folder(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on ``sys.path`` for the body's duration; what comes from it is remembered as its own.

    Code that changes the working directory finds it changed only until the end of the body.
    """
    folder = folder.resolve()
    here = _here()
    for name, other in list(_from_folder.items()):
        if other != folder:
            sys.modules.pop(name, None)
            del _from_folder[name]
    importlib.invalidate_caches()
    before = set(sys.modules)
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if here is not None:
            with contextlib.suppress(OSError):
                os.chdir(here)
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(folder) and not _in_library(file) and not _ours(file):
                _from_folder[name] = folder


def _here() -> str | None:
    """Return the working directory, None where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


def resolve(reference: str, folder: Path, key: str) -> Any:
    """Return the object that ``reference`` names; call it inside :func:`import_folder`.

    ``key`` is the config key for messages. UsageError when the reference is malformed, the module or file is not
    found or raises, or the attribute is not there (naming the nearest one).
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name or (len(where) == 1 and where.isalpha()):
        raise UsageError(f"`{key}`: expected package.module:callable or path/to/file.py:callable, got '{reference}'")
    module = _import_file(where, folder, key) if where.endswith(".py") else _import_module(where, folder, key)
    found: Any = module
    walked, joint = where, ":"
    for part in name.split("."):
        if not _has(found, part):
            public = [candidate for candidate in dir(found) if not candidate.startswith("_")]
            raise UsageError(f"`{key}`: {walked} has no `{part}`; {suggestion(part, public)}")
        found = getattr(found, part)
        walked, joint = f"{walked}{joint}{part}", "."
    return found


def _has(owner: Any, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except Exception:
        # A module's own __getattr__ may raise anything.
        return False


def _import_file(where: str, folder: Path, key: str) -> ModuleType:
    path = Path(os.path.realpath(folder / where))
    if not os.path.isfile(path):
        what = f"is {special_file(path)}" if special_file(path) else "no such file"
        if os.path.isdir(path):
            what = "is a folder"
        raise UsageError(f"`{key}`: {folder / where}: {what}")
    status = path.stat()
    stamp = (status.st_mtime_ns, status.st_size)
    name = f"_nanprobe_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and _file_stamps.get(name) == stamp:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{key}`: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        _reraise(error, f"`{key}`: importing {folder / where}")
    _file_stamps[name] = stamp
    return module


def _import_module(where: str, folder: Path, key: str) -> ModuleType:
    top = where.partition(".")[0]
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where == missing or where.startswith(missing + "."):
            hint = ""
            if (folder / f"{where}.py").is_file() or "/" in where:
                hint = "; a file is named with its .py"
            raise UsageError(
                f"`{key}`: no module named `{missing}` in {folder.resolve()} or among the installed packages{hint}"
            ) from None
        _reraise(error, f"`{key}`: importing {where}")
    except (ValueError, TypeError) as error:
        if where.startswith(".") or ".." in where:
            raise UsageError(f"`{key}`: '{where}' is not the name of a module") from None
        _reraise(error, f"`{key}`: importing {where}")
    except BaseException as error:
        _reraise(error, f"`{key}`: importing {where}")
    meant = next((p for p in (folder / f"{top}.py", folder / top / "__init__.py") if p.is_file()), None)
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if meant is not None and (loaded is None or not meant.samefile(loaded)):
        raise UsageError(
            f"`{key}`: the module `{top}` was loaded from {loaded or 'Python itself'} already, not from {meant}; "
            "name the file: path/to/file.py:callable"
        )
    return module


def call_factory(target: Any, kwargs: Mapping[str, Any], key: str, reference: str) -> Any:
    """Call what a config names with its keyword arguments; UsageError when it does not take them, or raises."""
    if not callable(target):
        raise UsageError(f"`{key}`: {reference} is not callable but a {type(target).__name__}")
    _check_keywords(target, kwargs, key, reference)
    try:
        return target(**kwargs)
    except BaseException as error:
        _reraise(error, f"`{key}`: {reference}")


def _check_keywords(target: Callable[..., Any], kwargs: Mapping[str, Any], key: str, reference: str) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters
    section = key.rpartition(".")[0] or key
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        legal = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for name in kwargs:
            if name not in legal:
                raise UsageError(f"`{section}.kwargs`: {reference} takes no `{name}`; {suggestion(name, legal)}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise UsageError(f"`{section}.kwargs`: {reference}: {error}") from None


def _reraise(error: BaseException, doing: str) -> NoReturn:
    """Raise the user's error as one line, or as it is where it is no mistake in the user's code."""
    if isinstance(error, KeyboardInterrupt | NanprobeError) or is_out_of_memory(error):
        raise error
    if isinstance(error, SystemExit):
        raise UsageError(f"{doing} ended the program (sys.exit) instead of returning") from error
    raise UsageError(f"{doing} raised {one_line(error)}{raised_in_user_code(error)}") from error


def one_line(error: BaseException, limit: int = 400) -> str:
    """Return type and message of an error on one line of at most ``limit`` characters."""
    name = type(error).__name__
    text = " ".join(text_of(error).split())
    if type(error) is KeyError and len(error.args) == 1 and text:
        text = f"no key {text}"
    whole = f"{name}: {text}" if text else name
    return whole if len(whole) <= limit else whole[: limit - 3] + "..."


def raised_in_user_code(error: BaseException) -> str:
    """Return " (file:line)" of the innermost line of user code that an error passed through, "" when there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not _ours(frame.filename)
    ]
    own = [frame for frame in frames if not _in_library(frame[0])] or frames
    return f" ({own[-1][0]}:{own[-1][1]})" if own else ""


def _ours(file: str) -> bool:
    """Tell whether a file belongs to nanprobe."""
    return Path(file).resolve().is_relative_to(_PACKAGE)


def _in_library(file: str) -> bool:
    """Tell whether a file belongs to the standard library or to an installed package."""
    path = str(Path(file).resolve())
    return any(path.startswith(library) for library in _LIBRARIES) or "site-packages" in path
