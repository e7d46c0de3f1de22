"""Finding and replacing the tensors inside the nested values that modules take and return.

Looks into tuples, lists, dicts and other mappings (``ModelOutput`` among them), named tuples (packed sequences),
dataclasses, and plain objects with attributes (key-value caches). Paths are written as a reader would: ``0.mask``,
``logits``, ``past_key_values.layers.3.keys``; the path of a bare tensor is "".
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

__all__ = ["is_wrapper", "map_tensors", "named_tensors", "uninspected"]

_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, torch.Size, type, types.ModuleType),
)
_MAX_DEPTH = 24


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the (name, child) pairs of a container, None for a value that is no container we can look into."""
    if isinstance(value, (torch.nn.Module, *_PLAIN)):
        return None
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, (tuple, list)):
        return [(str(position), child) for position, child in enumerate(value)]
    if isinstance(value, Set):
        return [(str(position), child) for position, child in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not callable(value):
        return [(name, child) for name, child in attributes.items() if not name.startswith("__")]
    return None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor runs Python code at every operation and may have no memory of its own to look at."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def _inner(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of what a wrapper holds, as it says itself; nothing where it does not say."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten is not None else []
    return [(name, held) for name in names if isinstance(held := getattr(tensor, name, None), torch.Tensor)]


def named_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor inside ``value``, each tensor object once, in order of appearance.

    Of a tensor that wraps others (jagged, distributed, quantised by a library), those others.
    """
    if isinstance(value, torch.Tensor) and not is_wrapper(value):
        yield prefix, value
        return
    seen: set[int] = set()

    def walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(node, torch.Tensor):
            if id(node) not in seen and depth <= _MAX_DEPTH:
                seen.add(id(node))
                if not is_wrapper(node):
                    yield path, node
                    return
                for name, held in _inner(node):
                    yield from walk(held, f"{path}.{name}" if path else name, depth + 1)
            return
        children = _children(node)
        if not children or depth > _MAX_DEPTH or id(node) in seen:
            return
        seen.add(id(node))
        for name, child in children:
            yield from walk(child, f"{path}.{name}" if path else name, depth + 1)

    yield from walk(value, prefix, 0)


def uninspected(value: Any) -> str | None:
    """Name the type of a value that may hold numbers but could not be looked into; None when there is nothing to miss.

    A value counts as looked into when a tensor was found in it or when it is made of plain Python values alone.
    """
    if isinstance(value, torch.Tensor):
        return type(value).__qualname__ if is_wrapper(value) and not _inner(value) else None
    if isinstance(value, _PLAIN):
        return None
    children = _children(value)
    if children is None:
        return type(value).__qualname__
    if next(named_tensors(value), None) is not None:
        return None
    for _, child in children:
        hidden = None if _children(child) == [] else uninspected(child)
        if hidden is not None:
            return hidden
    return None


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``; containers are rebuilt, never changed.

    One tensor object that appears twice is replaced by one result. Objects that are no container are kept as they are;
    plain objects with tensors in their attributes are copied shallowly, level by level.
    """
    done: dict[int, Any] = {}

    def walk(node: Any, depth: int) -> Any:
        if id(node) in done:
            return done[id(node)]
        if isinstance(node, torch.Tensor):
            result: Any = function(node)
        elif isinstance(node, _PLAIN) or depth > _MAX_DEPTH:
            return node
        else:
            result = rebuild(node, depth)
        done[id(node)] = result
        return result

    def rebuild(node: Any, depth: int) -> Any:
        children = _children(node)
        if children is None or isinstance(node, Set):
            return node
        if next(named_tensors(node), None) is None:
            return copy.copy(node) if isinstance(node, (list, dict)) else node
        replaced = [walk(child, depth + 1) for _, child in children]
        if isinstance(node, tuple):
            return type(node)(*replaced) if hasattr(node, "_fields") else type(node)(replaced)
        if isinstance(node, list):
            return type(node)(replaced)
        result = copy.copy(node)
        if isinstance(node, Mapping):
            for key, child in zip(list(node.keys()), replaced, strict=True):
                result[key] = child
            return result
        for (name, _), child in zip(children, replaced, strict=True):
            object.__setattr__(result, name, child)
        return result

    return walk(value, 0)
