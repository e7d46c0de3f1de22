"""Attention scores that leave FP16 before they are scaled, and temperatures that are zero in it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import PRODUCT, Built, fault
from benchmarks.diagnosis.parts import Call, Do, Residual, fixed, mean_square, mlp


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _unscaled(m: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    source = x if context is None else context
    q, k, v = _heads(m.q(x), 2), _heads(m.k(source), 2), _heads(m.v(source), 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return m.out(_merged(scores.softmax(-1) @ v))


def _upcast(m: Any, x: Tensor) -> Tensor:
    q, k, v = _heads(m.q(x), 2).float(), _heads(m.k(x), 2).float(), _heads(m.v(x), 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return m.out(_merged(scores.softmax(-1).to(v.dtype) @ v))


def _attention(forward: Any, width: int = 64) -> nn.Module:
    """Attention whose queries and keys are 300 times its input."""
    parts = {"q": nn.Linear(width, width), "k": nn.Linear(width, width), "v": nn.Linear(width, width)}
    fixed(parts["q"], 300.0)
    fixed(parts["k"], 300.0)
    return Call(forward, **parts, out=nn.Linear(width, width))


def _loud_sample(batch: int, length: int) -> Tensor:
    """Return small inputs, and a sample 1 all of whose tokens are one: 32 products of 300 x 300 make 2.9e6."""
    x = torch.randn(batch, length, 64).clamp(-2, 2) * 0.01
    x[1] = 1.0
    return x


@fault(
    "fp16",
    "ultralytics#24990",
    "pytorch#60939",
    at="1.inner",
    op=PRODUCT,
    mechanism="overflow",
    samples=(1,),
    mode="cast",
)
@fault("fp16", "imagen-pytorch#69", "flash-attention#49", at="1.inner", op=PRODUCT, mechanism="overflow", samples=(1,))
@fault(
    "fp16",
    "pytorch#60939",
    at="1.inner",
    op=PRODUCT,
    mechanism="overflow",
    samples=(1,),
    backward=False,
    train=False,
    name="scaled_after_the_product-fp16-autocast-eval",
)
def scaled_after_the_product() -> Built:
    """The scores are divided by sqrt(32) only after the product."""
    model = nn.Sequential(nn.Identity(), Residual(_attention(_unscaled)), nn.LayerNorm(64), mlp(64))
    return Built(model=model, batch=_loud_sample(3, 6), loss=mean_square)


@fault("fp16", "transformers#28163", "transformers#28673", at="1.inner", op=PRODUCT, mechanism="overflow", samples=(1,))
def upcast_that_autocast_undoes() -> Built:
    """Queries and keys are converted to FP32, and converted back by the product itself."""
    model = nn.Sequential(nn.Identity(), Residual(_attention(_upcast)), nn.LayerNorm(64), mlp(64))
    return Built(model=model, batch=_loud_sample(3, 6))


@fault(
    "fp16", "InvokeAI#2329", "Tune-A-Video#103", at="cross", op=PRODUCT, mechanism="overflow", samples=(1,), mode="cast"
)
def cross_attention() -> Built:
    """The same with 77 keys of a text."""

    def forward(m: Any, x: Tensor, text: Tensor) -> Tensor:
        return m.head(m.norm(x + m.cross(x, text)))

    model = Call(forward, cross=_attention(_unscaled), norm=nn.LayerNorm(64), head=nn.Linear(64, 4))
    return Built(model=model, batch={"x": _loud_sample(3, 6), "text": _loud_sample(3, 77)})


@fault("fp16", at="mixer", op=PRODUCT, mechanism="overflow", samples=(2,), mode="cast")
def linear_attention() -> Built:
    """Without a softmax, sample 2 sums 512 products of 12 x 12 over its keys: 7.4e4."""

    def mix(m: Any, x: Tensor) -> Tensor:
        keys = m.keys(x)
        state = keys.transpose(-1, -2) @ x
        return x @ state / (x @ keys.sum(1, keepdim=True).transpose(-1, -2) + 1.0)

    x = torch.full((3, 512, 16), 0.1)
    x[2] = 12.0
    model = Call(lambda m, x: m.head(m.norm(m.mixer(x))), mixer=Call(mix, keys=fixed(nn.Linear(16, 16), 1.0)),
                 norm=nn.LayerNorm(16), head=nn.Linear(16, 4))  # fmt: skip
    return Built(model=model, batch=x)


@fault("fp16", "pytorch#32137", at="match", op="aten.div", mechanism="overflow", samples=(0,), mode="cast")
def contrastive_temperature() -> Built:
    """A similarity of 1000 divided by a temperature of 0.01 is 1e5."""

    def match(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1, keepdim=True) / 0.01

    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m.match(m.left(a), m.right(b)).softmax(0)

    a, b = torch.rand(4, 16), torch.rand(4, 16)
    a[0], b[0] = 8.0, 7.8125
    model = Call(forward, left=fixed(nn.Linear(16, 16), 1.0), right=fixed(nn.Linear(16, 16), 1.0), match=Do(match))
    return Built(model=model, batch={"a": a, "b": b})


@fault(
    "fp16",
    at="attend",
    op="aten.div",
    mechanism={"underflow", "unrepresentable-constant"},
    samples=(0, 1, 2),
    mode="cast",
)
def temperature_that_is_zero_in_half() -> Built:
    """Scores are divided by a stored temperature of 1e-8, and FP16 holds that as zero."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.tensor(1e-8))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ x.transpose(-1, -2)) / self.temperature).softmax(-1) @ x

    model = Call(lambda m, x: m.head(m.attend(m.project(x))), project=nn.Linear(16, 16), attend=Attend(),
                 head=nn.Linear(16, 4))  # fmt: skip
    return Built(model=model, batch=torch.randn(3, 5, 16) * 0.1)
