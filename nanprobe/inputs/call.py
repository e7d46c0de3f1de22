"""How a batch becomes the arguments of the model's forward, checked against its signature before anything runs.

A mapping becomes keyword arguments, a list or tuple positional ones, anything else a single argument; ``call`` in the
config says otherwise where a model wants its batch whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from nanprobe.errors import UsageError
from nanprobe.nearest import nearest

__all__ = ["Call", "bind", "left_to_the_loss"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """The arguments that the model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def bind(model: nn.Module, value: Any, call: str = "auto", *, targets: bool = False) -> Call:
    """Return the batch as arguments of ``model``; ``call`` is "auto", "kwargs", "args" or "single".

    ``targets`` says that a loss gets the whole batch as well: under "auto", what the model's forward has no place for
    is then left to the loss, positional arguments from the end and names unlike any that it takes.
    UsageError, naming the argument, when the batch does not have the shape that ``call`` wants or the model's forward
    does not take it.
    """
    bound = _arrange(value, call)
    if targets and call == "auto":
        bound = _without_targets(model, bound)
    _check(model, bound)
    return bound


def left_to_the_loss(model: nn.Module, value: Any, call: str = "auto") -> str | None:
    """Return a sentence about the parts of a batch that only the loss takes, None when the model takes all."""
    if call != "auto":
        return None
    whole, taken = _arrange(value, call), bind(model, value, call, targets=True)
    names = [name for name in whole.kwargs if name not in taken.kwargs]
    if names:
        return f"only the loss gets {', '.join(f'`{name}`' for name in names)}, which the model's forward does not take"
    if len(taken.args) == len(whole.args):
        return None
    first, whole_count = len(taken.args), len(whole.args)
    return f"the model is called with the first {first} of the batch's {whole_count} fields, the loss gets all"


def _without_targets(model: nn.Module, call: Call) -> Call:
    """Return the call without what the model's forward has no place for; as it is where nothing would be left."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return call
    kinds = {p.kind for p in parameters}
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    args, kwargs = call.args, dict(call.kwargs)
    if inspect.Parameter.VAR_POSITIONAL not in kinds and places:
        args = args[:places]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        # A name that is nearly one of the model's is a slip of the pen, and told as such.
        kwargs = {n: value for n, value in kwargs.items() if n in names or nearest(n, list(names)) is not None}
    return Call(args=args, kwargs=kwargs) if args or kwargs else call


def _arrange(value: Any, call: str) -> Call:
    positional = isinstance(value, list | tuple) and not isinstance(value, PackedSequence)
    if call == "auto":
        call = "kwargs" if isinstance(value, Mapping) else "args" if positional else "single"
    if call == "kwargs":
        if not isinstance(value, Mapping):
            raise UsageError(f"batch: `call: kwargs` needs a mapping, the batch is a {type(value).__name__}")
        for key in value:
            if not isinstance(key, str):
                raise UsageError(
                    f"batch: the key {key!r} is no text and cannot name an argument; "
                    "write `call: single` to pass the mapping as one argument"
                )
        return Call(kwargs=dict(value))
    if call == "args":
        if not positional:
            raise UsageError(f"batch: `call: args` needs a list or tuple, the batch is a {type(value).__name__}")
        return Call(args=tuple(value))
    return Call(args=(value,))


def _check(model: nn.Module, call: Call) -> None:
    """Raise UsageError when the forward of ``model`` does not take these arguments, naming the one that is wrong."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise UsageError(_complaint(type(model).__name__, signature, call, str(error))) from None


def _complaint(model: str, signature: inspect.Signature, call: Call, fallback: str) -> str:
    parameters = signature.parameters
    takes = f"{model}.forward takes {', '.join(map(str, parameters.values())) or 'nothing'}"
    positional = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    whole = "; `call: single` passes the batch as one argument" if len(positional) == 1 else ""
    var_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    var_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    unknown = [name for name in call.kwargs if name not in named]
    if unknown and not var_keyword:
        close = nearest(unknown[0], named)
        hint = f"did you mean `{close}`? " if close else ""
        return f"batch: the model takes no argument `{unknown[0]}`; {hint}{takes}{whole}"
    if len(call.args) > len(positional) and not var_positional:
        return f"batch: {len(call.args)} positional arguments are too many; {takes}{whole}"
    given = set(positional[: len(call.args)]) | set(call.kwargs)
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        if required and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and name not in given:
            has = ", ".join(f"`{key}`" for key in call.kwargs) or f"{len(call.args)} positional"
            has = f"the batch has {has}" if call.kwargs or call.args else "the batch is empty"
            return f"batch: the model needs the argument `{name}`, {has}; {takes}{whole}"
    return f"batch: {fallback}; {takes}"
