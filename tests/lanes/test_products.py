"""Half products against the double-precision product rounded once, and what a lane makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanprobe
from nanprobe.lanes import products
from nanprobe.lanes.frames import LaneSettings
from nanprobe.lanes.lane import Lane
from nanprobe.lanes.lane_model import copy_model
from nanprobe.lanes.observer import Observer
from nanprobe.lanes.products import LACKING, PRODUCTS, Products
from tests.lanes.support import Code, mean_square, measure

HALVES = (torch.float16, torch.bfloat16)
OPERANDS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(33, 200), (200, 31)]),
    "bmm": (torch.bmm, [(3, 33, 100), (3, 100, 31)]),
    "addmm": (torch.addmm, [(31,), (33, 200), (200, 31)]),
    "baddbmm": (torch.baddbmm, [(3, 33, 31), (3, 33, 100), (3, 100, 31)]),
    "addbmm": (torch.addbmm, [(33, 31), (3, 33, 100), (3, 100, 31)]),
    "mv": (torch.mv, [(300, 200), (200,)]),
    "linear": (F.linear, [(4, 33, 200), (31, 200), (31,)]),
    "bilinear": (F.bilinear, [(33, 20), (33, 30), (8, 20, 30)]),
    "conv1d": (F.conv1d, [(2, 16, 40), (24, 16, 5), (24,)]),
    "conv2d": (F.conv2d, [(2, 16, 14, 14), (24, 16, 3, 3), (24,)]),
    "conv3d": (F.conv3d, [(1, 8, 6, 6, 6), (8, 8, 3, 3, 3)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 16, 40), (16, 24, 5)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 16, 14, 14), (16, 24, 3, 3), (24,)]),
    "conv_tbc": (torch.conv_tbc, [(20, 2, 16), (3, 16, 24), (24,)]),
}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the emulation, also on a processor that could do without."""
    monkeypatch.setattr(products, "runs_natively", lambda dtype: False)


def observed(dtype: torch.dtype) -> Observer:
    model = nn.Linear(1, 1)
    settings = LaneSettings(precision="low", dtype=dtype, mode="cast", device=torch.device("cpu"), grad=True)
    return Observer(Lane(settings, copy_model(model, dtype=dtype), None, is_reference=False))


def spacings(found: Tensor, exact: Tensor) -> Tensor:
    """Return by how many spacings of its format each element differs from the exact value rounded once."""
    rounded = exact.to(found.dtype)
    spacing = (torch.nextafter(rounded.abs(), torch.full_like(rounded, torch.inf)) - rounded.abs()).double()
    return (found.double() - rounded.double()).abs() / spacing


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", OPERANDS)
def test_products_differ_from_the_exact_one_by_the_last_rounding_only(name: str, dtype: torch.dtype) -> None:
    act, shapes = OPERANDS[name]
    operands = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    doubles = [operand.detach().double().requires_grad_() for operand in operands]
    with observed(dtype):
        found = act(*operands)
        downstream = torch.randn(found.shape).to(dtype)
        gradients = torch.autograd.grad(found, operands, downstream)
    exact = act(*doubles)
    expected = torch.autograd.grad(exact, doubles, downstream.double())
    assert found.dtype is dtype
    pairs = [(found, exact), *zip(gradients, expected, strict=True)]
    if name in ("bilinear", "conv_tbc"):
        pairs = pairs[:1]  # its backward goes through several operations that round in between
    for given, wanted in pairs:
        assert given.dtype is dtype
        off = spacings(given.detach(), wanted.detach())
        assert (off == 0).double().mean() >= 0.98
        large = wanted.abs() > wanted.abs().mean() / 16
        assert float(off[large].max()) <= 1


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
def test_attention_differs_from_the_exact_one_by_the_last_rounding_only(dtype: torch.dtype) -> None:
    operands = [torch.randn(2, 2, 24, 16).to(dtype).requires_grad_() for _ in range(3)]
    doubles = [operand.detach().double().requires_grad_() for operand in operands]
    with observed(dtype):
        found = F.scaled_dot_product_attention(*operands, is_causal=True)
        gradients = torch.autograd.grad(found.float().sum(), operands)
    exact = F.scaled_dot_product_attention(*doubles, is_causal=True)
    assert (spacings(found.detach(), exact.detach()) == 0).double().mean() >= 0.98
    for given, wanted in zip(gradients, torch.autograd.grad(exact.sum(), doubles), strict=True):
        assert torch.allclose(given.double(), wanted, rtol=0.02, atol=0.05)


def test_a_sum_that_half_precision_would_lose_is_kept() -> None:
    ones = torch.ones(1, 5000, dtype=torch.float16)
    with observed(torch.float16):
        assert (ones @ ones.T).item() == 5000
        assert torch.ones(1, 70000, dtype=torch.float16).matmul(torch.ones(70000, 1, dtype=torch.float16)).isinf()


def test_a_sum_of_half_products_that_cancels_is_exact() -> None:
    left = torch.tensor([[300.0, 300.0, 1.0]], dtype=torch.float16)
    right = torch.tensor([[300.0], [-300.0], [1.0]], dtype=torch.float16)
    with observed(torch.float16):
        assert (left @ right).item() == 1


def test_writing_forms_write_and_return_their_target() -> None:
    a, b = torch.randn(3, 40).half(), torch.randn(40, 5).half()
    with observed(torch.float16):
        product = a @ b
        target = torch.ones(3, 5).half()
        assert target.addmm_(a, b) is target
        assert torch.equal(target, torch.addmm(torch.ones(3, 5).half(), a, b))
        out = torch.empty(3, 5).half()
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, product)


def test_mixed_dtypes_are_refused_as_ever() -> None:
    with observed(torch.float16), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 2).half(), torch.ones(2, 2))


def test_strides_are_those_of_pytorch() -> None:
    image = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 8, 3, 3)
    with observed(torch.float16):
        found = F.conv2d(image.half(), weight.half())
    assert found.stride() == F.conv2d(image, weight).stride()


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
def test_an_operation_without_a_half_kernel_is_run_all_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 4, 4, 4).to(dtype).requires_grad_()
    observer = observed(dtype)
    with observer:
        y = F.avg_pool3d(x, 2)
        y.sum().backward()
    assert y.dtype is dtype
    assert torch.equal(y, F.avg_pool3d(x.float(), 2).to(dtype))
    assert x.grad is not None


def test_an_operation_that_a_gpu_has_no_half_kernel_for_raises_as_there() -> None:
    with observed(torch.float16), pytest.raises(RuntimeError, match="Half"):
        torch.linalg.solve(torch.eye(3).half(), torch.ones(3).half())


def test_an_error_of_the_models_own_is_not_swallowed() -> None:
    with observed(torch.float16), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3).half() @ torch.ones(2, 3).half()


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_the_report_counts_what_was_emulated(mode: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.conv = nn.Conv1d(2, 2, 3)

        def forward(self, x: Tensor) -> Any:
            return self.conv(self.lin(x))

    report = nanprobe.compare_precisions(Net(), torch.randn(3, 2, 4), mode=mode, loss=mean_square, local_error=False)
    counts = report.record.conditions["emulated"][PRODUCTS]
    assert set(counts) == {"fp16", "bf16"}
    assert counts["fp16"] == {"addmm": 1, "convolution": 1, "convolution_backward": 1, "mm": 1}
    assert "summed in FP32" in report.render()


def test_a_missing_kernel_is_named_in_the_report() -> None:
    model = Code(lambda self, x: self.pool(x), pool=nn.AvgPool3d(2))
    report = nanprobe.replay(model, torch.randn(1, 2, 4, 4, 4), dtype="fp16", mode="cast", local_error=False)
    assert measure(report, "pool", "fp16").dtype == "float16"
    assert report.record.conditions["emulated"][LACKING] == {"fp16": {"avg_pool3d": 1}}


def test_the_reference_emulates_nothing() -> None:
    model = Code(lambda self, x: self.lin(x), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), local_error=False)
    assert "fp32" not in report.record.conditions["emulated"].get(PRODUCTS, {})


def test_nothing_is_emulated_on_a_gpu() -> None:
    assert not Products(torch.float16, torch.device("cuda")).active


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
def test_the_trial_believes_a_good_native_product_and_no_bad_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 300, generator=generator).to(dtype) for _ in range(2))
    exact = (left.double() @ right.double().T).to(dtype)
    assert products._same_to_rounding((left.float() @ right.float().T).to(dtype), exact)
    steps = torch.zeros(64, 64, dtype=dtype)
    for k in range(300):
        steps = steps + left[:, k : k + 1] * right[:, k : k + 1].T
    assert not products._same_to_rounding(steps, exact)


def test_without_tiles_products_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(products, "_has_tiles", lambda dtype: False)
    assert not products.runs_natively.__wrapped__(torch.bfloat16)
    monkeypatch.setattr(products, "_has_tiles", lambda dtype: True)
    monkeypatch.setattr(products, "_trials", lambda dtype: iter([(torch.ones(2), torch.zeros(2))]))
    assert not products.runs_natively.__wrapped__(torch.bfloat16)
    monkeypatch.setattr(products, "_trials", lambda dtype: iter([(torch.ones(2), torch.ones(2))]))
    assert products.runs_natively.__wrapped__(torch.bfloat16)


class Noisy(nn.Module):
    """A leaf that adds noise drawn in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_local_error_is_that_of_the_lanes_own_operations(precision: str) -> None:
    """The extra run of a leaf rounds draws as the lane does; drawn natively, half noise would be other noise."""
    report = nanprobe.replay(nn.Sequential(Noisy()), torch.randn(4, 64), dtype=precision, mode="cast")
    local = measure(report, "0", precision).local_error
    assert local is not None
    assert local < 0.01


def test_the_local_error_of_a_product_is_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted: list[bool] = []
    run = Products.run

    def watched(self: Products, func: Any, way: Any, args: Any, kwargs: Any, *, counting: bool) -> Any:
        uncounted.append(way is not None and not counting)
        return run(self, func, way, args, kwargs, counting=counting)

    monkeypatch.setattr(Products, "run", watched)
    report = nanprobe.replay(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), dtype="fp16", mode="cast")
    assert sum(uncounted) == 1
    assert report.record.conditions["emulated"][PRODUCTS]["fp16"] == {"addmm": 1}
