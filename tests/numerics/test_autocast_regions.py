"""Autocast regions of a model's own code, and what a thread outside a replay sees meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from nanprobe.numerics import autocast_policy
from nanprobe.numerics.autocast_regions import as_on_cuda, emulate_cuda


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with emulate_cuda():
        yield


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def in_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def own_policy() -> list[torch.dtype]:
    with torch.autocast("cpu", dtype=torch.float16):
        return [
            half(3, 4).softmax(1).dtype,
            torch.cat([half(2), torch.ones(2)]).dtype,
            F.l1_loss(half(3), half(3)).dtype,
        ]


def test_autocast_for_cuda_opens_a_region_without_a_gpu() -> None:
    with as_on_cuda(), torch.autocast("cuda"):
        assert torch.is_autocast_enabled()
        assert torch.get_autocast_dtype("cuda") is torch.float16
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_old_spelling_takes_float16_whatever_is_around_it() -> None:
    with as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cuda"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
        with torch.cuda.amp.autocast():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_disabled_region_inside_switches_off_both(device: str) -> None:
    with as_on_cuda(), torch.autocast("cuda"):
        with torch.autocast(device, enabled=False):
            assert not torch.is_autocast_enabled()
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
            assert half(2, 2).softmax(0).dtype is torch.float16
        assert torch.is_autocast_enabled()
        assert half(2, 2).softmax(0).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_disabling_decorator_made_beforehand_switches_off() -> None:
    @torch.cuda.amp.autocast(enabled=False)
    def kept(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with as_on_cuda(), torch.autocast("cuda"):
        assert kept(torch.ones(2, 2)).dtype is torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


def test_explicit_float_is_undone_at_the_next_product() -> None:
    with as_on_cuda(), torch.autocast("cuda"):
        assert (half(2, 2).float() @ half(2, 2).float()).dtype is torch.float16


def test_float32_as_a_regions_dtype_is_accepted_as_on_cuda() -> None:
    with as_on_cuda(), torch.autocast("cuda", dtype=torch.float32):
        assert torch.is_autocast_enabled()
        assert torch.mm(half(2, 2), half(2, 2)).dtype is torch.float32


def test_a_reference_opens_no_region() -> None:
    with as_on_cuda(regions=False), torch.autocast("cuda"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled()
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


class Cast(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Cast.seen.append((x.dtype, torch.is_autocast_enabled()))
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        Cast.seen.append((g.dtype, torch.is_autocast_enabled()))
        return g * 2


class Plain(torch.autograd.Function):
    seen: ClassVar[list[Any]] = []

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        Plain.seen.append((torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")))
        return g.float()


def test_custom_functions_cast_and_remember_as_on_cuda() -> None:
    Cast.seen.clear()
    Plain.seen.clear()
    x = half(3, 3).requires_grad_()
    with as_on_cuda():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = Cast.apply(x)
            z = Plain.apply(x.bfloat16())
        y.sum().backward()
        z.float().sum().backward()
        Cast.apply(x)
    assert Cast.seen == [(torch.float32, False), (torch.float32, False), (torch.float16, False)]
    assert Plain.seen == [(True, torch.bfloat16)]


def test_a_parameter_is_cast_once_so_its_gradients_add_up_in_half() -> None:
    weight = torch.nn.Parameter(torch.ones(1, 1))
    with as_on_cuda():
        with torch.autocast("cuda"):
            first = torch.mm(torch.full((1, 1), 40000.0), weight)
            second = torch.mm(torch.full((1, 1), 40000.0), weight)
        (first.float() + second.float()).sum().backward()
    assert weight.grad is not None
    assert weight.grad.isinf().all()


def test_a_cast_without_gradients_is_not_kept_for_later() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with as_on_cuda(), torch.autocast("cuda"):
        with torch.no_grad():
            torch.mm(torch.ones(2, 2), weight)
        assert torch.mm(torch.ones(2, 2), weight).requires_grad


def test_copies_of_parameters_go_with_the_outermost_region() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with as_on_cuda():
        with torch.autocast("cuda"):
            torch.mm(torch.ones(2, 2), weight)
            assert autocast_policy._lists.casts
        assert not autocast_policy._lists.casts


def test_other_threads_keep_pytorchs_own_lists() -> None:
    expected = [torch.float16, torch.float32, torch.float32]
    with as_on_cuda(), torch.autocast("cuda"):
        assert in_thread(own_policy) == expected
    assert own_policy() == expected


def test_a_whole_recurrent_layer_runs_in_float16() -> None:
    with as_on_cuda(), torch.autocast("cuda", dtype=torch.bfloat16):
        for made in (torch.nn.LSTM(4, 4), torch.nn.GRU(4, 4), torch.nn.RNN(4, 4)):
            assert made(torch.randn(3, 2, 4))[0].dtype is torch.float16


def test_widest_type_refuses_the_other_half_as_cuda_does() -> None:
    with as_on_cuda(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.dot(torch.ones(2).bfloat16(), torch.ones(2).bfloat16())


def test_double_is_left_alone() -> None:
    with as_on_cuda(), torch.autocast("cuda"):
        x = torch.ones(2, 2, dtype=torch.float64)
        assert (x @ x).dtype is x.exp().dtype is x.sum().dtype is x.norm().dtype is torch.float64


def test_a_callers_own_region_is_set_aside_and_put_back() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"))
        with as_on_cuda():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        after = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"))
    assert after == before
