"""A batch as arguments, and messages about one that does not bind."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from nanprobe.errors import UsageError
from nanprobe.inputs.call import bind, left_to_the_loss

X = torch.ones(2, 3)


class Encoder(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, *, labels: Any = None) -> Any:
        return input_ids


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Pair(NamedTuple):
    input_ids: Any
    attention_mask: Any


@pytest.mark.parametrize(
    ("model", "value", "call", "args", "kwargs"),
    [
        (Encoder(), {"input_ids": X}, "auto", 0, ["input_ids"]),
        (Encoder(), UserDict(input_ids=X, labels=X), "auto", 0, ["input_ids", "labels"]),
        (Encoder(), (X, X), "auto", 2, []),
        (Encoder(), [X], "auto", 1, []),
        (Encoder(), Pair(X, X), "auto", 2, []),
        (Encoder(), X, "auto", 1, []),
        (Encoder(), {"input_ids": X}, "kwargs", 0, ["input_ids"]),
        (Encoder(), (X,), "args", 1, []),
        (Whole(), {"x": X}, "single", 1, []),
        (Whole(), [X, X], "single", 1, []),
        (Anything(), {"whatever": X}, "auto", 0, ["whatever"]),
        (Anything(), [X] * 9, "auto", 9, []),
        (nn.GRU(3, 3), (nn.utils.rnn.pack_sequence([X]),), "auto", 1, []),
        (nn.GRU(3, 3), nn.utils.rnn.pack_sequence([X]), "auto", 1, []),
    ],
)
def test_a_batch_becomes_arguments(model: nn.Module, value: Any, call: str, args: int, kwargs: list[str]) -> None:
    bound = bind(model, value, call)
    assert (len(bound.args), list(bound.kwargs)) == (args, kwargs)


def test_a_single_argument_is_the_batch_itself() -> None:
    value = {"x": X}
    assert bind(Whole(), value, "single").args[0] is value


@pytest.mark.parametrize(
    ("model", "value", "call", "parts"),
    [
        (Encoder(), {"input_idz": X}, "auto", ["no argument `input_idz`", "`input_ids`", "Encoder.forward takes"]),
        (Encoder(), {"attention_mask": X}, "auto", ["needs the argument `input_ids`", "has `attention_mask`"]),
        (Encoder(), {}, "auto", ["needs the argument `input_ids`", "the batch is empty"]),
        (Encoder(), (X, X, X), "auto", ["3 positional arguments are too many"]),
        (Encoder(), [], "auto", ["needs the argument `input_ids`"]),
        (Whole(), {"x": X}, "auto", ["no argument `x`", "`call: single`"]),
        (Whole(), (X, X), "auto", ["too many", "`call: single`"]),
        (Encoder(), {1: X}, "auto", ["the key 1 is no text", "`call: single`"]),
        (Encoder(), X, "kwargs", ["needs a mapping", "Tensor"]),
        (Encoder(), {"input_ids": X}, "args", ["needs a list or tuple", "dict"]),
    ],
)
def test_a_batch_that_does_not_bind(model: nn.Module, value: Any, call: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        bind(model, value, call)
    message = str(caught.value)
    assert message.startswith("batch: ")
    for part in parts:
        assert part in message


class OneInput(nn.Module):
    """A model whose targets only the loss takes."""

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return x * scale


def test_with_a_loss_what_the_model_does_not_take_is_left_to_it() -> None:
    model = OneInput()
    assert bind(model, (1, 2, 3), targets=True).args == (1, 2)
    assert bind(model, {"x": 1, "labels": 2}, targets=True).kwargs == {"x": 1}
    assert "first 2 of the batch's 3 fields" in (left_to_the_loss(model, (1, 2, 3)) or "")
    assert "only the loss gets `labels`" in (left_to_the_loss(model, {"x": 1, "labels": 2}) or "")
    assert left_to_the_loss(model, {"x": 1}) is None


@pytest.mark.parametrize(
    ("value", "call", "targets"),
    [
        ((1, 2, 3), "auto", False),
        ((1, 2, 3), "args", True),
        ({"x": 1, "scal": 2}, "auto", True),
        ({"labels": 2}, "auto", True),
    ],
)
def test_a_slip_of_the_pen_and_a_missing_argument_are_still_refused(value: Any, call: str, targets: bool) -> None:
    with pytest.raises(UsageError):
        bind(OneInput(), value, call, targets=targets)
