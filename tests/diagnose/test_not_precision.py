"""Faults that FP32 has too: said first, and the place named all the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.diagnose.support import Attention, Do, assert_clean, bad, compare, errors, mean_square, mlp

MODES = ("cast", "autocast")


@pytest.mark.parametrize("mode", MODES)
def test_a_logarithm_of_zero_in_a_leaf(mode: str) -> None:
    model = nn.Sequential(mlp(8), nn.ReLU(), Do(torch.log), nn.Linear(8, 3))
    report = compare(model, torch.randn(4, 8), mode)
    for precision in ("fp16", "bf16"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.precision_related) == ("forward", "2", False), report.render()
        assert report.precisions[precision].verdict == "not-precision"
    assert report.precisions["fp32"].verdict == "not-precision"
    assert report.precisions["fp32"].first_bad.module == "2"
    assert report.precisions["fp32"].first_bad.precision_related is False
    assert {f.module for f in errors(report)} == {"2"}
    assert {f.precision for f in errors(report)} == {"fp16", "bf16"}
    assert (report.verdict, report.exit_code) == ("not-precision", 1)
    assert bad(report, "fp16").remedies == ()


def test_a_mean_over_an_empty_mask_in_own_code() -> None:
    class MaskedMean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(8), nn.Linear(8, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            kept = self.body(x) * mask[..., None]
            return self.head(kept.sum(1) / mask.sum(1, keepdim=True).to(x.dtype))

    mask = torch.ones(4, 3)
    mask[3] = 0
    report = compare(MaskedMean(), {"x": torch.randn(4, 3, 8), "mask": mask})
    first = bad(report, "fp16")
    assert (first.module, first.between, first.samples) == ("", ("body", "head"), (3,))
    assert (report.verdict, first.precision_related) == ("not-precision", False)


def test_a_row_masked_whole_by_hand() -> None:
    mask = torch.zeros(2, 1, 4, 4)
    mask[1, :, 2] = -math.inf

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = Attention(8, 2), nn.LayerNorm(8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(self.attention(x, mask=mask))

    report = compare(Net(), {"x": torch.randn(2, 4, 8), "mask": mask})
    first = bad(report, "bf16")
    assert (first.module, first.between) == ("attention", ("attention.qkv", "attention.out"))
    assert (first.samples, first.precision_related) == ((1,), False)
    assert report.verdict == "not-precision"
    assert not [f for f in errors(report) if f.phase == "input"]


def test_a_row_of_a_fill_that_only_fp16_loses() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = Attention(8, 1), nn.LayerNorm(8)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            fill = torch.finfo(x.dtype).min
            scores_mask = torch.where(keep, 0.0, fill).to(x.dtype)[:, None]
            return self.norm(self.attention(x, mask=scores_mask))

    model = Net()
    with torch.no_grad():
        model.attention.qkv.weight.zero_()
        model.attention.qkv.bias.zero_()
        model.attention.qkv.bias[:8] = 10.0
        model.attention.qkv.bias[8:16] = -10.0
        model.attention.qkv.bias[16:] = torch.randn(8)
    keep = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    keep[0, 0] = False
    report = compare(model, {"x": torch.randn(2, 4, 8), "keep": keep})
    first = bad(report, "fp16")
    assert (first.module, first.samples, first.precision_related) == ("attention", (0,), True)
    assert report.precisions["bf16"].verdict == "clean", report.render()


def test_scores_that_leave_a_module_with_a_row_lost() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            raw = x @ x.transpose(-1, -2) * 0.0 - 20.0
            return raw + torch.where(keep, 0.0, torch.finfo(x.dtype).min).to(x.dtype)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scores, self.softmax, self.norm = mlp(8), Scores(), nn.Softmax(-1), nn.LayerNorm(8)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            h = self.body(x)
            return self.norm(self.softmax(self.scores(h, keep)) @ h)

    keep = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    batch = {"x": torch.randn(2, 4, 8), "keep": keep}
    assert_clean(compare(Net(), batch), ("bf16",))
    assert_clean(compare(Net(), batch))
    keep[1, 2] = False
    report = compare(Net(), batch)
    first = bad(report, "fp16")
    assert (first.module, first.samples, first.precision_related) == ("scores", (1,), True), report.render()
    assert report.precisions["bf16"].verdict == "clean"


def test_fp32_that_fails_only_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Do(torch.exp), nn.LayerNorm(4), nn.ReLU(), Do(torch.log), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    x = torch.tensor([[12.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    report = compare(model, x)
    first = bad(report, "fp16")
    assert (first.module, first.mechanism, first.precision_related, first.samples) == ("1", "overflow", True, (0,))
    assert report.precisions["fp16"].verdict == "precision"
    assert report.precisions["fp32"].verdict == "not-precision"
    assert report.precisions["fp32"].first_bad.module == "4"
    assert (report.precisions["bf16"].verdict, bad(report, "bf16").module) == ("not-precision", "4")
    assert {(f.precision, f.module) for f in errors(report)} >= {("fp16", "1"), ("bf16", "4")}
    assert report.verdict == "precision"
    alone = compare(model, x[:1], dtypes=("fp32", "fp16"))
    assert {(f.precision, f.module) for f in errors(alone)} == {("fp16", "1"), ("fp32", "4")}
    assert alone.exit_code == 1


def test_all_labels_ignored() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.float(), torch.full((output.shape[0],), -100))

    report = compare(mlp(8), torch.randn(4, 8), loss=loss)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.precision_related) == ("loss", None, False)
    assert report.verdict == "not-precision"
    assert report.precisions["fp32"].first_bad.phase == "loss"
    assert {f.phase for f in errors(report)} == {"loss"}


def test_a_clamp_bound_that_rounds_to_one_in_the_loss() -> None:
    def focal(output: Tensor, batch: Any) -> Tensor:
        p = output.sigmoid().clamp(1e-4, 1 - 1e-4)
        return -(p * torch.log(1 - p)).mean()

    model = nn.Sequential(mlp(8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].bias[2] = 20.0
    report = compare(model, torch.randn(3, 8), loss=focal)
    for precision in ("fp16", "bf16"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.precision_related) == ("loss", None, True), report.render()
        assert report.precisions[precision].verdict == "precision"
    assert report.precisions["fp32"].verdict == "clean"
    assert "FP32's loss is" in bad(report, "fp16").explanation


def test_a_clamp_bound_that_rounds_to_one_in_a_module() -> None:
    class Focal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = x.sigmoid().clamp(1e-4, 1 - 1e-4)
            return -(p * torch.log(1 - p)).mean()

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.criterion = mlp(8), nn.Linear(8, 4), Focal()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.head(self.body(x))
            return {"loss": self.criterion(y), "y": y}

    model = Detector()
    with torch.no_grad():
        model.head.bias[2] = 20.0
    report = compare(model, torch.randn(3, 8))
    for precision in ("fp16", "bf16"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.precision_related) == ("forward", "criterion", True)


def test_a_legitimate_inf_that_reaches_the_loss() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mask = mlp(8), Do(lambda x: x.masked_fill(torch.arange(8) == 3, -math.inf))

        def forward(self, x: Tensor) -> Tensor:
            return self.mask(self.body(x))

    def smoothed(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.float(), torch.zeros(4, dtype=torch.long), label_smoothing=0.1)

    report = compare(Logits(), torch.randn(4, 8), loss=smoothed)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.precision_related) == ("forward", "mask", False), report.render()
    assert (first.count, first.index) == (4, (0, 3))
    assert report.verdict == "not-precision"
    plain = compare(Logits(), torch.randn(4, 8), loss=lambda y, _: F.cross_entropy(y.float(), torch.zeros(4).long()))
    assert_clean(plain)


def test_log_of_softmax_loses_what_fp32_keeps() -> None:
    model = nn.Sequential(mlp(4), Do(lambda x: x * 0 + torch.tensor([0.0, 40.0, 1.0, 2.0]).to(x.dtype)), nn.Softmax(-1))
    report = compare(model, torch.randn(2, 4), loss=lambda p, _: -p[:, 0].log().mean())
    first = bad(report, "fp16")
    assert (first.phase, first.precision_related) == ("loss", True)
    assert report.precisions["bf16"].verdict == "clean"


def test_multihead_attention_with_a_sample_masked_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=pad)[0]

    pad = torch.zeros(2, 4, dtype=torch.bool)
    pad[1] = True
    report = compare(Net(), {"x": torch.randn(2, 4, 8), "pad": pad}, loss=lambda y, _: y[0].float().square().mean())
    first = bad(report, "fp16")
    assert (first.module, first.samples, first.precision_related) == ("attention", (1,), False), report.render()
    assert report.exit_code == 1
    assert mean_square(torch.ones(2), None) == 1


def test_a_square_root_at_zero_that_only_the_gradient_notices() -> None:
    class Magnitude(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sum(-1).sqrt()

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), Magnitude())
    x = torch.randn(3, 4)
    x[1] = 0
    report = compare(model, x, loss=lambda y, _: y.float().mean())
    for precision in ("fp16", "bf16", "fp32"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.class_) == ("backward", "2", "Magnitude"), report.render()
        assert first.precision_related is False
        assert first.samples == (1,)
    assert (report.verdict, report.exit_code) == ("not-precision", 1)


def test_where_does_not_protect_the_gradient() -> None:
    class Safe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return torch.where(x > 0, (y * (x > 0)).abs().sqrt(), torch.zeros_like(y))

    model = nn.Sequential(mlp(4), Safe(), mlp(4))
    report = compare(model, torch.randn(5, 4), loss=mean_square)
    first = bad(report, "bf16")
    assert (first.phase, first.module, first.class_, first.mechanism) == ("backward", "1", "Safe", "masked-gradient")
    assert (first.precision_related, report.verdict) == (False, "not-precision")
    assert "0 x Inf" in first.explanation
    assert math.isfinite(report.precisions["fp32"].loss)


def test_an_exponential_whose_absorbed_inf_comes_back_in_backward() -> None:
    def loss(ratio: Tensor, batch: Any) -> Tensor:
        return ratio.float().mean()

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.exp = nn.Linear(4, 1), Do(torch.exp)

        def forward(self, x: Tensor) -> Tensor:
            return self.exp(self.score(x)).clamp(max=2.0)

    model = Policy()
    with torch.no_grad():
        model.score.weight.fill_(1.0)
        model.score.bias.zero_()
    x = torch.full((3, 4), 0.1)
    x[2] = 5.0
    report = compare(model, x, loss=loss)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.absorbed_by, first.mechanism) == ("forward", "exp", "", "overflow")
    assert [f.severity for f in report.findings if f.module == "exp"] == ["error"]
    assert "score" in first.explanation
    assert report.precisions["bf16"].verdict == "clean"
