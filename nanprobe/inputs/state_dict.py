"""Which tensors of a checkpoint are the model's state dict: under which key they lie, and without which prefix."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from nanprobe.checkpoints import CheckpointIndex, Problem, TensorEntry, index_weights
from nanprobe.checkpoints.inert import Foreign, InertDict
from nanprobe.checkpoints.trees import mapping
from nanprobe.checkpoints.walk import children, join_name
from nanprobe.errors import UsageError
from nanprobe.inputs.mapped import TensorSource
from nanprobe.nearest import suggestion

__all__ = ["WRAPPERS", "StateDict", "read_optimizer_state", "read_state_dict"]

WRAPPERS: tuple[str, ...] = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
)
"""Keys under which training scripts keep the state dict, in the order in which they are tried."""

_NOT_WEIGHTS = ("optim", "lr", "sched", "scaler", "rng", "amp", "ema", "random", "callback", "loop", "epoch", "step")
"""Beginnings of keys that hold something else than the model's weights."""

_MAX_WRAPPERS = 3


class StateDict(dict[str, torch.Tensor]):
    """A state dict with where it comes from.

    ``path`` is the checkpoint as given, ``key`` the dotted key it lay under ("" for the root), ``notes`` what was
    decided without being asked to, ``mapped`` the address and bytes of each storage that is mapped from a file, and
    ``_metadata`` the module versions that ``load_state_dict`` looks for.
    """

    def __init__(self, items: dict[str, torch.Tensor], path: str) -> None:
        super().__init__(items)
        self.path = path
        self.key = ""
        self.notes: tuple[str, ...] = ()
        self.mapped: dict[int, int] = {}
        self._metadata: dict[str, dict[str, int]] = {}


def read_state_dict(
    path: str | os.PathLike[str], *, key: str | None = None, strip_prefix: str | None = None
) -> StateDict:
    """Return the tensors of the checkpoint at ``path`` (a file, an index or a folder) by name, mapped privately.

    ``key`` is the dotted place of the state dict in the file; None looks for the usual ones, "" takes the root.
    ``strip_prefix`` is taken off every name that begins with it. Nothing in the file is executed. Every call maps the
    files anew: what is written to the tensors of one call is seen by no other and never reaches the file.
    UsageError when the checkpoint is missing or damaged, or the key or the prefix is not there.
    """
    index = index_weights(path)
    _refuse_blocking(problem for problem in index.problems if problem.tensor is None)
    if not index.tensors:
        _refuse_blocking(index.problems)
        raise UsageError(f"checkpoint {index.path} holds no tensors")
    prefix, notes = _place(index, key)
    chosen = [entry for entry in index.tensors if entry.path[: len(prefix)] == prefix and entry.persistent]
    if any(entry.path == prefix for entry in chosen):
        where = f"key {join_name(prefix)!r} of " if prefix else ""
        raise UsageError(f"{where}checkpoint {index.path} is a single tensor and no state dict")
    named: dict[str, TensorEntry] = {}
    for entry in chosen:
        named.setdefault(join_name(entry.path[len(prefix) :]), entry)
    if strip_prefix:
        named = _stripped(named, strip_prefix, index.path)
    used = {entry.name for entry in named.values()}
    known = {entry.name for entry in index.tensors}
    _refuse_blocking(problem for problem in index.problems if problem.tensor in used or problem.tensor not in known)
    source = TensorSource(index)
    result = StateDict({name: source.tensor(entry) for name, entry in named.items()}, index.path)
    result.key = join_name(prefix)
    result.notes = notes
    result.mapped = source.mapped
    result._metadata = _versions(index, prefix)
    return result


def read_optimizer_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the optimizer's state that a training checkpoint holds beside the weights, as ``state_dict()`` has it.

    {"state": {number: {name: tensor or number}}, "param_groups": [{"params": [numbers]}]}; empty when there is none.
    Nothing in the file is executed.
    """
    index = index_weights(path)
    prefixes = dict.fromkeys(
        entry.path[: at + 1]
        for entry in index.tensors
        for at, part in enumerate(entry.path[:-2])
        if part == "state" and type(entry.path[at + 1]) is int
    )
    if len(prefixes) != 1:
        return {}
    (prefix,) = prefixes
    source = TensorSource(index)
    state: dict[Any, dict[str, Any]] = {}
    for entry in index.tensors:
        if entry.path[: len(prefix)] == prefix and len(entry.path) == len(prefix) + 2:
            state.setdefault(entry.path[-2], {})[str(entry.path[-1])] = source.tensor(entry)
    for tree in index.trees.values():
        for number, values in state.items():
            for name, value in mapping(_node(tree, (*prefix, number))).items():
                if isinstance(name, str) and type(value) in (int, float):
                    values.setdefault(name, value)
        groups = _node(tree, (*prefix[:-1], "param_groups"))
        if isinstance(groups, (list, tuple)):
            return {"state": state, "param_groups": [_plain_group(mapping(group)) for group in groups]}
    return {"state": state, "param_groups": []}


def _plain_group(group: dict[Any, Any]) -> dict[str, Any]:
    """Return a parameter group's plain settings and its lists of numbers and names."""
    plain = {
        key: value for key, value in group.items() if isinstance(key, str) and isinstance(value, (int, float, str))
    }
    lists = {key: list(group[key]) for key in ("params", "param_names") if isinstance(group.get(key), (list, tuple))}
    return {**plain, **lists}


def _refuse_blocking(problems: Iterable[Problem]) -> None:
    blocking = [problem for problem in problems if problem.blocking]
    if blocking:
        first = blocking[0]
        tensor = f"tensor {first.tensor!r}: " if first.tensor else ""
        more = f" (and {len(blocking) - 1} more such problems)" if len(blocking) > 1 else ""
        raise UsageError(f"checkpoint {first.file} cannot be used: {tensor}{first.message}{more}")


def _place(index: CheckpointIndex, key: str | None) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return the path of the state dict in the file's tree, and what to say about how it was found."""
    if key is not None:
        return (_resolve(index, key) if key else ()), ()
    prefix: tuple[Any, ...] = ()
    for _ in range(_MAX_WRAPPERS):
        if any(isinstance(_node(tree, prefix), Foreign) for tree in index.trees.values()):
            break
        inner = _wrapper(index, prefix)
        if inner is None:
            break
        prefix = (*prefix, inner)
    if not prefix:
        return (), ()
    return prefix, (f"took the state dict under the key `{join_name(prefix)}`; set `checkpoint.key` for another",)


def _wrapper(index: CheckpointIndex, prefix: tuple[Any, ...]) -> Any:
    """Return the key below ``prefix`` that wraps the state dict, None when the tensors there are the state dict."""
    depth = len(prefix)
    inner: Counter[Any] = Counter()
    direct = 0
    for entry in index.tensors:
        if entry.path[:depth] == prefix:
            if len(entry.path) > depth + 1:
                inner[entry.path[depth]] += 1
            else:
                direct += 1
    for name in WRAPPERS:
        if name in inner:
            return name
    rest = [name for name in inner if not str(name).lower().startswith(_NOT_WEIGHTS)]
    return rest[0] if len(rest) == 1 and len(inner) > 1 and not direct else None


def _resolve(index: CheckpointIndex, key: str) -> tuple[Any, ...]:
    """Return the path whose keys, joined by dots, read ``key``."""
    for entry in index.tensors:
        if entry.name == key or entry.name.startswith(f"{key}."):
            for length in range(1, len(entry.path) + 1):
                if join_name(entry.path[:length]) == key:
                    return entry.path[:length]
    groups = dict.fromkeys(
        join_name(entry.path[:length]) for entry in index.tensors for length in range(1, min(len(entry.path), 4))
    )
    tail = suggestion(key, groups) if groups else "its tensors lie at the root, so leave `key` out"
    raise UsageError(f"checkpoint {index.path} has no tensors under the key {key!r}: {tail}")


def _stripped(named: dict[str, TensorEntry], prefix: str, path: str) -> dict[str, TensorEntry]:
    matching = [name for name in named if name.startswith(prefix) and len(name) > len(prefix)]
    if not matching:
        starts = dict.fromkeys(name.split(".", 1)[0] + "." for name in named if "." in name)
        tail = suggestion(prefix, starts)
        raise UsageError(f"no key of checkpoint {path} begins with the strip_prefix {prefix!r}: {tail}")
    if not prefix.endswith(".") and all(name[len(prefix)] == "." for name in matching):
        prefix += "."
    result: dict[str, TensorEntry] = {}
    for name, entry in named.items():
        short = name.removeprefix(prefix) or name
        if short in result:
            raise UsageError(f"stripping {prefix!r} gives checkpoint {path} two keys {short!r}")
        result[short] = entry
    return result


def _node(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the object at ``path`` of a file's tree, None when there is none."""
    node = tree
    while path:
        for keys, child, _ in children(node):
            if path[: len(keys)] == keys:
                node, path = child, path[len(keys) :]
                break
        else:
            return None
    return node


def _versions(index: CheckpointIndex, prefix: tuple[Any, ...]) -> dict[str, dict[str, int]]:
    """Return the versions of modules that a saved state dict carries, so that old ones are upgraded on loading."""
    for tree in index.trees.values():
        node = _node(tree, prefix)
        state = node.state if isinstance(node, InertDict) else None
        metadata = state.get("_metadata") if isinstance(state, dict) else None
        if isinstance(metadata, dict):
            return {
                name: {key: value for key, value in local.items() if isinstance(key, str) and type(value) is int}
                for name, local in metadata.items()
                if isinstance(name, str) and isinstance(local, dict)
            }
    return {}
