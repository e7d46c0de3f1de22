"""The figures of a row against computations by hand: counts, headroom, errors, places and samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.formats import by_name
from tests.lanes.support import LOW, Code, assert_healthy, gradient, mean_square, measure, row, without_timings

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


def apart(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference|| in FP64."""
    wide, exact = value.detach().double(), reference.detach().double()
    return float((wide - exact).norm() / exact.norm())


def linears() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(5, 16)


@pytest.mark.parametrize("precision", LOW)
def test_errors_of_linear_layers_by_hand(precision: str) -> None:
    model, x = linears()
    dtype = DTYPES[precision]
    report = nanprobe.replay(model, x, dtype=precision, mode="cast")
    low = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(dtype)
    low.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()})
    with torch.no_grad():
        hidden, hidden_low = model[0](x), low[0](x.to(dtype))
        out, out_low = model[1](hidden), low[1](hidden_low)
        local = low[1](hidden.to(dtype))
    assert measure(report, "0", precision).rel_error == pytest.approx(apart(hidden_low, hidden), rel=1e-6)
    assert measure(report, "1", precision).rel_error == pytest.approx(apart(out_low, out), rel=1e-6)
    assert measure(report, "", precision).rel_error == measure(report, "1", precision).rel_error
    # The first layer's input is the batch itself, rounded: both errors are one.
    assert measure(report, "0", precision).local_error == pytest.approx(apart(hidden_low, hidden), rel=1e-6)
    assert measure(report, "1", precision).local_error == pytest.approx(apart(local, out), rel=1e-6)
    assert measure(report, "1", precision).local_error != measure(report, "1", precision).rel_error
    assert measure(report, "", precision).local_error is None


@MODES
def test_the_local_error_of_a_leaf_in_fp32(mode: str) -> None:
    """Given the reference's inputs a kept leaf computes what the reference does; one with low inputs rounds those."""
    model = nn.Sequential(nn.Linear(8, 8), Code(lambda self, x: x.float() * 2.0), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    report = nanprobe.compare_precisions(model, x, mode=mode, keep_fp32=["2"])
    hidden = model[0](x)
    for name in LOW:
        rounded = apart(hidden.to(DTYPES[name]), hidden)
        assert measure(report, "1", name).local_error == pytest.approx(rounded, rel=1e-5)
        assert measure(report, "2", name).local_error == 0.0
        error = measure(report, "2", name).rel_error
        assert error is not None
        assert error > 0.0


def test_a_leaf_in_fp32_under_autocast_has_no_local_error_at_all() -> None:
    report = nanprobe.compare_precisions(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), torch.tensor([[1, 2]]))
    for name in LOW:
        assert measure(report, "0", name).local_error == 0.0
        assert measure(report, "0", name).rel_error == 0.0
        assert measure(report, "1", name).local_error == measure(report, "1", name).rel_error != 0.0


def test_local_errors_can_be_left_out() -> None:
    model, x = linears()
    report = nanprobe.compare_precisions(model, x, local_error=False)
    assert all(m.local_error is None for r in report.record.modules for m in r.precisions.values())
    assert report.record.conditions["local_error"] is False


def test_the_extra_run_leaves_no_trace() -> None:
    """A leaf of the user's that counts, draws and keeps things: rows, errors aside, are as without the extra run."""

    class Odd(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            self.seen += 1
            self.kept.append(x)
            return x @ self.weight.to(x.dtype) * self.calls + torch.rand(()) * self.seen + len(self.kept)

    model, x = nn.Sequential(Odd(), nn.BatchNorm1d(4), nn.Dropout(0.5), Odd()), torch.randn(6, 4)
    reports = [
        nanprobe.compare_precisions(model, x, loss=mean_square, local_error=local, mode="cast")
        for local in (True, False)
    ]
    with_, without = (without_timings(report)["modules"] for report in reports)
    for a, b in zip(with_, without, strict=True):
        for name in a["precisions"]:
            a["precisions"][name].pop("local_error")
            b["precisions"][name].pop("local_error")
        assert a == b
    assert measure(reports[0], "3", "fp16").local_error is not None


def test_counts_by_hand() -> None:
    values = torch.tensor([[0.0, -0.0, 1e-6, -3e-5], [6.2e-5, 2.0, -7.0, 1e-9]])
    report = nanprobe.compare_precisions(Code(lambda self, x: x * 1.0), values, mode="cast")
    half = measure(report, "", "fp16")
    # 1e-9 is flushed; 1e-6 and 3e-5 are below 2**-14 = 6.1e-5, the smallest normal value.
    assert (half.elements, half.zero, half.subnormal, half.nan) == (8, 3, 2, 0)
    assert (half.min, half.max, half.absmax) == (-7.0, 2.0, 7.0)
    assert half.headroom_bits == pytest.approx(math.log2(65504 / 7))
    brain = measure(report, "", "bf16")
    assert (brain.zero, brain.subnormal) == (2, 0)
    assert brain.headroom_bits == pytest.approx(math.log2(by_name("bf16").max / 7))
    full = measure(report, "", "fp32")
    assert full.mean == pytest.approx(values.double().mean().item(), rel=1e-6)
    assert full.rms == pytest.approx(values.double().square().mean().sqrt().item(), rel=1e-6)
    assert full.rel_error is None
    for name in LOW:
        assert measure(report, "", name).rel_error == pytest.approx(apart(values.to(DTYPES[name]), values), rel=1e-5)


def test_headroom_at_the_edge_and_of_nothing() -> None:
    model = Code(lambda self, x: x * 1.0)
    assert measure(nanprobe.replay(model, torch.tensor([[65504.0]]), mode="cast"), "", "fp16").headroom_bits == 0.0
    assert measure(nanprobe.replay(model, torch.zeros(2, 2), mode="cast"), "", "fp16").headroom_bits is None
    assert measure(nanprobe.replay(model, torch.full((1, 1), 70000.0)), "", "fp32").headroom_bits > 100  # type: ignore[operator]


def bad_at(*places: tuple[int, ...]) -> Any:
    """Return a leaf that puts Inf at these places, in half precision only."""

    def forward(self: Any, x: Tensor) -> Any:
        out = x.clone()
        if x.dtype == torch.float16:
            for place in places:
                out[place] = torch.inf
        return out

    return Code(forward)


@pytest.mark.parametrize(
    ("shape", "places", "dim", "index", "samples"),
    [
        ((4, 3), [(2, 1)], 0, (2, 1), (2,)),
        ((4, 3), [(3, 0), (1, 2)], 0, (1, 2), (1, 3)),
        ((5, 4, 3), [(4, 1, 2), (0, 3, 0)], 1, (0, 3, 0), (1, 3)),
    ],
)
def test_where_bad_elements_are(shape: Any, places: Any, dim: int, index: Any, samples: Any) -> None:
    model = nn.Sequential(bad_at(*places))
    report = nanprobe.replay(model, torch.randn(shape), mode="cast", batch_dim=dim)
    found = measure(report, "0", "fp16")
    assert (found.posinf, found.first_index, found.samples) == (len(places), index, samples)
    assert report.record.conditions["batch_size"] == shape[dim]
    first = report.first_bad
    assert first is not None
    assert (first.module, first.count, first.elements) == ("0", len(places), math.prod(shape))
    assert (first.index, first.samples) == (index, samples)


def test_the_extra_run_leaves_the_buffers_of_the_visit_itself() -> None:
    """Running statistics are those of the lane's own inputs, not of the reference's that the extra run was given."""
    model = nn.Sequential(bad_at((1, 1)), nn.BatchNorm1d(3))
    report = nanprobe.replay(model, torch.randn(4, 3), mode="cast", loss=mean_square)
    poisoned = {f.evidence["parameter"] for f in report.findings if f.rule == "nonfinite-buffer"}
    assert poisoned == {"1.running_mean", "1.running_var"}


def test_rows_of_k_times_batch_belong_to_their_sample() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.bad(x.reshape(-1, 3))

    model = Code(forward, bad=bad_at((5, 0), (11, 2)))
    report = nanprobe.replay(model, torch.randn(4, 3, 3), mode="cast")
    # Twelve rows of four samples: row 5 is of sample 1, row 11 of sample 3.
    assert measure(report, "bad", "fp16").samples == (1, 3)


def test_rows_that_belong_to_no_sample() -> None:
    model = Code(lambda self, x: self.bad(x.sum(0)[:5].reshape(5, 1)), bad=bad_at((2, 0)))
    report = nanprobe.replay(model, torch.randn(4, 7), mode="cast")
    assert measure(report, "bad", "fp16").posinf == 1
    assert measure(report, "bad", "fp16").samples is None


def test_gradients_by_hand() -> None:
    model, x = linears()
    report = nanprobe.compare_precisions(model, x, loss=mean_square, mode="cast", loss_scale=512.0)
    assert_healthy(report)
    hidden = model[0](x)
    hidden.retain_grad()
    out = model[1](hidden)
    out.retain_grad()
    mean_square(out, None).backward()
    assert hidden.grad is not None
    assert out.grad is not None
    assert model[0].weight.grad is not None
    full = measure(report, "0", "fp32", phase="backward")
    assert full.absmax == pytest.approx(hidden.grad.abs().max().item(), rel=1e-5)
    assert measure(report, "1", "fp32", phase="backward").rms == pytest.approx(
        out.grad.square().mean().sqrt().item(), rel=1e-5
    )
    found = gradient(report, "0.weight")
    assert (found.module, found.shape, found.elements) == ("0", (16, 16), 256)
    assert found.precisions["fp32"].norm == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-5)
    assert found.precisions["fp32"].absmax == pytest.approx(model[0].weight.grad.abs().max().item(), rel=1e-5)
    low = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).half()
    low.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    (mean_square(low(x.half()), None) * 512.0).backward()
    assert low[0].weight.grad is not None
    assert found.precisions["fp16"].rel_error == pytest.approx(
        apart(low[0].weight.grad.double() / 512.0, model[0].weight.grad), rel=1e-5
    )
    total = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert report.precisions["fp32"].gradient_norm == pytest.approx(total, rel=1e-6)


def test_flushed_gradients_are_counted() -> None:
    model = nn.Linear(4, 1, bias=False)
    x = torch.tensor([[1.0, 1e-8, 1e-8, 2.0]])
    report = nanprobe.replay(model, x, loss=lambda o, b: o.float().sum(), mode="cast", loss_scale=1.0)
    found = gradient(report, "weight").precisions
    assert (found["fp16"].zero, found["fp16"].flushed, found["fp32"].zero) == (2, 2, 0)


def test_loss_errors_by_hand() -> None:
    model, x = linears()
    report = nanprobe.replay(model, x, dtype="bf16", mode="cast", loss=mean_square)
    low, full = report.precisions["bf16"].loss, report.precisions["fp32"].loss
    assert low is not None
    assert full is not None
    assert full == pytest.approx(mean_square(model(x), None).item(), rel=1e-6)
    assert report.precisions["bf16"].loss_error == pytest.approx(abs(low - full) / full)


def test_several_outputs_are_summed_and_listed() -> None:
    inner = Code(lambda self, x: {"a": x * 1.0, "b": [x * 2.0, (x > 0).long()]})
    model = Code(lambda self, x: self.inner(x)["a"], inner=inner)
    x = torch.randn(3, 4)
    report = nanprobe.replay(model, x, dtype="bf16", mode="cast")
    found = measure(report, "inner", "bf16")
    assert [(o.path, o.dtype, o.elements) for o in found.outputs] == [
        ("a", "bfloat16", 12),
        ("b.0", "bfloat16", 12),
        ("b.1", "int64", 12),
    ]
    assert found.elements == 24
    assert found.absmax == 2 * measure(report, "", "bf16").absmax  # type: ignore[operator]
    assert found.rel_error == pytest.approx(apart(x.bfloat16(), x), rel=1e-6)
    assert [o.rel_error for o in found.outputs] == [found.rel_error, pytest.approx(found.rel_error), None]


def test_fp32_is_judged_against_fp64() -> None:
    model, x = linears()
    report = nanprobe.replay(model, x, dtype="fp32", loss=mean_square)
    assert report.record.reference == "fp64"
    assert list(report.precisions) == ["fp64", "fp32"]
    assert_healthy(report, ("fp32",))
    wide = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    with torch.no_grad():
        wanted = apart(model(x), wide(x.double()))
    found = measure(report, "", "fp32")
    assert found.dtype == "float32"
    assert found.rel_error == pytest.approx(wanted, rel=1e-3)
    assert 0 < wanted < 1e-6
    assert measure(report, "", "fp64").dtype == "float64"
    assert row(report, "1", phase="backward").precisions["fp32"].rel_error


def test_fp32_that_fails_where_fp64_does_not() -> None:
    report = nanprobe.replay(Code(lambda self, x: x * 1e30), torch.full((2, 2), 1e10), dtype="fp32")
    assert report.verdict == "precision"
    first = report.first_bad
    assert first is not None
    assert (first.precision, first.limit) == ("fp32", by_name("fp32").max)
    assert first.reference_absmax == pytest.approx(1e40, rel=1e-6)
