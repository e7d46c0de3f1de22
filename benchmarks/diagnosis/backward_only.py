"""A clean forward and a gradient that is not: derivatives at the edge of a domain, branches masked out, overflow.

Where forward makes an Inf that it leaves out again, two answers are right: the forward operation that made the Inf,
which is the origin, and its derivative, which multiplies it with a gradient of zero and does the harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import LINEAR, Built, fault
from benchmarks.diagnosis.parts import Call, Do, fixed, mean_square, mlp


def _with_zeros(batch: int, width: int, sample: int) -> Tensor:
    x = torch.rand(batch, width) + 0.5
    x[sample, 3] = 0.0
    return x


def _through(function: Any, x: Tensor, at: str = "safe") -> Built:
    """Put a function between a layer that hands its input on and healthy ones."""
    parts = {"project": fixed(nn.Linear(x.shape[-1], x.shape[-1]), 1.0), at: Do(function), "head": mlp(x.shape[-1])}

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(getattr(m, at)(m.project(x)))

    return Built(model=Call(forward, **parts), batch=x, loss=mean_square)


@fault(
    "bf16",
    "pytorch#36923",
    "pytorch#68425",
    at="safe",
    op="aten.sqrt",
    mechanism="masked-gradient",
    samples=(1,),
    precision_related=False,
    phase="backward",
    mode="cast",
)
@fault(
    "fp16",
    "pytorch#52248",
    "kornia#4183",
    at="safe",
    op="aten.sqrt",
    mechanism="masked-gradient",
    samples=(1,),
    precision_related=False,
    phase="backward",
)
def root_in_a_branch_not_taken() -> Built:
    """where(x > 0, sqrt(x), 0) at x = 0: the derivative of the root is Inf, and the branch hands it a zero."""
    return _through(lambda t: torch.where(t > 0, t.sqrt(), torch.zeros_like(t)), _with_zeros(4, 8, 1))


@fault(
    "bf16",
    "pytorch#108618",
    at="safe",
    op="aten.pow",
    mechanism="masked-gradient",
    samples=(2,),
    precision_related=False,
    phase="backward",
    mode="cast",
)
def power_in_a_branch_not_taken() -> Built:
    """The same with a power of 0.7."""
    return _through(lambda t: torch.where(t > 0, t.pow(0.7), torch.zeros_like(t)), _with_zeros(4, 8, 2))


@fault(
    "bf16",
    "pytorch#156212",
    at="safe",
    op="aten.log",
    mechanism={"domain-error", "masked-gradient"},
    phase={"forward", "backward"},
    samples=(0,),
    precision_related=False,
    mode="cast",
)
@fault(
    "fp16",
    "pytorch#187297",
    at="safe",
    op="aten.log",
    mechanism={"domain-error", "masked-gradient"},
    phase={"forward", "backward"},
    samples=(0,),
    precision_related=False,
)
def logarithm_in_a_branch_not_taken() -> Built:
    """where(x > 0, log(x), 0) at x = 0: the -Inf of forward is left out, and the gradient is NaN."""
    return _through(lambda t: torch.where(t > 0, t.log(), torch.zeros_like(t)), _with_zeros(3, 8, 0))


@fault(
    "bf16",
    "pytorch#156212",
    at="safe",
    op="aten.log",
    mechanism={"domain-error", "masked-gradient"},
    phase={"forward", "backward"},
    samples=(2,),
    precision_related=False,
    mode="cast",
)
def logarithm_with_its_result_repaired() -> Built:
    """nan_to_num(log(0)) is finite, and its gradient is NaN."""
    return _through(lambda t: torch.nan_to_num(t.log(), neginf=0.0), _with_zeros(3, 8, 2))


@fault(
    "bf16",
    "pytorch#2421",
    "keras-io#910",
    at="magnitude",
    op="aten.sqrt",
    mechanism="domain-error",
    samples=(1,),
    precision_related=False,
    phase="backward",
    mode="cast",
)
@fault(
    "fp16",
    "piq#308",
    "nnAudio#138",
    at="magnitude",
    op="aten.sqrt",
    mechanism="domain-error",
    samples=(1,),
    precision_related=False,
    phase="backward",
)
def magnitude_of_silence() -> Built:
    """The root of a sum of squares at exactly zero; sample 1 is silent."""
    x = torch.rand(4, 16) + 0.5
    x[1] = 0.0

    def magnitude(t: Tensor) -> Tensor:
        real, imaginary = t.chunk(2, -1)
        return (real * real + imaginary * imaginary).sqrt()

    model = Call(lambda m, x: m.head(m.magnitude(m.project(x))), project=nn.Linear(16, 16, bias=False),
                 magnitude=Do(magnitude), head=mlp(8))  # fmt: skip
    return Built(model=model, batch=x, loss=mean_square)


@fault(
    "fp16",
    at="magnitude",
    op="aten.sqrt",
    mechanism="underflow",
    samples=(1,),
    phase="backward",
    mode="cast",
    loss_scale=1.0,
)
def magnitude_with_an_eps_of_1e_9() -> Built:
    """The eps inside the root saves FP32; in FP16 it is zero, and so is the root of sample 1."""
    x = torch.rand(4, 16) + 0.5
    x[1] = 0.0
    model = Call(lambda m, x: m.head(m.magnitude(m.project(x))), project=nn.Linear(16, 16, bias=False),
                 magnitude=Do(lambda t: (t * t + 1e-9).sqrt()), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=x, loss=mean_square)


@fault(
    "bf16",
    "pytorch#8069",
    at="angle",
    op="aten.acos",
    mechanism="domain-error",
    samples=(0, 1),
    precision_related=False,
    phase="backward",
    mode="cast",
)
def angle_between_equal_directions() -> Built:
    """The derivative of acos at exactly 1 is -Inf; samples 0 and 1 compare a unit vector with itself."""
    a = torch.zeros(3, 4)
    a[:, 0] = 1.0
    b = a.clone()
    b[2] = torch.tensor([0.0, 1.0, 0.0, 0.0])

    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return m.head(m.angle(m.encode(a), m.encode(b)))

    model = Call(forward, encode=fixed(nn.Linear(4, 4), 1.0),
                 angle=Do(lambda a, b: (a * b).sum(-1, keepdim=True).acos()), head=mlp(1))  # fmt: skip
    return Built(model=model, batch={"a": a, "b": b}, loss=mean_square)


@fault(
    "fp16",
    "apex#318",
    at="1",
    op=LINEAR,
    mechanism="loss-scale-overflow",
    samples=(0, 1, 2),
    phase="backward",
    loss_scale=65536.0,
    mode="cast",
)
@fault(
    "fp16",
    "DeepSpeed#931",
    at="1",
    op=LINEAR,
    mechanism="loss-scale-overflow",
    samples=(0, 1, 2),
    phase="backward",
    loss_scale=65536.0,
)
def loss_scale_that_is_too_large() -> Built:
    """A gradient of 1/96 grows sixteenfold in layer 2 and again in layer 1: to 2.7 unscaled, to 1.7e5 scaled."""
    model = nn.Sequential(fixed(nn.Linear(32, 32), 0.1), fixed(nn.Linear(32, 32), 16.0),
                          fixed(nn.Linear(32, 32), 16.0), fixed(nn.Linear(32, 32), 1.0))  # fmt: skip
    return Built(model=model, batch=torch.randn(3, 32) * 0.01, loss=lambda output, batch: output.float().mean())


@fault(
    "fp16", at="1", op=LINEAR, mechanism="overflow", samples=(0, 1, 2), phase="backward", loss_scale=1.0, mode="cast"
)
def gradient_beyond_fp16_without_a_scale() -> Built:
    """A gradient of 1 at the output grows by 200 in layer 3, 20 in layer 2 and 20 in layer 1: 8e4 leaves FP16."""
    model = nn.Sequential(fixed(nn.Linear(32, 32), 0.1), fixed(nn.Linear(32, 32), 20.0),
                          fixed(nn.Linear(32, 32), 20.0), fixed(nn.Linear(32, 32), 200.0))  # fmt: skip
    return Built(model=model, batch=torch.randn(3, 32) * 1e-4, loss=lambda output, batch: output.float().sum())


@fault(
    "fp16",
    at={"shared"},
    op=LINEAR | {"aten.add", "aten.t", None},
    mechanism="overflow",
    phase="backward",
    loss_scale=1.0,
    mode="cast",
    samples=None,
)
def contributions_to_a_shared_weight() -> Built:
    """Four uses of one weight give it 2.4e4 each; their sum is 9.6e4."""

    def forward(m: Any, x: Tensor) -> Tensor:
        total = m.shared(x)
        for factor in (0.5, 0.25, 0.125):
            total = total + m.shared(x * factor) / factor
        return total

    x = torch.full((3, 8), 8.0)
    model = Call(forward, shared=nn.Linear(8, 8))
    return Built(model=model, batch=x, loss=lambda output, batch: output.float().sum() * 1000.0)


@fault(
    "fp16",
    "trl#6550",
    at={"ratio"},
    op="aten.exp",
    mechanism={"overflow", "masked-gradient"},
    phase={"forward", "backward"},
    samples=(1,),
    precision_related=False,
    mode="cast",
)
@fault(
    "bf16",
    "OpenRLHF#1314",
    "prime-rl#2972",
    at={"ratio"},
    op="aten.exp",
    mechanism={"overflow", "masked-gradient"},
    phase={"forward", "backward"},
    samples=(1,),
    precision_related=False,
    mode="cast",
)
def exponential_in_a_branch_not_taken() -> Built:
    """where(x < 50, exp(x), x) at x = 100: forward leaves the Inf out, and its derivative is 0 x Inf."""
    x = torch.rand(3, 8)
    x[1, 2] = 100.0
    return _through(lambda t: torch.where(t < 50, t.exp(), t), x, at="ratio")
