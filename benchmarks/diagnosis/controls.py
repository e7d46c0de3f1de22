"""Healthy models and near misses: whatever a tool says about them, an error is a false alarm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.case import Built, control
from benchmarks.diagnosis.parts import Call, Do, Residual, fixed, mean_square, mlp


def _attend(m: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    q, k, v = m.q(x), m.k(x), m.v(x)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return m.out(scores.softmax(-1) @ v)


def _attention(width: int = 32) -> nn.Module:
    return Call(_attend, **{name: nn.Linear(width, width) for name in ("q", "k", "v", "out")})


@control("fp16", mode="cast")
@control("bf16")
@control("fp16")
def causal_mask_of_infinities() -> Built:
    """-Inf above the diagonal, as every decoder has it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        return m.head(m.norm(x + m.attn(x, mask)))

    model = Call(forward, attn=_attention(), norm=nn.LayerNorm(32), head=mlp(32))
    return Built(model=model, batch=torch.randn(3, 7, 32), loss=mean_square)


@control("fp16", mode="cast")
@control("bf16", mode="cast")
def lowest_value_used_correctly() -> Built:
    """finfo.min of the scores' dtype, and scores that are small beside it."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        bias = (1.0 - keep[:, None, :]) * torch.finfo(x.dtype).min
        return m.head(m.norm(x + m.attn(x, bias)))

    keep = torch.ones(3, 7)
    keep[1, 4:] = 0
    model = Call(forward, attn=_attention(), norm=nn.LayerNorm(32), head=mlp(32))
    return Built(model=model, batch={"x": torch.randn(3, 7, 32), "keep": keep}, loss=mean_square)


@control("fp16", mode="cast")
def constant_of_minus_1e9_with_a_free_key() -> Built:
    """(1 - keep) x -1e9 is -Inf in FP16, which does no harm as long as each row keeps a key."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        return m.head(m.norm(x + m.attn(x, (1.0 - keep[:, None, :]) * -1e9)))

    keep = torch.ones(3, 7)
    keep[1, 4:] = 0
    model = Call(forward, attn=_attention(), norm=nn.LayerNorm(32), head=mlp(32))
    return Built(model=model, batch={"x": torch.randn(3, 7, 32), "keep": keep}, loss=mean_square)


@control("fp16", mode="cast")
@control("fp16")
def peak_that_never_crosses() -> Built:
    """An activation of 6.0e4, and nothing beyond."""
    layer = fixed(nn.Linear(16, 16), 100.0)
    x = torch.randn(4, 16).clamp(-2, 2)
    x[1, 3] = 600.0
    return Built(model=nn.Sequential(nn.Identity(), layer, nn.LayerNorm(16), mlp(16)), batch=x, loss=mean_square)


@control("bf16", mode="cast")
@control("fp16", mode="cast")
def table_kept_in_fp32() -> Built:
    """A rotary table that the model keeps in FP32 whatever it is converted to."""

    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            table = 1.0 / (10000.0 ** (torch.arange(0, 32, 2).float() / 32))
            angles = torch.arange(x.shape[1]).float()[:, None] * table
            angles = torch.cat((angles, angles), -1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(m: Any, ids: Tensor) -> Tensor:
        h = m.embed(ids)
        cos, sin = m.rotary(h)
        first, second = h.chunk(2, -1)
        return m.head(m.norm(h * cos + torch.cat((-second, first), -1) * sin))

    model = Call(forward, embed=nn.Embedding(50, 32), rotary=Rotary(), norm=nn.LayerNorm(32), head=mlp(32))
    return Built(model=model, batch=torch.randint(0, 50, (2, 256)), loss=mean_square)


@control("fp16", mode="cast")
@control("bf16")
def dropout() -> Built:
    """Dropout in training mode, drawn alike in both precisions."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32), nn.Dropout(0.5), mlp(32))
    return Built(model=model, batch=torch.randn(8, 32), loss=mean_square)


@control("fp16")
@control("bf16", mode="cast")
def batch_norm() -> Built:
    """Convolutions with batch norms in training mode."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(16, 5))  # fmt: skip
    return Built(model=model, batch=torch.randn(6, 3, 16, 16), loss=mean_square)


@control("fp16")
@control("bf16", mode="cast")
def long_short_term_memory() -> Built:
    """A bidirectional LSTM of two layers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.lstm(m.embed(x))[0])

    model = Call(forward, embed=nn.Linear(16, 16), lstm=nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True),
                 head=nn.Linear(32, 4))  # fmt: skip
    return Built(model=model, batch=torch.randn(4, 12, 16), loss=mean_square)


@control("fp16", mode="cast")
@control("bf16")
def gated_recurrent_unit() -> Built:
    """A GRU."""
    model = Call(lambda m, x: m.head(m.gru(x)[0][:, -1]), gru=nn.GRU(16, 24, batch_first=True), head=nn.Linear(24, 4))
    return Built(model=model, batch=torch.randn(4, 12, 16), loss=mean_square)


@control("fp16", mode="cast")
@control("bf16")
def mixture_of_experts() -> Built:
    """Top-2 of four experts, with gate logits far apart."""

    def forward(m: Any, x: Tensor) -> Tensor:
        found = m.gate(x).topk(2, -1)
        out = torch.zeros_like(m.experts[0](x))
        for number, expert in enumerate(m.experts):
            share = (found.values.softmax(-1) * (found.indices == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return m.head(m.norm(x + out))

    gate = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[:, :4] = 4 * torch.eye(4)
    x = torch.randn(8, 16) * 0.3
    for row in range(8):
        x[row, :4] = torch.tensor([0.0, 1.0, 2.0, 3.0]).roll(row)
    model = Call(forward, gate=gate, experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(4)),
                 norm=nn.LayerNorm(16), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=x, loss=mean_square)


@control("fp16", mode="cast")
@control("bf16")
def nan_confined_to_padding() -> Built:
    """Rows of padding attend to nothing and hold NaN, which is selected away before the loss."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        h = m.embed(x)
        with torch.no_grad():
            bias = torch.zeros(h.shape[0], h.shape[1], h.shape[1]).masked_fill(keep[:, :, None] == 0, -math.inf)
            weights = (h @ h.transpose(-1, -2) + bias.to(h.dtype)).softmax(-1)
            mixed = torch.where(keep[..., None] == 0, torch.zeros_like(h), weights @ h)
        return m.head(m.norm(h + mixed))

    keep = torch.ones(3, 6)
    keep[1, 4:] = 0
    model = Call(forward, embed=nn.Linear(16, 16), norm=nn.LayerNorm(16), head=mlp(16))
    return Built(model=model, batch={"x": torch.randn(3, 6, 16), "keep": keep}, loss=mean_square)


@control("fp16")
def scale_that_overflows_once() -> Built:
    """Scaled by 65536 the gradients overflow; halved a few times, as training does, they fit."""
    model = nn.Sequential(fixed(nn.Linear(32, 32), 0.1), fixed(nn.Linear(32, 32), 16.0), fixed(nn.Linear(32, 32), 1.0))
    return Built(model=model, batch=torch.randn(3, 32) * 0.01, loss=lambda output, batch: output.float().mean() * 4)


@control("fp16", mode="cast")
def cubic_of_an_approximate_gelu() -> Built:
    """x^3 overflows at 50, and the tanh around it is 1 all the same."""

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

    x = torch.randn(4, 16)
    x[1, 3] = 60.0
    model = Call(lambda m, x: m.head(m.norm(m.act(m.up(x)))), up=fixed(nn.Linear(16, 16), 1.0), act=Do(gelu),
                 norm=nn.LayerNorm(16), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=x)


@control("fp16", mode="cast")
@control("bf16", mode="cast")
def rms_norm_with_an_upcast() -> Built:
    """The square of 300 is taken in FP32."""

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    x = torch.randn(4, 6, 32).clamp(-2, 2) * 150
    model = Call(lambda m, x: m.head(m.norm(m.up(x))), up=fixed(nn.Linear(32, 32), 1.0), norm=Do(norm), head=mlp(32))
    return Built(model=model, batch=x, loss=mean_square)


@control("fp16", mode="cast")
@control("fp16")
def scores_scaled_before_the_product() -> Built:
    """Queries are divided first: scores of 2.0e4 instead of 1.6e5."""

    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.q(x) / 8.0, m.k(x), m.v(x)
        return m.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)

    parts = {name: nn.Linear(64, 64) for name in ("q", "k", "v", "out")}
    fixed(parts["q"], 50.0)
    fixed(parts["k"], 50.0)
    x = torch.eye(64)[:8].repeat(3, 1, 1) * 8.0
    model = Call(lambda m, x: m.head(m.norm(x + m.attn(x))), attn=Call(attend, **parts), norm=nn.LayerNorm(64),
                 head=mlp(64))  # fmt: skip
    return Built(model=model, batch=x)


@control("bf16")
@control("fp16", mode="cast")
def double_where() -> Built:
    """The branch that is not taken gets a safe input first."""

    def safe(t: Tensor) -> Tensor:
        held = torch.where(t > 0, t, torch.ones_like(t))
        return torch.where(t > 0, held.sqrt(), torch.zeros_like(t))

    x = torch.rand(4, 16) + 0.5
    x[1, 3] = 0.0
    model = Call(lambda m, x: m.head(m.safe(m.project(x))), project=fixed(nn.Linear(16, 16), 1.0), safe=Do(safe),
                 head=mlp(16))  # fmt: skip
    return Built(model=model, batch=x, loss=mean_square)


@control("fp16")
@control("bf16", mode="cast")
def some_labels_ignored() -> Built:
    """A language model with padding among its labels."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), batch["labels"].flatten())

    ids = torch.randint(0, 30, (3, 6))
    labels = ids.clone()
    labels[1, 3:] = -100
    model = Call(lambda m, ids, labels: m.head(m.norm(m.embed(ids))), embed=nn.Embedding(30, 16),
                 norm=nn.LayerNorm(16), head=nn.Linear(16, 30))  # fmt: skip
    return Built(model=model, batch={"ids": ids, "labels": labels}, loss=loss)


@control("fp16")
@control("bf16")
def multihead_attention_with_padding() -> Built:
    """Some keys of sample 1 are padding, with weights asked for."""

    def forward(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        return m.head(m.norm(x + m.attn(x, x, x, key_padding_mask=padding, need_weights=True)[0]))

    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    model = Call(forward, attn=nn.MultiheadAttention(16, 2, batch_first=True), norm=nn.LayerNorm(16), head=mlp(16))
    return Built(model=model, batch={"x": torch.randn(3, 5, 16), "padding": padding}, loss=mean_square)


@control("bf16", mode="cast")
@control("fp16")
def deep_residual_network() -> Built:
    """Forty blocks, where rounding adds up as it must."""
    blocks = (Residual(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())) for _ in range(40))
    return Built(model=nn.Sequential(*blocks, nn.LayerNorm(32), nn.Linear(32, 8)), batch=torch.randn(4, 5, 32),
                 loss=mean_square)  # fmt: skip


@control("fp16", mode="cast")
@control("bf16")
def encoder_layers() -> Built:
    """PyTorch's own transformer encoder, in training mode."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Built(model=nn.TransformerEncoder(layer, 3), batch=torch.randn(3, 7, 32), loss=mean_square)


@control("fp16", mode="cast")
@control("bf16", mode="cast")
def bounds_that_a_format_holds() -> Built:
    """A focal loss whose margin is 2^-6, which both half formats hold."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        p = torch.sigmoid(output).clamp(2**-6, 1 - 2**-6)
        return -(torch.log(1 - p) * p**2).float().mean()

    logits = torch.randn(3, 8).clamp(-2, 2)
    logits[1, 4] = 15.0
    return Built(model=nn.Sequential(fixed(nn.Linear(8, 8), 1.0)), batch=logits, loss=loss)


@control("fp16", mode="cast")
def maximum_from_minus_infinity() -> Built:
    """A running maximum starts at -Inf, as it does in every streaming softmax."""

    def highest(x: Tensor) -> Tensor:
        best = torch.full_like(x[:, 0], -math.inf)
        for step in range(x.shape[1]):
            best = torch.maximum(best, x[:, step])
        return best

    model = Call(lambda m, x: m.head(m.pool(m.project(x))), project=nn.Linear(16, 16), pool=Do(highest), head=mlp(16))
    return Built(model=model, batch=torch.randn(3, 9, 16), loss=mean_square)


@control("fp16")
@control("bf16")
def small_gradients_with_dynamic_scaling() -> Built:
    """A small loss whose gradients a loss scale carries through FP16."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return Built(
        model=model, batch=torch.randn(8, 16), loss=lambda output, batch: output.float().square().mean() * 1e-3
    )


@control("bf16", mode="cast")
@control("fp16", mode="cast")
def zero_rows_with_an_eps_that_holds() -> Built:
    """Padding rows of zeros into a layer norm by hand with eps = 1e-5."""

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)

    x = torch.randn(3, 5, 16)
    x[1, 3:] = 0.0
    model = Call(lambda m, x: m.head(m.norm(x)), norm=Do(norm), head=mlp(16))
    return Built(model=model, batch=x)
