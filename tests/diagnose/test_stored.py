"""What was there before anything ran: NaN, Inf and casts in the batch, the parameters and the buffers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diagnose.support import Do, assert_clean, bad, compare, errors, mean_square, mlp

MODES = ("cast", "autocast")


def spoiled(value: float, *at: tuple[int, ...], shape: tuple[int, ...] = (4, 3, 8)) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for index in at:
        x[index] = value
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "kind"), [(math.nan, "nan"), (math.inf, "posinf"), (-math.inf, "neginf")])
def test_nonfinite_values_in_the_batch(mode: str, value: float, kind: str) -> None:
    x = spoiled(value, (1, 2, 3), (3, 0, 0))
    report = compare(mlp(8), {"input": x}, mode, loss=mean_square)
    for precision in ("fp16", "bf16"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.visit, first.parameter) == ("input", None, None, "input")
        assert (first.mechanism, first.precision_related) == ("nonfinite-input", False)
        assert (first.count, first.elements, first.index, first.samples) == (2, 96, (1, 2, 3), (1, 3))
        assert report.precisions[precision].verdict == "not-precision"
    assert report.precisions["fp32"].verdict == "not-precision"
    assert report.precisions["fp32"].first_bad.mechanism == "nonfinite-input"
    (error,) = errors(report)
    assert (error.rule, error.precision, error.phase) == ("nonfinite-input", None, "input")
    assert {k: error.evidence[k] for k in ("nan", "posinf", "neginf")} == {"nan": 0, "posinf": 0, "neginf": 0} | {
        kind: 2
    }
    assert (report.verdict, report.exit_code) == ("not-precision", 1)


def test_nan_at_padding_is_contained() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.proj(x).masked_fill(~mask[..., None], 0.0).sum(1))

    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[1, 2] = False
    report = compare(Masked(), {"x": spoiled(math.nan, (1, 2, 3)), "mask": mask})
    assert_clean(report)
    assert [(f.rule, f.severity, f.phase) for f in report.findings if f.precision is None] == [
        ("nonfinite-input", "warning", "input")
    ]
    assert report.precisions["fp32"].verdict == "clean"
    assert bad(report, "fp16").phase == "input"
    assert report.exit_code_for("warning") == 1


@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_nan_that_reaches_only_masked_positions_of_the_output(name: str) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8)

        def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
            return self.body(x)

    keep = torch.ones(4, 3, dtype=torch.long)
    keep[1, 2] = 0
    mask = 1 - keep if "pad" in name else keep
    report = compare(Tagger(), {"x": spoiled(math.nan, (1, 2, 3)), name: mask})
    assert_clean(report)
    assert [(f.rule, f.severity) for f in report.findings] == [("nonfinite-input", "warning")]
    elsewhere = compare(Tagger(), {"x": spoiled(math.nan, (1, 1, 3)), name: mask})
    assert [(f.rule, f.severity) for f in elsewhere.findings] == [("nonfinite-input", "error")]
    assert elsewhere.verdict == "not-precision"


def test_a_gradient_through_contained_nan_is_an_error() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.proj(x).masked_fill(~mask[..., None], 0.0).sum(1))

    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[1, 2] = False
    report = compare(Masked(), {"x": spoiled(math.nan, (1, 2, 3)), "mask": mask}, loss=mean_square)
    # 0 x NaN in the weight's gradient: the loss is finite and training is ruined.
    assert report.precisions["fp32"].loss is not None
    assert math.isfinite(report.precisions["fp32"].loss)
    assert (report.verdict, report.exit_code) == ("not-precision", 1)
    assert bad(report, "bf16").phase == "input"
    assert errors(report)[0].rule == "nonfinite-input"


def test_a_field_that_the_model_does_not_use() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8)

        def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
            return self.body(x)

    batch = {"x": torch.randn(2, 8), "extra": torch.tensor([1.0, math.nan])}
    report = compare(Uses(), batch, loss=lambda y, _: mean_square(y, None))
    assert_clean(report)
    assert [(f.rule, f.severity) for f in report.findings] == [("nonfinite-input", "warning")]


@pytest.mark.parametrize(("factor", "phase"), [(1.5e5, "forward"), (1e6, "parameter")])
def test_a_contained_nan_does_not_hide_an_overflow(factor: float, phase: str) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.top, self.norm = mlp(8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
            return self.norm(self.top(self.body(x)))

    model = Uses()
    with torch.no_grad():
        model.body[2].bias.copy_(torch.arange(8.0))
        model.top.weight.mul_(factor)
    report = compare(model, {"x": torch.randn(2, 8), "extra": torch.tensor([1.0, math.nan])})
    first = bad(report, "fp16")
    assert (first.module, first.phase) == ("top", phase)
    assert (report.precisions["fp16"].verdict, report.precisions["bf16"].verdict) == ("precision", "clean")
    assert [(f.rule, f.module, f.phase) for f in errors(report)] == [("overflow", "top", phase)]
    assert (report.findings[0].rule, report.findings[0].severity) == ("nonfinite-input", "warning")


def test_a_nan_in_one_sample_and_an_overflow_in_another() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
        model[1].weight.copy_(1e4 * torch.eye(8))
    x = spoiled(math.nan, (0, 1), shape=(4, 8))
    x[2, 5] = 9.0
    report = compare(model, x)
    assert [(f.rule, f.precision, f.module) for f in errors(report)] == [
        ("nonfinite-input", None, None),
        ("overflow", "fp16", "1"),
    ]
    assert errors(report)[1].evidence["samples"] == [2]


def test_labels_that_are_nan() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output.float() - batch["target"].float()).square().mean()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8)

        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            return self.body(x)

    target = torch.zeros(2, 8)
    target[1, 4] = math.nan
    report = compare(Uses(), {"x": torch.randn(2, 8), "target": target}, loss=loss)
    (error,) = errors(report)
    assert (error.rule, error.evidence["parameter"], error.evidence["samples"]) == ("nonfinite-input", "target", [1])
    assert report.verdict == "not-precision"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["0.0.weight", "1.2.bias"])
def test_a_parameter_that_is_nan(mode: str, name: str) -> None:
    model = nn.Sequential(mlp(8), mlp(8))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = math.nan
    report = compare(model, torch.randn(3, 8), mode)
    owner = name.rpartition(".")[0]
    for precision in ("fp32", "fp16", "bf16"):
        first = bad(report, precision)
        assert (first.phase, first.module, first.class_, first.parameter) == ("parameter", owner, "Linear", name)
        assert (first.mechanism, first.precision_related, first.count) == ("nonfinite-parameter", False, 1)
        assert first.samples is None
    (error,) = errors(report)
    assert (error.rule, error.phase, error.module) == ("nonfinite-parameter", "parameter", owner)
    assert (error.evidence["nan"], error.evidence["posinf"]) == (1, 0)
    assert report.verdict == "not-precision"


def test_a_tied_parameter_is_found_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(10, 8), mlp(8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.embed(ids)))

    model = Tied()
    with torch.no_grad():
        model.embed.weight[9, 0] = math.inf
    report = compare(model, torch.randint(0, 8, (2, 5)))
    (error,) = errors(report)
    assert (error.rule, error.module) == ("nonfinite-parameter", "embed")
    assert error.evidence["posinf"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_an_earlier_batch_poisoned(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), mlp(8))
    with torch.no_grad():
        model[1].running_mean[2] = math.nan
    report = compare(model, torch.randn(4, 8), mode)
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.parameter) == ("buffer", "1", "1.running_mean")
    assert [(f.rule, f.phase) for f in errors(report)] == [("nonfinite-buffer", "buffer")]
    assert (report.verdict, report.exit_code) == ("not-precision", 1)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_stored_value_that_the_cast_makes_infinite(kind: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            value = torch.tensor([1.0, 2e5, 3.0, 4.0])
            if kind == "parameter":
                self.inner.factor = nn.Parameter(value)
            else:
                self.inner.register_buffer("factor", value)
            self.body, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.body(x) * self.inner.factor)

    report = compare(Holder(), torch.randn(3, 4))
    first = bad(report, "fp16")
    assert (first.phase, first.module, first.parameter) == (kind, "inner", "inner.factor")
    assert (first.mechanism, first.precision_related, first.index, first.count) == ("overflow", True, (1,), 1)
    assert (first.reference_absmax, first.limit) == (2e5, 65504.0)
    assert [(f.rule, f.phase, f.precision) for f in errors(report)] == [("overflow", kind, "fp16")]
    assert report.precisions["bf16"].verdict == "clean"
    assert report.verdict == "precision"


def test_a_batch_field_that_the_cast_makes_infinite() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), mlp(8))
    x = torch.randn(4, 8)
    x[3, 1] = -1e5
    report = compare(model, {"input": x}, loss=mean_square)
    first = bad(report, "fp16")
    assert (first.phase, first.parameter, first.mechanism) == ("input", "input", "overflow")
    assert (first.samples, first.index, first.precision_related) == ((3,), (3, 1), True)
    assert [(f.rule, f.phase, f.precision) for f in errors(report)] == [("overflow", "input", "fp16")]
    assert report.precisions["bf16"].verdict == "clean"


def test_a_mask_as_a_buffer_is_no_fault_whichever_its_fill() -> None:
    for fill in (-math.inf, -1e9, torch.finfo(torch.float32).min):

        class Causal(nn.Module):
            mask: Tensor

            def __init__(self, value: float) -> None:
                super().__init__()
                self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
                self.register_buffer("mask", torch.full((5, 5), value).triu(1))

            def forward(self, x: Tensor) -> Tensor:
                return (self.q(x) @ self.k(x).transpose(-1, -2) + self.mask).softmax(-1) @ self.v(x)

        report = compare(nn.Sequential(mlp(8), Causal(fill)), torch.randn(2, 5, 8))
        assert_clean(report)


def test_a_scalar_buffer_of_minus_inf_and_an_unused_one() -> None:
    model = nn.Sequential(mlp(8), Do(lambda x: x))
    model.register_buffer("best", torch.tensor(-math.inf))
    assert_clean(compare(model, torch.randn(2, 8)))
