"""What was bad before the first operation: the batch, stored weights and buffers, and memory that nothing wrote."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import PRODUCT, Built, fault
from benchmarks.diagnosis.parts import Call, mean_square, mlp

_INPUT = {None, "aten._to_copy"}


@fault(
    "fp16",
    "Marigold#111",
    at=None,
    op=None,
    mechanism="nonfinite-input",
    samples=(1, 3),
    precision_related=False,
    phase="input",
)
@fault(
    "bf16",
    "Marigold#111",
    at=None,
    op=None,
    mechanism="nonfinite-input",
    samples=(1, 3),
    precision_related=False,
    phase="input",
    mode="cast",
)
def nan_in_the_batch() -> Built:
    """Three NaN in field x: two in sample 1, one in sample 3."""
    x = torch.randn(4, 16)
    x[1, 2] = x[1, 7] = x[3, 0] = math.nan
    model = Call(lambda m, x, y: m.head(m.norm(m.body(x)) + y), body=mlp(16), norm=nn.LayerNorm(16), head=mlp(16))
    return Built(model=model, batch={"x": x, "y": torch.randn(4, 16)}, loss=mean_square)


@fault("bf16", at=None, op=None, mechanism="nonfinite-input", samples=(2,), precision_related=False, phase="input")
def infinite_target() -> Built:
    """A target of Inf in sample 2, which only the loss reads."""
    target = torch.randn(4, 8)
    target[2, 0] = math.inf
    model = Call(lambda m, x, target: m.body(x), body=mlp(8))
    return Built(model=model, batch={"x": torch.randn(4, 8), "target": target},
                 loss=lambda output, batch: (output.float() - batch["target"]).square().mean())  # fmt: skip


@fault(
    "bf16",
    at=None,
    op=_INPUT,
    mechanism="unrepresentable-constant",
    samples="any",
    silent=True,
    phase="input",
    mode="cast",
)
def ids_stored_as_floats() -> Built:
    """Codes up to 999 in a float field; BF16 holds integers to 256 only."""

    def forward(m: Any, x: Tensor, code: Tensor) -> Tensor:
        return m.head(m.norm(x + m.table(code.long())))

    model = Call(forward, table=nn.Embedding(1100, 16), norm=nn.LayerNorm(16), head=mlp(16))
    codes = torch.tensor([[999.0, 3.0], [515.0, 17.0], [777.0, 301.0]])
    return Built(model=model, batch={"x": torch.randn(3, 2, 16), "code": codes})


@fault(
    "fp16",
    "vllm#53537",
    at="1.0",
    op=None,
    mechanism="nonfinite-parameter",
    samples=None,
    precision_related=False,
    phase="parameter",
)
@fault(
    "bf16",
    "CT-CIG#3",
    at="1.0",
    op=None,
    mechanism="nonfinite-parameter",
    samples=None,
    precision_related=False,
    phase="parameter",
    mode="cast",
)
def nan_in_a_weight() -> Built:
    """One NaN in a stored weight."""
    model = nn.Sequential(nn.Linear(16, 16), mlp(16), nn.Linear(16, 4))
    with torch.no_grad():
        model[1][0].weight[3, 5] = math.nan
    return Built(model=model, batch=torch.randn(4, 16))


@fault(
    "fp16",
    "pytorch#115500",
    at="norm",
    op=None,
    mechanism="nonfinite-buffer",
    samples=None,
    precision_related=False,
    phase="buffer",
    train=False,
)
def poisoned_running_mean() -> Built:
    """A batch norm that an earlier step left with a running mean of Inf, in eval mode."""
    model = Call(lambda m, x: m.head(m.norm(m.project(x))), project=nn.Linear(8, 8), norm=nn.BatchNorm1d(8),
                 head=mlp(8))  # fmt: skip
    model.norm.running_mean[3] = math.inf
    return Built(model=model, batch=torch.randn(4, 8))


@fault(
    "fp16",
    "Qwen3#315",
    at="1",
    op={None, "aten._to_copy"},
    mechanism="overflow",
    samples=None,
    phase="parameter",
    mode="cast",
)
@fault(
    "fp16",
    "Megatron-LM#5281",
    at="1",
    op={None, "aten._to_copy"},
    mechanism="overflow",
    samples=None,
    phase="parameter",
)
def weight_beyond_fp16() -> Built:
    """A stored weight of 7e4."""
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight[3, 5] = 7e4
    return Built(model=nn.Sequential(mlp(16), layer, nn.LayerNorm(16), mlp(16)), batch=torch.randn(4, 16))


@fault("fp16", at="scale", op={None, "aten._to_copy"}, mechanism="overflow", samples=None, phase="buffer", mode="cast")
def buffer_beyond_fp16() -> Built:
    """A stored scale of 1e5, converted with the model."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.tensor([1e5, 1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor[0]

    model = Call(lambda m, x: m.head(m.norm(m.scale(m.project(x)))), project=nn.Linear(8, 8), scale=Scale(),
                 norm=nn.LayerNorm(8), head=mlp(8))  # fmt: skip
    return Built(model=model, batch=torch.randn(4, 8) * 1e-3)


@fault(
    "fp16",
    "vllm#641",
    "vllm#936",
    at="attn",
    op={None, "aten.empty", "aten.new_empty", "aten.empty_like", *PRODUCT},
    mechanism="uninitialized",
    samples="any",
    precision_related=False,
    mode="cast",
)
@fault(
    "bf16",
    "Wan2GP#1628",
    at="attn",
    op={None, "aten.empty", "aten.new_empty", "aten.empty_like", *PRODUCT},
    mechanism="uninitialized",
    samples="any",
    precision_related=False,
)
def cache_of_unwritten_memory() -> Built:
    """Keys and values live in a cache of 64 rows, of which 8 are written; a weight of 0 times unwritten memory."""

    def attend(m: Any, x: Tensor) -> Tensor:
        written = x.shape[1]
        keys = x.new_empty(x.shape[0], 64, x.shape[2])
        values = x.new_empty(x.shape[0], 64, x.shape[2])
        keys[:, :written], values[:, :written] = m.k(x), m.v(x)
        scores = m.q(x) @ keys.transpose(-1, -2) / 4.0
        scores[..., written:] = -math.inf
        return m.out(scores.softmax(-1) @ values)

    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    model = Call(lambda m, x: m.head(m.norm(x + m.attn(m.embed(x)))), embed=nn.Linear(16, 16),
                 attn=Call(attend, **parts), norm=nn.LayerNorm(16), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=torch.randn(2, 8, 16))


@fault(
    "bf16",
    "TransformerLens#902",
    at="mix",
    op=None,
    mechanism={"uninitialized", "nonfinite-parameter"},
    samples=None,
    precision_related=False,
    phase="parameter",
    mode="cast",
)
def parameter_of_unwritten_memory() -> Built:
    """A parameter made by torch.empty and never initialised; here that memory holds NaN."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16, 16).fill_(math.nan))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    return Built(model=Call(lambda m, x: m.head(m.mix(m.project(x))), project=nn.Linear(16, 16), mix=Mix(),
                            head=mlp(16)), batch=torch.randn(4, 16))  # fmt: skip
