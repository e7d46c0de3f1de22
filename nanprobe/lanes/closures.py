"""Functions that remember the caller's modules, made to remember a lane's instead.

Copying a model copies its modules, and bound methods with them, but never a function: a hook such as
``lambda module, inputs, output: self.features.append(output)`` would go on writing to the caller's model, and a lambda
in an attribute would run the caller's layers. What such a function holds in its closure or its defaults and what was
copied along with the model is exchanged for the copy.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["rebind_functions"]


def rebind_functions(model: nn.Module, lane: nn.Module, copies: Mapping[int, Any]) -> None:
    """Rebind functions in attributes and hooks of ``lane``, the copy of ``model``.

    ``copies`` is the memo of the copying: the copy by the identity of what was copied.
    """
    originals = dict(model.named_modules())
    for path, module in lane.named_modules():
        theirs = originals[path].__dict__ if path in originals else {}
        for name, value in list(module.__dict__.items()):
            if isinstance(value, types.FunctionType):
                module.__dict__[name] = _rebound(value, copies)
            elif isinstance(value, dict | list) and value is not theirs.get(name):
                for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    if isinstance(item, types.FunctionType):
                        value[key] = _rebound(item, copies)


def _rebound(function: types.FunctionType, copies: Mapping[int, Any], depth: int = 0) -> types.FunctionType:
    """Return the function itself when it remembers nothing that was copied, else one that remembers the copies."""

    def own(value: Any) -> Any:
        if isinstance(value, types.FunctionType) and depth < _MAX_DEPTH:
            return _rebound(value, copies, depth + 1)
        if isinstance(value, types.MethodType) and id(value.__self__) in copies:
            return types.MethodType(value.__func__, copies[id(value.__self__)])
        return copies.get(id(value), value)

    cells = []
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            cells.append(cell)
            continue
        mine = own(held)
        cells.append(cell if mine is held else types.CellType(mine))
    defaults = tuple(own(value) for value in function.__defaults__ or ())
    named = {name: own(value) for name, value in (function.__kwdefaults__ or {}).items()}
    same = [
        *(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)),
        *(a is b for a, b in zip(defaults, function.__defaults__ or (), strict=True)),
        *(value is (function.__kwdefaults__ or {})[name] for name, value in named.items()),
    ]
    if all(same):
        return function
    closure = tuple(cells) or None
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, closure)
    twin.__kwdefaults__ = named or None
    twin.__dict__.update(function.__dict__)
    return twin


_MAX_DEPTH = 4
"""How many functions deep a closure inside a closure is followed; one that holds itself has no end."""
