"""Looking into the inert object tree of a file: attributes of stand-ins, numbers, sizes, paths."""

from __future__ import annotations

from typing import Any

from nanprobe.checkpoints.inert import Foreign, Global
from nanprobe.checkpoints.strides import impossible

__all__ = ["attribute", "class_of", "count", "mapping", "sizes", "text"]

_MAX_INTEGER = (1 << 63) - 1


def mapping(node: Any) -> dict[Any, Any]:
    """Return the items of a dictionary, or the attributes of a stand-in, as a dictionary; empty for all else."""
    if isinstance(node, dict):
        return node
    if isinstance(node, Foreign):
        if isinstance(node.state, dict):
            return node.state
        if isinstance(node.state, tuple) and len(node.state) == 2:
            merged: dict[Any, Any] = {}
            for part in node.state:
                if isinstance(part, dict):
                    merged.update(part)
            return merged
        if node.pairs is not None:
            return node.pairs
    return {}


def attribute(node: Any, *names: Any) -> Any:
    """Return what the keys or attributes ``names`` lead to, one after the other; None when one is missing."""
    for name in names:
        node = node[name] if isinstance(node, (list, tuple)) and _fits(node, name) else mapping(node).get(name)
    return node


def _fits(node: list[Any] | tuple[Any, ...], name: Any) -> bool:
    return type(name) is int and 0 <= name < len(node)


def class_of(node: Any) -> str:
    """Return the last part of the name of a stand-in's class, "" for anything else."""
    if isinstance(node, Foreign):
        return node.class_name.rpartition(".")[2]
    return node.name.rpartition(".")[2] if isinstance(node, Global) else ""


def text(value: Any) -> str | None:
    """Return ``value`` when it is a text, else None."""
    return value if isinstance(value, str) else None


def count(value: Any) -> int | None:
    """Return ``value`` when it is a number that counts something, else None."""
    return value if type(value) is int and 0 <= value <= _MAX_INTEGER else None


def sizes(value: Any) -> tuple[int, ...] | None:
    """Return a shape (a tuple, a list or a ``torch.Size``) as a tuple, None when it is none, or an impossible one."""
    if isinstance(value, Foreign) and value.class_name == "torch.Size":
        value = value.args[0] if isinstance(value.args, tuple) and value.args else ()
    if not isinstance(value, (tuple, list)) or len(value) > 64:
        return None
    if not all(count(part) is not None for part in value):
        return None
    return None if impossible(tuple(value)) else tuple(value)
