"""Errors of forward that are the batch's fault, in one line; and those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanprobe.inputs.call import Call, bind
from nanprobe.inputs.mismatch import explain_forward_error


class Decoder(nn.Module):
    """Token and position tables, a mask that is added, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.positions = nn.Embedding(6, 4)
        self.block = Block()
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.size(1)))
        logits = self.head(self.block(hidden, attention_mask))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.norm(hidden)
        return hidden if mask is None else hidden * mask.float().unsqueeze(-1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4 * 2 * 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        hidden: Tensor = self.fc(self.conv(image).flatten(1))
        return hidden


class TiedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table)


class Broken(nn.Module):
    """A model whose own layers do not fit each other, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(x))
        return hidden


class Asking(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + 1


class Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def explain(model: nn.Module, batch: Any, call: str = "auto") -> str | None:
    """Call the model, find the innermost module that raised as a replay would, and explain the error."""
    stack: list[tuple[str, Any]] = []
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        module.register_forward_pre_hook(
            lambda m, args, kwargs: stack.append((names[m], (args, kwargs))), with_kwargs=True
        )
        module.register_forward_hook(lambda m, args, out: void(stack.pop()))
    bound: Call = bind(model, batch, call)
    try:
        model(*bound.args, **bound.kwargs)
    except Exception as error:
        path, inputs = stack[-1]
        text = explain_forward_error(error, model, bound, path, inputs)
        assert text is None or "\n" not in text
        return text
    raise AssertionError("the model took the batch")


class Unpacking(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        batch, channels, height, width = image.shape
        return image.reshape(batch, channels, height * width)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.unsqueeze(-1).expand(-1, -1, 4) * mask.unsqueeze(-1)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.fc(x.view(-1, 8))
        return hidden


def void(_: Any) -> None:
    """Return nothing, so that a hook changes no output."""


IDS = torch.tensor([[1, 2, 3], [4, 5, 9]])


@pytest.mark.parametrize(
    ("model", "batch", "parts"),
    [
        (
            Decoder(),
            {"input_ids": torch.tensor([[1, 12]])},
            ["`input_ids` holds ids from 1 to 12", "`tokens` (Embedding)", "10 entries (0 to 9)"],
        ),
        (Decoder(), {"input_ids": torch.tensor([[-1, 2]])}, ["`input_ids` holds ids from -1 to 2"]),
        (Decoder(), (torch.tensor([[1, 12]]),), ["`0` holds ids from 1 to 12"]),
        (
            Decoder(),
            {"input_ids": torch.zeros(1, 8, dtype=torch.long)},
            [
                "`positions` (Embedding)",
                "6 entries",
                "0 to 7",
                "longer than the model allows",
                "`input_ids` has shape [1, 8]",
            ],
        ),
        (Decoder(), {"input_ids": IDS, "labels": IDS + 4}, ["`labels` holds ids from 5 to 13", "Target 13"]),
        (TiedTable(), torch.tensor([0, 7]), ["ids from 0 to 7", "the table `table` has 5 entries"]),
        (
            Decoder(),
            {"input_ids": IDS, "attention_mask": torch.ones(2, 5)},
            ["`attention_mask` [2, 5]", "`block` (Block)", "size of tensor"],
        ),
        (Decoder(), {"input_ids": IDS, "labels": IDS[:, :2]}, ["`labels` [2, 2]", "Decoder.forward"]),
        (nn.Sequential(nn.Linear(3, 2)), torch.ones(2, 5), ["[2, 5] does not fit `0` (Linear)", "mat1 and mat2"]),
        (nn.Linear(3, 2), torch.ones(2, 5), ["[2, 5] does not fit Linear.forward"]),
        (Convolutional(), {"image": torch.ones(1, 1, 4, 4)}, ["`image` [1, 1, 4, 4]", "`conv` (Conv2d)", "channels"]),
        (Convolutional(), {"image": torch.ones(4, 4)}, ["`image` [4, 4]", "`conv` (Conv2d)"]),
        (Decoder(), {"input_ids": torch.rand(1, 3)}, ["`input_ids` (float32)", "`tokens` (Embedding)"]),
        (nn.Sequential(nn.Linear(3, 2)), torch.ones(2, 3).double(), ["(float64)", "`0` (Linear)"]),
        (nn.Sequential(nn.Linear(3, 2)), torch.ones(2, 3).long(), ["(int64)", "`0` (Linear)"]),
        (Unpacking(), torch.ones(2, 3, 4), ["[2, 3, 4]", "expected 4, got 3"]),
        (Unpacking(), torch.ones(1, 2, 3, 4, 5), ["[1, 2, 3, 4, 5]", "too many values"]),
        (Viewing(), torch.ones(3, 5), ["[3, 5]", "invalid for input of size 15"]),
        (
            Masked(),
            {"x": torch.ones(2, 2), "mask": torch.ones(2, 3)},
            ["`x` [2, 2]", "`mask` [2, 3]", "Masked.forward"],
        ),
        (Decoder(), {"input_ids": [1, 2]}, ["`input_ids` is a list", "`tokens` (Embedding) needs a tensor"]),
        (nn.Sequential(nn.Linear(3, 2)), "text", ["`0` is a str", "`0` (Linear) needs a tensor"]),
        (nn.GRU(3, 4), torch.ones(2, 5, 6), ["[2, 5, 6]", "GRU.forward"]),
        (nn.Sequential(nn.LayerNorm(4)), torch.ones(2, 3), ["[2, 3]", "`0` (LayerNorm)"]),
        (nn.Sequential(nn.BatchNorm1d(4)), torch.ones(2, 3), ["[2, 3]", "`0` (BatchNorm1d)"]),
    ],
)
def test_a_batch_that_does_not_fit(model: nn.Module, batch: Any, parts: list[str]) -> None:
    message = explain(model, batch)
    assert message is not None
    assert message.startswith("batch: ")
    for part in parts:
        assert part in message


def test_a_key_that_the_model_asks_for() -> None:
    message = explain(Asking(), {"y": torch.ones(1), "z": torch.ones(1)}, "single")
    assert message == "batch: the model asks the batch for `x`, which it does not have; it has `y`, `z`"


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Broken(), torch.ones(2, 3)),
        (Raising(RuntimeError("the weather is bad")), torch.ones(2)),
        (Raising(ValueError("nan in the loss")), torch.ones(2)),
        (Raising(KeyError("x")), torch.ones(2)),
        (Raising(ZeroDivisionError("division by zero")), torch.ones(2)),
        (Raising(NotImplementedError("shape of things")), torch.ones(2)),
        (Raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: size 5")), torch.ones(2)),
        (Raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate size")), torch.ones(2)),
    ],
)
def test_an_error_that_is_not_the_batchs(model: nn.Module, batch: Any) -> None:
    assert explain(model, batch) is None


def test_an_error_of_the_loss() -> None:
    model = nn.Linear(3, 2)
    target = torch.tensor([0, 5])
    call = Call(kwargs={"x": torch.ones(2, 3), "target": target})
    with pytest.raises(IndexError) as caught:
        F.cross_entropy(torch.zeros(2, 2), target)
    message = explain_forward_error(caught.value, model, call, None, ())
    assert message is not None
    assert "`target` holds ids from 0 to 5" in message
    assert "the loss" in message
