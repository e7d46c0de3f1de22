"""The command line: parses, runs a command, and turns whatever happens into one line and the right exit code.

Typer ends with code 1 on an exception and on a closed pipe, and 1 means "findings" here; so its errors are taken out of
its hands (``standalone_mode=False``) and mapped in :func:`main`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import PurePath

import typer

from nanprobe._console import interrupts
from nanprobe._console.terminal import discard_stdout, one_line, say, write_stdout
from nanprobe.cli.app import app
from nanprobe.errors import Interrupted, NanprobeError, UsageError, text_of
from nanprobe.exit_codes import INCOMPLETE, INTERRUPTED, OK, UNUSABLE
from nanprobe.nearest import nearest
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.records import SCHEMA_VERSION
from nanprobe.version import __version__

__all__ = ["entry_point", "main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Why writing to stdout may fail other than by a reader that is gone."""

_EXTRA = re.compile(r"unexpected extra argument(?:s|\(s\))? \((\S+?)[ )]")
_BATCHES = (".pt", ".pth", ".bin", ".npz", ".safetensors")
_BUILT = ("replay", "compare-precisions", "scan-checkpoint", "diff-checkpoints", "render", "explain")
_NOT_BUILT = ("scan-batch", "isolate", "remedy")


def entry_point() -> None:
    """Run the command line of this process and raise SystemExit with its code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run the command line with these arguments and return its exit code; never raises."""
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        code = _dispatch(list(arguments), command)
        if code == INTERRUPTED:
            # Typer made a code of a KeyboardInterrupt and said nothing.
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | Interrupted) or interrupts.interrupted():
            # Code that was interrupted may have made another error of it.
            return _fail(arguments, command, Interrupted("interrupted"), INTERRUPTED)
        return _failed(arguments, command, error)


def _failed(arguments: Sequence[str], command: str | None, raised: BaseException) -> int:
    """Turn whatever was raised into one line and an exit code."""
    try:
        raise raised
    except BrokenPipeError:
        discard_stdout()
        return OK
    except SystemExit as error:
        # Typer ends the process when the reader of its help is gone; anything else is user code in a replay.
        if isinstance(error.__context__, BrokenPipeError):
            discard_stdout()
            return OK
        text = f"the replayed code ended the program: sys.exit({_shown(error.code)})"
        return _fail(arguments, command, error, INCOMPLETE, text)
    except NanprobeError as error:
        return _fail(arguments, command, error, error.exit_code)
    except typer.TyperException as error:
        return _fail(arguments, command, error, UNUSABLE, error.format_message() + _hint(error))
    except OSError as error:
        if error.errno in _FULL:
            discard_stdout()
            return _fail(arguments, command, error, INCOMPLETE, f"cannot write to stdout: {error.strerror}")
        return _fail(arguments, command, error, INCOMPLETE, _internal(error))
    except Exception as error:
        if is_out_of_memory(error):
            text = f"out of memory: {text_of(error)}".removesuffix(": ")
            return _fail(arguments, command, error, INCOMPLETE, f"{text}; try a smaller batch or fewer precisions")
        return _fail(arguments, command, error, INCOMPLETE, _internal(error))
    except BaseException as error:
        # nanprobe itself raises none of these: GeneratorExit, or an exception that derives from BaseException alone.
        text = f"the replayed code raised {type(error).__name__}: {text_of(error)}"
        return _fail(arguments, command, error, INCOMPLETE, text)


def _internal(error: Exception) -> str:
    said = text_of(error)
    return f"internal error: {type(error).__name__}{': ' if said else ''}{said} (--debug shows the traceback)"


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def _hint(error: typer.TyperException) -> str:
    """Return which option takes the path that was given as a bare word, "" where none was."""
    found = _EXTRA.search(error.format_message())
    if found is None:
        return ""
    word = found[1]
    suffix = PurePath(word).suffix.lower()
    option = "--config" if suffix in (".yaml", ".yml") else "--batch" if suffix in _BATCHES else None
    return f"; did you mean `{option} {word}`?" if option is not None else ""


def _dispatch(arguments: list[str], command: str | None) -> int:
    if not arguments:
        _run(["--help"])
        return UNUSABLE
    if arguments[0] in _NOT_BUILT:
        say(f"nanprobe: {arguments[0]} is not built yet")
        if _wants_json(arguments):
            _print_error_document(command, UNUSABLE, f"{arguments[0]} is not built yet")
        return UNUSABLE
    if not arguments[0].startswith("-") and arguments[0] not in _BUILT:
        close = nearest(arguments[0], _BUILT)
        hint = f"; did you mean `{close}`?" if close else f"; there are {', '.join(_BUILT)}"
        raise UsageError(f"no such command '{arguments[0]}'{hint}")
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    code = typer.main.get_command(app).main(args=arguments, prog_name="nanprobe", standalone_mode=False)
    return code if isinstance(code, int) else OK


def _fail(
    arguments: Sequence[str], command: str | None, error: BaseException, code: int, text: str | None = None
) -> int:
    """Say what went wrong: a traceback with --debug, one line on stderr, a document on stdout where JSON was asked."""
    if "--debug" in arguments and sys.stderr is not None:
        # A user's exception may be one that cannot be printed.
        with contextlib.suppress(Exception):
            traceback.print_exception(error, file=sys.stderr)
    message = one_line(text if text is not None else text_of(error)).rstrip(" :;,") or type(error).__name__
    say("nanprobe: interrupted" if code == INTERRUPTED else f"nanprobe: error: {message}")
    if _wants_json(arguments):
        _print_error_document(command, code, message)
    return code


def _wants_json(arguments: Sequence[str]) -> bool:
    """Tell from the bare words whether JSON was asked for, since parsing them may be what failed."""
    words = list(arguments)
    return "--json" in words or "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def _print_error_document(command: str | None, code: int, message: str) -> None:
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "nanprobe", "version": __version__},
        "command": command,
        "exit_code": code,
        "error": message,
    }
    try:
        write_stdout(json.dumps(document, indent=2) + "\n")
    except OSError:
        discard_stdout()
