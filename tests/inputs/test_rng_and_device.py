"""Random state that is kept and given back, and devices that are there or not."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from nanprobe.errors import UsageError
from nanprobe.inputs.device import check_device, move
from nanprobe.inputs.rng import RandomState, seed_all


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_repeats_every_generator() -> None:
    seed_all(3)
    first = draw()
    seed_all(3)
    assert draw() == first
    seed_all(4)
    other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_largest_seed_is_taken() -> None:
    seed_all(2**64 - 1)


def test_restore_gives_back_what_was_captured() -> None:
    random.gauss(0, 1)
    np.random.randn()
    state = RandomState.capture()
    first = (*draw(), random.gauss(0, 1), float(np.random.randn()))
    seed_all(99)
    state.restore()
    assert (*draw(), random.gauss(0, 1), float(np.random.randn())) == first


def test_an_empty_state_changes_nothing() -> None:
    seed_all(1)
    first = draw()
    seed_all(1)
    RandomState().restore()
    assert draw() == first


def test_a_cuda_state_that_cannot_be_restored_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    state = dataclasses.replace(RandomState.capture(), cuda=(torch.zeros(16, dtype=torch.uint8),))
    assert "1 of 1 CUDA devices cannot be restored" in str(state.not_restorable())
    state.restore()
    assert RandomState.capture().not_restorable() is None


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="sees no CUDA device"):
        check_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="there are 2 CUDA devices"):
        check_device("cuda:2")
    for name in ("gpu", "mps", ""):
        with pytest.raises(UsageError, match="expected cpu, cuda or cuda:N"):
            check_device(name)


def test_move_reaches_nested_tensors_and_keeps_the_rest() -> None:
    batch = {"x": torch.ones(2), "deep": [(torch.zeros(1), "text")], "n": 3}
    moved = move(batch, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["deep"][0][0].device.type == "meta"
    assert moved["deep"][0][1] == "text"
    assert moved["n"] == 3
    assert batch["x"].device.type == "cpu"  # type: ignore[union-attr]  # a tensor, as written above


def test_move_keeps_the_batch_sizes_of_a_packed_sequence_on_the_cpu() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = move((packed,), torch.device("meta"))[0]
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"
