"""Remedies of keeping modules in FP32 are ones that a config can hold, and say so when they were applied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.diagnose.keeping import keep_in_fp32


class Root(nn.Module):
    """A model whose own code overflows in FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.body(x).float().half().mul(0).add(300).square().float() if x.dtype is torch.float16 else self.body(x)
        )


class Inner(nn.Module):
    """The same as a part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        nn.init.constant_(self.part.weight, 3e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]  # modules return Any


def test_the_models_own_code_is_mended_and_not_kept() -> None:
    report = nanprobe.replay(Root(), torch.randn(2, 4), dtype="fp16", mode="cast")
    assert report.first_bad is not None
    assert report.first_bad.module == ""
    offered = [r for f in report.findings for r in f.remedies] + list(report.first_bad.remedies)
    assert "rewrite" in [remedy.kind for remedy in offered]
    assert not any("" in remedy.modules for remedy in offered)
    assert 'keep_fp32: [""]' not in report.render(width=200)


@pytest.mark.parametrize(("modules", "kind"), [(["a", "b"], "keep-fp32"), (["", "b"], "rewrite"), ([""], "rewrite")])
def test_keeping_everything_is_no_remedy(modules: list[str], kind: str) -> None:
    assert keep_in_fp32(modules, between=len(modules) > 1).kind == kind


def test_a_remedy_that_was_applied_is_told() -> None:
    report = nanprobe.replay(Inner(), torch.ones(2, 4), dtype="fp16", keep_fp32=["part"])
    assert report.verdict == "clean"
    text = report.render(width=200)
    assert text.startswith("Nothing goes wrong in fp16 with part kept in FP32:")
    assert "did not reproduce" not in text
    everything = nanprobe.replay(Inner(), torch.ones(2, 4), dtype="fp16", keep_fp32=["*"])
    assert "the whole model kept in FP32" in everything.render(width=200)
