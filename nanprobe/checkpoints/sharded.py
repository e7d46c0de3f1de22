"""Checkpoints in several files with an index that says which tensor lies where (Hugging Face's layout).

The index is not trusted: a name that leads out of the checkpoint's folder is refused without a look at the target, and
what the index says and what the shards hold are compared in both directions.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nanprobe.checkpoints.describe import limit_problems
from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.json_text import parse_json
from nanprobe.checkpoints.locate import SHARD_NAME
from nanprobe.checkpoints.paths import inside
from nanprobe.checkpoints.records import Damage, FileIndex, Problem
from nanprobe.checkpoints.window import Window

__all__ = ["ShardIndex", "compare_index", "read_shard_index", "read_shards"]

_MAX_INDEX = 100_000_000
_MAX_NAMES = 2_000_000
_MAX_SHARDS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The index: which file holds each tensor, the files in order (names, relative to the folder), the total size."""

    file: str
    weight_map: dict[str, str]
    shards: tuple[str, ...]
    total_size: int | None
    problems: tuple[Problem, ...]


def read_shard_index(path: str) -> ShardIndex:
    """Return the index in ``path``; Damage when it is no index."""
    with Window(path) as window:
        if window.size > _MAX_INDEX:
            raise window.damage("corrupt-file", f"an index of {window.size:,} bytes is not read")
        try:
            data = parse_json(window.read(0, window.size), strict=True)
        except ValueError as error:
            raise window.damage("corrupt-file", f"the shard index is no JSON text: {str(error)[:200]}") from None
        weight_map = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise window.damage("corrupt-file", "the shard index has no weight_map from tensor names to file names")
        if len(weight_map) > _MAX_NAMES or len(set(weight_map.values())) > _MAX_SHARDS:
            raise window.damage("corrupt-file", f"the weight_map names more than {_MAX_SHARDS:,} files")
        if not weight_map:
            raise window.damage("corrupt-file", "the weight_map of the shard index is empty")
    problems: list[Problem] = []
    shards: list[str] = []
    for name in dict.fromkeys(weight_map.values()):
        if inside(name):
            shards.append(name)
        else:
            problems.append(
                Problem(
                    rule="corrupt-file",
                    severity="error",
                    message=f"the shard index names {name[:200]!r}, which is outside its folder; it was not read",
                    file=path,
                )
            )
    problems.extend(_numbering(path, shards))
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return ShardIndex(
        file=path,
        weight_map=weight_map,
        shards=tuple(shards),
        total_size=total if type(total) is int else None,
        problems=limit_problems(problems),
    )


def _numbering(path: str, shards: list[str]) -> list[Problem]:
    """Compare the k-of-n in the names with the names there are."""
    seen: dict[tuple[str, int, str], set[int]] = {}
    for name in shards:
        found = SHARD_NAME.fullmatch(name)
        if found:
            seen.setdefault((found[1], int(found[3]), found[4]), set()).add(int(found[2]))
    problems = []
    for (stem, count, suffix), numbers in seen.items():
        absent = count - len(numbers)
        if absent > 0:
            problems.append(
                Problem(
                    rule="index-mismatch",
                    severity="warning",
                    message=f"the shard index names {len(numbers):,} of the {count:,} shards {stem}-*-of-*{suffix}",
                    file=path,
                    blocking=False,
                )
            )
    return problems


def read_shards(index: ShardIndex, read: Callable[[str], FileIndex]) -> tuple[list[FileIndex], list[Problem]]:
    """Return the index of every shard that is there, through ``read``, and the shards that are missing as problems."""
    folder = os.path.dirname(index.file)
    found: list[FileIndex] = []
    problems: list[Problem] = []
    counts = Counter(index.weight_map.values())
    for name in index.shards:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            wanted = counts[name]
            problems.append(
                Problem(
                    rule="missing-shard",
                    severity="error",
                    message=f"the shard {name} is missing, and with it {wanted:,} tensors",
                    file=path,
                    evidence={"count": wanted},
                )
            )
            continue
        try:
            found.append(read(path))
        except Damage as damage:
            problems.append(damage.problem)
    return found, problems


def compare_index(index: ShardIndex, files: list[FileIndex]) -> tuple[list[FileIndex], list[Problem]]:
    """Return the files with only the tensors that the index takes from them, and every difference as a problem."""
    folder = os.path.dirname(index.file)
    problems: list[Problem] = []
    kept: list[FileIndex] = []

    def add(message: str, tensor: str | None, *, error: bool, **evidence: Any) -> None:
        problems.append(
            Problem(
                rule="index-mismatch",
                severity="error" if error else "warning",
                message=message,
                file=index.file,
                tensor=tensor,
                blocking=error,
                evidence=evidence,
            )
        )

    wanted: dict[str, list[str]] = {}
    for tensor, shard in index.weight_map.items():
        wanted.setdefault(shard, []).append(tensor)
    for file in files:
        name = os.path.relpath(file.file, folder or ".").replace(os.sep, "/")
        held = {entry.name for entry in file.tensors}
        for tensor in wanted.get(name, ()):
            if tensor not in held:
                add(f"the index says that {name} holds it, but it does not", tensor, error=True)
        chosen = []
        for entry in file.tensors:
            place = index.weight_map.get(entry.name)
            if place == name:
                chosen.append(entry)
            elif place is None:
                add(f"{name} holds it, but the index does not name it", entry.name, error=False)
        kept.append(replace(file, tensors=tuple(chosen)))
    if index.total_size is not None and not index.problems and len(files) == len(index.shards):
        _compare_size(index.total_size, kept, add)
    return kept, list(limit_problems(problems))


def _compare_size(total: int, files: list[FileIndex], add: Callable[..., None]) -> None:
    """Compare the declared bytes with the sum over tensors, and over storages, which differ where weights are tied."""
    by_name = sum(
        nbytes(entry.elements, entry.dtype) for file in files for entry in file.tensors if entry.dtype in BITS
    )
    used = [{piece.storage for entry in file.tensors for piece in entry.pieces} for file in files]
    by_storage = sum(file.storages[name].size for file, names in zip(files, used, strict=True) for name in names)
    if total not in (by_name, by_storage):
        add(
            f"the index declares {total:,} bytes, the shards hold {by_name:,}",
            None,
            error=False,
            declared=total,
            found=by_name,
        )
