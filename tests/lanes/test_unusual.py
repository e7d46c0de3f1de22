"""Models with unusual code in forward, and whole models that are compiled, scripted or wrapped."""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import UsageError
from tests.lanes.support import ALL, Code, assert_healthy, mean_square, measure, rows, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


def layers() -> dict[str, Any]:
    return {"first": nn.Linear(4, 4), "inner": nn.Linear(4, 4), "last": nn.Linear(4, 2)}


def mapped(self: Any, x: Tensor) -> Any:
    return self.last(torch.func.vmap(self.inner)(self.first(x)))


def called_with_other_weights(self: Any, x: Tensor) -> Any:
    fast = {name: 0.9 * value for name, value in self.inner.named_parameters()}
    return self.last(torch.func.functional_call(self.inner, fast, (self.first(x),)))


def differentiated(self: Any, x: Tensor) -> Any:
    h = self.first(x)
    slope = torch.func.grad(lambda v: self.inner(v).float().square().mean())(h)
    return self.last(h + slope.to(h.dtype))


def jacobian(self: Any, x: Tensor) -> Any:
    h = self.first(x)
    return self.last(h) + torch.func.jacrev(lambda v: self.inner(v).sum())(h[0]).sum().to(h.dtype)


def inner_loop(self: Any, x: Tensor) -> Any:
    """One step of gradient descent inside forward, as in meta-learning."""
    h = self.first(x)
    weights = dict(self.inner.named_parameters())
    loss = torch.func.functional_call(self.inner, weights, (h,)).float().square().mean()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    fast = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
    return self.last(torch.func.functional_call(self.inner, fast, (h,)))


def without_gradients(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = self.inner(self.first(x))
    return self.last(self.first(x) + target)


def in_inference_mode(self: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        target = self.inner(x)
    return self.last(self.first(x) + target.clone())


def a_generator(self: Any, x: Tensor) -> Any:
    def parts() -> Iterator[Tensor]:
        for _ in range(3):
            yield self.inner(self.first(x))

    return self.last(sum(parts()))


def mapped_over_a_list(self: Any, x: Tensor) -> Any:
    return self.last(functools.reduce(torch.add, map(self.inner, [self.first(x)] * 3)))


def reversible(self: Any, x: Tensor) -> Any:
    a, b = self.first(x).chunk(2, dim=-1)
    b = b + a
    return self.last(self.inner(torch.cat([a, b], dim=-1).contiguous()).view(-1, 4).flip(0).t().t())


def with_scratch_buffers(self: Any, x: Tensor) -> Any:
    out = torch.empty(x.shape[0], 4, dtype=self.first.weight.dtype)
    out.copy_(self.first(x))
    out[:, 1] = 0
    out[1:].add_(out[:1].clone())
    return self.last(self.inner(out))


FORWARDS = [
    mapped,
    called_with_other_weights,
    differentiated,
    jacobian,
    inner_loop,
    without_gradients,
    in_inference_mode,
    a_generator,
    mapped_over_a_list,
    reversible,
    with_scratch_buffers,
]


@MODES
@pytest.mark.parametrize("forward", FORWARDS)
def test_unusual_code_in_forward(forward: Any, mode: str) -> None:
    model, x = Code(forward, **layers()), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    # The reference is what the model gives by itself.
    exact = model(x)
    assert report.precisions["fp32"].loss == pytest.approx(mean_square(exact, x).item(), rel=1e-5)
    hidden = report.record.coverage.outputs_not_inspected
    if forward in (mapped, differentiated, jacobian):
        assert hidden == ("inner (inside a torch.func transform)",)
        assert rows(report, "inner") == []
    else:
        assert hidden == ()
        assert len(rows(report, "inner")) >= 1
    assert {r.module for r in report.record.gradients} >= {"first", "last"}


class Labelled(torch.Tensor):
    """A tensor subclass that only carries its type along."""


@MODES
def test_tensors_of_a_subclass(mode: str) -> None:
    inner = Code(lambda self, x: self.lin(x).as_subclass(Labelled), lin=nn.Linear(4, 4))
    model = Code(lambda self, x: self.last(torch.relu(self.inner(x))), inner=inner, last=nn.Linear(4, 2))
    x = torch.randn(3, 4).as_subclass(Labelled)
    report = nanprobe.compare_precisions(model, x, mode=mode, loss=lambda o, b: mean_square(o, b).as_subclass(Tensor))
    assert_healthy(report)
    assert measure(report, "inner", "bf16").rel_error


def test_lazy_modules_that_were_never_called_are_refused_in_one_line() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"^model: the lazy parameter 0.weight has no shape yet; call the model once"):
        nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert isinstance(model[0].weight, nn.UninitializedParameter)


@pytest.mark.parametrize("way", ["compiled", "scripted", "traced", "fx", "data parallel"])
def test_whole_models_that_are_wrapped(way: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model: Any = {
            "compiled": lambda: torch.compile(plain, backend="eager"),
            "scripted": lambda: torch.jit.script(plain),
            "traced": lambda: torch.jit.trace(plain, x),
            "fx": lambda: torch.fx.symbolic_trace(plain),
            "data parallel": lambda: nn.DataParallel(plain),
        }[way]()
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert report.precisions["fp32"].loss == pytest.approx(mean_square(plain(x), x).item(), rel=1e-5)
    assert len(report.record.gradients) == 4


_depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


def test_context_variables_of_the_caller_are_seen_in_lanes() -> None:
    seen: list[int] = []

    def forward(self: Any, x: Tensor) -> Any:
        seen.append(_depth.get())
        _depth.set(_depth.get() + 1)
        return self.lin(x)

    token = _depth.set(5)
    try:
        nanprobe.compare_precisions(Code(forward, lin=nn.Linear(4, 4)), torch.randn(3, 4), loss=mean_square)
        assert set(seen) == {5}
        assert _depth.get() == 5
    finally:
        _depth.reset(token)


def test_models_that_accumulate_gradients_inside_forward() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.first(x).float().sum().backward()
        return self.last(self.first(x))

    model, x = Code(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 2)), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert all(set(r.precisions) == set(ALL) for r in report.record.gradients)


@MODES
def test_modules_called_in_threads_of_the_models_own_do_not_wait_for_lanes(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda layer: layer(x), [self.a, self.b]))
        return self.last(parts[0].to(x.dtype) + parts[1].to(x.dtype))

    model, x = Code(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), last=nn.Linear(4, 2)), torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert len(report.record.gradients) == 6
    hidden = report.record.coverage.outputs_not_inspected
    assert sorted(hidden) == ["a (called in a thread of the model's)", "b (called in a thread of the model's)"]
    assert report.record.coverage.never_visited == ("a", "b")


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as libraries for quantised and distributed tensors have them."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Wrapped) else value

        result = func(*[bare(a) for a in args], **{k: bare(v) for k, v in (kwargs or {}).items()})
        return Wrapped(result) if isinstance(result, Tensor) else result


def test_a_tensor_that_wraps_another_is_not_looked_into() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        wrapped = Wrapped(m.layer(x).detach()) * 3e4
        return wrapped.held * 3 + m.layer(x)  # type: ignore[no-any-return]  # modules return Any

    model = Code(forward, layer=nn.Linear(8, 8))
    report = nanprobe.replay(model, torch.ones(4, 8) * 1e2, dtype="fp16", mode="cast", backward=False)
    assert report.precisions["fp16"].completed
    assert any("Wrapped, not looked into" in note for note in report.record.conditions["notes"])


def test_a_jagged_tensor_is_looked_into_by_its_values() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor([x[:2], x[2:3]], layout=torch.jagged)
        return m.layer(jagged).values()  # type: ignore[no-any-return]  # modules return Any

    report = nanprobe.replay(Code(forward, layer=nn.Linear(8, 8)), torch.randn(4, 8), dtype="fp16")
    assert report.verdict == "clean"
    assert measure(report, "layer", "fp16").elements >= 24


def test_cast_leaves_complex_parameters_as_half_does() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (m.layer(x).float() * m.turn).abs()  # type: ignore[no-any-return]  # modules return Any

    model = Code(forward, layer=nn.Linear(4, 4), turn=nn.Parameter(torch.ones(4, dtype=torch.complex64) * 1j))
    report = nanprobe.replay(model, torch.randn(2, 4), dtype="bf16", mode="cast")
    assert report.verdict == "clean"


def test_threads_and_flushing_that_a_model_changes_are_put_back() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.set_flush_denormal(True)
        torch.set_num_threads(3)
        return m.layer(x)  # type: ignore[no-any-return]  # modules return Any

    threads = torch.get_num_threads()
    nanprobe.replay(Code(forward, layer=nn.Linear(4, 4)), torch.randn(2, 4), dtype="bf16")
    assert torch.get_num_threads() == threads
    assert float(torch.tensor([1e-39]) * 1.0) != 0.0
