"""What a tensor is called and what it is: from wrappers, optimizer numbers, averaged copies, flattened keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanprobe.checkpoints import CheckpointIndex, index_checkpoint
from nanprobe.checkpoints.flat import flat_blocks
from nanprobe.checkpoints.optimizer_ids import names_of_ids
from tests.checkpoints import layouts


class Mixed(nn.Module):
    """Convolution, batch norm and a head: parameters and buffers in turn, several of one shape."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        if tied:
            self.tail.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(self.norm(self.conv(x)).mean((2, 3))))


def stepped(model: nn.Module, groups: Any = None, cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    optimizer = cls(model.parameters() if groups is None else groups, lr=0.1)
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    return optimizer


def saved(folder: Path, state: Any) -> CheckpointIndex:
    torch.save(state, folder / "a.pt")
    return index_checkpoint(folder / "a.pt")


def states(index: CheckpointIndex, state: str = "exp_avg") -> set[str]:
    return {entry.name.removesuffix(f".{state}") for entry in index.tensors if entry.role == state}


def check_values(index: CheckpointIndex, model: nn.Module, optimizer: Any, state: str = "exp_avg") -> None:
    """Every named state has the shape of its parameter and the key of its number."""
    numbers = {id(p): number for number, p in enumerate(q for g in optimizer.param_groups for q in g["params"])}
    for name, parameter in model.named_parameters():
        entry = next(e for e in index.tensors if e.name == f"{name}.{state}")
        assert entry.key is not None
        assert entry.key.endswith(f"state.{numbers[id(parameter)]}.{state}")


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "model_state_dict", "module", "net"])
def test_wrappers_and_numbers(tmp_path: Path, wrapper: str) -> None:
    model = Mixed()
    optimizer = stepped(model)
    index = saved(tmp_path, {wrapper: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    assert {entry.name for entry in index.tensors if entry.role is None} == set(model.state_dict())
    check_values(index, model, optimizer)


def test_a_state_dict_at_the_root_keeps_its_names(tmp_path: Path) -> None:
    model = nn.Sequential(Mixed())
    assert {entry.name for entry in saved(tmp_path, model.state_dict()).tensors} == set(model.state_dict())
    wrapped = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert {entry.name for entry in saved(tmp_path, wrapped).tensors} == set(wrapped)


def test_two_groups_by_decay(tmp_path: Path) -> None:
    model = layouts.Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    check_values(saved(tmp_path, {"model": model.state_dict(), "opt": optimizer.state_dict()}), model, optimizer)


def test_two_groups_with_a_buffer_of_the_same_shape(tmp_path: Path) -> None:
    """The buffer could stand for any of the vectors, so that only the matrices are certain."""
    model = Mixed()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = stepped(model, groups)
    index = saved(tmp_path, {"model": model.state_dict(), "opt": optimizer.state_dict()})
    assert {"conv.weight", "head.weight", "tail.weight"} == {name for name in states(index) if "opt" not in name}


def test_groups_that_list_names(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = stepped(model, reversed(list(model.named_parameters())))
    check_values(saved(tmp_path, {"optimizer": optimizer.state_dict()}), model, optimizer)


def test_tied_weights_have_one_number(tmp_path: Path) -> None:
    model = Mixed(tied=True)
    optimizer = stepped(model)
    check_values(saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}), model, optimizer)


def test_numbers_that_could_be_either_stay_numbers(tmp_path: Path) -> None:
    """Only the head is trained, and head and tail have the same shapes: no name is better than a wrong one."""
    model = Mixed()
    optimizer = stepped(model, model.head.parameters())
    index = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert states(index) == {"optimizer.state.0", "optimizer.state.1"}


def test_sgd_and_masters(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    index = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert states(index, "momentum_buffer") == {name for name, _ in model.named_parameters()}


def test_states_by_name(tmp_path: Path) -> None:
    """FSDP's full optimizer state has names for keys."""
    state = {"state": {"fc.weight": {"exp_avg": torch.ones(2), "step": 3}}, "param_groups": [{"params": ["fc.weight"]}]}
    index = saved(tmp_path, {"model": {"fc.weight": torch.ones(2)}, "optimizer": state})
    assert states(index) == {"fc.weight"}
    steps = [(scalar.value, scalar.of) for scalar in index.scalars if scalar.role == "optimizer-step"]
    assert steps == [(3, "fc.weight")]


def test_plain_steps_know_their_parameter(tmp_path: Path) -> None:
    model = Mixed()
    optimizer = stepped(model)
    state = copy.deepcopy(optimizer.state_dict())
    for fields in state["state"].values():
        fields["step"] = 7
    index = saved(tmp_path, {"model": model.state_dict(), "optimizer": state})
    found = {scalar.of: scalar.value for scalar in index.scalars if scalar.role == "optimizer-step"}
    assert found == {name: 7 for name, _ in model.named_parameters()}


@pytest.mark.parametrize("key", ["ema", "model_ema", "ema_state_dict", "state_dict_ema", "params_ema"])
def test_averaged_copies(tmp_path: Path, key: str) -> None:
    weights = layouts.parameters()
    index = saved(tmp_path, {"model": weights, key: {f"module.{name}": value for name, value in weights.items()}})
    copies = [entry for entry in index.tensors if entry.role == "ema"]
    assert {entry.of for entry in copies} == set(weights)
    assert copies[0].name.startswith(f"{key}.module.")


def test_averaged_copies_beside_the_weights(tmp_path: Path) -> None:
    state = {"model.fc.weight": torch.ones(2), "model_ema.fc.weight": torch.ones(2)}
    entries = {entry.name: entry for entry in saved(tmp_path, {"state_dict": state}).tensors}
    assert entries["model_ema.fc.weight"].role == "ema"
    assert entries["model_ema.fc.weight"].of == "model.fc.weight"
    assert entries["model.fc.weight"].role is None


def test_a_whole_module_under_a_key(tmp_path: Path) -> None:
    index = saved(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2)), "epoch": 1})
    assert {entry.name for entry in index.tensors} == {"0.weight", "0.bias"}


def test_other_places(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "cuda_rng_state": torch.zeros(4, dtype=torch.uint8),
        "grad_scaler": {"scale": torch.tensor([2.0]), "growth_tracker": torch.tensor([1])},
        "callbacks": {"best": torch.tensor(float("inf"))},
        "lr_scheduler": {"lrs": torch.ones(1)},
    }
    roles = {entry.name: entry.role for entry in saved(tmp_path, state).tensors}
    assert roles == {
        "w": None,
        "cuda_rng_state": "rng",
        "grad_scaler.scale": "loss-scale",
        "grad_scaler.growth_tracker": "scaler",
        "callbacks.best": "callback",
        "lr_scheduler.lrs": "scheduler",
    }


def test_problems_follow_the_names(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(300)}}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data.replace(b"M,\x01", b"M,\x02"))
    problems = index_checkpoint(tmp_path / "a.pt").problems
    assert problems
    assert {problem.tensor for problem in problems} in ({"w"}, {None})


# Numbers


def test_numbers_between_other_tensors() -> None:
    parameters = [("a", (2,)), ("buffer", (9,)), ("b", (3,)), ("c", (2,))]
    group = [{"params": [0, 1, 2]}]
    shapes = {0: (2,), 1: (3,), 2: (2,)}
    assert names_of_ids(group, shapes, parameters, ordered=True) == {0: "a", 1: "b", 2: "c"}
    assert names_of_ids(group, {**shapes, 1: (4,)}, parameters, ordered=True) == {}
    # Without an order only the one shape that occurs once is certain.
    assert names_of_ids(group, shapes, parameters, ordered=False) == {1: "b"}


def test_numbers_that_are_partly_certain() -> None:
    parameters = [("a", (2,)), ("b", (2,)), ("c", (3,))]
    assert names_of_ids([{"params": [0, 1]}], {0: (2,), 1: (3,)}, parameters, ordered=True) == {1: "c"}


@pytest.mark.parametrize("groups", [[{}], [{"params": 3}], [{"params": [0, 0]}], [{"params": [[1]]}], [None], [[]]])
def test_groups_that_make_no_sense(groups: Any) -> None:
    assert names_of_ids(groups, {0: (2,)}, [("a", (2,))], ordered=True) == {}


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2), (4, 1)])
def test_ranges_become_blocks(shape: tuple[int, ...]) -> None:
    total = torch.zeros(shape).numel()
    whole = torch.arange(total).reshape(shape)
    for begin in range(total + 1):
        for end in range(begin, total + 1):
            seen = torch.full(shape, -1)
            blocks = flat_blocks(shape, begin, end)
            for start, extent, position in blocks:
                block = tuple(slice(at, at + size) for at, size in zip(start, extent, strict=True))
                count = torch.zeros(extent).numel()
                seen[block] = torch.arange(begin + position, begin + position + count).reshape(extent)
            inside = (whole >= begin) & (whole < end)
            assert torch.equal(seen, torch.where(inside, whole, torch.tensor(-1)))
            assert len(blocks) <= max(2 * len(shape), 1)
