"""What PyTorch's rebuild functions would make, as records: the builders that the pickle machine is given.

Sources: torch/_utils.py, torch/_tensor.py and torch/serialization.py of PyTorch 2.6 to 2.13. Each builder takes the
arguments as the file has them and raises ValueError when they are not what PyTorch writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanprobe.checkpoints.dtypes import STORAGE_CLASSES, torch_dtype_name
from nanprobe.checkpoints.inert import Foreign, Global, StorageRef, TensorValue
from nanprobe.checkpoints.numpy_values import NUMPY_BUILDERS

__all__ = ["BUILDERS", "persistent_value"]

_MAX_DIMENSIONS = 64
"""PyTorch's own limit on tensor dimensions (at::MaxDims)."""

_MAX_INTEGER = (1 << 63) - 1


def persistent_value(identifier: Any) -> Any:
    """Return the storage (or class) that a persistent id of a torch.save file stands for."""
    if isinstance(identifier, str):
        return _textual_storage(identifier)
    if not isinstance(identifier, tuple) or not identifier:
        raise ValueError("a persistent id that is no tuple")
    if identifier[0] == "module" and len(identifier) == 4:
        return identifier[1]
    if identifier[0] != "storage" or len(identifier) not in (5, 6):
        raise ValueError("a persistent id of unknown kind")
    _, cls, key, location, numel = identifier[:5]
    dtype = STORAGE_CLASSES.get(cls.name.rpartition(".")[2]) if isinstance(cls, Global) else None
    if dtype is None:
        raise ValueError("a storage of unknown class")
    view = None
    if len(identifier) == 6 and identifier[5] is not None:
        view_key, offset, size = identifier[5]
        view = (_count(offset), _count(size))
        if not isinstance(view_key, str):
            raise ValueError("a storage view without a key")
    return StorageRef(str(key), dtype, _count(numel), location if isinstance(location, str) else "cpu", view)


_TEXTUAL = re.compile(
    r"\('storage', <class 'torch\.(?:storage\.)?(\w+)'>, '([^']{1,64})', '([^']{0,64})', (\d{1,18})(?:, None)?\)"
)


def _textual_storage(identifier: str) -> StorageRef:
    """Return the storage of an id that protocol 0 wrote as text."""
    found = _TEXTUAL.fullmatch(identifier)
    if found is None or found[1] not in STORAGE_CLASSES:
        raise ValueError("a persistent id of unknown form")
    return StorageRef(found[2], STORAGE_CLASSES[found[1]], int(found[4]), found[3])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise ValueError("a count that is no count")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMENSIONS:
        raise ValueError("a shape that is no shape")
    return tuple(_count(part) for part in value)


def _dtype(value: Any) -> str | None:
    return torch_dtype_name(value.name) if isinstance(value, Global) and value.module == "torch" else None


def _strided(args: tuple[Any, ...]) -> TensorValue:
    storage, offset, shape, strides = args[:4]
    if isinstance(storage, Foreign):
        return TensorValue(None, None, 0, _sizes(shape), _sizes(strides))
    if not isinstance(storage, StorageRef):
        raise ValueError("a tensor without a storage")
    value = TensorValue(storage.dtype, storage, _count(offset), _sizes(shape), _sizes(strides))
    if len(value.shape) != len(value.strides):
        raise ValueError("a tensor whose strides do not match its shape")
    value.requires_grad = len(args) > 4 and args[4] is True
    return value


def _strided_v2(args: tuple[Any, ...]) -> TensorValue:
    return _with_bits(_strided(args), args[6] if len(args) > 6 else None)


def _with_bits(value: TensorValue, metadata: Any) -> TensorValue:
    """Return ``value`` with the bits of a lazy conjugate or negative, which the file keeps beside the tensor."""
    if isinstance(metadata, dict):
        value.conjugate = metadata.get("conj") is True
        value.negate = metadata.get("neg") is True
    return value


def _strided_v3(args: tuple[Any, ...]) -> TensorValue:
    value = _strided(args)
    value.dtype = _dtype(args[6])
    return _with_bits(value, args[7] if len(args) > 7 else None)


def _quantized(args: tuple[Any, ...]) -> TensorValue:
    value = _strided(args[:4])
    value.layout = "quantized"
    return value


def _meta(args: tuple[Any, ...]) -> TensorValue:
    dtype, shape, strides = args[:3]
    return TensorValue(_dtype(dtype), None, 0, _sizes(shape), _sizes(strides), "meta")


def _wrapper(args: tuple[Any, ...]) -> TensorValue:
    _, dtype, shape, strides = args[:4]
    return TensorValue(_dtype(dtype), None, 0, _sizes(shape), _sizes(strides), "meta")


def _parameter(args: tuple[Any, ...]) -> Any:
    value = args[0]
    if not isinstance(value, TensorValue):
        return Foreign(Global("torch._utils", "_rebuild_parameter"), args)
    return replace(value, parameter=True, requires_grad=args[1] is True)


def _from_type(args: tuple[Any, ...]) -> Any:
    function, cls, inner, state = args[:4]
    builder = BUILDERS.get(function.dotted) if isinstance(function, Global) else None
    if builder is not None and isinstance(inner, tuple):
        value = builder(inner)
        if isinstance(value, TensorValue) and value.storage is not None:
            return value
    return Foreign(cls, inner, state)


def _sparse(args: tuple[Any, ...]) -> Foreign:
    coordinates = len(args[1]) > 2 and isinstance(args[1][2], tuple)
    names = ("indices", "values") if coordinates else ("compressed_indices", "plain_indices", "values")
    return Foreign(Global("torch", "sparse"), (), dict(zip(names, args[1], strict=False)))


def _cpu_tensor(args: tuple[Any, ...]) -> Any:
    return args[0]


def _size(args: tuple[Any, ...]) -> Any:
    return args[0] if args else ()


BUILDERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor": _strided,
    "torch._utils._rebuild_tensor_v2": _strided_v2,
    "torch._utils._rebuild_tensor_v3": _strided_v3,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _cpu_tensor,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.Size": _size,
    **NUMPY_BUILDERS,
}
"""Builders by the dotted name of the function that the file calls."""
