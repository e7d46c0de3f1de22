"""Whatever happens, the model and the process are afterwards exactly as they were, and no thread is left."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import IncompleteError, UsageError
from nanprobe.lanes.baton import LaneThread
from nanprobe.lanes.conductor import Conductor
from tests.lanes.support import Code, Photograph, assert_healthy, mean_square, measure, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


class Full(nn.Module):
    """A model with everything that can be changed: buffers, modes of its own, gradients, hooks, attributes."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 2)
        self.norm.eval()
        self.act = act
        self.cache: list[Tensor] = []
        self.aux: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        h = self.drop(self.norm(self.inp(x)))
        self.cache.append(h)
        self.aux = h.float().square().mean()
        h = self.frozen(h)
        return self.out(h if self.act is None else self.act(h))


def full(act: Any = None) -> tuple[Full, Tensor]:
    model = Full(act).train()
    model.norm.eval()
    x = torch.randn(5, 4)
    mean_square(model(x), x).backward()
    model.inp.weight.register_hook(lambda g: g * 1.0)
    return model, x


@pytest.fixture
def unusual() -> Iterator[None]:
    """Process-wide settings that are not the default, so that restoring the default is not enough."""
    before = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        gc.get_threshold(),
    )
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    gc.set_threshold(701, 11, 12)
    torch.manual_seed(1234)
    random.seed(77)
    np.random.seed(78)
    np.random.standard_normal()  # leaves a second Gauss number waiting
    yield
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.use_deterministic_algorithms(False)
    torch.backends.mha.set_fastpath_enabled(before[2])
    gc.set_threshold(*before[3])


@MODES
def test_after_success(mode: str, unusual: None) -> None:
    model, x = full()
    model, x = model.float(), x.float()
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert all(result.completed for result in report.precisions.values()), report.findings
    assert model.calls == 1
    assert len(model.cache) == 1
    assert report.record.conditions["loss_scales"]["fp16"] >= 1


@MODES
def test_after_a_dynamic_loss_scale_and_a_search_for_the_bad_gradient(mode: str) -> None:
    model, x = full()

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.float().sum() * 1e5

    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=loss, loss_scale=65536.0)
    assert report.first_bad is not None
    with untouched(model):
        nanprobe.compare_precisions(model, x, mode=mode, loss=loss)


@pytest.mark.parametrize("moment", ["no_grad", "inference", "autocast", "evaluated", "fastpath", "deterministic"])
def test_whatever_the_caller_is_in_the_middle_of(moment: str) -> None:
    model, x = full()
    plain = nanprobe.compare_precisions(model, x, loss=mean_square)
    contexts: dict[str, Any] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "evaluated": lambda: torch.autograd.set_grad_enabled(True),
        "fastpath": lambda: torch.autograd.set_grad_enabled(True),
        "deterministic": lambda: torch.autograd.set_multithreading_enabled(False),
    }
    if moment == "evaluated":
        model.eval()
        model.out.train()
    if moment == "fastpath":
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contexts[moment](), untouched(model):
            report = nanprobe.compare_precisions(model, x, loss=mean_square)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert_healthy(report)
    assert report.record.gradients == plain.record.gradients
    assert report.record.modules == plain.record.modules


def test_models_and_batches_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert len(report.record.gradients) == 6


def test_the_callers_autocast_does_not_reach_the_reference() -> None:
    """Not even where a lane runs in the caller's own thread: the search for the loss, for its scale, for a bad node."""
    dtypes: list[torch.dtype] = []

    def forward(self: Any, x: Tensor) -> Any:
        h = self.lin(x)
        dtypes.append(h.dtype)
        return h.float().square().mean()

    model = Code(forward, lin=nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        nanprobe.compare_precisions(model, torch.randn(3, 4), dtypes=("fp32", "fp16"))
    assert torch.bfloat16 not in dtypes
    assert dtypes.count(torch.float32) >= 2


def boom(h: Tensor) -> Tensor:
    raise ValueError("the model's own mistake")


@MODES
@pytest.mark.parametrize("where", ["model", "loss", "backward", "bind", "dtype"])
def test_after_an_exception_in_the_reference(where: str, mode: str) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("the model's own mistake")

    model, x = full()
    model.act = {"model": boom, "backward": Broken.apply}.get(where)
    loss: Any = boom_loss if where == "loss" else mean_square
    batch: Any = {"y": x} if where == "bind" else x
    with untouched(model), pytest.raises((IncompleteError, UsageError)):
        nanprobe.compare_precisions(
            model, batch, mode=mode, loss=loss, dtypes=("fp32", "fp1" if where == "dtype" else "fp16")
        )


def boom_loss(output: Any, batch: Any) -> Tensor:
    raise ValueError("the loss's own mistake")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_after_whatever_is_raised_inside_a_lane(phase: str, error: type[BaseException], dtype: torch.dtype) -> None:
    """Ctrl-C arrives in the main thread; raised in a lane it must come out as well, and every other lane must end."""
    reached: list[str] = []

    class Interrupting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return interrupt(grads[0])

    def interrupt(h: Tensor) -> Tensor:
        if h.dtype == dtype:
            reached.append(threading.current_thread().name)
            raise error("stop")
        return h

    model, x = full()
    model.act = interrupt if phase == "forward" else Interrupting.apply
    expected: Any = IncompleteError if error is ValueError else error
    with untouched(model):
        if error is ValueError and dtype != torch.float32:
            report = nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square)
            assert [r.completed for r in report.precisions.values()].count(False) == 1
        else:
            with pytest.raises(expected):
                nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square)
    assert len(reached) == 1


def test_after_ctrl_c_while_lanes_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is interrupted in the conductor, between two boundaries."""
    steps: list[None] = []
    step = Conductor._step

    def interrupted(self: Conductor) -> None:
        steps.append(None)
        if len(steps) == 7:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(Conductor, "_step", interrupted)
    model, x = full()
    with untouched(model), pytest.raises(KeyboardInterrupt):
        nanprobe.compare_precisions(model, x, loss=mean_square)
    assert len(steps) == 7


@pytest.mark.parametrize("after", range(1, 30, 4))
def test_ctrl_c_between_lanes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The interrupt comes just after a lane has handed the baton back."""
    count = [0]
    resume = LaneThread.resume

    def interrupted(self: LaneThread) -> None:
        resume(self)
        count[0] += 1
        if count[0] == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(LaneThread, "resume", interrupted)
    model, x = full()
    with untouched(model), pytest.raises(KeyboardInterrupt):
        nanprobe.compare_precisions(model, x, loss=mean_square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_signal_while_a_lane_runs(phase: str, dtype: torch.dtype) -> None:
    """The signal wakes the main thread, which waits for the lane: the lane goes on to its boundary and ends there."""
    sent: list[None] = []

    class Signalling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return send(grads[0])

    def send(h: Tensor) -> Tensor:
        if h.dtype == dtype:
            sent.append(None)
            signal.pthread_kill(main, signal.SIGINT)
        return h

    main = threading.main_thread().ident
    assert main == threading.get_ident()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model, x = full()
    model.act = send if phase == "forward" else Signalling.apply
    with untouched(model), pytest.raises(KeyboardInterrupt):
        nanprobe.compare_precisions(model, x, mode="cast", loss=mean_square)
    assert len(sent) == 1


def test_models_that_swallow_every_exception_cannot_keep_a_lane_alive() -> None:
    def stubborn(self: Any, x: Tensor) -> Any:
        try:
            return self.lin(x)
        except Exception:
            return x

    def failing(self: Any, x: Tensor) -> Any:
        if x.dtype == torch.float32:
            raise KeyboardInterrupt
        return x

    model = nn.Sequential(Code(stubborn, lin=nn.Linear(4, 4)), Code(failing))
    x = torch.randn(3, 4)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        nanprobe.compare_precisions(model, x, mode="cast")


def test_hooks_of_the_users_own_are_called_on_copies_and_stay() -> None:
    seen: list[tuple[str, int]] = []

    def record(name: str) -> Any:
        def hook(module: nn.Module, *args: Any) -> None:
            seen.append((name, id(module)))

        return hook

    model, x = full()
    model.inp.register_forward_pre_hook(record("pre"))
    model.inp.register_forward_hook(record("post"))
    model.inp.register_forward_hook(lambda m, a, o: o * 2.0)
    model.out.register_full_backward_hook(record("backward"))
    doubled = model.inp(x)
    seen.clear()
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    # Once in each lane, and not again for the local error.
    assert not {id(model.inp), id(model.out)} & {module for _, module in seen}
    assert sorted(name for name, _ in seen) == 3 * ["backward"] + 3 * ["post"] + 3 * ["pre"]
    # What hooks make of an output is no error of the module's.
    assert measure(report, "inp", "fp16").local_error is None
    assert measure(report, "inp", "fp16").note == "local error unknown: the module has hooks"
    assert measure(report, "inp", "fp32").absmax == pytest.approx(doubled.abs().max().item(), rel=1e-5)


def test_global_hooks_of_the_users_own_are_left_alone() -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(type(m).__name__))
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        assert_healthy(nanprobe.compare_precisions(model, torch.randn(3, 4), local_error=False))
    finally:
        handle.remove()
    assert seen.count("Sequential") >= 3


def test_gradients_of_the_caller_are_neither_used_nor_changed() -> None:
    model, x = full()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e9)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    norm = report.precisions["fp32"].gradient_norm
    assert norm is not None
    assert norm < 100.0


def test_the_photograph_itself_notices_changes() -> None:
    model, _ = full()

    def changes() -> Iterator[Any]:
        yield lambda: model.norm.train()
        yield lambda: model.inp.weight.data.add_(1.0)
        yield lambda: setattr(model, "calls", 1000)
        yield lambda: model.inp.register_forward_hook(lambda *_: None)
        yield lambda: torch.rand(1)
        yield lambda: random.random()
        yield lambda: np.random.rand()
        yield lambda: setattr(model.out.weight, "grad", None)

    for change in changes():
        before = Photograph(model)
        before.same()
        change()
        with pytest.raises(AssertionError):
            before.same()


def test_lanes_are_let_go_of() -> None:
    """Nothing of a replay outlives it: no copy of the model, no activation."""

    class Marked(nn.Linear):
        pass

    model = nn.Sequential(Marked(4, 4), nn.ReLU(), Marked(4, 4))
    x = torch.randn(3, 4)
    nanprobe.compare_precisions(model, x, loss=mean_square)
    gc.collect()
    assert sum(type(o) is Marked for o in gc.get_objects()) == 2
    with pytest.raises(IncompleteError):
        nanprobe.compare_precisions(nn.Sequential(model, Code(lambda self, x: boom(x))), x)
    gc.collect()
    assert sum(type(o) is Marked for o in gc.get_objects()) == 2
