"""Normalisations: squares that overflow and hide as zeros, an eps that is zero, rows without any spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.case import Built, fault
from benchmarks.diagnosis.parts import Call, Do, big_rows, fixed, mean_square, mlp


def _around(norm: nn.Module, width: int, x: Tensor) -> Built:
    """Put a normalisation between healthy layers; the projection before it hands its input on."""
    model = Call(lambda m, x: m.head(m.norm(m.project(x))), project=fixed(nn.Linear(width, width), 1.0), norm=norm,
                 head=mlp(width))  # fmt: skip
    return Built(model=model, batch=x)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@fault(
    "fp16",
    "pytorch#133085",
    "pytorch#134106",
    at="norm",
    op={"aten.pow", "aten.mul"},
    mechanism="overflow",
    samples=(1,),
    mode="cast",
)
def rms_norm_in_half() -> Built:
    """Sample 1 holds 300 in every channel; its square is Inf, and the normalised row becomes zero."""
    x = big_rows(4, 6, 32, rows=(), factor=1.0)
    x[1] = 300.0
    return _around(Do(_rms), 32, x)


@fault(
    "fp16",
    "MIGraphX#2556",
    at="norm",
    op={"aten.pow", "aten.mul"},
    mechanism="overflow",
    samples=(1,),
    mode="cast",
    name="rms_norm_in_half-fp16-cast-backward",
)
def rms_norm_in_half_trained() -> Built:
    """The same with a loss and a backward pass."""
    made = rms_norm_in_half()
    return Built(model=made.model, batch=made.batch, loss=mean_square)


@fault(
    "fp16", "executorch#18772", at="norm", op={"aten.pow", "aten.mul"}, mechanism="overflow", samples=(2,), mode="cast"
)
def channels_first_layer_norm() -> Built:
    """Sample 2 alternates between -400 and 400 over its channels."""

    def norm(x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-6)

    x = torch.randn(3, 8, 6, 6)
    x[2] = 400.0 * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    model = Call(lambda m, x: m.head(m.norm(m.stem(x))), stem=nn.Conv2d(8, 8, 1), norm=Do(norm),
                 head=nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()))  # fmt: skip
    with torch.no_grad():
        model.stem.weight.copy_(torch.eye(8)[:, :, None, None])
        model.stem.bias.zero_()
    return Built(model=model, batch=x)


@fault(
    "fp16", "pytorch#41527", "DeepSpeed#581", at="norm", op="aten.div", mechanism="underflow", samples=(1,), mode="cast"
)
def layer_norm_with_eps_1e_12() -> Built:
    """Two padding rows of sample 1 are zero: their deviation is zero, and the eps beside it is zero in FP16."""

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-12)

    x = torch.randn(3, 5, 16)
    x[1, 3:] = 0.0
    return _around(Do(norm), 16, x)


@fault("fp16", "pytorch#183605", at="norm", op="aten.rsqrt", mechanism="underflow", samples=(0, 2), mode="cast")
def instance_norm_with_eps_1e_9() -> Built:
    """Channel 0 of samples 0 and 2 is constant: a variance of 0 plus 1e-9, which is zero in FP16."""

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-9)

    x = torch.randn(4, 3, 32)
    x[[0, 2], 0] = 0.5
    model = Call(lambda m, x: m.head(m.norm(m.stem(x))), stem=nn.Identity(), norm=Do(norm), head=nn.Conv1d(3, 3, 1))
    return Built(model=model, batch=x)


@fault(
    "fp16", "pytorch#32137", "diffusers#13316", at="", op="aten.div", mechanism="underflow", samples=(2,), mode="cast"
)
def normalised_padding_embedding() -> Built:
    """Sample 2 is the padding entry, a row of zeros; normalize's eps of 1e-12 is zero in FP16."""
    ids = torch.tensor([3, 7, 0, 9])
    model = Call(lambda m, ids: m.head(F.normalize(m.embed(ids), dim=-1)),
                 embed=nn.Embedding(20, 16, padding_idx=0), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=ids)


@fault(
    "fp16",
    "pytorch#192017",
    "kornia#4021",
    at="similarity",
    op="aten.div",
    mechanism="underflow",
    samples=(1,),
    mode="cast",
)
def cosine_of_a_zero_vector() -> Built:
    """Sample 1 of one side is zero throughout; cosine_similarity's eps of 1e-8 is zero in FP16."""

    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m.head(m.similarity(m.left(a), m.right(b)).unsqueeze(-1))

    a, b = torch.randn(4, 16), torch.randn(4, 16)
    a[1] = 0.0
    parts = {"left": nn.Linear(16, 16, bias=False), "right": nn.Linear(16, 16, bias=False)}
    model = Call(forward, **parts, similarity=nn.CosineSimilarity(dim=-1), head=nn.Linear(1, 4))
    return Built(model=model, batch={"a": a, "b": b})


def _variance_of_squares(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)


def _around_100(seed: int) -> Tensor:
    """Return sample 1 near 100 in quarters, the others standard normal."""
    x = torch.randn(3, 16)
    x[1] = 100 + 0.25 * torch.randint(-3, 4, (16,), generator=torch.Generator().manual_seed(seed)).float()
    return x


@fault(
    "fp16",
    at="norm",
    op="aten.sqrt",
    mechanism="cancellation",
    samples=(1,),
    mode="cast",
    name="variance_as_a_difference-fp16-cast",
)
def variance_as_a_difference() -> Built:
    """mean(x^2) - mean(x)^2 of values near 100 is 0.24 exactly and -8 in FP16."""
    return _around(Do(_variance_of_squares), 16, _around_100(1))


@fault(
    "bf16",
    at="norm",
    op="aten.sqrt",
    mechanism="cancellation",
    samples=(1,),
    mode="cast",
    name="variance_as_a_difference-bf16-cast",
)
def variance_as_a_difference_in_bf16() -> Built:
    """The same in BF16: 0.19 exactly, and -64."""
    return _around(Do(_variance_of_squares), 16, _around_100(18))


@fault("fp16", at="distance", op="aten.sqrt", mechanism="cancellation", samples=(0,), mode="cast")
def distance_by_the_binomial_formula() -> Built:
    """|a|^2 + |b|^2 - 2ab of two neighbouring integer vectors is 1 exactly and -16 in FP16."""

    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m.head(m.distance(m.encode(a), m.encode(b)))

    def distance(a: Tensor, b: Tensor) -> Tensor:
        squares = (a * a).sum(-1, keepdim=True) + (b * b).sum(-1, keepdim=True)
        return torch.sqrt(squares - 2 * (a * b).sum(-1, keepdim=True))

    a = torch.zeros(3, 8)
    a[0] = torch.randint(20, 60, (8,), generator=torch.Generator().manual_seed(17)).float()
    b = a.clone()
    b[:, 0] += 1
    b[1:] += 2
    model = Call(forward, encode=fixed(nn.Linear(8, 8), 1.0), distance=Do(distance), head=nn.Linear(1, 4))
    return Built(model=model, batch={"a": a, "b": b})


@fault(
    "fp16",
    at="norm",
    op={
        "aten.native_batch_norm",
        "aten.cudnn_batch_norm",
        "aten._native_batch_norm_legit_no_training",
        "aten.sqrt",
        "aten.rsqrt",
    },
    mechanism="domain-error",
    samples=(0, 1, 2),
    precision_related=False,
    train=False,
)
def negative_running_variance() -> Built:
    """A stored variance of -0.5 in channel 2, as a bad average of checkpoints leaves it."""
    model = Call(lambda m, x: m.head(m.norm(m.project(x))), project=nn.Linear(8, 8), norm=nn.BatchNorm1d(8),
                 head=mlp(8))  # fmt: skip
    model.norm.running_var[2] = -0.5
    return Built(model=model, batch=torch.randn(3, 8))


@fault(
    "fp16",
    "Real-Time-Voice-Cloning#797",
    at="0",
    op="aten.div",
    mechanism="domain-error",
    samples=(3,),
    precision_related=False,
    mode="cast",
)
@fault(
    "bf16", "Megatron-LM#780", at="0", op="aten.div", mechanism="domain-error", samples=(3,), precision_related=False
)
def silent_sample_into_a_normaliser() -> Built:
    """Sample 3 is zero throughout, and is divided by its own peak."""
    x = torch.randn(4, 16)
    x[3] = 0.0
    return Built(model=nn.Sequential(Do(lambda t: t / t.abs().amax(-1, keepdim=True)), mlp(16)), batch=x)


@fault(
    "bf16",
    "torchao#4713",
    "aiter#4288",
    at="1",
    op="aten.div",
    mechanism="domain-error",
    samples=None,
    precision_related=False,
    mode="cast",
)
@fault("fp16", "lmdeploy#3652", at="1", op="aten.div", mechanism="domain-error", samples=None, precision_related=False)
def quantised_weight_with_a_zero_row() -> Built:
    """The scale of row 5 is its largest magnitude, zero; 0 / 0 is NaN."""

    class Quantised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.abs().amax(-1, keepdim=True) / 127
            return F.linear(x, (self.weight / scale).round() * scale, self.bias)

    layer = Quantised(12, 12)
    with torch.no_grad():
        layer.weight[5] = 0.0
    return Built(model=nn.Sequential(mlp(12), layer, mlp(12)), batch=torch.randn(3, 12))


@fault(
    "fp16",
    "kernels-community#681",
    at="quantise",
    op="aten.div",
    mechanism="domain-error",
    samples=(2,),
    precision_related=False,
    mode="cast",
)
def quantised_token_of_zeros() -> Built:
    """The scale of a token is its largest magnitude; one token of sample 2 is zero after the ReLU."""

    def quantise(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    x = torch.rand(4, 5, 16)
    x[2, 4] = -1.0
    model = Call(lambda m, x: m.head(m.quantise(torch.relu(m.up(x)))), up=fixed(nn.Linear(16, 16), 1.0),
                 quantise=Do(quantise), head=nn.Linear(16, 4))  # fmt: skip
    return Built(model=model, batch=x)
