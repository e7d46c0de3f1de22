"""Telling a batch that does not fit the model from a model that fails: one line that names module, field and shapes.

PyTorch raises the same kinds of errors for both. An error counts as the batch's when it is one of an id outside a
table, or one of shape or type raised where a tensor of the batch is used as it was given (itself or a view of it), or
when the sizes that do not fit are those of two fields that disagree.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanprobe.errors import text_of
from nanprobe.inputs.call import Call
from nanprobe.inputs.factories import one_line
from nanprobe.numerics.tree import named_tensors
from nanprobe.out_of_memory import is_out_of_memory

__all__ = ["explain_forward_error"]

_OUT_OF_RANGE = re.compile(r"index out of range|out of bounds|indices should be|device-side assert|index_select.*range")
_NAMED_INDEX = re.compile(r"(?:Target|index) (-?\d+) is out of bounds")
_SHAPE = re.compile(
    r"shape|size|dimension|channels|must match|broadcast|expected input|to have \d+|batch_size|-D\b|\dD\b|numel|"
    r"not enough values to unpack|too many values to unpack|running_mean|input_size|elements",
    re.IGNORECASE,
)
_UNPACK = re.compile(r"values to unpack \(expected (\d+)(?:, got (\d+))?\)")
_NO_TENSOR = re.compile(r"must be Tensor, not (\w+)")
_TYPE = re.compile(
    r"same dtype|scalar type|must be Tensor|Expected tensor for argument|expected .* to have the same dtype|"
    r"should be the same|but found \w+|not implemented for '(?:Long|Int|Byte|Bool|Short|Char|Double)'",
)


def explain_forward_error(
    error: BaseException, model: nn.Module, call: Call, module_path: str | None, inputs: Any
) -> str | None:
    """Return why the batch does not fit, in one line, or None when the error is not the batch's.

    ``call`` is what the model was called with (the very tensors, not copies), ``module_path`` the innermost module that
    raised (None outside the model, as in a loss), ``inputs`` what that module was called with.
    """
    if isinstance(error, KeyError):
        return _missing_key(error, call)
    if not isinstance(error, IndexError | RuntimeError | ValueError | TypeError | AssertionError):
        return None
    if isinstance(error, NotImplementedError) or is_out_of_memory(error):
        return None
    message = text_of(error)
    if isinstance(error, IndexError | RuntimeError) and _OUT_OF_RANGE.search(message):
        return _out_of_range(message, model, call, module_path, inputs)
    if _TYPE.search(message):
        return _wrong_type(error, model, call, module_path, inputs)
    if _SHAPE.search(message):
        return _wrong_shape(error, model, call, module_path, inputs)
    return None


def _fields(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the batch by their path: the argument's name, or its position."""
    yield from named_tensors(call.args)
    yield from named_tensors(dict(call.kwargs))


def _ids(call: Call) -> list[tuple[str, Tensor]]:
    """Return the fields that may hold ids: integers, not empty."""
    return [(path, t) for path, t in _fields(call) if _holds_ids(t)]


def _holds_ids(tensor: Tensor) -> bool:
    numeric = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return numeric and tensor.numel() > 0 and tensor.layout is torch.strided


def _range(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.min()), int(tensor.max())


def _module(model: nn.Module, path: str | None) -> nn.Module | None:
    if path is None:
        return None
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _place(model: nn.Module, path: str | None) -> str:
    """Return how a message names where the error was raised."""
    module = _module(model, path)
    if module is None:
        return "the loss" if path is None else f"`{path}`"
    return f"`{path}` ({type(module).__name__})" if path else f"{type(module).__name__}.forward"


def _shared(call: Call, inputs: Any) -> list[tuple[str, Tensor]]:
    """Return the fields of the batch that ``inputs`` holds, themselves or as views of the same memory."""
    memory = {_memory(tensor) for _, tensor in named_tensors(inputs)} - {None}
    identities = {id(tensor) for _, tensor in named_tensors(inputs)}
    return [(path, t) for path, t in _fields(call) if id(t) in identities or _memory(t) in memory]


def _memory(tensor: Tensor) -> int | None:
    """Return an identifier of the memory behind a tensor that its views share, None where there is none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


def _out_of_range(message: str, model: nn.Module, call: Call, path: str | None, inputs: Any) -> str | None:
    named = _NAMED_INDEX.search(message)
    place = _place(model, path)
    tables = list(_tables(model, path))
    # A table that only the module's own tensors overflow (positions counted by the model) is told by those.
    for table, rows in tables:
        for field, tensor in _ids(call):
            low, high = _range(tensor)
            if low < 0 or high >= rows:
                return (
                    f"batch: ids out of range: `{field}` holds ids from {low} to {high}, "
                    f"{table} has {rows} entries (0 to {rows - 1})"
                )
    if named is not None:
        value = int(named.group(1))
        for field, tensor in _ids(call):
            if bool((tensor == value).any()):
                low, high = _range(tensor)
                return (
                    f"batch: `{field}` holds ids from {low} to {high}, and {place} refused {value}: {message.strip()}"
                )
    for table, rows in tables:
        for _, tensor in named_tensors(inputs):
            if _holds_ids(tensor) and (_range(tensor)[0] < 0 or _range(tensor)[1] >= rows):
                low, high = _range(tensor)
                shapes = "; ".join(f"`{field}` has shape {list(t.shape)}" for field, t in _fields(call))
                return (
                    f"batch: {table} has {rows} entries and was asked for {low} to {high}, which the model made from "
                    f"the batch; is the batch longer than the model allows? {shapes}"
                )
    if path is None or _ids(call):
        ranges = "; ".join("`{}` holds {} to {}".format(field, *_range(t)) for field, t in _ids(call))
        return f"batch: an id is out of range in {place}: {' '.join(message.split())}" + (
            f" ({ranges})" if ranges else ""
        )
    return None


def _tables(model: nn.Module, path: str | None) -> Iterator[tuple[str, int]]:
    """Yield (how to name it, number of rows) of the tables that a module looks ids up in."""
    module = _module(model, path)
    if module is None:
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 2:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                yield f"the vocabulary of {_place(model, path)}", parameter.shape[0]
            else:
                yield f"the table `{path + '.' if path else ''}{name}`", parameter.shape[0]


def _wrong_type(error: BaseException, model: nn.Module, call: Call, path: str | None, inputs: Any) -> str | None:
    place = _place(model, path)
    unwanted = _NO_TENSOR.search(text_of(error))
    if unwanted is not None:
        given = {**{str(position): value for position, value in enumerate(call.args)}, **call.kwargs}
        found = [name for name, value in given.items() if type(value).__name__ == unwanted.group(1)]
        return f"batch: `{found[0]}` is a {unwanted.group(1)}, {place} needs a tensor" if found else None
    shared = _shared(call, inputs)
    if not shared:
        return None
    fields = ", ".join(f"`{field}` ({str(t.dtype).removeprefix('torch.')})" for field, t in shared)
    return f"batch: {fields} has a type that {place} does not take: {_first_line(error)}"


def _wrong_shape(error: BaseException, model: nn.Module, call: Call, path: str | None, inputs: Any) -> str | None:
    message = text_of(error)
    module = _module(model, path)
    # A container is given the batch whole, which says nothing about what its own code used when it raised. A leaf with
    # parameters fails against those, so fields that disagree with each other are not looked for.
    leaf = module is not None and next(module.children(), None) is None
    weighted = module is not None and leaf and next(module.parameters(recurse=False), None) is not None
    found = _shared(call, inputs) if leaf or path else []
    if not found and not weighted:
        found = _unpacked(message, call) or _disagreeing(message, call)
    if not found:
        return None
    fields = ", ".join(f"`{field}` {list(t.shape)}" for field, t in found)
    verb = "does not fit" if len(found) == 1 else "do not fit"
    return f"batch: {fields} {verb} {_place(model, path)}: {_first_line(error)}"


def _unpacked(message: str, call: Call) -> list[tuple[str, Tensor]]:
    """Return the fields whose number of dimensions code as ``b, c, h, w = x.shape`` stumbled over."""
    found = _UNPACK.search(message)
    if found is None:
        return []
    wanted, got = int(found.group(1)), found.group(2)
    return [(path, t) for path, t in _fields(call) if (t.ndim == int(got) if got is not None else t.ndim > wanted)]


def _disagreeing(message: str, call: Call) -> list[tuple[str, Tensor]]:
    """Return the fields that the message is about by the sizes it names.

    Of several fields, two that hold two different sizes, the first of which lacks the other's; the only field, when one
    of its sizes is named. Elements of a field count as a size of it, since fields get flattened.
    """
    sizes = list(dict.fromkeys(int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", message)))
    fields = [(path, t, {*t.shape, t.numel()}) for path, t in _fields(call)]
    if len(fields) == 1:
        path, tensor, own = fields[0]
        return [(path, tensor)] if set(sizes) & (own - set(tensor.shape[:1])) else []
    for first, second in itertools.permutations(sizes, 2):
        one = [(path, t) for path, t, own in fields if first in own and second not in own]
        other = [(path, t) for path, t, own in fields if second in own]
        if one and other:
            return [one[0], other[0]]
    return []


def _first_line(error: BaseException) -> str:
    text = one_line(error, 240)
    return text.removeprefix(f"{type(error).__name__}: ")


def _missing_key(error: KeyError, call: Call) -> str | None:
    """Explain a key that the model asked a batch given as one mapping for."""
    if len(call.args) != 1 or not isinstance(call.args[0], Mapping) or len(error.args) != 1:
        return None
    key = error.args[0]
    if not isinstance(key, str) or key in call.args[0]:
        return None
    has = ", ".join(f"`{name}`" for name in call.args[0])
    return f"batch: the model asks the batch for `{key}`, which it does not have; it has {has}"
