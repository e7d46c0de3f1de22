"""Names for the tensors of an object tree: dictionary keys, list positions and module attributes, joined by dots.

Shared and self-containing objects are legal in a pickle, and a few bytes can describe a tree of exponential size;
the walk visits a container again only within a budget, and says when it had to stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nanprobe.checkpoints.inert import Foreign, TensorValue
from nanprobe.checkpoints.numpy_values import array_value, is_array

__all__ = ["Found", "WalkResult", "children", "join_name", "walk"]

MAX_DEPTH = 100
_MAX_NAME = 4096
_REVISITS = 10_000
_MAX_NAMES_LENGTH = 1 << 26
_MAX_TENSORS = 250_000


@dataclass(slots=True)
class Found:
    """A tensor, the keys that lead to it, and whether a module would save it (False for non-persistent buffers)."""

    path: tuple[Any, ...]
    name: str
    value: TensorValue
    persistent: bool


@dataclass(slots=True)
class WalkResult:
    """Every tensor found, and why the list is not complete, if it is not."""

    tensors: list[Found] = field(default_factory=list)
    incomplete: str | None = None


def join_name(path: tuple[Any, ...]) -> str:
    """Return the tensor's name for a path: ("state_dict", "fc.weight") is "state_dict.fc.weight"."""
    return ".".join(part if isinstance(part, str) else _segment(part) for part in path)


def _segment(key: Any) -> str:
    return str(key) if isinstance(key, (int, float, bool, str)) or key is None else f"<{type(key).__name__}>"


def children(node: Any) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    """Yield (key path, child, persistent) of a container; nothing for a leaf.

    A module's parameters, buffers and children appear under their own names, as in ``state_dict()``.
    """
    if isinstance(node, dict):
        for key, value in node.items():
            yield (key,), value, True
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield (index,), value, True
    elif isinstance(node, Foreign) and node.class_name.endswith(".DTensor"):
        # What a process holds of a distributed tensor goes by the tensor's own name; its mesh is no data.
        for keys, value, _ in _attributes(node.state):
            if keys == ("_local_tensor",):
                yield (), value, True
    elif isinstance(node, Foreign):
        yield from _attributes(node.state)
        if isinstance(node.args, (list, tuple)):
            for index, value in enumerate(node.args):
                yield ("args", index), value, True
        if node.items:
            for index, value in enumerate(node.items):
                yield (index,), value, True
        if node.pairs:
            for key, value in node.pairs.items():
                yield (key,), value, True


def _attributes(state: Any) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
    if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
        for part in state:
            yield from _attributes(part)
        return
    if not isinstance(state, dict):
        if state is not None:
            yield ("state",), state, True
        return
    transient = state.get("_non_persistent_buffers_set")
    dropped = {key for key in transient if isinstance(key, str)} if isinstance(transient, (list, tuple)) else set()
    is_module = "_parameters" in state and "_modules" in state
    for key, value in state.items():
        if is_module and key in ("_parameters", "_buffers", "_modules") and isinstance(value, dict):
            for name, child in value.items():
                yield (name,), child, key != "_buffers" or name not in dropped
        else:
            yield (key,), value, not is_module


def walk(root: Any) -> WalkResult:
    """Return every tensor below ``root``, in the order of the file."""
    result = WalkResult()
    done: set[int] = set()
    active: set[int] = set()
    revisits = 0
    spent = 0
    arrays: dict[int, TensorValue | None] = {}
    stack: list[tuple[Any, tuple[Any, ...], bool, Iterator[tuple[tuple[Any, ...], Any, bool]]]] = []

    def enter(node: Any, path: tuple[Any, ...], persistent: bool) -> None:
        nonlocal revisits, spent
        if isinstance(node, Foreign) and is_array(node):
            if id(node) not in arrays:
                arrays[id(node)] = array_value(node, len(arrays))
            node = arrays[id(node)]
        if isinstance(node, TensorValue):
            name = join_name(path)
            spent += len(name)
            if len(name) > _MAX_NAME or spent > _MAX_NAMES_LENGTH:
                result.incomplete = "tensor names are longer than the limit"
            else:
                result.tensors.append(Found(path, name, node, persistent))
            return
        if not isinstance(node, (dict, list, tuple, Foreign)) or id(node) in active:
            return
        if len(stack) >= MAX_DEPTH:
            result.incomplete = f"objects are nested deeper than {MAX_DEPTH} levels"
            return
        if id(node) in done:
            revisits += 1
            if revisits > _REVISITS:
                result.incomplete = "objects refer to each other too often to list every path"
                return
        active.add(id(node))
        stack.append((node, path, persistent, children(node)))

    enter(root, (), True)
    while stack and len(result.tensors) < _MAX_TENSORS:
        node, path, persistent, rest = stack[-1]
        for keys, child, kept in rest:
            if isinstance(child, (TensorValue, dict, list, tuple, Foreign)):
                enter(child, path + keys, persistent and kept)
                if len(result.tensors) >= _MAX_TENSORS:
                    result.incomplete = f"there are {_MAX_TENSORS:,} or more"
                    break
                if stack[-1][0] is not node or stack[-1][3] is not rest:
                    break
        else:
            stack.pop()
            active.discard(id(node))
            done.add(id(node))
    return result
