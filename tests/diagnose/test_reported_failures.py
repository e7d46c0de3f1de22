"""Failures as people reported them, rebuilt small: each names one place, and a neighbour of it must stay clean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.diagnose.support import Do, Residual, assert_clean, compare, errors, mean_square, mlp


class Call(nn.Module):
    """A model of some parts and a forward given as a function."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass
class Failure:
    """A model, its batch, and what each failing precision must be told: (phase, module, precision_related)."""

    model: nn.Module
    batch: Any
    blamed: dict[str, tuple[str, str | None, bool]]
    samples: tuple[int, ...] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


FAILURES: dict[str, Callable[[], Failure]] = {}


def failure(build: Callable[[], Failure]) -> Callable[[], Failure]:
    FAILURES[build.__name__] = build
    return build


@failure
def squeeze_and_excite_that_sums_before_it_divides() -> Failure:
    class Squeeze(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.flatten(2).sum(-1)
            return total / (x.shape[2] * x.shape[3])

    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), Do(lambda x: torch.relu(x) * 0.0 + 20.0 + x), Squeeze(), nn.Linear(8, 8), mlp(8)
    )
    return Failure(model, torch.randn(2, 3, 64, 64), {"fp16": ("forward", "2", True)})


@failure
def upcast_of_queries_undone_by_autocast() -> Failure:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k = m.q(x).float(), m.k(x).float()
        return m.out(((q @ k.transpose(-1, -2)) / 8).softmax(-1) @ m.v(x).float())

    parts = {name: nn.Linear(32, 32) for name in ("q", "k", "v", "out")}
    attention = Call(forward, **parts)
    with torch.no_grad():
        attention.q.weight.mul_(800)
        attention.k.weight.mul_(800)
    model = nn.Sequential(mlp(32), nn.LayerNorm(32), Residual(attention))
    return Failure(model, torch.randn(2, 7, 32), {"fp16": ("forward", "2.inner", True)}, settings={"mode": "autocast"})


@failure
def normalising_a_zero_vector() -> Failure:
    def forward(m: Any, ids: Tensor) -> Tensor:
        return m.head(F.normalize(m.embed(ids), dim=-1))

    ids = torch.randint(1, 20, (4,))
    ids[2] = 0
    model = Call(forward, embed=nn.Embedding(20, 16, padding_idx=0), head=mlp(16))
    return Failure(model, ids, {"fp16": ("forward", "", True)}, (2,))


@failure
def layer_norm_by_hand_with_an_epsilon_of_1e_12() -> Failure:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()

    x = torch.randn(3, 5, 8)
    x[1, 3:] = 0
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Norm(), mlp(8))
    return Failure(model, x, {"fp16": ("forward", "1", True)}, (1,))


@failure
def quantisation_with_a_scale_of_zero() -> Failure:
    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.abs().amax(-1, keepdim=True) / 127
            return F.linear(x, (self.weight / scale).round() * scale, self.bias)

    layer = Quantised(8, 8)
    with torch.no_grad():
        layer.weight[5] = 0
    everywhere = ("forward", "1", False)
    return Failure(
        nn.Sequential(mlp(8), layer, mlp(8)), torch.randn(3, 8), dict.fromkeys(("fp16", "bf16", "fp32"), everywhere)
    )


@failure
def an_all_zero_sample_into_a_normaliser() -> Failure:
    x = torch.randn(4, 8)
    x[3] = 0
    model = nn.Sequential(Do(lambda t: t / t.abs().amax(-1, keepdim=True)), mlp(8))
    return Failure(model, x, dict.fromkeys(("fp16", "bf16", "fp32"), ("forward", "0", False)), (3,))


@failure
def a_log_variance_too_large_for_exp() -> Failure:
    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.encoder(x)
        mean, log_var = m.mean(h), m.log_var(h)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
        out = m.decoder(mean + (0.5 * log_var).exp())
        return {"loss": (out - x).square().mean() + kl, "out": out}

    parts = {"encoder": mlp(8), "mean": nn.Linear(8, 4), "log_var": nn.Linear(8, 4), "decoder": nn.Linear(4, 8)}
    model = Call(forward, **parts)
    with torch.no_grad():
        model.log_var.bias[2] = 12.0
    return Failure(model, torch.randn(3, 8), {"fp16": ("forward", "", True)}, settings={"backward": False})


@failure
def a_bias_row_that_only_one_token_reaches() -> Failure:
    embed = nn.Embedding(30, 8)
    model = nn.Sequential(embed, nn.Linear(8, 8), nn.LayerNorm(8), mlp(8))
    with torch.no_grad():
        embed.weight[29] = 3e4 * torch.linspace(-1, 1, 8)
        model[1].weight.copy_(torch.eye(8) + torch.eye(8).roll(1, 0) * 2)
    ids = torch.randint(0, 28, (4, 6))
    ids[2, 5] = 29
    return Failure(model, ids, {"fp16": ("forward", "1", True)}, (2,))


@failure
def a_generator_that_peaks_only_in_its_last_convolution() -> Failure:
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 2, 2),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 3, 3, padding=1),
    )
    with torch.no_grad():
        model[2].weight.mul_(3e3)
        model[4].weight.mul_(3e2)
    return Failure(model, torch.randn(2, 4, 8, 8), {"fp16": ("forward", "4", True)}, (0, 1))


@failure
def a_smape_of_two_zeros_in_the_loss() -> Failure:
    def smape(output: Tensor, batch: Any) -> Tensor:
        target = torch.zeros_like(output)
        return ((output - target).abs() / (output.abs() + target.abs())).mean()

    model = nn.Sequential(mlp(8), nn.ReLU())
    return Failure(
        model, torch.randn(4, 8), dict.fromkeys(("fp16", "bf16", "fp32"), ("loss", None, False)), None, loss=smape
    )


@failure
def a_gradient_penalty_at_zero_in_a_loss_function() -> Failure:
    def penalty(output: Tensor, batch: Any) -> Tensor:
        return (output.float().square().sum(-1).sqrt() - 1).square().mean()

    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8)
    x[1] = 0
    blamed = dict.fromkeys(("fp16", "bf16", "fp32"), ("backward", None, False))
    return Failure(model, x, blamed, (1,), loss=penalty)


@failure
def an_infeasible_alignment() -> Failure:
    def ctc(output: Tensor, batch: Any) -> Tensor:
        log_probs = output.float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((2,), 4)
        targets = torch.tensor([[1, 2, 3, 1, 2, 3], [1, 2, 0, 0, 0, 0]])
        return F.ctc_loss(log_probs, targets, lengths, torch.tensor([6, 2]))

    blamed = dict.fromkeys(("fp16", "bf16", "fp32"), ("loss", None, False))
    return Failure(nn.Sequential(mlp(8)), torch.randn(2, 4, 8), blamed, loss=ctc)


@failure
def a_standard_deviation_of_one_value() -> Failure:
    model = nn.Sequential(
        mlp(8), Do(lambda x: (x - x.mean(0)) / ((x - x.mean(0)).square().sum(0) / (len(x) - 1))), mlp(8)
    )
    return Failure(model, torch.randn(1, 8), dict.fromkeys(("fp16", "bf16", "fp32"), ("forward", "1", False)))


@failure
def an_eighth_block_whose_norm_weight_grew() -> Failure:
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.mix(x))

    model = nn.Sequential(*(PostNorm() for _ in range(12)), nn.LayerNorm(16))
    with torch.no_grad():
        for block in list(model)[:7]:
            block.norm.weight.mul_(50)
        model[7].norm.weight.fill_(6e4)
    return Failure(model, torch.randn(3, 16), {"fp16": ("forward", "7.norm", True)}, loss=mean_square)


@pytest.mark.parametrize("name", FAILURES)
def test_the_place_is_named(name: str) -> None:
    case = FAILURES[name]()
    report = compare(case.model, case.batch, **{"loss": case.loss, **case.settings})
    for precision, (phase, module, related) in case.blamed.items():
        first = report.precisions[precision].first_bad
        assert first is not None, report.render()
        assert (first.phase, first.module, first.precision_related) == (phase, module, related), report.render()
        if case.samples is not None:
            assert first.samples == case.samples
        assert report.precisions[precision].verdict == ("precision" if related else "not-precision")
    for precision in {"fp16", "bf16"} - set(case.blamed):
        assert report.precisions[precision].verdict == "clean", report.render()
    named = {(f.phase, f.module) for f in errors(report)}
    assert named == {(phase, module) for phase, module, _ in case.blamed.values()}
    assert report.exit_code == 1


def test_an_infinity_that_a_clamp_puts_back_within_tolerance_only_warns() -> None:
    model = nn.Sequential(mlp(8), Do(lambda x: (x * 1e6).clamp(-1e4, 1e4) / 1e4), mlp(8))
    assert_clean(compare(model, torch.randn(4, 8) * 10))


def test_what_one_sample_does_to_its_neighbours() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ x

    model = nn.Sequential(nn.Linear(8, 8), Attend(), nn.LayerNorm(8), mlp(8))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    x = torch.randn(4, 6, 8)
    x[2, 3] = 400.0
    report = compare(model, x)
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.module, first.samples) == ("1", (2,))
    assert [f.module for f in errors(report, "fp16")] == ["1"]
