"""The optimizer's step, the gradient norm and the loss scale: where finite gradients make bad or no updates."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.diagnosis.case import ANY, LINEAR, Built, fault
from benchmarks.diagnosis.parts import fixed, mean_square, mlp
from nanprobe.config import OptimizerSpec


def _adam(**kwargs: float) -> OptimizerSpec:
    return OptimizerSpec(name="Adam", kwargs=kwargs)


@fault(
    "fp16",
    "glide-finetune#5",
    "apex#240",
    at="0",
    op={"aten.addcdiv_", "aten.addcdiv", "aten.div", None},
    mechanism="optimizer-error",
    samples=None,
    phase="optimizer",
    mode="cast",
    optimizer=_adam(lr=1e-3),
    loss_scale=1.0,
)
def adam_on_half_parameters() -> Built:
    """A feature that is zero gives zero gradients: 0 / (0 + eps), and eps = 1e-8 is zero in FP16."""
    x = torch.rand(4, 8) + 0.5
    x[:, 3] = 0.0
    return Built(model=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), batch=x, loss=mean_square)


@fault(
    "bf16",
    "ao#1124",
    "torchtune#2254",
    at="0",
    op={"aten.add_", "aten.addcdiv_", "aten.add", "aten.addcdiv", None},
    mechanism="update-underflow",
    samples=ANY,
    phase="optimizer",
    silent=True,
    mode="cast",
    optimizer=_adam(lr=1e-5),
)
def update_below_the_spacing() -> Built:
    """Updates of 1e-5 to weights of 1, where the spacing of BF16 is 0.004 below it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.0)
    return Built(model=model, batch=torch.rand(4, 8), loss=mean_square)


@fault(
    "fp16",
    "fairscale#263",
    "Automodel#825",
    at={None, "", "0"},
    op={"aten.linalg_vector_norm", "aten._foreach_norm", None},
    mechanism="overflow",
    samples=None,
    phase="optimizer",
    mode="cast",
    loss_scale=1.0,
    clip_grad_norm=1.0,
)
def gradient_norm_in_half() -> Built:
    """Gradients of 4e4 are finite in FP16 and their norm is not: the clip coefficient is zero."""
    model = nn.Sequential(fixed(nn.Linear(8, 8), 1.0), fixed(nn.Linear(8, 8), 1.0))
    return Built(model=model, batch=torch.ones(1, 8),
                 loss=lambda output, batch: output.float().sum() * 4e4)  # fmt: skip


@fault(
    "fp16",
    "nanoGPT#167",
    "Open-Rig3R#35",
    at={None, "", "2"},
    op={None, *LINEAR},
    mechanism="gradient-underflow",
    samples=ANY,
    phase="backward",
    silent=True,
    loss_scale=1.0,
)
def no_loss_scale() -> Built:
    """A loss of 1e-9 gives gradients below FP16's smallest subnormal, 6e-8."""
    model = nn.Sequential(nn.Linear(16, 16), mlp(16), nn.Linear(16, 16))
    return Built(model=model, batch=torch.randn(4, 16), loss=lambda o, b: o.float().square().mean() * 1e-6)


@fault("fp16", "fairseq#1529", "DeepSpeed#697", at="1", op=LINEAR, mechanism="overflow", samples=(0, 1, 2))
def forward_that_no_loss_scale_helps() -> Built:
    """Forward overflows, 32 x 64 x 64 = 1.3e5; dynamic loss scaling halves its scale for nothing."""
    layer = nn.Linear(32, 32)
    with torch.no_grad():
        layer.weight.fill_(64.0)
    model = nn.Sequential(fixed(nn.Linear(32, 32), 1.0), layer, nn.LayerNorm(32), mlp(32))
    return Built(model=model, batch=torch.full((3, 32), 64.0), loss=mean_square)
