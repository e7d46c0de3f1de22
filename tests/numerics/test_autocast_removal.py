"""What a replay installs for the whole process is gone when it ends, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanprobe.numerics import autocast_policy
from nanprobe.numerics.autocast_regions import as_on_cuda, emulate_cuda


def photograph() -> tuple[Any, ...]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    region: Any = torch.autocast
    half = torch.ones(2, 2).half()
    with torch.autocast("cpu", dtype=torch.float16):
        dtypes = [half.softmax(0).dtype, torch.cat([half, half.float()]).dtype, (half.float() @ half).dtype]
    return (
        sorted(name for name in torch._C._dispatch_get_all_op_names() if has(name, "AutocastCPU")),
        [torch._C._dispatch_dump_table(f"aten::{name}") for name in ("softmax.int", "cat", "mm", "lstm.input")],
        (region.__init__, region.__enter__, region.__exit__, torch.amp.autocast_mode._cast),
        dtypes,
        [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")],
    )


def test_all_is_as_before_after_an_error() -> None:
    before = photograph()
    with pytest.raises(KeyError), emulate_cuda(), as_on_cuda(), torch.autocast("cuda"):
        raise KeyError
    assert photograph() == before


def test_kernels_stay_until_the_last_user_leaves() -> None:
    half = torch.ones(2, 2).half()
    with emulate_cuda():
        with emulate_cuda():
            pass
        with as_on_cuda(), torch.autocast("cuda"):
            assert half.softmax(0).dtype is torch.float32


def test_a_failing_installation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = photograph()

    def failing(*_: Any) -> Any:
        raise KeyError

    with monkeypatch.context() as patched:
        patched.setitem(autocast_policy._CUDA_WAYS, "widest", failing)
        with pytest.raises(KeyError), emulate_cuda():
            pytest.fail("installed in spite of the failure")
    assert photograph() == before
