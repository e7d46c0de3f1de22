"""Values beyond FP16's range: the place, the numbers, the verdict; BF16 is fine with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.diagnose.support import (
    Attention,
    Do,
    GatedMLP,
    Residual,
    assert_clean,
    bad,
    compare,
    errors,
    mean_square,
    mlp,
)

MODES = ("cast", "autocast")


def assert_overflow(report: Any, module: str, **expected: Any) -> None:
    """FP16 overflows where ``module`` says and BF16 is clean."""
    first = bad(report, "fp16")
    told = {name: getattr(first, name) for name in expected}
    assert (first.phase, first.module, first.precision_related) == ("forward", module, True), report.render()
    assert told == expected
    assert report.precisions["fp16"].verdict == "precision"
    assert report.precisions["fp32"].verdict == "clean"
    assert_clean_in(report, "bf16")
    assert report.verdict == "precision"
    assert report.exit_code == 1
    assert report.first_bad == first
    assert [f.module for f in errors(report)] == [module]
    assert errors(report)[0].precision == "fp16"


def assert_clean_in(report: Any, precision: str) -> None:
    assert report.precisions[precision].verdict == "clean", report.render()
    assert report.precisions[precision].first_bad is None
    assert not errors(report, precision)


def feed_forward(width: int = 32) -> nn.Sequential:
    """ReLU feed-forward whose second layer peaks above 65504 for the first sample only."""
    wi, wo = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    with torch.no_grad():
        wi.weight.fill_(1 / width)
        wo.weight.fill_(0.01)
        wo.weight[5] = 8.0
    return nn.Sequential(wi, nn.ReLU(), wo)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_linear_deep_inside(mode: str, backward: bool) -> None:
    model = nn.ModuleDict({"stem": mlp(), "trunk": nn.ModuleList([feed_forward(), mlp()]), "tail": nn.LayerNorm(32)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            y = x + 0.01 * self.parts["stem"](x)
            for part in self.parts["trunk"]:
                y = y + part(y)
            return self.parts["tail"](y)

    x = torch.ones(4, 3, 32)
    x[1, 2] = 120.0
    report = compare(Net(), x, mode, loss=mean_square if backward else None)
    assert_overflow(
        report,
        "parts.trunk.0.2",
        class_="Linear",
        visit=0,
        mechanism="overflow",
        count=1,
        elements=4 * 3 * 32,
        index=(1, 2, 5),
        samples=(1,),
        limit=65504.0,
        absorbed_by=None,
        between=None,
    )
    first = bad(report, "fp16")
    assert first.reference_absmax == pytest.approx(8 * 128 * 120, rel=0.02)
    assert first.input_absmax == pytest.approx(120, rel=0.02)
    assert "bits beyond" in first.explanation


@pytest.mark.parametrize("mode", MODES)
def test_the_first_layer_whose_input_is_too_large_for_a_cast(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), mlp(8))
    x = torch.randn(4, 8)
    x[2] *= 1e6
    report = compare(model, x, mode)
    first = bad(report, "fp16")
    if mode == "cast":
        assert (first.phase, first.module, first.mechanism) == ("input", None, "overflow")
        assert (first.parameter, first.samples, first.precision_related) == ("", (2,), True)
        assert len(errors(report)) == 1
        assert report.verdict == "precision"
    else:
        assert_overflow(report, "0", mechanism="overflow", samples=(2,))
        assert "cast of an operand" in first.explanation


@pytest.mark.parametrize("mode", MODES)
def test_the_last_layer(mode: str) -> None:
    model = nn.Sequential(mlp(16), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].bias[3] = 9e4 if mode == "autocast" else 6e4
        model[1].weight[3] = 0
        model[1].weight[3, 0] = 1e4
        model[0][2].weight.mul_(0)
        model[0][2].bias.fill_(2.0)
    report = compare(model, torch.randn(3, 16), mode)
    assert_overflow(report, "1", mechanism="overflow", count=3, index=(0, 3), samples=(0, 1, 2))


@pytest.mark.parametrize("mode", MODES)
def test_a_gate_product_between_children(mode: str) -> None:
    gated = GatedMLP(16, 32)
    with torch.no_grad():
        gated.gate_proj.weight[7] = 16.0
        gated.up_proj.weight[7] = 16.0
    model = nn.Sequential(mlp(16), Residual(gated), mlp(16))
    with torch.no_grad():
        model[0][2].weight.mul_(0.0)
        model[0][2].bias.fill_(0.0)
    model[0] = nn.Sequential(model[0], Do(lambda y: y + 0.0), Do(lambda y: torch.ones_like(y) + y))
    report = compare(model, torch.randn(2, 5, 16), mode)
    assert_overflow(
        report,
        "1.inner",
        class_="GatedMLP",
        between=("1.inner.up_proj", "1.inner.down_proj"),
        mechanism="overflow",
        count=2 * 5,
        index=(0, 0, 7),
        reference_absmax=65536.0,
    )
    assert bad(report, "fp16").input_absmax == 256.0


@pytest.mark.parametrize("mode", MODES)
def test_a_residual_sum_at_the_end_of_a_block(mode: str) -> None:
    branch = nn.Linear(8, 8)
    with torch.no_grad():
        branch.weight.copy_(torch.eye(8))
        branch.bias.zero_()
    model = nn.Sequential(Do(lambda x: x * 1e4), Residual(branch), nn.LayerNorm(8), mlp(8))
    x = torch.randn(3, 8).clamp(-2, 2)
    x[2, 4] = 4.0
    report = compare(model, x, mode)
    if mode == "autocast":
        # The stream is FP32 there, and so is the sum.
        assert_clean(report)
        return
    assert_overflow(
        report,
        "1",
        class_="Residual",
        between=("1.inner", None),
        count=1,
        index=(2, 4),
        samples=(2,),
        mechanism="overflow",
        reference_absmax=8e4,
    )


def test_a_growing_stream_names_the_block_where_it_crosses() -> None:
    class Grow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(x)

    model = nn.Sequential(*(Grow() for _ in range(36)))
    with torch.no_grad():
        for block in model:
            block.norm.bias[3] = 2000.0
    report = compare(model, torch.randn(2, 32))
    assert_overflow(report, "32", class_="Grow", between=("32.norm", None), mechanism="overflow", count=2)


@pytest.mark.parametrize("mode", MODES)
def test_raw_attention_scores(mode: str) -> None:
    attention = Attention(64, 2)
    with torch.no_grad():
        attention.qkv.weight[:128] *= 180
    model = nn.Sequential(mlp(64), nn.LayerNorm(64), Residual(attention), mlp(64))
    report = compare(model, torch.randn(2, 9, 64), mode, loss=mean_square)
    assert_overflow(report, "2.inner", class_="Attention", between=("2.inner.qkv", "2.inner.out"))
    attention.prescale = True
    scaled_first = compare(model, torch.randn(2, 9, 64), mode, loss=mean_square)
    # Scores of 3e4 leave bf16 no digit behind the point, which is another fault.
    assert scaled_first.precisions["fp16"].first_bad is None
    assert scaled_first.precisions["bf16"].first_divergence.module == "2.inner"


def test_the_second_visit_of_a_shared_module() -> None:
    scale = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        scale.weight.copy_(300.0 * torch.eye(4))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.norm = scale, scale, nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.again(self.first(x)))

    report = compare(Twice(), torch.ones(2, 4) + torch.arange(4))
    assert_overflow(report, "first", visit=1, class_="Linear", mechanism="overflow", count=8)


def test_a_value_that_travels_by_keyword_out_of_one_of_several_outputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 6)

        def forward(self, *, hidden: Tensor, scale: Tensor) -> dict[str, Any]:
            return {"small": self.a(hidden), "rest": (self.b(hidden), {"large": self.b(hidden) * scale})}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.pair, self.head = mlp(8), Pair(), nn.LayerNorm(6)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            made = self.pair(hidden=self.stem(x), scale=scale)
            return self.head(made["rest"][1]["large"]) + made["small"].mean()

    model = Net()
    with torch.no_grad():
        model.pair.b.bias[4] = 30.0
    report = compare(model, {"x": torch.randn(3, 8), "scale": torch.tensor([[1.0], [5e3], [2.0]])})
    assert_overflow(
        report, "pair", visit=0, between=("pair.b", None), index=(1, 4), samples=(1,), count=1, mechanism="overflow"
    )


def test_rows_of_a_folded_batch_belong_to_their_samples() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), Do(lambda x: x.view(3 * 2, 4, 8)), Do(lambda x: x * 1.0), nn.Linear(8, 4), nn.Flatten(0, 1)
    )
    with torch.no_grad():
        model[3].weight.fill_(100.0)
        model[0].weight.copy_(torch.eye(8))
    x = torch.ones(3, 8, 8)
    x[1, 6] = 100.0
    report = compare(model, x)
    assert_overflow(report, "3", samples=(1,), index=(3, 2, 0), count=4, elements=3 * 2 * 4 * 4)


def test_samples_are_null_where_nothing_ties_them_to_the_batch() -> None:
    model = nn.Sequential(Do(lambda x: x.sum(0)), nn.Linear(5, 5), nn.LayerNorm(5))
    with torch.no_grad():
        model[1].weight.copy_(torch.arange(1.0, 6.0)[:, None] * 5e3)
    assert_overflow(compare(model, torch.ones(4, 5)), "1", samples=None, count=5)


def test_another_batch_dimension() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[1].weight.copy_(1e4 * torch.eye(6))
    x = torch.ones(7, 3, 6)
    x[4, 2, 1] = 9.0
    assert_overflow(compare(model, x, batch_dim=1), "1", samples=(2,), index=(4, 2, 1), count=1)


def test_two_independent_faults_of_two_samples() -> None:
    def layer(row: int) -> nn.Linear:
        made = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            made.weight.copy_(torch.eye(8))
            made.weight[row, row] = 1e4
        return made

    model = nn.Sequential(layer(1), Residual(nn.Tanh()), layer(5), nn.LayerNorm(8))
    x = torch.ones(4, 8)
    x[0, 1] = 9.0
    x[3, 5] = 9.0
    report = compare(model, x)
    found = errors(report)
    assert [(f.module, f.evidence["samples"], f.evidence["index"]) for f in found] == [
        ("0", [0], [0, 1]),
        ("2", [3], [3, 5]),
    ]
    assert [f.evidence["count"] for f in found] == [1, 1]
    assert bad(report, "fp16").module == "0"
    assert all(f.precision == "fp16" and f.mechanism == "overflow" for f in found)


def test_two_independent_faults_in_parallel_branches() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(torch.cat([self.left(x), self.right(x)], -1))

    model = Branches()
    with torch.no_grad():
        model.left.weight.fill_(3e4)
        model.right.weight.fill_(2e4)
    report = compare(model, torch.ones(2, 4))
    assert [f.module for f in errors(report)] == ["left", "right"]


def test_a_batch_norm_that_spreads_a_fault_is_no_second_origin() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), mlp(8))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
        model[1].weight.copy_(1e4 * torch.eye(8))
    x = torch.ones(4, 8)
    x[2, 3] = 9.0
    report = compare(model, x, train=True)
    assert [f.module for f in errors(report, "fp16")] == ["1"]
    poisoned = [f for f in report.findings if f.rule == "nonfinite-buffer"]
    assert [(f.severity, f.module) for f in poisoned] == [("warning", "2"), ("warning", "2")]
    assert {f.evidence["parameter"] for f in poisoned} == {"2.running_mean", "2.running_var"}


def test_an_exponential_absorbed_by_a_clamp() -> None:
    class Ratio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.exp, self.head = nn.Linear(4, 1), Do(torch.exp), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.exp(self.score(x)).clamp(max=2.0))

    model = Ratio()
    with torch.no_grad():
        model.score.weight.fill_(1.0)
        model.score.bias.zero_()
    x = torch.ones(3, 4) * 0.1
    x[1] = 5.0
    report = compare(model, x)
    first = bad(report, "fp16")
    assert (first.module, first.mechanism, first.absorbed_by, first.samples) == ("exp", "overflow", "", (1,))
    assert_clean(report)
    assert [(f.severity, f.rule) for f in report.findings] == [("warning", "overflow")]
    assert "absorbed" in report.findings[0].message
    assert report.exit_code_for("warning") == 1


def test_an_overflow_absorbed_by_a_module_with_consequences_is_an_error() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square, self.rsqrt, self.head = Do(torch.square), Do(torch.rsqrt), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rsqrt(self.square(x)) * x)

    report = compare(Net(), torch.full((2, 8), 300.0))
    first = bad(report, "fp16")
    assert (first.module, first.mechanism, first.absorbed_by) == ("square", "overflow", "rsqrt")
    assert [f.rule for f in errors(report)] == ["overflow"]
    assert (report.precisions["fp16"].verdict, report.exit_code) == ("precision", 1)


def test_an_absorbed_overflow_does_not_hide_the_one_that_reaches_the_end() -> None:
    clamped = nn.Sequential(Do(lambda x: x * 1e5), Do(lambda x: x.clamp(-1, 1)))
    model = nn.Sequential(clamped, nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
        model[2].weight.copy_(1e5 / 2 * (torch.eye(4) + torch.eye(4).roll(1, 0)))
    report = compare(model, torch.ones(2, 4))
    assert [(f.severity, f.module) for f in report.findings if f.precision == "fp16"] == [
        ("warning", "0.0"),
        ("error", "2"),
    ]
    assert bad(report, "fp16").module == "2"


def test_a_pre_norm_stack_in_a_nested_container_of_other_names() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln, self.body = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

        def forward(self, h: Tensor) -> Tensor:
            return h + self.body(self.ln(h))

    stages = nn.ModuleDict({f"stage{i}": nn.Sequential(Cell(), Cell()) for i in range(2)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.ModuleDict({"encoder": stages})
            self.classifier = nn.Linear(16, 3)

        def forward(self, pixels: Tensor) -> Tensor:
            for stage in self.backbone["encoder"].values():
                pixels = stage(pixels)
            return self.classifier(pixels.mean(1))

    model = Net()
    with torch.no_grad():
        stages["stage1"][0].body[2].weight *= 1e6
    report = compare(model, torch.randn(2, 6, 16), "autocast", loss=lambda y, _: y.float().logsumexp(-1).mean())
    assert_overflow(report, "backbone.encoder.stage1.0.body.2", class_="Linear", mechanism="overflow")


def test_inside_a_checkpointed_segment() -> None:
    class Segment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = mlp(8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(checkpoint(lambda y: self.b(self.a(y)), x, use_reentrant=False))

    model = Segment()
    with torch.no_grad():
        model.b.weight.mul_(1.2e5)
        model.a[2].bias.copy_(2 * torch.arange(8.0))
    report = compare(model, torch.randn(4, 8), loss=mean_square)
    assert_overflow(report, "b", class_="Linear", visit=0, mechanism="overflow")


def test_own_code_that_works_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.mul_(1e6)
            return self.b(self.act(y))

    report = compare(nn.Sequential(mlp(8), InPlace(), nn.LayerNorm(8)), torch.randn(4, 8))
    assert_overflow(report, "1", class_="InPlace", between=("1.a", "1.act"), mechanism="overflow")


def test_keeping_the_named_module_in_fp32_is_a_cure() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(8) * 1e5)
    ids = torch.randint(0, 10, (3, 4))
    assert_overflow(compare(model, ids, "autocast"), "1", class_="Linear", mechanism="overflow")
    assert_clean(compare(model, ids, "autocast", keep_fp32=("1",)))
