"""Tensors inside nested values: found once, named as a reader would, and replaced without touching the original."""

from __future__ import annotations

import math
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from nanprobe.numerics.tree import map_tensors, named_tensors, uninspected

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    a: Tensor
    rest: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Tensor
    count: int = 3


class Cache:
    def __init__(self, keys: list[Tensor]) -> None:
        self.keys = keys
        self.length = 2

    def __len__(self) -> int:
        return self.length


class Sealed:
    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


def t(*shape: int) -> Tensor:
    return torch.zeros(shape)


CASES: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("a tensor", lambda: t(2), [""]),
    ("tuple", lambda: (t(1), 3, t(2)), ["0", "2"]),
    ("list in list", lambda: [[t(1)], [[t(2)], "x"]], ["0.0", "1.0.0"]),
    ("dict", lambda: {"a": t(1), "b": {"c": t(2), "d": None}}, ["a", "b.c"]),
    ("integer keys", lambda: {0: t(1), (1, 2): t(2)}, ["0", "(1, 2)"]),
    ("ordered dict", lambda: OrderedDict(z=t(1), a=t(2)), ["z", "a"]),
    ("named tuple", lambda: Pair(t(1), (t(2),)), ["left", "right.0"]),
    ("dataclass", lambda: Record(t(1), [Record(t(2))]), ["a", "rest.0.a"]),
    ("frozen dataclass", lambda: Frozen(t(1)), ["a"]),
    ("plain object", lambda: Cache([t(1), t(2)]), ["keys.0", "keys.1"]),
    ("namespace", lambda: types.SimpleNamespace(x=t(1), y=[t(2)]), ["x", "y.0"]),
    ("nothing", lambda: None, []),
    ("plain values", lambda: (1, "a", 2.0, b"x", torch.float32, torch.device("cpu"), torch.Size([1])), []),
    ("empty containers", lambda: ([], {}, ()), []),
    ("a module", lambda: nn.Linear(2, 2), []),
    ("a Python module", lambda: (torch, math), []),
    ("a function", lambda: (t, lambda: t(1)), []),
    ("a class", lambda: (Tensor, Record), []),
    ("a generator", lambda: iter([t(1)]), []),
]


@pytest.mark.parametrize(("make", "paths"), [(m, p) for _, m, p in CASES], ids=[name for name, _, _ in CASES])
def test_tensors_are_found_by_path_and_replaced(make: Callable[[], Any], paths: list[str]) -> None:
    value = make()
    found = dict(named_tensors(value))
    assert list(found) == paths
    replaced = map_tensors(lambda tensor: tensor + 1.0, value)
    assert type(replaced) is type(value)
    again = dict(named_tensors(replaced))
    assert list(again) == paths
    for path in paths:
        assert torch.equal(again[path], found[path] + 1.0)
        assert again[path] is not found[path]
    # The original still holds the original tensors.
    assert all(tensor is found[path] for path, tensor in named_tensors(value))


def test_packed_sequences_keep_their_type_and_sizes() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    assert [name for name, _ in named_tensors(packed)] == ["data", "batch_sizes"]
    half = map_tensors(lambda x: x.half() if x.is_floating_point() else x, packed)
    assert isinstance(half, PackedSequence)
    assert half.data.dtype == torch.float16
    assert torch.equal(half.batch_sizes, packed.batch_sizes)


def test_model_outputs_keep_keys_and_attributes() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    output = CausalLMOutput(loss=t(), logits=t(2))
    assert [name for name, _ in named_tensors(output)] == ["loss", "logits"]
    mapped = map_tensors(lambda x: x + 1.0, output)
    assert isinstance(mapped, CausalLMOutput)
    assert mapped["loss"] is mapped.loss
    assert mapped.loss is not None
    assert float(mapped.loss) == 1.0
    assert float(output["loss"]) == 0.0


def test_a_tensor_that_appears_twice_is_one() -> None:
    x = t(2)
    value = {"a": x, "b": [x]}
    assert [name for name, _ in named_tensors(value)] == ["a"]
    mapped = map_tensors(lambda tensor: tensor + 1.0, value)
    assert mapped["a"] is mapped["b"][0]


def test_values_that_hold_themselves_end() -> None:
    loop: list[Any] = [t(1)]
    loop.append(loop)
    assert [name for name, _ in named_tensors(loop)] == ["0"]
    mapped = map_tensors(lambda tensor: tensor + 1.0, loop)
    assert float(mapped[0]) == 1.0
    owner = types.SimpleNamespace(x=t(1))
    owner.me = owner
    assert [name for name, _ in named_tensors(owner)] == ["x"]
    assert float(map_tensors(lambda tensor: tensor + 1.0, owner).x) == 1.0


def test_containers_without_tensors_are_copied_where_code_may_write_to_them() -> None:
    value = {"ids": [1, 2], "names": {"a": 1}, "x": t(1)}
    mapped = map_tensors(lambda tensor: tensor, value)
    mapped["ids"].append(3)
    mapped["names"]["b"] = 2
    assert value["ids"] == [1, 2]
    assert value["names"] == {"a": 1}


def test_an_object_is_copied_level_by_level() -> None:
    cache = Cache([t(1)])
    mapped = map_tensors(lambda tensor: tensor + 1.0, (cache, [cache]))
    assert mapped[0] is mapped[1][0]
    assert mapped[0] is not cache
    mapped[0].keys.append(t(2))
    assert len(cache.keys) == 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (t(2), None),
        ((t(2), 3), None),
        (None, None),
        ({"a": 1, "b": ["x", None]}, None),
        ([], None),
        ((), None),
        (Sealed(t(1)), "Sealed"),
        ([1, Sealed(t(1))], "Sealed"),
        ({"a": iter([t(1)])}, "list_iterator"),
        ((t(1), Sealed(t(1))), None),
        (object(), "object"),
    ],
)
def test_what_cannot_be_looked_into_is_named(value: Any, name: str | None) -> None:
    assert uninspected(value) == name


@dataclass
class _Bag:
    items: list[Any] = field(default_factory=list)


_leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(lambda: torch.zeros(1)))
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab.", min_size=1, max_size=2), inner, max_size=3),
        st.lists(inner, max_size=2).map(_Bag),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_trees)
def test_mapping_keeps_the_structure_of_any_value(value: Any) -> None:
    count = [0]

    def number(tensor: Tensor) -> Tensor:
        count[0] += 1
        return torch.full_like(tensor, float(count[0]))

    mapped = map_tensors(number, value)
    before, after = list(named_tensors(value)), list(named_tensors(mapped))
    assert [path for path, _ in before] == [path for path, _ in after]
    assert [float(x) for _, x in after] == [float(i + 1) for i in range(count[0])]
    assert _shape(value) == _shape(mapped)
    assert all(float(x) == 0.0 for _, x in before)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_shape(item) for item in value])
    if isinstance(value, _Bag):
        return ("bag", _shape(value.items))
    return value
