"""The loss that a config names: a function, a class to instantiate, or a module; called as loss(output, batch)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nanprobe.config import LossSpec
from nanprobe.errors import UsageError
from nanprobe.inputs.factories import call_factory, import_folder, resolve

__all__ = ["build_loss", "checked_loss"]


def build_loss(spec: LossSpec, folder: Path) -> Callable[[Any, Any], Tensor]:
    """Return the loss of a config as a function of (output, batch) that gives a scalar tensor.

    A class is instantiated with ``kwargs``; a function gets them with every call. UsageError when it is not found, not
    callable, cannot take two arguments, raises while it is built, or returns no scalar tensor.
    """
    with import_folder(folder):
        target = resolve(spec.factory, folder, "loss.factory")
        if inspect.isclass(target):
            target = call_factory(target, spec.kwargs, "loss.factory", spec.factory)
        elif isinstance(target, nn.Module):
            if spec.kwargs:
                raise UsageError(f"`loss.kwargs`: {spec.factory} is a module already and takes none")
        elif spec.kwargs and callable(target):
            target = functools.partial(target, **spec.kwargs)
    if not callable(target):
        raise UsageError(f"`loss.factory`: {spec.factory} is not callable but a {type(target).__name__}")
    try:
        inspect.signature(target.forward if isinstance(target, nn.Module) else target).bind(None, None)
    except TypeError as error:
        raise UsageError(f"`loss.factory`: {spec.factory} is called as loss(output, batch): {error}") from None
    except ValueError:
        # Built-in functions have no signature to look at; the call itself will tell.
        pass
    return checked_loss(target, f"`loss.factory`: {spec.factory}")


def checked_loss(loss: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Tensor]:
    """Return ``loss`` with a check of what it returns: UsageError, naming the loss, when that is no scalar tensor.

    A tensor of one element counts as a scalar and is returned with no dimensions.
    """

    def call(output: Any, batch: Any) -> Tensor:
        value = loss(output, batch)
        if not isinstance(value, Tensor):
            raise UsageError(f"{name} returned a {type(value).__name__}, expected a scalar tensor")
        if value.numel() != 1:
            raise UsageError(f"{name} returned a tensor of shape {list(value.shape)}, expected a scalar")
        if not value.is_floating_point():
            raise UsageError(f"{name} returned a scalar of type {value.dtype}, expected a floating-point one")
        return value.reshape(()) if value.dim() else value

    return call
