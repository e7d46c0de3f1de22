"""Whose autocast lists a replay follows, and what the report says about it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import Code, assert_healthy, gradient, mean_square, measure, untouched


def soft() -> nn.Module:
    return Code(lambda self, x: self.soft(self.lin(x)), lin=nn.Linear(4, 4), soft=nn.Softmax(dim=-1))


@pytest.mark.parametrize(("policy", "dtype"), [("cuda", "float32"), ("cpu", "float16")])
def test_the_policy_decides_in_which_dtype_a_softmax_runs(policy: str, dtype: str) -> None:
    report = nanprobe.replay(soft(), torch.randn(3, 4), dtype="fp16", autocast_policy=policy)
    assert measure(report, "lin", "fp16").dtype == "float16"
    assert measure(report, "soft", "fp16").dtype == dtype
    assert report.record.conditions["autocast_policy"] == policy
    assert not any("operator lists" in note for note in report.record.conditions["notes"])


def test_cuda_is_the_default() -> None:
    report = nanprobe.replay(soft(), torch.randn(3, 4), dtype="fp16")
    assert report.record.conditions["autocast_policy"] == "cuda"


def test_bce_is_refused_in_the_low_lane_only() -> None:
    model = Code(lambda self, x: torch.sigmoid(self.lin(x)), lin=nn.Linear(4, 4))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy(output, torch.ones_like(output))

    batch = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.replay(model, batch, dtype="fp16", loss=loss)
    error = report.precisions["fp16"].error
    assert error is not None
    assert "unsafe to autocast" in error
    assert report.precisions["fp32"].completed


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_regions_of_the_models_own_open_without_a_gpu(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            kept = self.kept(x.to(self.kept.weight.dtype))
        with torch.autocast("cuda", dtype=torch.float16):
            return self.low(kept.float()).float()

    model = Code(forward, kept=nn.Linear(4, 4), low=nn.Linear(4, 4))
    report = nanprobe.replay(model, torch.randn(3, 4), dtype="fp16", mode=mode, loss=mean_square)
    assert_healthy(report, ("fp16",))
    assert measure(report, "kept", "fp16").dtype == ("float32" if mode == "autocast" else "float16")
    assert measure(report, "low", "fp16").dtype == "float16"
    assert measure(report, "low", "fp32").dtype == "float32"


def test_a_lane_leaves_other_threads_alone() -> None:
    seen: list[torch.dtype] = []

    def look() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            seen.append(torch.ones(2).half().softmax(0).dtype)

    def forward(self: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        out: Tensor = self.lin(x)
        return out

    nanprobe.replay(Code(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4), dtype="fp16")
    assert set(seen) == {torch.float16}


def test_tied_weights_add_up_their_gradients_in_half() -> None:
    model = Code(lambda self, x: self.lin(x) - self.lin(x.flip(0)), lin=nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.lin.weight)  # type: ignore[arg-type, union-attr]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output.float() * torch.tensor([[1.0], [-1.0]])).sum()

    batch = torch.tensor([[20000.0], [-20000.0]])
    report = nanprobe.replay(model, batch, dtype="fp16", loss=loss, loss_scale=1.0)
    found = gradient(report, "lin.weight").precisions
    assert (found["fp32"].absmax, found["fp32"].posinf, found["fp16"].posinf) == (80000.0, 0, 1)
