"""Losses: logarithms of zero, ratios of exponentials, divergences of distributions, alignments that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.case import ANY, Built, fault
from benchmarks.diagnosis.parts import Call, Do, fixed, mlp


def _classifier(logits: Tensor, loss: Callable[[Any, Any], Tensor], **fields: Tensor) -> Built:
    """Hand these logits on through a layer, with healthy layers before it; further fields are for the loss."""

    def forward(m: Any, x: Tensor, **_: Tensor) -> Tensor:
        return m.head(x + 0.0 * m.body(x))

    width = logits.shape[-1]
    model = Call(forward, body=mlp(width), head=fixed(nn.Linear(width, width), 1.0))
    return Built(model=model, batch={"x": logits, **fields}, loss=loss)


def _focal(output: Tensor, batch: Any) -> Tensor:
    p = torch.sigmoid(output).clamp(1e-4, 1 - 1e-4)
    target = batch["target"]
    positive = torch.log(p) * (1 - p) ** 2 * target
    negative = torch.log(1 - p) * p**2 * (1 - target)
    return -(positive + negative).float().mean()


@fault(
    "fp16",
    "CenterNet#201",
    "EfficientDet#502",
    at=None,
    op="aten.log",
    mechanism="unrepresentable-constant",
    samples=(1,),
    phase="loss",
    mode="cast",
)
@fault(
    "bf16",
    "retinanet-examples#93",
    at=None,
    op="aten.log",
    mechanism="unrepresentable-constant",
    samples=(1,),
    phase="loss",
    mode="cast",
)
@fault(
    "fp16", "CenterNet#201", at=None, op="aten.log", mechanism="unrepresentable-constant", samples=(1,), phase="loss"
)
def focal_loss_with_a_clamp() -> Built:
    """1 - 1e-4 is 1 in both half formats: the clamp does nothing for a logit of 15, and log(1 - p) is -Inf."""
    logits = torch.randn(3, 8).clamp(-2, 2)
    logits[1, 4] = 15.0
    return _classifier(logits, _focal, target=torch.zeros(3, 8))


@fault(
    "fp16", "tt-forge-onnx#3405", at=None, op="aten.log", mechanism="underflow", samples=(2,), phase="loss", mode="cast"
)
def logarithm_of_a_softmax() -> Built:
    """A probability of e^-40 is zero in FP16, and its logarithm -Inf."""
    logits = torch.zeros(4, 8)
    logits[2, 0] = 40.0

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.nll_loss(torch.log(torch.softmax(output, -1)), batch["target"])

    return _classifier(logits, loss, target=torch.full((4,), 3))


@fault(
    "bf16",
    "tt-forge-onnx#3405",
    at=None,
    op="aten.log",
    mechanism={"underflow", "domain-error"},
    samples=(2,),
    phase="loss",
    precision_related=False,
)
def logarithm_of_a_softmax_in_fp32() -> Built:
    """A probability of e^-110 is zero in FP32 too."""
    logits = torch.zeros(4, 8)
    logits[2, 0] = 110.0

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.nll_loss(torch.log(torch.softmax(output, -1)), batch["target"])

    return _classifier(logits, loss, target=torch.full((4,), 3))


@fault(
    "fp16",
    "pytorch#49844",
    at=None,
    op={"aten.mul", "aten.binary_cross_entropy_with_logits"},
    mechanism="invalid-operation",
    samples=ANY,
    phase="loss",
    precision_related=False,
)
def binary_cross_entropy_of_an_infinite_logit() -> Built:
    """A logit masked with -Inf and a soft target: 0 x -Inf in (1 - target) x logit, where the target is 1."""

    def forward(m: Any, x: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        return m.head(m.body(x)).masked_fill(keep == 0, -math.inf)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch["target"])

    keep = torch.ones(3, 8)
    keep[0, 5] = 0
    target = torch.zeros(3, 8)
    target[0, 5] = 1
    model = Call(forward, body=mlp(16), head=nn.Linear(16, 8))
    return Built(model=model, batch={"x": torch.randn(3, 16), "target": target, "keep": keep}, loss=loss)


@fault(
    "bf16", at=None, op="aten.mul", mechanism="invalid-operation", samples=(0,), phase="loss", precision_related=False
)
def masked_log_probability_times_zero() -> Built:
    """An action masked with -Inf has probability 0 and log-probability -Inf; the entropy multiplies the two."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        return m.head(m.body(x)).masked_fill(keep == 0, -math.inf)

    def loss(output: Tensor, batch: Any) -> Tensor:
        log_p = output.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1).mean()

    keep = torch.ones(3, 8)
    keep[0, 5] = 0
    model = Call(forward, body=mlp(16), head=nn.Linear(16, 8))
    return Built(model=model, batch={"x": torch.randn(3, 16), "keep": keep}, loss=loss)


@fault("bf16", at=None, op="aten.log", mechanism="domain-error", samples=(1,), phase="loss", precision_related=False)
def entropy_of_a_target_that_is_zero() -> Built:
    """Target x log(target) is 0 x -Inf where a target is zero."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        target = batch["target"]
        return (target * (target.log() - output.float().log_softmax(-1))).sum(-1).mean()

    target = torch.rand(3, 8) + 0.1
    target[1, 2] = 0.0
    return _classifier(torch.randn(3, 8), loss, target=target)


@fault(
    "fp16",
    "synthcity#331",
    "DALLE2-pytorch#138",
    at="",
    op="aten.exp",
    mechanism="overflow",
    samples=(0, 1, 2),
    mode="cast",
    backward=False,
)
def log_variance_of_twelve() -> Built:
    """The log-variance head has a bias of 12, and e^12 is 1.6e5."""
    return _variational(12.0)


@fault("bf16", "pyg#500", at="", op="aten.exp", mechanism="overflow", samples=(0, 1, 2), precision_related=False)
@fault("fp16", "apex#812", at="", op="aten.exp", mechanism="overflow", samples=(0, 1, 2), precision_related=False)
def log_variance_of_ninety_two() -> Built:
    """A gap of 92 between two log-variances: e^92 is beyond FP32."""
    return _variational(92.0)


def _variational(bias: float) -> Built:
    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        h = m.encoder(x)
        mean, log_var = m.mean(h), m.log_var(h)
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).float().mean()
        out = m.decoder(mean)
        return {"loss": (out - x).float().square().mean() + divergence, "out": out}

    log_var = nn.Linear(16, 4)
    with torch.no_grad():
        log_var.weight.zero_()
        log_var.bias.zero_()
        log_var.bias[2] = bias
    model = Call(forward, encoder=mlp(16), mean=nn.Linear(16, 4), log_var=log_var,
                 decoder=nn.Sequential(nn.Linear(4, 16), mlp(16)))  # fmt: skip
    return Built(model=model, batch=torch.randn(3, 16))


def _policy(gap: float, *, bound: float) -> Built:
    """A policy update in which sample 1 is a token that the mask leaves out, with this log-ratio."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        ratio = torch.exp(output.squeeze(-1) - batch["old"])
        gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, bound) * batch["advantage"])
        return -(gain * batch["keep"]).float().mean()

    def forward(m: Any, x: Tensor, old: Tensor, advantage: Tensor, keep: Tensor) -> Tensor:
        return m.head(m.body(x) * 0.0)

    old = torch.zeros(4)
    old[1] = -gap
    keep = torch.ones(4)
    keep[1] = 0
    model = Call(forward, body=mlp(8), head=nn.Linear(8, 1))
    with torch.no_grad():
        model.head.bias.zero_()
    batch = {"x": torch.randn(4, 8), "old": old, "advantage": torch.ones(4), "keep": keep}
    return Built(model=model, batch=batch, loss=loss)


@fault(
    "bf16",
    "OpenRLHF#1314",
    "slime#2198",
    at=None,
    op="aten.exp",
    mechanism={"overflow", "masked-gradient"},
    samples=(1,),
    phase={"loss", "backward"},
    precision_related=False,
)
@fault(
    "fp16",
    "miles#1363",
    at=None,
    op="aten.exp",
    mechanism={"overflow", "masked-gradient"},
    samples=(1,),
    phase={"loss", "backward"},
    precision_related=False,
)
def ratio_of_two_policies() -> Built:
    """e^200 of a masked token is Inf; clamp and min make forward finite, and the gradient is 0 x Inf."""
    return _policy(200.0, bound=1.2)


@fault(
    "fp16",
    "trl#6550",
    "Soup#1084",
    at=None,
    op="aten.exp",
    mechanism={"overflow", "masked-gradient"},
    samples=(1,),
    phase={"loss", "backward"},
    mode="cast",
)
def ratio_of_two_policies_in_half() -> Built:
    """e^13 is 4.4e5: finite in FP32, Inf in FP16."""
    return _policy(13.0, bound=1.2)


@fault(
    "fp16",
    "pytorch#49047",
    at=None,
    op={"aten._ctc_loss"},
    mechanism="domain-error",
    samples=(0,),
    phase="loss",
    precision_related=False,
)
@fault(
    "bf16",
    "wenet#2299",
    at=None,
    op={"aten._ctc_loss"},
    mechanism="domain-error",
    samples=(0,),
    phase="loss",
    precision_related=False,
    mode="cast",
)
def alignment_that_cannot_be() -> Built:
    """Sample 0 has six labels and four frames."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        log_probs = output.float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["labels"], torch.full((2,), 4), batch["lengths"])

    labels = torch.tensor([[1, 2, 3, 1, 2, 3], [1, 2, 0, 0, 0, 0]])
    model = Call(lambda m, x, labels, lengths: m.head(m.body(x)), body=mlp(16), head=nn.Linear(16, 8))
    batch = {"x": torch.randn(2, 4, 16), "labels": labels, "lengths": torch.tensor([6, 2])}
    return Built(model=model, batch=batch, loss=loss)


@fault("fp16", "kornia#4021", at="dice", op="aten.div", mechanism="underflow", samples=(2,), mode="cast")
def dice_of_two_empty_masks() -> Built:
    """(2ab + 1e-8) / (a + b + 1e-8): sample 2 has neither a nor b, and 1e-8 is zero in FP16."""

    def dice(a: Tensor, b: Tensor) -> Tensor:
        return (2 * (a * b).sum(-1) + 1e-8) / (a.sum(-1) + b.sum(-1) + 1e-8)

    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m.head(m.dice(torch.relu(m.predict(a)), b)[:, None])

    a, b = torch.rand(4, 16), (torch.rand(4, 16) > 0.5).float()
    a[2], b[2] = -1.0, 0.0
    model = Call(forward, predict=fixed(nn.Linear(16, 16), 1.0), dice=Do(dice), head=nn.Linear(1, 3))
    return Built(model=model, batch={"a": a, "b": b})


@fault("fp16", "YOLOX#336", at=None, op="aten.log", mechanism="underflow", samples=(0,), phase="loss", mode="cast")
def entropy_with_an_eps_of_1e_10() -> Built:
    """P log(p + 1e-10) where p is zero: the eps is zero in FP16 as well."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        p = torch.relu(output)
        return -(p * torch.log(p + 1e-10)).float().sum(-1).mean()

    x = torch.rand(3, 8) + 0.1
    x[0, 6] = -1.0
    return _classifier(x, loss)
