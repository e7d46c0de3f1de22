"""Whatever modules take and return is looked into: keywords, containers, nothing at all, and odd dtypes."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanprobe
from tests.lanes.support import ALL, LOW, Code, assert_healthy, mean_square, measure, row, rules, untouched

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Answer:
    logits: Tensor
    extra: Any = None


def _model_output(h: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=h, hidden_states=(h * 2, h * 3))


OUTPUTS: dict[str, tuple[Any, Any, list[str]]] = {
    "tuple": (lambda h: (h, h * 2), lambda o: o[0] + o[1], ["0", "1"]),
    "list": (lambda h: [h, h * 2], lambda o: o[0] + o[1], ["0", "1"]),
    "nested list": (lambda h: [[h], [h * 2, [h * 3]]], lambda o: o[1][1][0], ["0.0", "1.0", "1.1.0"]),
    "dict": (lambda h: {"a": h, "b": h * 2}, lambda o: o["b"], ["a", "b"]),
    "ordered": (lambda h: OrderedDict(a=h, b=h * 2), lambda o: o["b"], ["a", "b"]),
    "namedtuple": (lambda h: Pair(h, h * 2), lambda o: o.right, ["left", "right"]),
    "dataclass": (lambda h: Answer(h, {"x": h * 2}), lambda o: o.extra["x"], ["logits", "extra.x"]),
    "ModelOutput": (
        _model_output,
        lambda o: o.hidden_states[1],
        ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_tensor_of_an_output_is_measured_and_gets_its_gradient(kind: str) -> None:
    make, take, paths = OUTPUTS[kind]
    inner = Code(lambda self, x: make(self.lin(x)), lin=nn.Linear(4, 4))
    model = Code(lambda self, x: take(self.inner(x)), inner=inner)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    for name in ALL:
        found = measure(report, "inner", name)
        assert [o.path for o in found.outputs] == paths
        assert found.elements == 12 * len(paths)
    for output in measure(report, "inner", "bf16").outputs:
        assert output.rel_error is not None
        assert 0 < output.rel_error < 0.02
    assert row(report, "inner", phase="backward").precisions["fp16"].absmax


def test_keyword_inputs_are_compared_and_judged() -> None:
    inner = Code(lambda self, *, x, mask: self.lin(x) + mask, lin=nn.Linear(4, 4))
    model = Code(lambda self, x, big: self.inner(x=x, mask=big * 300.0), inner=inner)
    x = torch.randn(3, 4)
    assert_healthy(nanprobe.compare_precisions(model, {"x": x, "big": torch.full((4,), 2.0)}, mode="cast"))
    report = nanprobe.compare_precisions(model, {"x": x, "big": torch.full((4,), 3e2)}, mode="cast")
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.module, first.between, first.reference_absmax) == ("", (None, "inner"), 90000.0)
    assert report.precisions["bf16"].verdict == "clean"


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_a_batch_of_integers_only(mode: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    report = nanprobe.compare_precisions(model, torch.tensor([[1, 2], [3, 9]]), mode=mode, loss=mean_square)
    assert_healthy(report)
    assert measure(report, "0", "fp16").dtype == ("float16" if mode == "cast" else "float32")


def test_a_batch_without_any_tensor() -> None:
    model = Code(lambda self, n, names: self.lin(torch.ones(n, 4)) * len(names), lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, {"n": 3, "names": ["a", "b"]}, loss=mean_square)
    assert_healthy(report)
    assert measure(report, "lin", "fp32").shape == (3, 4)


def test_an_empty_batch_for_a_model_that_takes_nothing() -> None:
    model = Code(lambda self: self.lin(torch.ones(2, 4)), lin=nn.Linear(4, 4))
    assert_healthy(nanprobe.compare_precisions(model, {}, loss=mean_square))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_tensors_without_elements(mode: str) -> None:
    model = Code(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=nn.ReLU())
    report = nanprobe.compare_precisions(model, torch.zeros(0, 4), mode=mode)
    assert_healthy(report)
    found = measure(report, "a", "fp16")
    assert (found.elements, found.absmax, found.rel_error, found.mean) == (0, None, None, None)


def test_empty_tensors_beside_others_and_in_backward() -> None:
    model = Code(lambda self, x: torch.cat([self.a(x), self.a(x[:0])]), a=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [measure(report, "a", "fp16", v).elements for v in (0, 1)] == [12, 0]


def test_complex_outputs_are_measured_by_their_parts() -> None:
    inner = Code(lambda self, x: torch.fft.rfft(x.float()))
    model = Code(lambda self, x: self.lin(self.inner(x * self.scale).abs()), inner=inner, lin=nn.Linear(5, 2))
    model.scale = nn.Parameter(torch.ones(8))
    x = torch.randn(3, 8)
    report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    found = measure(report, "inner", "fp32")
    parts = torch.view_as_real(torch.fft.rfft(x))
    assert found.dtype == "complex64"
    assert found.absmax == pytest.approx(parts.abs().max().item(), rel=1e-6)
    assert measure(report, "inner", "bf16").rel_error == 0.0
    arrived = measure(report, "inner", "bf16", phase="backward")
    assert arrived.dtype == "complex64"
    assert arrived.rel_error is not None
    assert 0 < arrived.rel_error < 0.05


def test_integer_outputs_have_counts_and_no_error() -> None:
    inner = Code(lambda self, x: (x > 0).long() * 7)
    model = Code(lambda self, x: self.emb(self.inner(x)), inner=inner, emb=nn.Embedding(8, 2))
    report = nanprobe.compare_precisions(model, torch.tensor([[-1.0, 2.0, 0.0]]))
    assert_healthy(report)
    found = measure(report, "inner", "fp16")
    assert (found.dtype, found.absmax, found.zero, found.rel_error, found.headroom_bits) == ("int64", 7, 2, None, None)


def test_a_module_that_returns_nothing() -> None:
    log: list[int] = []
    inner = Code(lambda self, x: log.append(x.shape[0]))
    model = Code(lambda self, x: (self.inner(x), self.lin(x))[1], inner=inner, lin=nn.Linear(4, 4))
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert measure(report, "inner", "bf16").elements == 0
    assert measure(report, "inner", "bf16").note == "no tensor in the output"
    assert report.record.coverage.outputs_not_inspected == ()


def test_an_output_that_hides_its_tensors_is_told() -> None:
    class Sealed:
        __slots__ = ("value",)

        def __init__(self, value: Tensor) -> None:
            self.value = value

    inner = Code(lambda self, x: Sealed(self.lin(x)), lin=nn.Linear(4, 4))
    model = Code(lambda self, x: self.inner(x).value, inner=inner)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4))
    assert report.verdict == "clean"
    (hidden,) = report.record.coverage.outputs_not_inspected
    assert hidden.startswith("inner (")
    assert "Sealed" in hidden


def test_views_and_the_same_tensor_twice_in_an_output() -> None:
    inner = Code(lambda self, x: (lambda h: (h, h, h[:, :2]))(self.lin(x)), lin=nn.Linear(4, 4))
    model = Code(lambda self, x: self.inner(x)[0] + self.inner(x)[1], inner=inner)
    report = nanprobe.compare_precisions(model, torch.randn(3, 4), loss=mean_square)
    assert_healthy(report)
    assert [o.path for o in measure(report, "inner", "fp16").outputs] == ["0", "2"]


def test_the_batch_itself_is_not_changed_and_lanes_do_not_share_it() -> None:
    def forward(self: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        x.mul_(2.0)
        seen.append(x)
        return self.lin(x) * len(seen)

    model = Code(forward, lin=nn.Linear(4, 4))
    batch = {"x": torch.ones(3, 4), "seen": []}
    with untouched(model):
        report = nanprobe.compare_precisions(model, batch, loss=mean_square)
    assert_healthy(report)
    assert torch.equal(batch["x"], torch.ones(3, 4))
    assert batch["seen"] == []


def test_inputs_that_require_gradients_keep_doing_so() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.lin(x)
        (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return y + slope

    model = Code(forward, lin=nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    with untouched(model):
        report = nanprobe.compare_precisions(model, x, loss=mean_square)
    assert_healthy(report)
    assert x.grad is None


@pytest.mark.parametrize("precision", LOW)
def test_minus_infinity_of_a_mask_is_no_fault(precision: str) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.scores(x, mask)
        out = torch.softmax(scores, dim=-1) @ x
        assert isinstance(out, Tensor)
        return out

    scores = Code(lambda self, x, mask: (self.q(x) @ x.transpose(-1, -2)).masked_fill(mask, float("-inf")))
    scores.q = nn.Linear(4, 4)
    model = Code(forward, scores=scores)
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    report = nanprobe.replay(model, {"x": torch.randn(2, 5, 4), "mask": mask}, dtype=precision, loss=mean_square)
    assert_healthy(report, (precision,))
    found = measure(report, "scores", precision)
    assert found.neginf == 20
    assert found.state == "clean"


def test_an_additive_mask_in_the_batch_is_no_fault_and_a_lost_row_is() -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.soft(self.lin(x) + mask)

    model = Code(forward, lin=nn.Linear(4, 4), soft=nn.Softmax(dim=-1))
    mask = torch.zeros(3, 4)
    mask[:, 2:] = float("-inf")
    assert_healthy(nanprobe.compare_precisions(model, {"x": torch.randn(3, 4), "mask": mask}))
    mask[1] = float("-inf")
    report = nanprobe.compare_precisions(model, {"x": torch.randn(3, 4), "mask": mask})
    assert report.verdict == "not-precision"
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.module, first.samples) == ("soft", (1,))


def test_findings_of_a_healthy_model_are_none() -> None:
    assert rules(nanprobe.replay(nn.Linear(4, 4), torch.randn(2, 4))) == []
