"""Faults met on GPUs that depend on the autocast policy or on the attention back end, replayed on a CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanprobe
from nanprobe.report import Report
from tests.lanes.support import Code, mean_square, measure


def first(report: Report) -> Any:
    found = report.record.first_bad
    assert found is not None
    return found


def written_out(self: Any, x: Tensor) -> Tensor:
    """Attention of one head as people write it: the scale comes after the product."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    scores = self.scores(q, k) / math.sqrt(q.shape[-1])
    return torch.matmul(self.softmax(scores), v)


def heads(scores: Any, width: int = 64, size: float = 100.0, code: Any = written_out) -> nn.Module:
    """Return attention with q and k of about ``size`` for inputs of about 1."""
    members = {name: nn.Linear(width, width, bias=False) for name in ("q", "k", "v")}
    for name, layer in members.items():
        nn.init.orthogonal_(layer.weight, gain=size if name != "v" else 1.0)
    return Code(code, **members, scores=Code(scores), softmax=nn.Softmax(dim=-1))


def tokens(count: int = 16, width: int = 64) -> Tensor:
    return torch.randn(2, count, width)


def test_12_input_cast_poisons_batch_norm_and_stays() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    report = nanprobe.replay(model, torch.randn(16, 8) * 1e6, dtype="fp16", loss=mean_square)
    found = first(report)
    assert (found.module, found.phase) == ("0", "forward")
    assert found.input_absmax is None or found.input_absmax > 65504
    assert report.verdict == "precision"
    assert any("1.running_mean" in finding.message for finding in report.record.findings)


class Squeeze(nn.Module):
    """The mean over a map, by sum and count."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).sum(-1, dtype=self.dtype) / (x.shape[2] * x.shape[3])


@pytest.mark.parametrize(
    ("mode", "policy", "fails"), [("autocast", "cuda", False), ("autocast", "cpu", True), ("cast", "cuda", True)]
)
def test_16_a_spatial_sum_overflows_in_half_and_cuda_autocast_runs_it_in_float32(
    mode: str, policy: str, fails: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Squeeze(None))
    nn.init.constant_(model[0].weight, 10.0)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    report = nanprobe.replay(model, torch.ones(1, 2, 64, 64), dtype="fp16", mode=mode, autocast_policy=policy)
    assert report.verdict == ("precision" if fails else "clean")
    if fails:
        assert first(report).module == "1"


def test_18_scale_after_the_product() -> None:
    model = heads(lambda self, q, k: q @ k.transpose(-2, -1))
    report = nanprobe.compare_precisions(model, tokens())
    found = first(report)
    assert (found.precision, found.module) == ("fp16", "scores")
    assert found.reference_absmax is not None
    assert found.reference_absmax > 65504
    assert report.precisions["bf16"].verdict == "clean"
    scaled = heads(lambda self, q, k: (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1) * math.sqrt(q.shape[-1]))
    assert measure(nanprobe.replay(scaled, tokens(), dtype="fp16"), "q", "fp16").posinf == 0


def test_19_the_outcome_depends_on_the_back_end() -> None:
    def fused(self: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in (self.q(x), self.k(x), self.v(x)))
        out: Tensor = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return out

    model = heads(lambda self, q, k: q, code=fused)
    batch = tokens()
    found = {
        (way, name): result.verdict
        for way in ("fused", "math", "math-half")
        for name, result in nanprobe.compare_precisions(model, batch, attention=way).precisions.items()
        if name != "fp32"
    }
    assert found == {
        ("fused", "fp16"): "clean",
        ("fused", "bf16"): "clean",
        ("math", "fp16"): "clean",
        ("math", "bf16"): "clean",
        ("math-half", "fp16"): "precision",
        ("math-half", "bf16"): "clean",
    }


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_20_float_is_undone_by_autocast_and_kept_where_it_is_off(device: str) -> None:
    def upcast(self: Any, q: Tensor, k: Tensor) -> Tensor:
        return q.float() @ k.float().transpose(-2, -1)

    def with_autocast_off(self: Any, q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast(device, enabled=False):
            return q.float() @ k.float().transpose(-2, -1)

    undone = nanprobe.replay(heads(upcast), tokens(), dtype="fp16")
    assert first(undone).module == "scores"
    assert measure(undone, "scores", "fp16").dtype == "float16"
    kept = nanprobe.replay(heads(with_autocast_off), tokens(), dtype="fp16")
    assert measure(kept, "scores", "fp16").dtype == "float32"
    assert measure(kept, "scores", "fp16").posinf == measure(kept, "scores", "fp16").neginf == 0


def test_21_cross_attention_over_77_keys() -> None:
    def cross(self: Any, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(context), self.v(context)
        scores = self.scores(q, k) / math.sqrt(q.shape[-1])
        return torch.matmul(self.softmax(scores), v)

    model = heads(lambda self, q, k: q @ k.transpose(-2, -1), size=110.0, code=cross)
    batch = {"x": tokens(), "context": tokens(77)}
    report = nanprobe.replay(model, batch, dtype="fp16")
    assert first(report).module == "scores"
    assert measure(report, "softmax", "fp16").nan > 0
    wide = nanprobe.replay(model, batch, dtype="bf16")
    assert measure(wide, "softmax", "bf16").nan == 0


class Norm(nn.Module):
    """Root-mean-square norm in the input's own precision."""

    def __init__(self, upcast: bool) -> None:
        super().__init__()
        self.upcast = upcast

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.upcast else x
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("upcast", [False, True])
def test_33_a_norm_written_in_half_collapses_to_zero(upcast: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Norm(upcast))
    nn.init.orthogonal_(model[0].weight, gain=2000.0)  # type: ignore[arg-type]
    report = nanprobe.replay(model, torch.randn(2, 64), dtype="fp16", mode="cast")
    norm = measure(report, "1", "fp16")
    assert (norm.zero == norm.elements) == (not upcast)
    assert (report.verdict == "clean") == upcast
    reference = measure(report, "1", "fp32")
    assert reference.absmax is not None
    assert reference.absmax > 1


def test_33_a_square_runs_in_float32_under_cudas_policy() -> None:
    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = nn.Sequential(nn.Linear(64, 64, bias=False), Squared())
    nn.init.orthogonal_(model[0].weight, gain=2000.0)  # type: ignore[arg-type]
    batch = torch.randn(2, 64)
    assert nanprobe.replay(model, batch, dtype="fp16").verdict == "clean"
    cpu = nanprobe.replay(model, batch, dtype="fp16", autocast_policy="cpu")
    assert measure(cpu, "1", "fp16").zero == 128
