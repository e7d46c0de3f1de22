"""Mixed placements of dtypes as people train with them, in every low lane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import LOW, Code, assert_healthy, gradient, mean_square, measure, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


class Fp32Norm(nn.LayerNorm):
    """A norm that computes in FP32 and hands on the dtype it was given, whatever its own weights are."""

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float())
        return found.to(x.dtype)


@MODES
def test_an_fp32_norm_inside_a_bf16_model(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), Fp32Norm(16), nn.Linear(16, 4)).bfloat16()
    model[1].float()
    x = torch.randn(4, 8)
    with untouched(model):
        report = nanprobe.replay(model, x.bfloat16(), dtype="bf16", mode=mode, loss=mean_square)
    assert_healthy(report, ("bf16",))
    assert measure(report, "1", "bf16").dtype == "bfloat16"


def test_a_norm_left_in_fp32_in_a_model_that_is_cast_whole_gets_its_values_back_when_kept() -> None:
    """``model.half()`` rounds the norm's weights too; named in ``keep_fp32`` they are those of before."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].weight.fill_(1.0001)
    x = torch.randn(4, 8)
    seen: dict[str, set[float]] = {}
    model[1].register_forward_pre_hook(
        lambda module, args: seen.setdefault(str(module.weight.dtype), set()).add(float(module.weight[0].detach()))
    )
    report = nanprobe.replay(model, x, dtype="bf16", mode="cast", keep_fp32=["1"], loss=mean_square)
    assert_healthy(report, ("bf16",))
    assert seen == {"torch.float32": {float(torch.tensor(1.0001))}}
    assert measure(report, "1", "bf16").dtype == "float32"
    assert measure(report, "2", "bf16").dtype == "bfloat16"


@MODES
def test_modules_that_transformers_keeps_in_fp32(mode: str, tmp_path: Path) -> None:
    """T5 names ``wo`` in ``_keep_in_fp32_modules``: its forward looks at that weight's dtype and casts to it."""
    import transformers

    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    kept = [name for name, p in model.named_parameters() if p.dtype is torch.float32]
    assert kept
    assert all(".wo." in name for name in kept)
    ids = torch.randint(1, 40, (2, 6))
    with untouched(model):
        report = nanprobe.replay(
            model, {"input_ids": ids, "labels": ids}, dtype="fp16", mode=mode, keep_fp32=["*.wo"], train=False
        )
    assert_healthy(report, ("fp16",))
    place = "encoder.block.0.layer.1.DenseReluDense"
    assert measure(report, f"{place}.wo", "fp16").dtype == "float32"
    assert measure(report, f"{place}.wi", "fp16").dtype == "float16"


def test_what_transformers_would_keep_in_fp32_is_told_when_a_cast_converts_it() -> None:
    class Asks(nn.Sequential):
        _keep_in_fp32_modules = ("wo",)

    def notes(**settings: Any) -> str:
        model = Asks()
        model.add_module("wi", nn.Linear(4, 4))
        model.add_module("wo", nn.Linear(4, 4))
        report = nanprobe.replay(model, torch.randn(2, 4), dtype="bf16", **settings)
        return " ".join(report.record.conditions["notes"])

    assert 'keep_fp32: ["wo"]' in notes(mode="cast")
    assert "keep_fp32" not in notes(mode="cast", keep_fp32=["wo"])
    assert "keep_fp32" not in notes(mode="autocast")


@MODES
def test_a_frozen_part_in_another_dtype(mode: str) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8).requires_grad_(False).bfloat16()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                features = self.inner(x.to(self.inner.weight.dtype))
            return self.head(features.to(self.head.weight.dtype))

    model, x = Frozen(), torch.randn(4, 8)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert [row.parameter for row in report.record.gradients] == ["head.weight", "head.bias"]
    # The reference is FP32 throughout: the values that bf16 holds, and FP32 arithmetic.
    assert measure(report, "inner", "fp32").dtype == "float32"
    assert model.inner.weight.dtype is torch.bfloat16


@MODES
def test_half_parameters_with_fp32_buffers(mode: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8).bfloat16()
            self.register_buffer("table", torch.arange(8) * 100.3)

        def forward(self, x: Tensor) -> Any:
            return self.lin(x) + torch.cos(self.table).to(x.dtype)

    model, x = Table(), torch.randn(4, 8)
    with untouched(model):
        report = nanprobe.replay(model, x, dtype="bf16", mode=mode, loss=mean_square)
    assert report.precisions["bf16"].completed
    assert model.table.dtype is torch.float32
    if mode == "autocast":
        assert_healthy(report, ("bf16",))  # the buffer stays FP32
    else:
        # model.bfloat16() would round the table: the cosine of 702.1 is not that of 704.
        assert report.verdict == "precision"


@MODES
@pytest.mark.parametrize("name", LOW)
def test_a_kept_buffer_stays_as_it_was(mode: str, name: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(8) * 100.3)

        def forward(self, x: Tensor) -> Any:
            return x + torch.cos(self.table)

    model = nn.Sequential(nn.Linear(8, 8), Table(), nn.Linear(8, 4))
    report = nanprobe.replay(model, torch.randn(4, 8), dtype=name, mode=mode, keep_fp32=["1"], loss=mean_square)
    assert_healthy(report, (name,))
    assert gradient(report, "2.weight").precisions[name].rel_error is not None


def test_the_dtype_of_a_half_model_is_no_gradient_dtype_of_the_reference() -> None:
    model = Code(lambda self, x: self.lin(x), lin=nn.Linear(4, 4).half())
    report = nanprobe.replay(model, torch.randn(2, 4), dtype="fp16", mode="cast", loss=mean_square)
    assert_healthy(report, ("fp16",))
    assert measure(report, "lin", "fp32", phase="backward").dtype == "float32"
    assert measure(report, "lin", "fp16", phase="backward").dtype == "float16"
