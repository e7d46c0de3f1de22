"""The attention back end as a condition: PyTorch's choice, its math back end, or written out with half scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanprobe
from nanprobe.lanes.attention import written_out, written_out_here
from tests.lanes.support import Code, rules, untouched


def attention(size: float) -> nn.Module:
    """Attention whose scores are about 8 * size ** 2 before scaling."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = F.scaled_dot_product_attention(q * size, k * size, v)
        return out

    return Code(forward)


def qkv(*shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(*(shape or (2, 2, 16, 64))) for name in ("q", "k", "v")}


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.rand(2, 2, 6, 6) > 0.4},
    "float mask": {"attn_mask": torch.randn(6, 6)},
    "all masked": {"attn_mask": torch.tensor([[False] * 6, *[[True] * 6] * 5])},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("name", CALLS)
def test_written_out_attention_is_pytorchs(name: str) -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **CALLS[name])
    with written_out_here("math-half"):
        found = F.scaled_dot_product_attention(q, k, v, **CALLS[name])
    assert torch.allclose(found, expected, atol=1e-5)


def test_grouped_heads_and_dropout() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with written_out_here("math-half"):
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), expected, atol=1e-5)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=1.0, enable_gqa=True)
    assert not dropped.any()


def test_fused_changes_nothing() -> None:
    flash, function = torch.backends.cuda.flash_sdp_enabled(), F.scaled_dot_product_attention
    with written_out("fused"), written_out_here("fused"):
        assert torch.backends.cuda.flash_sdp_enabled() == flash
        assert F.scaled_dot_product_attention is function


def test_the_back_end_is_put_back_after_an_error() -> None:
    flash, function = torch.backends.cuda.flash_sdp_enabled(), F.scaled_dot_product_attention
    with pytest.raises(KeyError), written_out("math-half"), written_out_here("math-half"):
        raise KeyError
    assert torch.backends.cuda.flash_sdp_enabled() == flash
    assert F.scaled_dot_product_attention is function


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_only_half_scores_overflow(mode: str) -> None:
    batch = qkv()
    verdicts = {}
    for way in ("fused", "math", "math-half"):
        with untouched(attention(100.0)):
            report = nanprobe.replay(attention(100.0), batch, dtype="fp16", mode=mode, attention=way)
        verdicts[way] = report.verdict
        assert report.record.conditions["attention"] == way
        assert ("attention" in " ".join(report.record.conditions["notes"])) == (way != "fused")
    assert verdicts == {"fused": "clean", "math": "clean", "math-half": "precision"}


def test_multihead_attention_is_written_out_too() -> None:
    layer = nn.MultiheadAttention(64, 1, bias=False)
    nn.init.eye_(layer.out_proj.weight)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([torch.eye(64) * 300, torch.eye(64) * 300, torch.eye(64)]))
    model = Code(lambda self, x: self.attn(x, x, x, need_weights=False)[0], attn=layer)
    batch = torch.randn(8, 2, 64)
    assert nanprobe.replay(model, batch, dtype="fp16", attention="math-half").verdict == "precision"
    assert rules(nanprobe.replay(model, batch, dtype="fp16", attention="fused"), "error") == []
