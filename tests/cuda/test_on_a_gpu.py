"""The same replay on a GPU: lanes, backward, trace, statistics, randomness, and what must be left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.numerics.stats import is_finite, measure, measure_against
from tests.lanes.support import Code, assert_healthy, mean_square, untouched
from tests.lanes.support import measure as measured

pytestmark = pytest.mark.cuda
LOW = ("fp16", "bf16", "tf32", "fp8-e4m3")


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(16, 64),
            nn.LayerNorm(64),
            nn.Dropout(0.3),
            nn.Linear(64, 4),
        )
        self.factor = factor

    def forward(self, x: Tensor) -> Any:
        return self.down(self.drop(self.norm(torch.relu(self.up(x) * self.factor))))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_healthy_model_is_clean_and_left_where_it_was(mode: str, where: str) -> None:
    model, x = Net().to(where), torch.randn(8, 16)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, dtypes=LOW, mode=mode, device="cuda", loss=mean_square)
    assert_healthy(report, LOW)
    assert report.record.environment["device"] == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_the_cuda_generator_is_left_as_it_was_and_lanes_drop_the_same(mode: str) -> None:
    before = torch.cuda.get_rng_state()
    report = nanprobe.compare_precisions(Net(), torch.randn(8, 16), mode=mode, device="cuda", loss=mean_square)
    assert torch.equal(before, torch.cuda.get_rng_state())
    zeros = {name: measured(report, "drop", name).zero for name in report.precisions}
    assert len(set(zeros.values())) == 1


def test_an_overflow_is_named_down_to_the_operation() -> None:
    report = nanprobe.replay(Net(1e5), torch.randn(8, 16), dtype="fp16", device="cuda", loss=mean_square)
    assert report.first_bad is not None
    assert (report.first_bad.module, report.first_bad.op) == ("", "aten.mul")
    assert report.first_bad.mechanism == "overflow"


def test_a_bad_gradient_is_found() -> None:
    model = Code(lambda self, x: torch.sqrt(self.lin(x) * 0), lin=nn.Linear(4, 4))
    report = nanprobe.replay(model, torch.randn(2, 4), dtype="bf16", device="cuda", loss=mean_square)
    assert report.first_bad is not None
    assert (report.first_bad.phase, report.first_bad.op) == ("backward", "aten.sqrt")


def test_the_culprit_is_the_same_on_the_cpu() -> None:
    model, x = Net(1e5), torch.randn(8, 16)
    found = [nanprobe.replay(model, x, dtype="fp16", device=device).first_bad for device in ("cpu", "cuda")]
    assert found[0] is not None
    assert found[1] is not None
    assert (found[0].module, found[0].op, found[0].mechanism) == (found[1].module, found[1].op, found[1].mechanism)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    reference = torch.randn(1000, 33)
    values = (reference * 1.01).to(dtype)
    values[3, 4], values[5, 6], values[7] = float("nan"), float("-inf"), 0.0
    here, there = measure_against(values, reference), measure_against(values.cuda(), reference.cuda())
    assert here[0][:6] == there[0][:6]
    assert here[0][8:] == there[0][8:]
    assert here[1] is not None
    assert there[1] is not None
    assert there[1].rel_error == pytest.approx(here[1].rel_error, rel=1e-6)
    assert there[1].flushed == here[1].flushed
    assert measure(values.cuda()).bad == 2
    assert not is_finite(values.cuda())


def test_one_measurement_is_one_synchronisation() -> None:
    values, reference = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    with torch.profiler.profile() as profile:
        measure_against(values, reference)
    waits = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(waits) + len(copies) <= 1


def test_flags_are_the_lanes_own() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    seen: dict[str, set[str]] = {}

    def look(self: Any, x: Tensor) -> Any:
        seen.setdefault(str(x.dtype), set()).add(torch.get_float32_matmul_precision())
        return self.lin(x)

    nanprobe.replay(Code(look, lin=nn.Linear(4, 4)), torch.randn(2, 4), dtype="tf32", device="cuda")
    assert "highest" in seen["torch.float32"]
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
