"""The JSON files of a run's folder that say something about the numbers, and names for the files that do not."""

from __future__ import annotations

import os
from typing import Any

from nanprobe.checkpoints.json_text import TooLarge, parse_json
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import Damage, Scalar
from nanprobe.checkpoints.window import Window

__all__ = ["is_json_state", "read_json_state", "text_reason"]

_MAX_JSON = 1 << 27
_MAX_LOG = 200_000
"""Values of a training log that are kept; beyond them only those that are not finite."""

_STATES = {
    "trainer_state.json": "log",
    "config.json": "config",
    "adapter_config.json": "config",
    "params.json": "config",
}

_REASONS = {
    ".json": "a JSON file that holds no tensors",
    ".jsonl": "a JSON file that holds no tensors",
    ".txt": "a text file",
    ".md": "a text file",
    ".yaml": "a configuration file",
    ".yml": "a configuration file",
    ".toml": "a configuration file",
    ".py": "a program, which is not run",
    ".log": "a log file",
    ".csv": "a table of text",
    ".model": "a tokenizer's model",
    ".tiktoken": "a tokenizer's vocabulary",
    ".jinja": "a template",
    ".png": "an image",
    ".jpg": "an image",
    ".lock": "a lock file",
    ".gitattributes": "a file of git",
    ".sh": "a program, which is not run",
}


def is_json_state(name: str) -> bool:
    """Return whether a file of that name is read for its numbers."""
    return name in _STATES


def text_reason(name: str) -> str | None:
    """Return why a file of that name is not scanned, None when the name does not say."""
    if name.startswith(("tokenizer", "vocab", "special_tokens", "merges", "added_tokens", "spiece", "sentencepiece")):
        return "a tokenizer file"
    if name.startswith("events.out.tfevents"):
        return "a log file"
    if name in (".gitattributes", ".gitignore"):
        return "a file of git"
    return _REASONS.get(os.path.splitext(name)[1].lower())


def read_json_state(path: str, part: Part) -> None:
    """Put the numbers of the file into ``part.scalars``; a problem when it is no JSON text."""
    name = os.path.basename(path)
    try:
        with Window(path) as window:
            size = window.size
            if size > _MAX_JSON:
                raise window.damage("not-scanned", f"a JSON file of {size:,} bytes is not read", "warning")
            data = parse_json(window.read(0, size))
    except Damage as damage:
        part.problems.append(damage.problem)
        return
    except OSError as error:
        part.problem("not-scanned", f"it cannot be read: {error.strerror or error}", path, severity="warning")
        return
    except TooLarge as error:
        part.problem("not-scanned", str(error), path, severity="warning", blocking=False)
        return
    except ValueError:
        part.problem(
            "truncated-file" if size and _starts_like_json(path) else "corrupt-file",
            "it is no complete JSON text: the save may not have finished",
            path,
            blocking=False,
        )
        return
    part.note_file(path, "json", size)
    if not isinstance(data, dict):
        return
    if _STATES[name] == "log":
        _log(path, data, part)
    else:
        _config(path, data, part)


def _starts_like_json(path: str) -> bool:
    try:
        with Window(path) as window:
            return window.head(64).lstrip().startswith(b"{")
    except (OSError, Damage):
        return False


def _number(value: Any) -> bool:
    return type(value) in (int, float, bool) and not (type(value) is int and abs(value) >= 1 << 63)


def _log(path: str, data: dict[Any, Any], part: Part) -> None:
    """Take the counters and the log of a Trainer's state."""
    for key, value in data.items():
        if key == "log_history" or not _number(value):
            continue
        role = {"global_step": "step", "epoch": "epoch", "best_metric": "callback"}.get(key, "other")
        part.scalars.append(Scalar(name=key, path=(key,), file=path, value=value, role=role))
    history = data.get("log_history")
    kept = 0
    for number, line in enumerate(history if isinstance(history, list) else ()):
        if not isinstance(line, dict):
            continue
        step = line.get("step")
        for key, value in line.items():
            if key == "step" or not _number(value):
                continue
            kept += 1
            if kept > _MAX_LOG and value == value and abs(value) != float("inf"):
                continue
            part.scalars.append(
                Scalar(
                    name=f"log_history.{number}.{key}",
                    path=("log_history", number, key),
                    file=path,
                    value=value,
                    role="log",
                    step=step if type(step) is int else None,
                )
            )


def _config(path: str, data: dict[Any, Any], part: Part) -> None:
    """Take the plain fields of a model's configuration, those of its parts included."""
    stack: list[tuple[tuple[Any, ...], dict[Any, Any]]] = [((), data)]
    while stack:
        where, node = stack.pop()
        for key, value in node.items():
            place = (*where, key)
            if isinstance(value, dict) and len(place) < 4:
                stack.append((place, value))
            elif _number(value) or (isinstance(value, str) and len(value) <= 200):
                part.scalars.append(Scalar(name=".".join(place), path=place, file=path, value=value, role="config"))
