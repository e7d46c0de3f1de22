"""A lane's own copy of the model: module objects of its own, weights shared until somebody writes to them.

Models keep state in attributes (an auxiliary loss, a cache), so every lane needs its own module objects; their weights
would cost a copy each, so FP32 weights are copy-on-write clones: they share memory, and a lane that writes to one (a
``max_norm`` embedding, a clamp in ``forward``) gets its own copy at that moment without the others noticing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nanprobe.errors import UsageError
from nanprobe.lanes.closures import rebind_functions
from nanprobe.numerics.tree import named_tensors

__all__ = ["LaneModel", "copy_model", "kept_paths"]

_NO_TENSORS = (str, int, float, bool, type(None))

Weights = Callable[[], Mapping[str, torch.Tensor]]


class LaneModel:
    """A copied model, its modules by path, and what could not be copied.

    ``kept`` are the paths of the outermost modules that stay in FP32. ``split`` holds, by name, the parameters that
    are one in the original and two here: tied between a kept module and another.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: tuple[str, ...],
        notes: tuple[str, ...],
        split: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        self.model = model
        self.kept = kept
        self.notes = notes
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._split = split

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients by the names that the parameters have in the original; those split in two added up."""
        split = {id(part) for parts in self._split.values() for part in parts}
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in split and parameter.grad is not None:
                found[name] = parameter.grad
        for name, parts in self._split.items():
            gradients = [part.grad for part in parts if part.grad is not None]
            if gradients:
                found[name] = sum((gradient.float() for gradient in gradients[1:]), gradients[0].float())
        return found


def kept_paths(model: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of the outermost modules that match one of the ``keep_fp32`` patterns (fnmatch).

    Raises UsageError when a pattern matches no module.
    """
    paths = [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UsageError(f"keep_fp32: the pattern {pattern!r} matches no module of the model")
    matching = [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]
    return tuple(
        path for path in matching if not any(path.startswith(f"{other}.") or other == "" != path for other in matching)
    )


class _Fresh:
    """The checkpoint's tensors by name, mapped when the first one is asked for."""

    def __init__(self, weights: Weights | None) -> None:
        self._weights = weights
        self._mapped: Mapping[str, torch.Tensor] | None = None

    def get(self, name: str) -> torch.Tensor | None:
        if self._weights is None:
            return None
        if self._mapped is None:
            self._mapped = self._weights()
        return self._mapped.get(name)


def _share(name: str, tensor: torch.Tensor, fresh: _Fresh) -> torch.Tensor:
    """Return a tensor with the values of ``tensor`` that can be written to without changing it.

    A copy-on-write clone where the storage allows it; for file-backed weights a mapping of their own from ``fresh``;
    else a plain copy.
    """
    detached = tensor.detach()
    if type(detached) is not torch.Tensor or detached.layout is not torch.strided or detached.is_meta:
        return detached.clone()
    try:
        return torch._lazy_clone(detached)
    except RuntimeError:
        again = fresh.get(name)
        if again is not None and again.shape == tensor.shape and again.dtype == tensor.dtype:
            return again
        return detached.clone()


def _parameter(values: torch.Tensor, original: nn.Parameter) -> nn.Parameter:
    """Return a parameter that is treated as ``original`` is: trained or not, and with its gradient hooks.

    What runs after a gradient has been accumulated is left out: it is an optimizer's business.
    """
    parameter = nn.Parameter(values, requires_grad=original.requires_grad)
    hooks: Mapping[int, Any] = getattr(original, "_backward_hooks", None) or {}
    for hook in hooks.values():
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return parameter


def _loose_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors held in attributes that ``copy.deepcopy`` refuses: results of a graph, not leaves."""
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules") or isinstance(value, _NO_TENSORS):
            continue
        for _, tensor in named_tensors(value):
            if not tensor.is_leaf:
                yield tensor


def _copyable(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # whatever a user's __deepcopy__ or pickle support raises means the same: not copyable
        return False
    return True


def copy_model(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep_fp32: tuple[str, ...] = (),
    weights: Weights | None = None,
) -> LaneModel:
    """Copy ``model`` for one lane; ``dtype`` converts it as ``model.half()`` does, None leaves it as it is.

    Modules that match ``keep_fp32`` keep their original parameters and buffers. ``weights`` maps the state dict from
    its file afresh; it is called at most once, for weights that live in a file mapping. Attributes that cannot be
    copied are shared with the model and named in ``notes``.
    """
    kept = kept_paths(model, keep_fp32)
    fresh = _Fresh(weights)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = _parameter(_share(name, parameter, fresh), parameter)
    for buffer in model.buffers():
        if type(buffer) is torch.Tensor:
            memo[id(buffer)] = buffer.detach().clone()
    for module in model.modules():
        for tensor in _loose_tensors(module):
            memo[id(tensor)] = tensor.detach().clone()
    notes: list[str] = []
    try:
        lane = copy.deepcopy(model, memo)
    except Exception:  # a lock, a generator, an open file somewhere: find which, and share it
        clean = {key: value for key, value in memo.items() if isinstance(value, torch.Tensor)}
        for path, module in model.named_modules():
            for name, value in module.__dict__.items():
                if name not in ("_parameters", "_buffers", "_modules") and not _copyable(value, clean):
                    clean[id(value)] = value
                    notes.append(
                        f"{path}.{name}".lstrip(".") + f" ({type(value).__qualname__}) is shared between lanes"
                    )
        lane = copy.deepcopy(model, clean)
        memo = clean
    _own_scripted(model, lane, memo)
    rebind_functions(model, lane, memo)
    split: dict[str, list[nn.Parameter]] = {}
    if dtype is not None:
        # As half() and bfloat16() do, which leave complex numbers as they are; to() would drop their imaginary part.
        convert: Any = lane._apply
        convert(lambda t: t.to(dtype) if t.is_floating_point() else t)
        split = _restore_kept(model, lane, kept, fresh)
    return LaneModel(lane, kept, tuple(notes), split)


def _own_scripted(model: nn.Module, lane: nn.Module, memo: Mapping[int, Any]) -> None:
    """Give scripted modules parameters of their own.

    TorchScript copies parameters by itself, as results of the caller's, so that gradients would flow on into those.
    """
    copies: dict[str, nn.Module] = {}
    for path, original in model.named_modules(remove_duplicate=False):
        if isinstance(original, torch.jit.ScriptModule):
            copies = copies or dict(lane.named_modules(remove_duplicate=False))
            for name, parameter in original.named_parameters(recurse=False):
                own = memo.get(id(parameter))
                if not isinstance(own, nn.Parameter):
                    own = _parameter(parameter.detach().clone(), parameter)
                setattr(copies[path], name, own)


def _restore_kept(
    model: nn.Module, lane: nn.Module, kept: tuple[str, ...], fresh: _Fresh
) -> dict[str, list[nn.Parameter]]:
    """Give kept modules their original values back; return parameters split in two, by name, as :class:`LaneModel` has.

    Tied parameters stay tied among kept modules. One that a kept module shares with another is FP32 in the one and low
    in the other.
    """
    originals = dict(model.named_modules())
    copies = dict(lane.named_modules())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    done: dict[int, Any] = {}
    for path in kept:
        for inner, original in originals[path].named_modules():
            full = ".".join(part for part in (path, inner) if part)
            target = copies[full]
            for name, parameter in original.named_parameters(recurse=False):
                if id(parameter) not in done:
                    done[id(parameter)] = _parameter(_share(f"{full}.{name}".lstrip("."), parameter, fresh), parameter)
                target._parameters[name] = done[id(parameter)]
            for name, buffer in original.named_buffers(recurse=False):
                target._buffers[name] = done.setdefault(id(buffer), buffer.detach().clone())
    parts: dict[str, list[nn.Parameter]] = {}
    for path, original in originals.items():
        for name, parameter in original.named_parameters(recurse=False):
            mine = copies[path]._parameters[name]
            held = parts.setdefault(names[id(parameter)], [])
            if mine is not None and not any(mine is other for other in held):
                held.append(mine)
    return {name: held for name, held in parts.items() if len(held) > 1}
