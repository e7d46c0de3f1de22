"""The local error of a leaf: the low-precision module run once more, on the reference's own inputs.

The extra run must leave no trace. Modules of ``torch.nn`` keep state in buffers only, so they run on copies of those as
they were before the visit; a module of the user's own may do anything, so a copy of it, made before the visit, is run
instead. Hooks would see an extra call, so a module that has some is not run again. Random state is that of the
visit's start, so that dropout drops the same elements, and is put back afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanprobe.inputs.rng import RandomState
from nanprobe.numerics.tree import map_tensors, named_tensors

__all__ = ["LocalTwin"]


class LocalTwin:
    """A leaf as it was before its visit, ready to be run on other inputs."""

    def __init__(
        self,
        module: nn.Module,
        buffers: dict[str, torch.Tensor] | None,
        random: RandomState,
        refused: str | None = None,
    ) -> None:
        self._module = module
        self._buffers = buffers
        self._random = random
        self._refused = refused

    @classmethod
    def prepare(cls, module: nn.Module) -> LocalTwin | None:
        """Get ready for an extra run of ``module``; None when it has children or cannot be copied."""
        builtin = type(module).__module__.startswith("torch.nn.")
        random = RandomState.capture_torch()
        if module._forward_hooks or module._forward_pre_hooks:
            return cls(module, None, random, "local error unknown: the module has hooks")
        if builtin and type(module).forward is not nn.Module.forward and not isinstance(module, _CONTAINERS):
            buffers = {name: b.clone() for name, b in module.named_buffers(recurse=False)}
            return cls(module, buffers, random)
        if next(module.children(), None) is not None:
            return None
        memo: dict[int, Any] = {id(p): p for p in module.parameters()}
        memo[id(module.__dict__.get("_compiled_call_impl"))] = None
        try:
            return cls(copy.deepcopy(module, memo), None, random)
        except Exception:  # a user's attribute that cannot be copied: no local error for this leaf
            return None

    @staticmethod
    def keep_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of a visit's inputs, for a module that is about to write over them."""
        return map_tensors(torch.clone, args), map_tensors(torch.clone, kwargs)

    def run(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]], dtypes: Mapping[str, torch.dtype]
    ) -> tuple[dict[str, torch.Tensor], str | None]:
        """Run on the reference's ``inputs``, each floating tensor cast to the dtype that the lane's own input had.

        Returns the outputs by path, and the reason when there are none.
        """
        if self._refused is not None:
            return {}, self._refused
        paths = {id(tensor): path for path, tensor in named_tensors(inputs)}

        def fit(tensor: torch.Tensor) -> torch.Tensor:
            wanted = dtypes.get(paths.get(id(tensor), ""))
            detached = tensor.detach()
            if wanted is None or not tensor.dtype.is_floating_point or wanted == tensor.dtype:
                return detached.clone() if getattr(self._module, "inplace", False) else detached
            return detached.to(wanted)

        args, kwargs = map_tensors(fit, inputs)
        saved = RandomState.capture_torch()
        self._random.restore()
        own = dict(self._module._buffers)
        if self._buffers is not None:
            self._module._buffers.update(self._buffers)
        try:
            with torch.no_grad():
                output = self._module.forward(*args, **kwargs)
        except Exception as error:  # the model's own code may refuse inputs it has never been given
            return {}, f"local error unknown: {type(error).__name__}"
        finally:
            saved.restore()
            if self._buffers is not None:
                self._module._buffers.update(own)
        return dict(named_tensors(output)), None


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
