"""A model that differs from itself is no evidence against a precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nanprobe


class Fresh(nn.Module):
    """Adds noise that no random state explains, in proportion to ``share``."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        torch.seed()
        return self.inner(x) + self.share * torch.randn(4, 8)


class Wide(nn.Module):
    """Overflows whatever it draws."""

    def forward(self, x: Tensor) -> Tensor:
        torch.seed()
        return x * 1e5 + torch.randn(4, 8)


def test_a_difference_that_noise_explains_gives_no_verdict() -> None:
    report = nanprobe.compare_precisions(Fresh(0.3), torch.randn(4, 8))
    assert report.verdict == "inconclusive"
    assert {f.rule for f in report.findings} == {"not-deterministic"}
    assert report.exit_code == 0
    assert all(result.first_divergence is None for result in report.precisions.values())


def test_a_model_that_repeats_itself_is_not_called_noisy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    report = nanprobe.replay(model, torch.randn(4, 8), dtype="fp16", mode="cast", train=True)
    assert report.verdict == "precision"
    assert "not-deterministic" not in {f.rule for f in report.findings}


def test_an_overflow_stays_an_overflow_in_a_noisy_model() -> None:
    report = nanprobe.replay(Wide(), torch.randn(4, 8), dtype="fp16", mode="cast")
    assert report.first_bad is not None
    assert report.first_bad.mechanism == "overflow"
    assert {"overflow", "not-deterministic"} <= {f.rule for f in report.findings}
