"""Modules kept in FP32 inside a low lane: what they get, hold and hand on, and what comes after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from nanprobe.errors import UsageError
from tests.lanes.support import ALL, LOW, Code, assert_healthy, gradient, mean_square, measure, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


class Block(nn.Module):
    """A pre-norm residual block; with the norm kept, the stream may become FP32 and must come down again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@MODES
def test_a_kept_module_runs_in_fp32_and_the_next_one_low(mode: str) -> None:
    model, x = nn.Sequential(Block(), Block(), nn.Linear(8, 2)), torch.randn(4, 8)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, keep_fp32=["*.norm"], loss=mean_square)
    assert_healthy(report)
    for name, dtype in zip(LOW, ("float16", "bfloat16"), strict=True):
        assert measure(report, "0.norm", name).dtype == "float32"
        assert measure(report, "0.up", name).dtype == dtype
        assert measure(report, "1.up", name).dtype == dtype
        assert measure(report, "2", name).dtype == dtype
    assert report.record.conditions["keep_fp32"] == ["0.norm", "1.norm"]


@MODES
def test_everything_below_a_kept_module_is_kept(mode: str) -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    report = nanprobe.compare_precisions(model, torch.randn(4, 8), mode=mode, keep_fp32=["1"], loss=mean_square)
    assert_healthy(report)
    for path in ("1", "1.norm", "1.up", "1.down"):
        assert measure(report, path, "bf16").dtype == "float32", path
        if path != "1":
            assert measure(report, path, "bf16").local_error == 0.0, path
    assert measure(report, "0.up", "bf16").dtype == "bfloat16"
    assert measure(report, "2", "bf16").dtype == "bfloat16"


@MODES
def test_a_model_kept_whole_is_the_reference(mode: str) -> None:
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    report = nanprobe.compare_precisions(model, torch.randn(4, 8), mode=mode, keep_fp32=["*"])
    for name in LOW:
        error = measure(report, "", name).rel_error
        assert error is not None
        # In cast mode the batch itself is rounded, which is all there is.
        assert error == 0.0 if mode == "autocast" else error < 0.01


@MODES
def test_a_residual_after_a_kept_module_and_functional_code_in_between(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        kept = self.kept(h)
        mixed = torch.cat([torch.nn.functional.gelu(kept) + h, kept[:, :4] * 2.0], dim=-1)
        return self.last(mixed)

    model = Code(forward, first=nn.Linear(8, 8), kept=nn.Linear(8, 8), last=nn.Linear(12, 2))
    report = nanprobe.compare_precisions(model, torch.randn(4, 8), mode=mode, keep_fp32=["kept"], loss=mean_square)
    assert_healthy(report)
    assert measure(report, "kept", "fp16").dtype == "float32"
    assert measure(report, "kept", "fp16").local_error == 0.0
    assert measure(report, "last", "fp16").dtype == "float16"


def test_the_models_own_float_is_left_alone() -> None:
    """Only what comes from a kept module is cast; a ``.float()`` of the model's own goes on as it is."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def inspect(self: Any, x: Tensor, y: Tensor) -> Any:
        seen.append((x.dtype, y.dtype))
        return x.to(y.dtype) + y

    def forward(self: Any, x: Tensor) -> Any:
        return self.inspect(self.kept(x), self.first(x).float())

    model = Code(forward, first=nn.Linear(8, 8), kept=nn.Linear(8, 8), inspect=Code(inspect))
    nanprobe.replay(model, torch.randn(4, 8), mode="cast", keep_fp32=["kept"], local_error=False)
    assert set(seen) == {(torch.float32, torch.float32), (torch.float16, torch.float32)}


@MODES
def test_a_kept_head_tied_to_an_embedding(mode: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(11, 8)
            self.mid = nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.mid(self.emb(ids)))

    model, ids = Tied(), torch.tensor([[1, 2, 3], [4, 5, 5]])
    for kept in (["head"], ["emb"], ["head", "emb"]):
        with untouched(model):
            report = nanprobe.compare_precisions(model, ids, mode=mode, keep_fp32=kept, loss=mean_square)
        assert_healthy(report)
        assert [r.parameter for r in report.record.gradients] == ["emb.weight", "mid.weight", "mid.bias"]
        exact = gradient(report, "emb.weight").precisions["fp32"].norm
        for name in ALL:
            assert gradient(report, "emb.weight").precisions[name].norm == pytest.approx(exact, rel=0.02)
        assert measure(report, "mid", "fp16").dtype == "float16"


def test_kept_modules_hold_their_original_values_not_rounded_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.zeros(2, 4)
    report = nanprobe.replay(model, x, dtype="bf16", mode="cast", keep_fp32=["0"])
    # Of a zero input only the bias comes out, exactly.
    assert measure(report, "0", "bf16").rel_error == 0.0
    rounded = nanprobe.replay(model, x, dtype="bf16", mode="cast")
    assert measure(rounded, "0", "bf16").rel_error != 0.0


@MODES
def test_keeping_the_module_that_overflows_helps(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.last(self.squash(self.big(x)))

    model = Code(forward, big=nn.Linear(8, 8), squash=nn.Tanh(), last=nn.Linear(8, 2))
    with torch.no_grad():
        model.big.weight.fill_(2e4)
    x = torch.ones(4, 8)
    assert nanprobe.replay(model, x, mode=mode).findings
    report = nanprobe.replay(model, x, mode=mode, keep_fp32=["big", "squash"], loss=mean_square)
    assert_healthy(report, ("fp16",))
    assert measure(report, "big", "fp16").absmax == pytest.approx(1.6e5, rel=1e-3)


def test_a_value_beyond_the_format_that_a_low_module_receives_is_the_parents_doing() -> None:
    model = Code(lambda self, x: self.last(self.big(x)), big=nn.Linear(8, 8), last=nn.Linear(8, 2))
    with torch.no_grad():
        model.big.weight.fill_(2e4)
    report = nanprobe.replay(model, torch.ones(4, 8), mode="cast", keep_fp32=["big"])
    first = report.first_bad
    assert first is not None
    assert first.phase == "forward"
    assert first.module in ("", "last")


@MODES
def test_kept_modules_that_take_keywords_and_tuples(mode: str) -> None:
    def inner(self: Any, *, pair: tuple[Tensor, dict[str, Tensor]]) -> Any:
        assert pair[0].dtype == pair[1]["b"].dtype == torch.float32
        assert pair[1]["ids"].dtype == torch.int64
        return {"out": self.lin(pair[0] + pair[1]["b"]), "ids": pair[1]["ids"]}

    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        found = self.kept(pair=(h, {"b": h * 2, "ids": torch.arange(4)}))
        return self.last(found["out"])

    model = Code(forward, first=nn.Linear(8, 8), kept=Code(inner, lin=nn.Linear(8, 8)), last=nn.Linear(8, 2))
    report = nanprobe.compare_precisions(model, torch.randn(4, 8), mode=mode, keep_fp32=["kept"], loss=mean_square)
    assert_healthy(report)


@MODES
@pytest.mark.parametrize("reentrant", [True, False])
def test_kept_modules_under_checkpointing(reentrant: bool, mode: str) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        return self.last(checkpoint(self.block, h, use_reentrant=reentrant))

    model = Code(forward, first=nn.Linear(8, 8), block=Block(), last=nn.Linear(8, 2))
    report = nanprobe.compare_precisions(
        model, torch.randn(4, 8), mode=mode, keep_fp32=["block.norm"], loss=mean_square
    )
    assert_healthy(report)
    assert len(report.record.gradients) == 10


@MODES
def test_recurrent_and_attention_modules_can_be_kept(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h, _ = self.rnn(self.first(x))
        h, _ = self.attn(h, h, h)
        return self.last(h)

    model = Code(forward, first=nn.Linear(8, 8), rnn=nn.LSTM(8, 8, batch_first=True))
    model.attn = nn.MultiheadAttention(8, 2, batch_first=True)
    model.last = nn.Linear(8, 2)
    for kept in (["rnn"], ["attn"], ["rnn", "attn"]):
        report = nanprobe.compare_precisions(model, torch.randn(4, 5, 8), mode=mode, keep_fp32=kept, loss=mean_square)
        assert_healthy(report)
        assert measure(report, kept[0], "fp16").dtype == "float32"
        assert measure(report, "last", "fp16").dtype == "float16"


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^keep_fp32: the pattern 'nrom' matches no module of the model"):
        nanprobe.replay(nn.Linear(4, 4), torch.randn(2, 4), keep_fp32=["nrom"])
