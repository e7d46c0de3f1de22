"""What looks like a fault and is none: no finding of severity error, forward and backward, in cast and autocast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.diagnose.support import Attention, Do, GatedMLP, Residual, RMSNorm, assert_clean, bad, compare, mlp

Case = tuple[nn.Module, Any, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def mean_square(output: Any, batch: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    return tensor.float().square().mean()


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


class Call(nn.Module):
    """A model of some parts and a forward given as a function."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.n1(x), mask)
        return x + self.ff(self.n2(x))


def causal(value: float, length: int = 6) -> Tensor:
    return torch.full((length, length), value).triu(1)


@case
def causal_mask_of_minus_inf_as_an_input() -> Case:
    model = Call(lambda m, x, mask: m.block(x, mask=mask), block=Block())
    return model, {"x": torch.randn(2, 6, 16), "mask": causal(-math.inf)}, {}


@case
def causal_mask_of_minus_inf_as_a_modules_output() -> Case:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return causal(-math.inf, x.shape[1]).to(x)

    return Call(lambda m, x: m.block(x, m.mask(x)), mask=Mask(), block=Block()), torch.randn(2, 6, 16), {}


@case
def masked_scores_leave_a_module() -> Case:
    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) / 4
            return scores.masked_fill(causal(1.0).bool(), -math.inf)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(m.softmax(m.scores(m.q(x), m.k(x))) @ m.v(x))

    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    return Call(forward, scores=Scores(), softmax=nn.Softmax(-1), **parts), torch.randn(2, 6, 16), {}


@case
def causal_mask_as_a_buffer() -> Case:
    model = Call(lambda m, x: m.block(x, mask=m.mask), block=Block())
    model.register_buffer("mask", causal(-math.inf))
    return model, torch.randn(2, 6, 16), {}


@case
def finfo_min_used_correctly() -> Case:
    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        scores = m.q(x) @ m.k(x).transpose(-1, -2) / 4
        scores = scores.masked_fill(~keep[:, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ m.v(x)

    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 3:] = False
    return (
        Call(forward, q=nn.Linear(16, 16), k=nn.Linear(16, 16), v=nn.Linear(16, 16)),
        {"x": torch.randn(2, 6, 16), "keep": keep},
        {},
    )


@case
def finfo_min_added_to_negative_scores_with_rows_that_stay() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.scores(x)
        return m.softmax(scores) @ x

    def scores(x: Tensor) -> Tensor:
        raw = x @ x.transpose(-1, -2) * 0.1 - 30.0
        return raw + causal(1.0).to(raw.dtype) * torch.finfo(raw.dtype).min

    return Call(forward, scores=Do(scores), softmax=nn.Softmax(-1)), torch.randn(2, 6, 16), {"loss": None}


@case
def minus_1e9_in_fp16_with_finite_rows() -> Case:
    keep = torch.ones(2, 6)
    keep[0, 4:] = 0
    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v")}

    def safe(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        penalty = torch.where(keep.bool(), 0.0, -1e9).to(x.dtype)
        scores = m.q(x) @ m.k(x).transpose(-1, -2) / 4 + penalty[:, None, :]
        return scores.softmax(-1) @ m.v(x)

    return Call(safe, **parts), {"x": torch.randn(2, 6, 16), "keep": keep}, {}


@case
def a_peak_of_6e4_that_never_crosses() -> Case:
    peak = nn.Linear(8, 8)
    with torch.no_grad():
        peak.weight.copy_(torch.eye(8) * 3e4)
        peak.bias.zero_()
    x = torch.randn(4, 8).clamp(-1.9, 1.9)
    x[1, 2] = 2.0
    return nn.Sequential(peak, nn.LayerNorm(8), mlp(8)), x, {}


@case
def an_fp32_buffer_in_a_bf16_model() -> Case:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.table = torch.linspace(0, 1, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.proj(x).float() * self.table).to(x.dtype)

    return nn.Sequential(mlp(8), Table(), mlp(8)), torch.randn(4, 8), {}


@case
def dropout() -> Case:
    return (
        nn.Sequential(mlp(16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.5), mlp(16)),
        torch.randn(8, 16),
        {"train": True},
    )


@case
def functional_dropout() -> Case:
    model = Call(lambda m, x: m.b(F.dropout(m.a(x), 0.4, m.training)), a=mlp(16), b=mlp(16))
    return model, torch.randn(8, 16), {"train": True}


@case
def batch_norm_in_training() -> Case:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), mlp(8)), torch.randn(16, 8), {"train": True}


@case
def group_norm_and_convolutions() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    return model, torch.randn(2, 3, 8, 8), {}


@case
def instance_norm() -> Case:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.InstanceNorm1d(8, affine=True), nn.ReLU(), nn.Conv1d(8, 4, 3))
    return model, torch.randn(2, 3, 16), {"train": True}


@case
def recurrent_nets() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, _ = m.rnn(x)
        z, _ = m.gru(y)
        return m.head(z)

    return (
        Call(forward, rnn=nn.RNN(8, 12, batch_first=True), gru=nn.GRU(12, 8, batch_first=True), head=nn.Linear(8, 3)),
        torch.randn(3, 12, 8),
        {},
    )


@case
def a_bidirectional_lstm() -> Case:
    # Some CPUs have no FP16 kernel for a fused LSTM under autocast; there the lane would raise.
    model = Call(lambda m, x: m.head(m.lstm(x)[0]), lstm=nn.LSTM(8, 6, 2, bidirectional=True), head=nn.Linear(12, 3))
    return model, torch.randn(9, 3, 8), {"mode": "cast", "batch_dim": 1}


@case
def a_mixture_of_experts_with_ties() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        weight, chosen = m.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(m.experts):
            share = (weight * (chosen == number)).sum(-1, keepdim=True)
            out = out + share.to(x.dtype) * expert(x)
        return out

    gate = nn.Linear(8, 4)
    with torch.no_grad():
        gate.weight[1] = gate.weight[0]
        gate.bias[1] = gate.bias[0]
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    return Call(forward, gate=gate, experts=experts), torch.randn(32, 8), {}


@case
def nan_confined_to_padding() -> Case:
    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        clean = x.masked_fill(~keep[..., None], 0.0)
        return m.body(clean) * keep[..., None]

    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 4:] = False
    x = torch.randn(2, 6, 16)
    x[1, 4:] = math.nan
    return Call(forward, body=mlp(16)), {"x": x, "keep": keep}, {}


@case
def a_dynamic_scale_that_overflows_once() -> Case:
    return mlp(8), torch.randn(4, 8), {"loss": lambda y, b: 300 * mean_square(y, b)}


@case
def softmax_over_one_key() -> Case:
    return Call(lambda m, x: m.block(x), block=Block()), torch.randn(3, 1, 16), {}


@case
def a_bias_before_a_norm() -> Case:
    return (
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        torch.randn(4, 4, 16),
        {"train": True},
    )


@case
def residual_branches_that_start_at_zero() -> Case:
    def block() -> nn.Module:
        inner = mlp(16)
        nn.init.zeros_(inner[2].weight)
        nn.init.zeros_(inner[2].bias)
        return Residual(inner)

    return nn.Sequential(nn.Linear(16, 16), *(block() for _ in range(4)), nn.Linear(16, 4)), torch.randn(4, 16), {}


@case
def layer_scale_of_1e6() -> Case:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gamma = mlp(16), nn.Parameter(torch.full((16,), 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gamma * self.inner(x)

    return nn.Sequential(nn.Linear(16, 16), *(Scaled() for _ in range(6)), nn.LayerNorm(16)), torch.randn(4, 16), {}


@case
def kinks_in_a_deep_net() -> Case:
    layers: list[nn.Module] = []
    for _ in range(24):
        linear = nn.Linear(32, 32)
        nn.init.kaiming_normal_(linear.weight)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 4)), torch.randn(16, 32), {}


@case
def max_pool_ties() -> Case:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
    return model, torch.randn(4, 1, 8, 8).round(), {}


@case
def an_embedding_with_padding_rows() -> Case:
    model = nn.Sequential(nn.Embedding(50, 16, padding_idx=0), nn.LayerNorm(16), mlp(16))
    ids = torch.randint(1, 50, (3, 7))
    ids[1, 4:] = 0
    return model, ids, {}


@case
def tiny_outputs() -> Case:
    return nn.Sequential(mlp(8), Do(lambda x: x * 1e-7), nn.Linear(8, 8, bias=False)), torch.randn(4, 8), {}


@case
def constant_inputs() -> Case:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), mlp(8)), torch.ones(4, 8), {}


@case
def zero_inputs() -> Case:
    return nn.Sequential(nn.Linear(8, 8, bias=False), RMSNorm(8, eps=1e-3), mlp(8)), torch.zeros(4, 8), {}


@case
def sixty_four_blocks() -> Case:
    return nn.Sequential(*(Block(16, 2) for _ in range(64)), nn.LayerNorm(16)), torch.randn(2, 5, 16), {}


@case
def saturated_tanh_and_sigmoid() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), Do(lambda x: 30 * x), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), mlp(8))
    return model, torch.randn(8, 8), {}


@case
def a_contrastive_loss_near_zero() -> Case:
    def loss(z: Tensor, batch: Any) -> Tensor:
        z = F.normalize(z.float(), dim=-1)
        return F.cross_entropy(z @ z.T / 0.05, torch.arange(z.shape[0]))

    return nn.Sequential(mlp(16), nn.Linear(16, 16)), 10 * torch.eye(16)[:6], {"loss": loss}


@case
def a_contrastive_loss_near_zero_inside_the_model() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = F.normalize(m.body(x), dim=-1)
        return F.cross_entropy(z @ z.T / 0.02, torch.arange(z.shape[0]))

    return Call(forward, body=nn.Linear(16, 16)), 10 * torch.eye(16)[:6], {"loss": None}


@case
def a_score_near_zero() -> Case:
    head = nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        head.weight[:, :8] = 1.0
        head.weight[:, 8:] = -1.0
    return nn.Sequential(Do(lambda x: torch.cat([x, x], -1)), head), torch.randn(1, 8), {}


@case
def a_score_near_zero_behind_layers() -> Case:
    head = nn.Linear(16, 1, bias=False)
    with torch.no_grad():
        head.weight[:, :8] = 0.3
        head.weight[:, 8:] = -0.3
    return nn.Sequential(mlp(8), nn.Linear(8, 8), Do(lambda x: torch.cat([x, x], -1)), head), torch.randn(1, 8), {}


@case
def accumulated_micro_batches() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.stack([m.body(part).float().square().mean() for part in x.chunk(4)]).mean()

    return Call(forward, body=mlp(16)), torch.randn(8, 16), {"loss": None}


@case
def gated_units() -> Case:
    return (
        nn.Sequential(Residual(GatedMLP(16, 32)), nn.LayerNorm(16), nn.Linear(16, 8), nn.GLU()),
        torch.randn(4, 16),
        {},
    )


@case
def a_convolutional_autoencoder() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    x = torch.rand(3, 1, 16, 16)
    return model, x, {"loss": lambda y, b: (y.float() - b.float()).square().mean()}


@case
def a_unet() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        a = F.silu(m.down1(x))
        b = F.silu(m.down2(F.avg_pool2d(a, 2)))
        up = F.interpolate(m.mid(b), scale_factor=2, mode="nearest")
        return m.out(torch.cat([a, up], 1))

    parts = {
        "down1": nn.Conv2d(2, 8, 3, padding=1),
        "down2": nn.Conv2d(8, 8, 3, padding=1),
        "mid": nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)),
        "out": nn.Conv2d(16, 2, 1),
    }
    return Call(forward, **parts), torch.randn(2, 2, 8, 8), {}


@case
def two_heads_of_a_gan() -> Case:
    def forward(m: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        fake = m.generator(z)
        return m.critic(fake), m.critic(fake.detach())

    def loss(output: Any, batch: Any) -> Tensor:
        return F.softplus(-output[0].float()).mean() + F.softplus(output[1].float()).mean()

    critic = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return Call(forward, generator=mlp(16), critic=critic), torch.randn(8, 16), {"loss": loss}


@case
def a_weight_tied_autoencoder() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(m.encoder(x)), m.encoder.weight.t())

    return Call(forward, encoder=nn.Linear(16, 4)), torch.randn(8, 16), {}


@case
def a_sample_padded_whole_with_native_attention() -> Case:
    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (p(x).unsqueeze(1) for p in (m.q, m.k, m.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :]).squeeze(1)

    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1] = False
    parts = {name: nn.Linear(8, 8) for name in ("q", "k", "v")}
    return Call(forward, **parts), {"x": torch.randn(2, 5, 8), "keep": keep}, {}


@case
def a_transformer_encoder_with_padding() -> Case:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[2, 3:] = True
    model = Call(lambda m, x, pad: m.encoder(x, src_key_padding_mask=pad), encoder=encoder)
    return model, {"x": torch.randn(3, 5, 16), "pad": pad}, {}


@case
def cosine_similarity_and_temperature() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.left(x), m.right(x)
        return F.cosine_similarity(a, b, dim=-1) / 0.07

    return Call(forward, left=mlp(16), right=mlp(16)), torch.randn(6, 16), {}


@case
def an_integer_count_beside_floats() -> Case:
    def forward(m: Any, x: Tensor, steps: Tensor) -> dict[str, Any]:
        return {"y": m.body(x), "steps": steps + 1, "name": "run"}

    batch = {"x": torch.randn(4, 8), "steps": torch.full((4,), 4097)}
    return Call(forward, body=mlp(8)), batch, {"loss": lambda o, _: o["y"].float().square().mean()}


@case
def small_whole_numbers_as_floats() -> Case:
    return mlp(8), torch.randint(0, 200, (4, 8)).float() / 1.0, {}


@pytest.mark.parametrize("mode", ["cast", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_a_near_miss_is_no_error(name: str, mode: str) -> None:
    model, batch, settings = CASES[name]()
    report = compare(model, batch, **{"mode": mode, "loss": mean_square, **settings})
    assert_clean(report)
    assert report.verdict == "clean"


def test_a_near_miss_that_is_really_a_fault_next_door() -> None:
    # The arithmetic mask of `minus_1e9_in_fp16_with_finite_rows`: 0 x -Inf is NaN at cells that are allowed.
    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        scores = m.q(x) @ m.k(x).transpose(-1, -2) + ((1 - keep.to(x.dtype)) * torch.tensor(-1e9).to(x))[:, None, :]
        return scores.softmax(-1) @ m.v(x)

    keep = torch.ones(2, 6)
    keep[0, 4:] = 0
    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v")}
    report = compare(Call(forward, **parts), {"x": torch.randn(2, 6, 16), "keep": keep})
    first = bad(report, "fp16")
    assert (first.module, first.precision_related) == ("", True)
    assert report.precisions["bf16"].verdict == "clean"
