"""The optimizer that a config names, and the state that it had before the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanprobe.checkpoints.optimizer_ids import names_of_ids
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
    if not isinstance(trial, Optimizer) or not callable(getattr(trial, "step", None)):
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
    step = getattr(type(optimizer), "step", None)
    if not callable(step):
        return False
    closure = inspect.signature(inspect.unwrap(step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def like_optimizer(live: Optimizer, model: nn.Module) -> tuple[MakeOptimizer, dict[str, dict[str, Any]] | None]:
    """Return what makes another optimizer like ``live``, and the state it has of the model's parameters by name.

    The settings are those of its first group. UsageError when its class cannot be called with them.
    """
    known = inspect.signature(type(live)).parameters
    group = live.param_groups[0] if live.param_groups else {}
    kwargs = {name: group[name] for name in known if name in group and name != "params"}
    make = build_optimizer(OptimizerSpec(name=type(live).__name__, kwargs=kwargs), target=type(live))
    state = {name: dict(live.state[p]) for name, p in model.named_parameters() if p in live.state}
    return make, state or None


def optimizer_state(
    given: Any, checkpoint: CheckpointSpec | None, model: nn.Module, make: MakeOptimizer
) -> tuple[dict[str, dict[str, Any]] | None, str | None]:
    """Return the optimizer's state by the parameter's name, and a note about where it came from or why not.

    ``given`` is a bundle's ``optimizer`` (what ``Optimizer.state_dict()`` returns), which goes before the checkpoint's.
    State fits when every entry belongs to one parameter for certain and holds what the optimizer of ``make`` keeps, in
    the parameter's shape. Without any the step starts afresh: (None, note or None).
    """
    where = "the bundle"
    if not isinstance(given, Mapping):
        given, where = (read_optimizer_state(checkpoint.path), "the checkpoint") if checkpoint is not None else ({}, "")
    state = given.get("state")
    if not isinstance(state, Mapping) or not state:
        return None, None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    names = _names(given, state, model)
    expected = _kept_by(make)
    entries = {names[key]: dict(value) for key, value in state.items() if key in names and isinstance(value, Mapping)}
    if len(entries) < len(state) or not all(_fits(entry, shapes[name], expected) for name, entry in entries.items()):
        return None, f"the optimizer state of {where} does not fit the parameters: the step starts afresh"
    return entries, f"the optimizer state of {where} was taken"


def _names(given: Mapping[Any, Any], state: Mapping[Any, Any], model: nn.Module) -> dict[Any, str]:
    """Return the parameter's name by the number that it has in a saved state; numbers that cannot be told are left out.

    One group that lists as many numbers as the model has parameters, or trainable ones, lists them in their order.
    """
    groups = given.get("param_groups")
    groups = list(groups) if isinstance(groups, (list, tuple)) else []
    listed = [g.get("params") if isinstance(g, Mapping) else None for g in groups]
    ids = listed[0] if len(listed) == 1 else None
    every = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    trainable = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if isinstance(ids, (list, tuple)) and all(type(key) is int for key in ids) and len(set(ids)) == len(ids):
        for candidates in (trainable, every):
            if len(candidates) == len(ids):
                return {key: name for key, (name, _) in zip(ids, candidates, strict=True)}
    moments: dict[Hashable, tuple[int, ...]] = {}
    for key, value in state.items():
        tensors = [t for t in value.values() if isinstance(t, torch.Tensor)] if isinstance(value, Mapping) else []
        if tensors:
            moments[key] = tuple(max(tensors, key=torch.Tensor.dim).shape)
    return {key: name for key, name in names_of_ids(groups, moments, trainable, ordered=True).items() if key in state}


def _kept_by(make: MakeOptimizer) -> dict[str, tuple[int, ...] | None]:
    """Return what an optimizer keeps of a parameter of shape [2, 2]: shapes of tensors, None for others.

    Nothing where its step raises: the replay will say so.
    """
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = make([parameter])
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer.step()
    except Exception:  # the optimizer's own
        return {}
    kept = optimizer.state.get(parameter, {})
    return {key: tuple(v.shape) if isinstance(v, torch.Tensor) else None for key, v in kept.items()}


def _fits(entry: Mapping[str, Any], shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...] | None]) -> bool:
    """Whether an entry holds all that is expected: tensors of the parameter's shape where those are, else numbers."""
    for key, wanted in expected.items():
        value = entry.get(key)
        if wanted == (2, 2):
            if not (isinstance(value, torch.Tensor) and value.layout is torch.strided and value.shape == shape):
                return False
        elif wanted == () and not (isinstance(value, (int, float)) or _is_scalar(value)):
            return False
    return True


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
