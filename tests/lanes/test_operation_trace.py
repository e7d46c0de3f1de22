"""The operation trace: every operation beside its FP64 shadow, whatever it does with memory, and where it ran."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanprobe.lanes import operation_trace
from nanprobe.lanes.run import trace_operations
from nanprobe.lanes.spec import ReplaySpec
from nanprobe.lanes.trace import IN_LOSS, OperationRecord, Operations

Code = Callable[[Tensor], Tensor]


class Do(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def traced(model: nn.Module, x: Tensor, precision: str = "bf16", **options: Any) -> Operations:
    stretch = options.pop("stretch", None)
    shadows = options.pop("shadows", True)
    settings: dict[str, Any] = {"mode": "cast", "batch_size": x.shape[0], **options}
    spec = ReplaySpec(model=model, batch=x, bind=lambda _, v: ((v,), {}), precisions=(precision,), **settings)
    return trace_operations(spec, precision, shadows=shadows, stretch=stretch)


def last(operations: Operations) -> OperationRecord:
    return [r for r in operations.records if r.phase == "forward"][-1]


def assign_slice(x: Tensor) -> Tensor:
    y = x * 1.1
    y[:, :4] += x[:, 4:8] * 0.3
    y.t()[0].mul_(1.7)
    return y * 1.0


def written_after_a_cast(x: Tensor) -> Tensor:
    y = x * 1.1
    wide = y.float()
    y.mul_(1.7)
    wide[0].add_(0.3)
    return (wide + y.float()).to(x.dtype) * 1.3


def into_memory(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.add(x, x * 0.3, out=out)
    buffer = torch.empty(2, *x.shape, dtype=x.dtype)
    buffer[0].copy_(out * 1.3)
    buffer[1] = x
    return buffer.sum(0)


def scattered(x: Tensor) -> Tensor:
    y = torch.zeros_like(x).index_put_((torch.tensor([0, 2]),), x[:2] * 1.3, accumulate=True)
    return y.scatter_add(1, torch.zeros(4, 2, dtype=torch.long), x[:, :2] * 0.7) * 1.01


def chosen(x: Tensor) -> Tensor:
    top = (x * 1.3).topk(3, dim=1)
    return torch.where(x > 0, top.values[:, :1] * 1.1, x.gather(1, top.indices)[:, :1] * 0.9)


def as_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex((x.float() * 1.1).reshape(4, -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(()), torch.tensor(0.3))).flatten(1).to(x.dtype) * 1.3


CODES: dict[str, Code] = {
    "views": lambda x: (x * 1.1).view(2, 2, -1).transpose(0, 1)[..., ::2].reshape(4, -1).expand(3, 4, -1)[1] * 1.3,
    "slices written in place": assign_slice,
    "memory given with out=": into_memory,
    "written to after a cast": written_after_a_cast,
    "index_put and scatter": scattered,
    "top-k, gather and where": chosen,
    "split, cat and stack": lambda x: torch.stack([p * 1.3 for p in torch.cat([x, x * 0.7]).chunk(4)]).mean(0),
    "sums and softmax": lambda x: (x * 1.3).softmax(-1).cumsum(-1) / (x.exp().sum(-1, keepdim=True) + 0.1),
    "normalisation": lambda x: F.layer_norm(F.group_norm(x[:, :, None] * 1.3, 4)[:, :, 0], (16,)),
    "convolution": lambda x: F.conv1d(x[:, None], x[:3, None, :3] * 0.3).relu(),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 4, 8) * f for f in (1.1, 0.9, 1.3))),
    "masks": lambda x: (x @ x.t()).masked_fill(torch.eye(4) > 0, float("-inf")).softmax(-1) @ x,
    "complex numbers": as_complex,
    "batch of products": lambda x: torch.einsum("bi,bj->ij", x * 1.1, x).tanh(),
    "detached": lambda x: (x * 1.1).detach().clone().mul_(1.3) + x.new_tensor(0.5),
    "foreach": lambda x: torch._foreach_mul([x * 1.1, x], 1.3)[0] * 1.0,
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_accumulated_error_is_the_distance_from_the_same_code_in_fp64(name: str, precision: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16) + 0.1
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    code = CODES[name]
    outputs: list[Tensor] = []
    model = Do(lambda t: outputs.append(code(t)) or outputs[-1])  # type: ignore[func-returns-value]  # keeps a copy
    operations = traced(model, x, precision)
    exact = code(x.double())
    actual = outputs[-1]
    assert actual.dtype is dtype
    record = [r for r in operations.records if r.elements == actual.numel()][-1]
    size = float(torch.linalg.vector_norm(exact))
    error = float(torch.linalg.vector_norm(actual.double() - exact))
    assert operations.notes == ()
    assert error > 0
    assert record.size == pytest.approx(size, rel=1e-6)
    assert record.error == pytest.approx(error, rel=1e-4)


def test_local_and_accumulated_error_are_told_apart() -> None:
    records = traced(Do(lambda x: (x + 1000) - 1000), torch.randn(4, 16)).records
    add, sub = (r for r in records if r.op in ("aten.add", "aten.sub"))
    assert add.local_error is not None
    assert add.local_error == pytest.approx(add.rel_error, rel=0.1)
    assert sub.local == 0
    assert sub.rel_error is not None
    assert sub.rel_error > 0.5
    assert sub.operands == (add.order,)


def test_without_local_errors_none_is_measured() -> None:
    records = traced(Do(lambda x: (x + 1000) - 1000), torch.randn(4, 16), local_error=False).records
    assert all(r.local is None for r in records if r.op)


DROPPING: list[Code] = [lambda x: F.dropout(x * 1.3, 0.5), lambda x: torch.native_dropout(x * 1.3, 0.5, True)[0]]


@pytest.mark.parametrize("draw", DROPPING)
def test_the_shadow_drops_what_the_lane_drops(draw: Code) -> None:
    record = last(traced(Do(draw), torch.randn(64, 64)))
    assert record.rel_error is not None
    assert 0 < record.rel_error < 0.01


def test_random_draws_are_taken_as_they_are() -> None:
    operations = traced(Do(lambda x: x * 1.3 + torch.randn_like(x)), torch.randn(64, 64))
    assert operations.notes == ()
    error = last(operations).rel_error
    assert error is not None
    assert error < 0.01


def test_an_operation_without_fp64_kernel_is_shadowed_in_fp32_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = operation_trace.evaluated

    def lacking(func: Any, args: Any, kwargs: Any, operand: Any, dtype: torch.dtype) -> Any:
        if func is torch.ops.aten.erf.default and dtype is torch.float64:
            return None
        return real(func, args, kwargs, operand, dtype)

    monkeypatch.setattr(operation_trace, "evaluated", lacking)
    operations = traced(Do(lambda x: torch.erf(x * 1.3) * 1.1), torch.randn(4, 16))
    assert operations.notes == ("aten.erf (no FP64 kernel, shadow evaluated in FP32): 1",)
    erf = next(r for r in operations.records if r.op == "aten.erf")
    assert erf.note == "evaluated in FP32: no FP64 kernel"
    assert erf.rel_error is not None
    assert 0 < erf.rel_error < 0.01


@torch.library.custom_op("nanprobe_tests::count", mutates_args=())
def count(x: Tensor) -> Tensor:
    """An operation of a model's own, with an effect."""
    CALLS.append(1)
    return x * 2


CALLS: list[int] = []


def test_an_operation_of_the_models_own_is_run_once_and_told() -> None:
    CALLS.clear()
    operations = traced(Do(lambda x: count(x * 1.1) * 1.3), torch.randn(4, 16))
    assert len(CALLS) == 1
    assert any("nanprobe_tests.count" in note and "not looked into" in note for note in operations.notes)
    error = last(operations).rel_error
    assert error is not None
    assert error < 0.01


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 16), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: torch.tanh(self.first(t)), x, use_reentrant=self.reentrant)
        with torch.no_grad():
            offset = y.mean() * 0.3
        return self.second(y) + offset


def squared(output: Tensor, _: Any) -> Tensor:
    return output.float().square().mean()


@pytest.mark.parametrize("mode", ["cast", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_is_shadowed_through_checkpoints_and_named_by_modules(reentrant: bool, mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16, requires_grad=True)
    operations = traced(Checkpointed(reentrant), x, mode=mode, loss=squared, backward=True)
    backward = [r for r in operations.records if r.phase == "backward"]
    assert {"first", "second"} <= {r.module for r in backward}
    products = [r for r in backward if r.backward_op == "aten.mm" and r.module == "first"]
    assert products
    errors = [r.rel_error for r in backward if r.rel_error is not None]
    assert errors
    assert max(errors) < 0.1
    assert all(place == IN_LOSS for r in operations.records if r.phase == "loss" for place in r.inside[:1])


def test_modules_that_switch_autocast_off_are_shadowed_in_their_own_precision() -> None:
    class Off(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (x.float() @ x.float().t()) * 1.1

    records = traced(nn.Sequential(nn.Linear(16, 16), Off()), torch.randn(4, 16), mode="autocast").records
    product = next(r for r in records if r.module == "1" and r.op == "aten.mm")
    assert product.dtype == "float32"
    assert product.local_error is not None
    assert product.local_error < 1e-6


def test_operations_say_which_module_ran_them_or_that_none_did() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(Do(lambda x: x * 1.3)))
    operations = traced(model, torch.randn(4, 16), loss=squared)
    by_op = {r.op: r for r in operations.records if r.op}
    assert by_op["aten.addmm"].module == "0"
    assert by_op["aten.mul"].module == "1.0"
    assert by_op["aten.mul"].inside == (("", 0), ("1", 0), ("1.0", 0))
    assert (by_op["aten.mean"].module, by_op["aten.mean"].phase) == (None, "loss")


def test_a_stretch_is_shadowed_alone_and_non_finite_values_are_seen_everywhere() -> None:
    model = nn.Sequential(Do(lambda x: x * 1.3), Do(lambda x: x * 1.7), Do(lambda x: x * 1e39 * 1.0))
    operations = traced(model, torch.ones(4, 16), stretch=(("1", 0), ("1", 0)))
    assert [(r.module, r.op) for r in operations.records if r.op] == [("1", "aten.mul")]
    assert [(f.module, f.op) for f in operations.facts] == [("2", "aten.mul")]
    assert not operations.whole


def test_memory_that_is_only_written_to_is_no_operand() -> None:
    def code(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer.fill_(float("nan"))
        torch.mul(x, 1e39, out=buffer)
        return buffer

    facts = traced(Do(code), torch.ones(4, 16)).facts
    assert [f.op for f in facts] == ["aten.fill_", "aten.mul"]


def test_what_absorbs_an_inf_is_named() -> None:
    facts = traced(Do(lambda x: (x * 1e39).clamp(max=7.0) + 1), torch.ones(4, 16)).facts
    assert [(f.op, f.absorbed_by) for f in facts] == [("aten.mul", ("", "aten.clamp"))]


def test_the_public_function_behind_an_operation_is_named() -> None:
    facts = traced(Do(lambda x: F.dropout(x * 4e4, 0.5)), torch.ones(4, 16), "fp16", train=True).facts
    assert [(f.op, f.call) for f in facts] == [("aten.mul", "dropout")]
    facts = traced(Do(lambda x: x * 4e4 * 2), torch.ones(4, 16), "fp16").facts
    assert [(f.op, f.call) for f in facts] == [("aten.mul", None)]


def test_everything_of_the_callers_is_as_before_also_when_the_model_raises() -> None:
    def code(x: Tensor) -> Tensor:
        y = F.dropout(x * 1.1)
        if x.dtype is torch.bfloat16:
            raise ValueError("no")
        return y

    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), Do(code))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    operations = traced(model, torch.randn(4, 16), loss=squared, backward=True, train=True)
    assert "aten.addmm" in {r.op for r in operations.records}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert "_compiled_call_impl" not in model.__dict__
    assert random.getstate() == states[1]


def test_nothing_is_kept_alive_that_the_model_let_go() -> None:
    gone: list[bool] = []

    def code(x: Tensor) -> Tensor:
        y = x * 1.1
        kept = weakref.ref(y)
        z = torch.stack([y, y.cumsum(0)]).sum(0)
        del y
        gone.append(kept() is None)
        return z

    gc.disable()
    try:
        traced(Do(code), torch.randn(4, 16))
    finally:
        gc.enable()
    assert gone == [True]
