"""CUDA's autocast policy on CPU tensors: what autocast does to an operation on a GPU, done to it on a CPU.

PyTorch keeps one list of operations for each kind of device, and the lists differ: under float16 autocast a softmax
runs in float32 on a GPU and in float16 on a CPU. Here every overload that has an autocast kernel for CUDA gets one of
the same meaning for CPUs, composite operations included; what only the CPU's list names is passed on untouched.

The kernels are registered for the whole process while anybody is inside :func:`cuda_kernels`, and ask whose thread they
run in: they follow CUDA's lists in threads that are inside :func:`follow_cuda`, and PyTorch's own lists in all others.
Like CUDA's, they keep the cast copies of parameters until the outermost region ends, so that a gradient that a
parameter gets from several uses is summed in the region's dtype.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanprobe.numerics import autocast_lists as lists

__all__ = ["Lists", "cuda_kernels", "follow_cuda", "follows_cuda", "forget_casts", "listed_for_cuda", "unknown_to_us"]

Kernel = Callable[..., Any]

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


class Lists(threading.local):
    """Whose lists the present thread follows, and the parameters it has cast so far."""

    cuda = False

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


_lists = Lists()
_lock = threading.RLock()
_users = 0
_stack: contextlib.ExitStack | None = None


def follows_cuda() -> bool:
    """Whether autocast regions of the present thread follow CUDA's lists."""
    return _lists.cuda


def forget_casts() -> None:
    """Let go of the cast copies of parameters, as autocast does at the end of its outermost region."""
    _lists.casts.clear()


@contextlib.contextmanager
def follow_cuda() -> Iterator[None]:
    """Follow CUDA's lists in this thread; they are in force only inside :func:`cuda_kernels`."""
    before = _lists.cuda
    _lists.cuda = True
    try:
        yield
    finally:
        _lists.cuda = before
        forget_casts()


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Have the kernels registered; they go when the last user leaves, whatever happened."""
    global _users, _stack
    with _lock:
        if _users == 0:
            stack = contextlib.ExitStack()
            try:
                _register(stack)
            except BaseException:
                stack.close()
                raise
            _stack = stack
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _stack is not None:
                _stack.close()
                _stack = None


@functools.cache
def _overloads(key: str) -> frozenset[str]:
    """Return the aten overloads that PyTorch has a kernel for under a dispatch key, without the namespace.

    Asked before anything is registered here, and remembered.
    """
    names = torch._C._dispatch_get_all_op_names()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name[6:] for name in names if name.startswith("aten::") and has(name, key))


def listed_for_cuda() -> frozenset[str]:
    """Return the overloads that this PyTorch's CUDA autocast changes or refuses."""
    return _overloads("AutocastCUDA")


def unknown_to_us() -> tuple[str, ...]:
    """Return the overloads that this PyTorch's CUDA autocast changes in a way that is not known here."""
    return tuple(
        sorted(name for name in listed_for_cuda() if lists.group_of(name) is None and "_cudnn_rnn" not in name)
    )


def _register(stack: contextlib.ExitStack) -> None:
    cpu = _overloads("AutocastCPU")
    cuda = listed_for_cuda()
    make: Any = torch.library.Library  # its constructor has no types
    library = make("aten", "IMPL")
    stack.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every kernel that is registered in place of another
        for name in sorted(cpu | (cuda - {"_cudnn_rnn"}) | lists.RNN):
            op = _find(name)
            if op is not None:
                library.impl(name, _kernel(name, op, name in cuda, name in cpu), "AutocastCPU", with_keyset=True)


def _find(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None)


def _kernel(name: str, op: Any, in_cuda: bool, in_cpu: bool) -> Kernel:
    """Return the kernel of one overload: CUDA's way in threads that follow CUDA, else the way of PyTorch's own list."""

    def passed_on(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & _BELOW, *args, **kwargs)

    group = lists.group_of(name) if in_cuda else None
    if name in lists.RNN:
        cuda = _cast_all(op, _float16)
    elif group is None:
        cuda = passed_on
    else:
        cuda = _CUDA_WAYS[group](name, op)
    if not in_cpu:
        own = passed_on
    elif name in lists.CPU_LOW:
        own = _cast_all(op, _region_dtype)
    elif name in lists.CPU_WIDEST:
        own = _widest(name, op)
    else:
        own = _cast_all(op, _float32)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return (cuda if _lists.cuda else own)(keys, *args, **kwargs)

    return kernel


def _region_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _float16() -> torch.dtype:
    return torch.float16


def _float32() -> torch.dtype:
    return torch.float32


def _changeable(value: Any) -> bool:
    """Whether autocast casts this operand: a floating CPU tensor that is not float64."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "cpu"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _changeable(value) or value.dtype is dtype:
        return value
    if not (
        _lists.cuda
        and value.dtype is torch.float32
        and value.is_leaf
        and value.requires_grad
        and torch.is_grad_enabled()
        and dtype is _region_dtype()
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    ):
        return value.to(dtype)
    found = _lists.casts.get((id(value), dtype))
    if found is None:
        found = _lists.casts[id(value), dtype] = (value, value.to(dtype))
    return found[1]


def _outside(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with autocast off inside it, as PyTorch's own kernels do."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return op(*args, **kwargs)


def _cast_all(op: Any, dtype_of: Callable[[], torch.dtype]) -> Kernel:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of()
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*[_cast(a, dtype) for a in args], **{name: _cast(a, dtype) for name, a in kwargs.items()})

    return kernel


def _low(name: str, op: Any) -> Kernel:
    return _cast_all(op, _region_dtype)


def _in_float32(name: str, op: Any) -> Kernel:
    return _cast_all(op, _float32)


def _sums_in_float32(name: str, op: Any) -> Kernel:
    if name in lists.APPEND_DTYPE:
        return _appending_dtype(_find(lists.APPEND_DTYPE[name]))
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and _changeable(args[0]):
            args = args[:position]
            kwargs = {**kwargs, "dtype": torch.float32}
        return _outside(op, *args, **kwargs)

    return kernel


def _appending_dtype(op: Any) -> Kernel:
    arguments = [argument for argument in op._schema.arguments if argument.name != "dtype"]
    defaults = {"p": 2, "keepdim": False}

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if _changeable(args[0]) else args[0].dtype
        # The overload with a dtype has no defaults, and those of the other one are not handed on.
        missing = [kwargs.pop(a.name, defaults.get(a.name)) for a in arguments[len(args) :]]
        return _outside(op, *args, *missing, dtype=dtype)

    return kernel


def _widest(name: str, op: Any) -> Kernel:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = _region_dtype()
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                dtype = _wider(dtype, tensor)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*[_cast(a, dtype) for a in args], **{key: _cast(a, dtype) for key, a in kwargs.items()})

    return kernel


def _wider(dtype: torch.dtype, value: Any) -> torch.dtype:
    if not _changeable(value):
        return dtype
    if torch.float32 in (dtype, value.dtype):
        return torch.float32
    if value.dtype is not _region_dtype():
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return dtype


def _refused(name: str, op: Any) -> Kernel:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(lists.REFUSED[name])

    return kernel


_CUDA_WAYS: dict[str, Callable[[str, Any], Kernel]] = {
    "low": _low,
    "float32": _in_float32,
    "float32 sums": _sums_in_float32,
    "widest": _widest,
    "refused": _refused,
}
