"""PyTorch's own modules with paths of their own: attention, fused encoders, recurrent layers, parametrizations."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import nanprobe
from tests.lanes.support import ALL, Code, assert_healthy, gradient, mean_square, measure, row, rows, untouched

MODES = pytest.mark.parametrize("mode", ["autocast", "cast"])


@MODES
@pytest.mark.parametrize("train", [False, True])
def test_attention_with_masks_as_keywords(mode: str, train: bool) -> None:
    def forward(self: Any, x: Tensor, pad: Tensor) -> Tensor:
        causal = torch.triu(torch.full((5, 5), float("-inf"), dtype=x.dtype), 1)
        out, _ = self.attn(x, x, x, key_padding_mask=pad, attn_mask=causal, need_weights=not train)
        assert isinstance(out, Tensor)
        return out

    model = Code(forward, attn=nn.MultiheadAttention(8, 2, batch_first=True))
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[1, 3:] = True
    batch = {"x": torch.randn(3, 5, 8), "pad": pad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # masks of two dtypes, in PyTorch's own code
        report = nanprobe.compare_precisions(model, batch, mode=mode, train=train, loss=mean_square)
    assert_healthy(report)
    assert report.record.coverage.never_visited == ("attn.out_proj",)
    assert {r.parameter for r in report.record.gradients} >= {"attn.out_proj.weight", "attn.in_proj_weight"}


def encoder(**kwargs: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **kwargs)


def test_the_fused_encoder_path_is_taken_in_cast_and_eval_and_its_parts_are_told_as_unseen() -> None:
    report = nanprobe.compare_precisions(encoder(), torch.randn(3, 5, 8), mode="cast", train=False)
    assert_healthy(report)
    assert [r.module for r in report.record.modules] == ["layers.0", "layers.1", ""]
    assert "layers.0.linear1" in report.record.coverage.never_visited


def test_under_autocast_the_encoder_takes_the_slow_path_in_every_lane() -> None:
    report = nanprobe.compare_precisions(encoder(), torch.randn(3, 5, 8), train=False)
    assert_healthy(report)
    assert len(rows(report, "layers.1.linear2")) == 1
    assert report.record.coverage.never_visited == (
        "layers",
        "layers.0.self_attn.out_proj",
        "layers.1.self_attn.out_proj",
    )


@MODES
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_with_padding_goes_through_nested_tensors(mode: str, train: bool) -> None:
    model = Code(lambda self, x, pad: self.enc(x, src_key_padding_mask=pad), enc=encoder(enable_nested_tensor=True))
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[1, 3:] = True
    report = nanprobe.compare_precisions(model, {"x": torch.randn(3, 5, 8), "pad": pad}, mode=mode, train=train)
    assert_healthy(report)
    found = measure(report, "enc.layers.1", "bf16")
    assert found.elements == (13 * 8 if mode == "cast" and not train else 15 * 8)
    assert found.rel_error is not None
    assert 0 < found.rel_error < 0.05


@MODES
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_with_packed_input(kind: type[nn.RNNBase], mode: str) -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return self.head(padded)

    model = Code(forward, rnn=kind(4, 6, 2, batch_first=True, bidirectional=True), head=nn.Linear(12, 2))
    batch = {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 2, 3])}
    with untouched(model):
        report = nanprobe.compare_precisions(model, batch, mode=mode, loss=mean_square)
    assert_healthy(report)
    data = measure(report, "rnn", "fp16")
    assert data.outputs[0].path == "0.data"
    assert data.outputs[0].shape == (10, 12)
    assert row(report, "rnn", phase="backward").precisions["bf16"].rel_error
    assert len(report.record.gradients) == len(list(model.parameters()))


def test_a_packed_sequence_in_the_batch() -> None:
    packed = rnn.pack_padded_sequence(torch.randn(3, 5, 4), torch.tensor([5, 3, 2]), batch_first=True)
    report = nanprobe.compare_precisions(nn.LSTM(4, 6, batch_first=True), packed, loss=lambda o, b: o[0].data.sum())
    assert_healthy(report)


@MODES
def test_recurrent_cells_in_a_loop(mode: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], 6, dtype=x.dtype)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return h

    model = Code(forward, cell=nn.LSTMCell(4, 6))
    report = nanprobe.compare_precisions(model, torch.randn(3, 5, 4), mode=mode, loss=mean_square)
    assert_healthy(report)
    assert len(rows(report, "cell")) == 5


@MODES
def test_batch_norm_starts_from_the_same_statistics_in_each_lane(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))
    x = torch.randn(16, 4) * 3 + 5
    with untouched(model):
        reports = [nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square) for _ in range(2)]
    assert_healthy(reports[0])
    assert model[1].num_batches_tracked == 0
    assert reports[0].record.modules == reports[1].record.modules
    evaluated = nanprobe.compare_precisions(model, x, mode=mode, train=False)
    assert_healthy(evaluated)
    assert measure(evaluated, "1", "fp32").absmax != measure(reports[0], "1", "fp32").absmax


def test_a_step_that_poisons_a_buffer_is_told_and_the_users_buffer_is_whole() -> None:
    class Track(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            self.seen.copy_(x.abs().max(0).values * 1e4)
            return self.lin(x)

    model = nn.Sequential(Track())
    with untouched(model):
        report = nanprobe.compare_precisions(model, torch.full((2, 4), 10.0), mode="cast")
    (found,) = report.findings
    assert (found.rule, found.severity, found.precision) == ("nonfinite-buffer", "warning", "fp16")
    assert found.evidence["parameter"] == "0.seen"
    assert torch.equal(model[0].seen, torch.zeros(4))


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 0.5


@MODES
@pytest.mark.parametrize(
    "kind", ["parametrize", "weight_norm", "old_weight_norm", "spectral_norm", "old_spectral_norm"]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_are_computed(kind: str, mode: str) -> None:
    linear = nn.Linear(4, 4)
    if kind == "parametrize":
        register_parametrization(linear, "weight", Scaled())
    elif kind == "weight_norm":
        weight_norm(linear)
    elif kind == "old_weight_norm":
        nn.utils.weight_norm(linear)
    elif kind == "spectral_norm":
        spectral_norm(linear)
    else:
        nn.utils.spectral_norm(linear)
    model = nn.Sequential(linear, nn.Tanh())
    x = torch.randn(3, 4)
    model(x)  # leaves a computed weight that is no leaf in an attribute, with the older kinds
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
    assert_healthy(report)
    assert {r.parameter for r in report.record.gradients} == {name for name, _ in model.named_parameters()}
    # The reference is what the model itself gives.
    copied = measure(nanprobe.replay(model, x, train=False), "1", "fp32").absmax
    assert copied == pytest.approx(model.eval()(x).abs().max().item(), rel=1e-5)


@MODES
def test_sparse_gradients(mode: str) -> None:
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    ids = torch.tensor([[1, 2, 1], [3, 3, 3]])
    report = nanprobe.compare_precisions(model, ids, mode=mode, loss=mean_square)
    assert_healthy(report)
    mean_square(model(ids), None).backward()
    exact = model[0].weight.grad
    assert exact is not None
    for name in ALL:
        found = gradient(report, "0.weight").precisions[name]
        assert found.norm == pytest.approx(exact.to_dense().norm().item(), rel=1e-6 if name == "fp32" else 0.02)
    assert gradient(report, "0.weight").precisions["bf16"].rel_error


def test_embedding_that_renormalises_its_table_is_not_seen_by_other_lanes() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 2))
    ids = torch.tensor([[1, 2, 3]])
    with untouched(model):
        report = nanprobe.compare_precisions(model, ids, loss=mean_square)
    assert_healthy(report)
    assert float(model[0].weight.detach().norm(dim=1).max()) > 0.5


def test_a_model_that_writes_to_its_parameters_in_forward() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            self.lin.weight.mul_(3.0)
        return self.lin(x)

    for mode in ("autocast", "cast"):
        model = Code(forward, lin=nn.Linear(4, 4))
        x = torch.randn(3, 4)
        exact = (3 * model.lin.weight @ x.T).T + model.lin.bias
        with untouched(model):
            report = nanprobe.compare_precisions(model, x, mode=mode, loss=mean_square)
        assert_healthy(report)
        assert measure(report, "lin", "fp32").absmax == pytest.approx(exact.abs().max().item(), rel=1e-5)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


@MODES
def test_a_custom_autograd_function(mode: str) -> None:
    model = Code(lambda self, x: self.b(Double.apply(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), mode=mode, loss=mean_square)
    assert_healthy(report)
    assert len(report.record.gradients) == 4


def test_scripted_and_traced_parts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted, traced)
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert len(rows(report, "1")) == len(rows(report, "2")) == 1
    assert "1.0" in report.record.coverage.never_visited
    assert {r.parameter for r in report.record.gradients} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("way", ["function", "method"])
def test_a_compiled_part_runs_eagerly_and_is_seen_inside(way: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if way == "method":
        inner.compile(backend="eager")
        model = nn.Sequential(inner, nn.Linear(4, 2))
    else:
        model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    exact = measure(report, "", "fp32").absmax
    assert exact == pytest.approx(model(x).abs().max().item(), rel=1e-5)
    assert any("compiled parts" in note for note in report.record.conditions["notes"])


def test_data_parallel_wrappers_are_transparent() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert len(rows(report, "module.0")) == 1
