"""Autocast regions that the model's own code opens, behaving on a CPU as they do on the user's GPU.

``torch.autocast("cuda")`` disables itself where there is no GPU, ``torch.is_autocast_enabled()`` asks about CUDA, and
``custom_fwd(device_type="cuda")`` casts CUDA tensors only. Inside :func:`as_on_cuda` a thread's tensors stand for CUDA
tensors: a region for "cuda" is opened, one for "cpu" counts as one for "cuda" (code that asks a tensor for its device
writes either), and the states of both are kept equal, so that every question gets the answer it would get there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

from nanprobe.numerics import autocast_policy as policy

__all__ = ["as_on_cuda", "emulate_cuda"]

_DEVICES = ("cpu", "cuda")
_lock = threading.RLock()
_users = 0
_stack: contextlib.ExitStack | None = None


class _Thread(threading.local):
    """Whether regions of the present thread may be switched on at all, and how many it is inside of."""

    allowed = True
    depth = 0


_thread = _Thread()


@contextlib.contextmanager
def emulate_cuda() -> Iterator[None]:
    """Have CUDA's kernels and regions ready for the threads that are inside :func:`as_on_cuda`.

    Process-wide; other threads notice nothing. All is as before when the last user leaves, whatever happened.
    """
    global _users, _stack
    with policy.cuda_kernels():
        with _lock:
            if _users == 0:
                _stack = contextlib.ExitStack()
                for target, name, replacement in _replacements():
                    _stack.enter_context(mock.patch.object(target, name, replacement))
            _users += 1
        try:
            yield
        finally:
            with _lock:
                _users -= 1
                if _users == 0 and _stack is not None:
                    _stack.close()
                    _stack = None


@contextlib.contextmanager
def as_on_cuda(*, regions: bool = True) -> Iterator[None]:
    """Let this thread's CPU tensors stand for CUDA tensors, starting outside any region.

    With ``regions=False`` no region is ever switched on: a reference is FP32 and nothing less.
    """
    before = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES}
    outer = (_thread.allowed, _thread.depth)
    _thread.allowed, _thread.depth = regions, 0
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, torch.float16)
        with policy.follow_cuda():
            yield
    finally:
        _thread.allowed, _thread.depth = outer
        for device, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _mirror(device: str) -> None:
    other = _DEVICES[1 - _DEVICES.index(device)]
    torch.set_autocast_enabled(other, torch.is_autocast_enabled(device))
    torch.set_autocast_dtype(other, torch.get_autocast_dtype(device))


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    region: Any = torch.autocast
    init, enter, leave, cast = region.__init__, region.__enter__, region.__exit__, autocast_mode._cast

    def __init__(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not policy.follows_cuda() or device_type not in _DEVICES:
            init(self, device_type, dtype, enabled, cache_enabled)
            return
        # Made disabled and switched on afterwards: PyTorch would ask whether a GPU is there.
        init(self, device_type, dtype, False, cache_enabled)
        self._enabled = enabled

    def __enter__(self: Any) -> Any:
        if not policy.follows_cuda() or self.device not in _DEVICES:
            return enter(self)
        entered = enter(self)
        if not _thread.allowed:
            torch.set_autocast_enabled(self.device, False)
        _thread.depth += 1
        _mirror(self.device)
        return entered

    def __exit__(self: Any, *failure: Any) -> Any:
        if not policy.follows_cuda() or self.device not in _DEVICES:
            return leave(self, *failure)
        left = leave(self, *failure)
        _mirror(self.device)
        _thread.depth -= 1
        if _thread.depth == 0:
            policy.forget_casts()
        return left

    def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        standing_in = policy.follows_cuda() and device_type == "cuda"
        return cast(value, "cpu" if standing_in else device_type, dtype)

    yield region, "__init__", __init__
    yield region, "__enter__", __enter__
    yield region, "__exit__", __exit__
    yield autocast_mode, "_cast", _cast
