"""An Inf that does no harm is not blamed for what went wrong beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import Code


def test_an_inf_that_a_clamp_takes_back_is_not_blamed_for_a_cancellation() -> None:
    """Quantisation with a tiny scale: x / s overflows and is clamped rightly; (q - x) + x loses the digits."""

    def quantise(m: object, x: Tensor) -> Tensor:
        q = (x / 1e-4).clamp(-8, 7) * 1e-4
        return (q - x) + x

    model = nn.Sequential(nn.Linear(8, 8), Code(quantise), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight.mul_(40)  # type: ignore[operator]  # a Linear's weight
    report = nanprobe.replay(model, torch.randn(4, 8), dtype="fp16", mode="cast")
    assert report.verdict == "precision"
    bad = report.first_bad
    assert bad is None or bad.op != "aten.div"
    assert report.precisions["fp16"].first_divergence is not None


def test_zero_times_a_masked_logit_is_no_masked_row() -> None:
    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept[:, :2] = True  # columns that no sample keeps hold -Inf throughout
        masked = logits.float().masked_fill(~kept, -torch.inf)
        p = masked.softmax(-1)
        return -(p * masked.log_softmax(-1)).sum(-1).mean()

    report = nanprobe.replay(nn.Linear(8, 6), torch.randn(4, 8), dtype="bf16", loss=loss)
    bad = report.first_bad
    assert bad is not None
    assert (bad.phase, bad.op, bad.mechanism, bad.precision_related) == (
        "loss",
        "aten.mul",
        "invalid-operation",
        False,
    )
