"""Lanes that block each other end with a clear error, and odd exceptions end one lane only."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import IncompleteError
from nanprobe.lanes import baton

LOCK = threading.Lock()


class Locked(nn.Module):
    """Holds a lock of the process while it calls a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            return self.inner(x)


class Odd(Locked):
    """Raises something that is no Exception, in one precision only."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.dtype == torch.bfloat16:
            raise BaseException("odd")
        return y


def test_a_lock_held_across_modules_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton, "_PATIENCE", 0.05)
    monkeypatch.setattr(baton, "_STUCK_AFTER", 0.2)
    before = threading.active_count()
    with pytest.raises(IncompleteError, match="waits for a lock"):
        nanprobe.compare_precisions(Locked(), torch.randn(2, 4))
    assert not LOCK.locked()
    assert threading.active_count() == before


def test_an_exception_of_no_usual_kind_ends_its_lane_only() -> None:
    report = nanprobe.compare_precisions(Odd(), torch.randn(2, 4), mode="cast")
    assert report.verdict == "inconclusive"
    assert report.precisions["fp16"].completed
    assert "odd" in str(report.precisions["bf16"].error)
