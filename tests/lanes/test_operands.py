"""TF32 and 8-bit lanes, sums in half and flushed subnormals: what a product is given, and what the report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanprobe
from benchmarks.healthy import FAMILIES, batch_for
from nanprobe.errors import IncompleteError
from nanprobe.formats import by_name
from nanprobe.lanes.arithmetic import Arithmetic
from nanprobe.lanes.frames import LaneSettings
from nanprobe.lanes.lane import Lane
from nanprobe.lanes.lane_model import copy_model
from nanprobe.lanes.observer import Observer
from nanprobe.lanes.operands import FLUSHED, PARTIAL_SUMS, SLICE, TF32, quantised
from nanprobe.numerics.rounding import round_to
from nanprobe.report import Report
from tests.lanes.support import Code, assert_healthy, mean_square, measure, untouched

EMULATED = ("tf32", "fp8-e4m3", "fp8-e5m2")
MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


def observed(dtype: torch.dtype, phase: str = "forward", **arithmetic: Any) -> Observer:
    settings = LaneSettings(
        precision="low",
        dtype=dtype,
        mode="cast",
        device=torch.device("cpu"),
        grad=True,
        arithmetic=Arithmetic(**arithmetic),
    )
    lane = Lane(settings, copy_model(nn.Linear(1, 1), dtype=dtype), None, is_reference=False)
    lane.phase = phase
    return Observer(lane)


def counts(report: Report, word: str, precision: str) -> dict[str, int]:
    """Return what was emulated under the heading that has ``word`` in it."""
    (found,) = [value for why, value in report.record.conditions["emulated"].items() if word in why]
    return dict(found[precision])


class Net(nn.Module):
    """Two linear layers with a factor between them, so that the second one's input can be large."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)) * self.factor)
        return found


# -- TF32 ------------------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(33, 200), (200, 31)]),
    "addmm": (torch.addmm, [(31,), (33, 200), (200, 31)]),
    "bmm": (torch.bmm, [(3, 33, 100), (3, 100, 31)]),
    "baddbmm": (torch.baddbmm, [(3, 33, 31), (3, 33, 100), (3, 100, 31)]),
    "linear": (F.linear, [(4, 33, 200), (31, 200), (31,)]),
    "conv2d": (F.conv2d, [(2, 16, 14, 14), (24, 16, 3, 3), (24,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 16, 14, 14), (16, 24, 3, 3), (24,)]),
}
ADDED = {"addmm": 0, "baddbmm": 0, "linear": 2, "conv2d": 2, "conv_transpose2d": 2}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_tf32_product_is_that_of_rounded_operands_forward_and_backward(name: str) -> None:
    act, shapes = PRODUCTS[name]
    operands = [torch.randn(*shape).requires_grad_() for shape in shapes]
    exact = [
        (o.detach() if ADDED.get(name) == i else round_to(o.detach(), by_name("tf32"))).double().requires_grad_()
        for i, o in enumerate(operands)
    ]
    with observed(torch.float32, tf32=True):
        found = act(*operands)
        downstream = torch.randn(found.shape)
        gradients = torch.autograd.grad(found, operands, downstream)
    wanted = act(*exact)
    rounded = round_to(downstream, by_name("tf32")).double()
    expected = list(torch.autograd.grad(wanted, exact, rounded, retain_graph=True))
    if name in ADDED:  # a bias adds up the gradients as they are
        expected[ADDED[name]] = torch.autograd.grad(wanted, exact, downstream.double())[ADDED[name]]
    for given, right in [(found, wanted), *zip(gradients, expected, strict=True)]:
        assert given.dtype is torch.float32
        right = right.detach()
        assert float((given.detach().double() - right).norm() / right.norm()) < 1e-6


def test_a_tf32_product_is_not_the_fp32_one_and_a_matrix_times_a_vector_is() -> None:
    left, right, vector = torch.randn(8, 64), torch.randn(64, 8), torch.randn(64)
    with observed(torch.float32, tf32=True):
        product, other = left @ right, left.mv(vector)
    error = float((product - left @ right).norm() / product.norm())
    assert 1e-5 < error < by_name("tf32").unit_roundoff * 2
    assert torch.equal(other, left.mv(vector))


def test_a_kept_module_is_exempt_from_tf32_in_forward_and_backward() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)
    report = nanprobe.replay(model, x, dtype="tf32", keep_fp32=["1"], loss=mean_square)
    assert counts(report, TF32, "tf32") == {"addmm": 1, "mm": 1}
    assert measure(report, "1", "tf32").local_error == 0.0
    whole = nanprobe.replay(model, x, dtype="tf32", keep_fp32=["*"], loss=mean_square)
    assert whole.record.conditions["emulated"] == {}
    assert measure(whole, "", "tf32").rel_error == 0.0


@MODES
def test_tf32_can_be_a_condition_of_half_lanes(mode: str) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cuda", enabled=False):
                weights = self.inner[0].weight.float()
                return self.inner(x) if x.dtype is torch.float16 else x.float() @ weights.T

    on, off = (nanprobe.replay(Own(), x, dtype="bf16", mode="autocast", tf32=flag) for flag in (True, False))
    assert counts(on, TF32, "bf16") == {"mm": 1}
    assert not [why for why in off.record.conditions["emulated"] if why == TF32]
    assert (on.record.conditions["tf32"], off.record.conditions["tf32"]) == (True, False)


# -- 8 bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2"])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_8_bit_product_is_that_of_quantised_operands_rounded_once(name: str, scaled: bool) -> None:
    fmt = by_name(name)
    left, right, bias = torch.randn(33, 200), torch.randn(200, 31) * 0.01, torch.randn(31)
    halves = [t.bfloat16() for t in (bias, left, right)]
    with observed(torch.bfloat16, operands=fmt, gradients=by_name("fp8-e5m2"), scaled=scaled):
        found = torch.addmm(*halves)
    stand_for = []
    for half in halves[1:]:
        grid, scale = quantised(half.float(), fmt, scaled=scaled)
        assert float(grid.abs().max()) <= fmt.max
        if scaled:
            assert float(grid.abs().max()) == fmt.max
        stand_for.append(grid.double() / scale)
    exact = (halves[0].double() + stand_for[0] @ stand_for[1]).bfloat16()
    assert found.dtype is torch.bfloat16
    assert float((found == exact).float().mean()) > 0.98


def test_gradients_are_in_e5m2_and_what_forward_saved_is_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanprobe.lanes import operands

    seen: list[tuple[str, bool]] = []
    original = operands.quantised

    def watched(wide: Tensor, fmt: Any, *, scaled: bool) -> Any:
        seen.append((fmt.name, bool((wide == 7).all())))
        return original(wide, fmt, scaled=scaled)

    monkeypatch.setattr(operands, "quantised", watched)
    x = torch.randn(4, 4).bfloat16().requires_grad_()
    w = torch.randn(4, 4).bfloat16().requires_grad_()
    observer = observed(torch.bfloat16, operands=by_name("fp8-e4m3"), gradients=by_name("fp8-e5m2"))
    # A lane without a conductor observes nothing, but forward's operands must be known all the same.
    with observer:
        y = F.linear(x, w)
        observer._lane.phase = "backward"
        torch.autograd.grad(y, [x, w], torch.full_like(y, 7))
    assert seen[:2] == [("fp8-e4m3", False)] * 2
    assert sorted(seen[2:]) == sorted([("fp8-e5m2", True), ("fp8-e4m3", False)] * 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forward_code_is_forward_code(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.again = Net(), again

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.again else self.inner(x)

    x = torch.randn(8, 32, requires_grad=True)
    plain, again = (nanprobe.replay(Again(flag), x, dtype="fp8-e4m3", loss=mean_square) for flag in (False, True))
    for mine, theirs in zip(plain.record.gradients, again.record.gradients, strict=True):
        assert mine.precisions["fp8-e4m3"].norm == pytest.approx(theirs.precisions["fp8-e4m3"].norm, rel=1e-6)


@MODES
def test_saturation_is_an_overflow_at_the_product_though_nothing_is_inf(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Net(factor=3000.0), torch.randn(16, 32)
    with untouched(model):
        report = nanprobe.replay(model, x, dtype="fp8-e4m3", mode=mode, fp8_scaling="none", loss=mean_square)
    first = report.first_bad
    assert first is not None
    assert (first.phase, first.module, first.op, first.mechanism) == ("forward", "down", "aten.addmm", "overflow")
    assert first.limit == 448.0
    assert first.reference_absmax is not None
    assert first.reference_absmax > 448
    assert 0 < first.count < first.elements == 16 * 64
    assert first.samples == tuple(range(16))
    assert report.verdict == "precision"
    assert measure(report, "down", "fp8-e4m3").posinf == 0
    assert "saturate at 448" in first.explanation
    assert "Inf appear" not in report.render()
    assert "values beyond 448" not in report.render() or first.absorbed_by is not None


@MODES
def test_scaled_to_the_format_the_same_values_do_not_saturate(mode: str) -> None:
    torch.manual_seed(0)
    report = nanprobe.replay(Net(factor=3000.0), torch.randn(16, 32), dtype="fp8-e4m3", mode=mode, loss=mean_square)
    assert report.verdict == "clean"
    assert report.first_bad is None
    assert report.findings == ()


def test_values_up_to_the_largest_do_not_saturate() -> None:
    model = Code(lambda self, x: self.lin(x), lin=nn.Linear(4, 4))
    edge = nanprobe.replay(model, torch.full((2, 4), 462.0), dtype="fp8-e4m3", fp8_scaling="none")
    assert edge.first_bad is None
    over = nanprobe.replay(model, torch.full((2, 4), 466.0), dtype="fp8-e4m3", fp8_scaling="none")
    assert over.first_bad is not None
    assert (over.first_bad.module, over.first_bad.count) == ("lin", 8)
    wider = nanprobe.replay(model, torch.full((2, 4), 466.0), dtype="fp8-e5m2", fp8_scaling="none")
    assert wider.first_bad is None


def test_a_mild_saturation_before_a_harmful_one_is_not_the_culprit() -> None:
    torch.manual_seed(0)
    model = Net(factor=3000.0)
    with torch.no_grad():
        model.up.weight[0, 0] = 470.0
    x = torch.randn(16, 32)
    x[:, 0] = 0
    report = nanprobe.replay(model, x, dtype="fp8-e4m3", fp8_scaling="none", loss=mean_square)
    assert report.first_bad is not None
    assert report.first_bad.module == "down"
    severities = {f.module: f.severity for f in report.findings if f.rule == "overflow"}
    assert severities == {"up": "warning", "down": "error"}


def test_a_gradient_that_saturates_is_found_in_backward() -> None:
    torch.manual_seed(0)
    report = nanprobe.replay(
        Net(),
        torch.randn(16, 32),
        dtype="fp8-e4m3",
        fp8_scaling="none",
        loss=lambda output, batch: output.float().square().sum() * 1e6,
    )
    first = report.first_bad
    assert first is not None
    assert (first.phase, first.module, first.limit) == ("backward", "down", 57344.0)


def test_headroom_is_the_operands_where_a_product_takes_the_value_unscaled() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    for mode in ("autocast", "cast"):
        plain = nanprobe.replay(model, x, dtype="fp8-e4m3", mode=mode, fp8_scaling="none")
        bits = {path: measure(plain, path, "fp8-e4m3").headroom_bits or 0.0 for path in ("0", "1", "2")}
        assert 6 < bits["1"] < 9
        assert bits["0"] > 100
        assert bits["2"] > 100
    scaled = nanprobe.replay(model, x, dtype="fp8-e4m3")
    assert (measure(scaled, "1", "fp8-e4m3").headroom_bits or 0.0) > 100


def test_a_kept_module_is_not_quantised() -> None:
    report = nanprobe.replay(Net(3000.0), torch.randn(16, 32), dtype="fp8-e4m3", fp8_scaling="none", keep_fp32=["down"])
    assert counts(report, "fp8-e4m3", "fp8-e4m3") == {"addmm": 1}
    assert measure(report, "down", "fp8-e4m3").local_error == 0.0


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit", "gpt2"])
@pytest.mark.parametrize("dtype", EMULATED)
def test_healthy_models_give_no_finding(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().train()
    report = nanprobe.replay(model, batch_for(name), dtype=dtype)
    assert report.findings == ()
    assert report.verdict == "clean"


@MODES
def test_all_formats_side_by_side(mode: str) -> None:
    model, x = Net(), torch.randn(16, 32)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, dtypes=("fp32", "fp16", *EMULATED), mode=mode, loss=mean_square)
    assert_healthy(report, ("fp16", *EMULATED))
    dtypes = {name: measure(report, "down", name).dtype for name in EMULATED}
    assert dtypes == {"tf32": "float32", "fp8-e4m3": "bfloat16", "fp8-e5m2": "bfloat16"}
    errors = [measure(report, "down", name).rel_error or 0.0 for name in EMULATED]
    assert errors[0] < errors[1] < errors[2]


# -- sums and subnormals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_partial_sums_are_rounded_to_half(name: str, dtype: torch.dtype) -> None:
    act, shapes = PRODUCTS[name]
    shapes = [tuple(600 if size in (100, 200) else size for size in shape) for shape in shapes]
    operands = [torch.randn(*shape).to(dtype) for shape in shapes]
    with observed(dtype, partial_sums=True):
        found = act(*operands)
    left, right = (operand.double() for operand in operands[-2:])
    total = torch.zeros(())
    for start in range(0, 600, SLICE):
        part = (left[..., start : start + SLICE] @ right[..., start : start + SLICE, :]).to(dtype)
        total = part if start == 0 else (total.double() + part.double()).to(dtype)
    wanted = total if len(operands) == 2 else (operands[0].double() + total.double()).to(dtype)
    assert float((found == wanted).float().mean()) > 0.98


def test_a_partial_sum_overflows_that_the_whole_sum_would_not() -> None:
    model = Code(lambda self, x: self.lin(x), lin=nn.Linear(512, 4, bias=False))
    with torch.no_grad():
        model.lin.weight.fill_(1.0)
    x = torch.full((2, 512), 300.0)
    x[:, 256:] = -300.0
    full = nanprobe.replay(model, x, dtype="fp16")
    assert full.verdict == "clean"
    reduced = nanprobe.replay(model, x, dtype="fp16", reduced_precision_reduction=True)
    assert reduced.first_bad is not None
    assert (reduced.first_bad.module, reduced.first_bad.op) == ("lin", "aten.mm")
    assert counts(reduced, PARTIAL_SUMS, "fp16") == {"mm": 1}
    assert reduced.record.conditions["reduced_precision_reduction"] is True


@MODES
def test_flushed_subnormals(mode: str) -> None:
    model = Code(lambda self, x: self.act(x * 1.0), act=nn.Identity())
    x = torch.full((2, 4), 3e-5).half() if mode == "autocast" else torch.full((2, 4), 3e-5)
    kept, flushed = (
        nanprobe.replay(model, x, dtype="fp16", mode=mode, flush_subnormals=flag) for flag in (False, True)
    )
    assert measure(kept, "act", "fp16").subnormal == 8
    assert measure(flushed, "act", "fp16").zero == 8
    assert FLUSHED in flushed.record.conditions["emulated"]
    assert float(torch.tensor([1e-39]) * 1.0) > 0, "the caller's thread flushes subnormals now"


def test_fp32_values_of_a_low_lane_are_flushed_and_the_reference_is_not() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x.float() * 1e-30) * 1e-9 * 1e30 * 1e9

    report = nanprobe.replay(Small(), torch.ones(2, 4), dtype="bf16", flush_subnormals=True)
    assert measure(report, "", "bf16").zero == 8
    assert measure(report, "", "fp32").zero == 0
    assert report.precisions["bf16"].verdict == "precision"


def test_subnormals_are_back_after_an_exception() -> None:
    def fails(self: Any, x: Tensor) -> Any:
        raise ValueError("no")

    with pytest.raises(IncompleteError):
        nanprobe.replay(Code(fails), torch.ones(2), dtype="bf16", flush_subnormals=True)
    assert float(torch.tensor([1e-39]) * 1.0) > 0


def test_local_errors_are_those_of_the_lanes_own_products() -> None:
    """The extra run of a leaf quantises its operands as the lane does, and counts nothing twice."""
    report = nanprobe.replay(Net(), torch.randn(16, 32), dtype="fp8-e4m3")
    for path in ("up", "down"):
        assert (measure(report, path, "fp8-e4m3").local_error or 0.0) > 0.02
    assert counts(report, "fp8-e4m3", "fp8-e4m3") == {"addmm": 2}
