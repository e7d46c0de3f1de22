"""The optimizer that a config names, and the state that it had before the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanprobe.config import CheckpointSpec, OptimizerSpec
from nanprobe.errors import UsageError
from nanprobe.inputs.factories import import_folder, one_line, resolve
from nanprobe.inputs.state_dict import read_optimizer_state
from nanprobe.nearest import suggestion

__all__ = ["MakeOptimizer", "build_optimizer", "like_optimizer", "optimizer_state"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes the optimizer of some parameters."""


def build_optimizer(spec: OptimizerSpec, folder: Path | None = None, target: Any = None) -> MakeOptimizer:
    """Return what makes the optimizer of ``spec``: a class of ``torch.optim`` by name, or any by import or file path.

    ``target`` is the class itself where it is known already.

    Operations are told apart by running one parameter at a time (``foreach=False``) unless the fused form is asked for,
    which rounds otherwise. UsageError when there is no such class, when it does not take the arguments, and when its
    step needs a closure.
    """
    target = target if target is not None else _class(spec.name, folder)
    try:
        known = set(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        known = set()
    kwargs = dict(spec.kwargs)
    if "foreach" in known and not kwargs.get("fused"):
        kwargs["foreach"] = False

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        made: Optimizer = target(list(parameters), **kwargs)
        return made

    try:
        trial = make([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:  # whatever the class makes of its arguments
        raise UsageError(f"`optimizer.kwargs`: {spec.name}: {one_line(error)}") from None
    if not isinstance(trial, Optimizer):
        raise UsageError(f"`optimizer.name`: {spec.name} makes a {type(trial).__name__}, not a torch.optim.Optimizer")
    if _needs_closure(trial):
        raise UsageError(f"`optimizer.name`: the step of {spec.name} needs a closure, which cannot be replayed")
    return make


def _class(name: str, folder: Path | None) -> Any:
    if ":" in name:
        with import_folder(folder or Path.cwd()):
            found = resolve(name, folder or Path.cwd(), "optimizer.name")
        if not callable(found):
            raise UsageError(f"`optimizer.name`: {name} is not callable but a {type(found).__name__}")
        return found
    short = name.removeprefix("torch.optim.")
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if short not in classes:
        raise UsageError(
            f"`optimizer.name`: torch.optim has no `{short}`; {suggestion(short, classes)}, or name one of your own as "
            "`file.py:Class`"
        )
    return classes[short]


def _needs_closure(optimizer: Optimizer) -> bool:
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def like_optimizer(live: Optimizer, model: nn.Module) -> tuple[MakeOptimizer, dict[int, dict[str, Any]] | None]:
    """Return what makes another optimizer like ``live``, and the state it has of the model's parameters by position.

    The settings are those of its first group. UsageError when its class cannot be called with them.
    """
    known = inspect.signature(type(live)).parameters
    group = live.param_groups[0] if live.param_groups else {}
    kwargs = {name: group[name] for name in known if name in group and name != "params"}
    make = build_optimizer(OptimizerSpec(name=type(live).__name__, kwargs=kwargs), target=type(live))
    parameters = [p for p in model.parameters() if p.requires_grad]
    state = {n: dict(live.state[p]) for n, p in enumerate(parameters) if p in live.state}
    return make, state or None


def optimizer_state(
    given: Any, checkpoint: CheckpointSpec | None, model: nn.Module
) -> tuple[dict[int, dict[str, Any]] | None, str | None]:
    """Return the optimizer's state by the number of the parameter, and a note about where it came from or why not.

    ``given`` is a bundle's ``optimizer`` (what ``Optimizer.state_dict()`` returns), which goes before the checkpoint's.
    State fits when there is an entry for each parameter that has one and all its tensors have the parameter's shape or
    no dimension. Without any the step starts afresh: (None, note or None).
    """
    where = "the bundle"
    if not isinstance(given, Mapping):
        given, where = (read_optimizer_state(checkpoint.path), "the checkpoint") if checkpoint is not None else ({}, "")
    found = _numbered(given)
    if not found:
        return None, None
    parameters = [p for p in model.parameters() if p.requires_grad]
    shapes = [tuple(p.shape) for p in parameters]
    if any(not _fits(state, shapes, number) for number, state in found.items()):
        return None, f"the optimizer state of {where} does not fit the parameters: the step starts afresh"
    return found, f"the optimizer state of {where} was taken"


def _numbered(given: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    """Return state by position: parameters are numbered in the order in which the groups list them."""
    state, groups = given.get("state"), given.get("param_groups")
    if not isinstance(state, Mapping):
        return {}
    listed: list[Any] = []
    for group in groups if isinstance(groups, (list, tuple)) else ():
        ids = group.get("params") if isinstance(group, Mapping) else None
        listed.extend(ids if isinstance(ids, (list, tuple)) else ())
    position = {key: number for number, key in enumerate(listed)}
    found: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        number = position.get(key, key)
        if isinstance(value, Mapping) and isinstance(number, int):
            found[number] = dict(value)
    return found


def _fits(state: Mapping[str, Any], shapes: list[tuple[int, ...]], number: int) -> bool:
    if not 0 <= number < len(shapes):
        return False
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(t.dim() == 0 or t.numel() <= 1 or tuple(t.shape) == shapes[number] for t in tensors)
