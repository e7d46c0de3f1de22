"""Every operation of PyTorch's CUDA autocast reference in the ways in which people write it, and some unlisted ones.

The groups follow the page, not our tables: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference, with
the few entries of ``ATen/autocast_mode.h`` that the page leaves out marked "(header)".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Make = Callable[..., torch.Tensor]
"""Makes a tensor of the given shape in the dtype that is to be probed."""

GROUPS = {
    "low": "the region's dtype",
    "float32": "float32",
    "widest": "the widest operand's",
    "refused": "refused",
    "unlisted": "unchanged",
}
"""What an operation of a group returns."""


@dataclass(frozen=True)
class Case:
    """One operation: its group, and every way of writing it, each a function of two makers of tensors."""

    name: str
    group: str
    ways: Mapping[str, Callable[[Make, Make], Any]]


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.5


def module(made: nn.Module, *inputs: torch.Tensor) -> Any:
    return made(*inputs)


def upsampled(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Call the overload that autocast lists; the one behind ``F.interpolate`` may be another."""
    dims = x.dim() - 2
    name = f"{'_' if 'exact' in mode else ''}upsample_{mode.replace('-', '_')}{dims}d"
    corners = [] if "nearest" in mode else [False]
    return getattr(torch.ops.aten, name).default(x, [6] * dims, *corners)


CASES: list[Case] = []


def case(group: str, name: str, **ways: Callable[[Make, Make], Any]) -> None:
    CASES.append(Case(name, group, {way.replace("_", " ").strip(): make for way, make in ways.items()}))


labels = torch.tensor([0, 1, 2])

case("low", "__matmul__", operator=lambda t, u: t(3, 4) @ u(4, 5))
case(
    "low",
    "matmul",
    function=lambda t, u: torch.matmul(t(3, 4), u(4, 5)),
    method=lambda t, u: t(2, 3, 4).matmul(u(4, 5)),
)
case("low", "mm", function=lambda t, u: torch.mm(t(3, 4), u(4, 5)), method=lambda t, u: t(3, 4).mm(u(4, 5)))
case("low", "mv", function=lambda t, u: torch.mv(t(3, 4), u(4)), method=lambda t, u: t(3, 4).mv(u(4)))
case(
    "low",
    "bmm",
    function=lambda t, u: torch.bmm(t(2, 3, 4), u(2, 4, 5)),
    method=lambda t, u: t(2, 3, 4).bmm(u(2, 4, 5)),
)
case(
    "low",
    "addmm",
    function=lambda t, u: torch.addmm(t(3, 5), t(3, 4), u(4, 5)),
    method=lambda t, u: t(3, 5).addmm(t(3, 4), u(4, 5), beta=0.5),
)
case(
    "low",
    "addmv",
    function=lambda t, u: torch.addmv(t(3), t(3, 4), u(4)),
    method=lambda t, u: t(3).addmv(t(3, 4), u(4)),
)
case("low", "addr", function=lambda t, u: torch.addr(t(3, 4), t(3), u(4)), method=lambda t, u: t(3, 4).addr(t(3), u(4)))
case(
    "low",
    "addbmm",
    function=lambda t, u: torch.addbmm(t(3, 5), t(2, 3, 4), u(2, 4, 5)),
    method=lambda t, u: t(3, 5).addbmm(t(2, 3, 4), u(2, 4, 5)),
)
case(
    "low",
    "baddbmm",
    function=lambda t, u: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), u(2, 4, 5)),
    method=lambda t, u: t(2, 3, 5).baddbmm(t(2, 3, 4), u(2, 4, 5)),
)
case("low", "chain_matmul", function=lambda t, u: torch.chain_matmul(t(3, 4), u(4, 5), t(5, 2)))
case("low", "multi_dot", function=lambda t, u: torch.linalg.multi_dot([t(3, 4), u(4, 5), t(5, 2)]))
case("low", "einsum (header)", function=lambda t, u: torch.einsum("ij,jk->ik", t(3, 4), u(4, 5)))
case("low", "linalg.vecdot (header)", function=lambda t, u: torch.linalg.vecdot(t(3, 4), u(3, 4)))
case(
    "low",
    "linear",
    functional=lambda t, u: F.linear(t(3, 4), u(5, 4), u(5)),
    module=lambda t, u: module(nn.Linear(4, 5), t(3, 4)),
)
case(
    "low",
    "conv1d",
    function=lambda t, u: torch.conv1d(t(2, 3, 8), u(4, 3, 3)),
    functional=lambda t, u: F.conv1d(t(2, 3, 8), u(4, 3, 3), padding="same"),
    module=lambda t, u: module(nn.Conv1d(3, 4, 3), t(2, 3, 8)),
)
case(
    "low",
    "conv2d",
    function=lambda t, u: torch.conv2d(t(2, 3, 8, 8), u(4, 3, 3, 3), u(4)),
    functional=lambda t, u: F.conv2d(t(2, 3, 8, 8), u(4, 3, 3, 3), padding="same"),
    module=lambda t, u: module(nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1), t(2, 3, 8, 8)),
)
case(
    "low",
    "conv3d",
    functional=lambda t, u: F.conv3d(t(2, 3, 4, 4, 4), u(4, 3, 3, 3, 3)),
    module=lambda t, u: module(nn.Conv3d(3, 4, 3), t(2, 3, 4, 4, 4)),
)
case(
    "low",
    "conv_transpose1d",
    functional=lambda t, u: F.conv_transpose1d(t(2, 3, 8), u(3, 4, 3)),
    module=lambda t, u: module(nn.ConvTranspose1d(3, 4, 3), t(2, 3, 8)),
)
case(
    "low",
    "conv_transpose2d",
    functional=lambda t, u: F.conv_transpose2d(t(2, 3, 8, 8), u(3, 4, 3, 3)),
    module=lambda t, u: module(nn.ConvTranspose2d(3, 4, 3), t(2, 3, 8, 8)),
)
case(
    "low",
    "conv_transpose3d",
    functional=lambda t, u: F.conv_transpose3d(t(2, 3, 4, 4, 4), u(3, 4, 3, 3, 3)),
    module=lambda t, u: module(nn.ConvTranspose3d(3, 4, 3), t(2, 3, 4, 4, 4)),
)
case("low", "conv_tbc (header)", function=lambda t, u: torch.conv_tbc(t(5, 2, 3), u(3, 3, 4), u(4)))
case(
    "low",
    "convolution (header)",
    function=lambda t, u: torch.convolution(t(2, 3, 8), u(4, 3, 3), None, [1], [0], [1], False, [0], 1),
    internal=lambda t, u: torch._convolution(
        t(2, 3, 8), u(4, 3, 3), None, [1], [0], [1], False, [0], 1, False, False, False, False
    ),
    deprecated=lambda t, u: torch.ops.aten._convolution.deprecated(
        t(2, 3, 8), u(4, 3, 3), None, [1], [0], [1], False, [0], 1, False, False, False
    ),
)
case(
    "low",
    "prelu",
    function=lambda t, u: torch.prelu(t(3, 4), u(1)),
    functional=lambda t, u: F.prelu(t(3, 4), u(1)),
    module=lambda t, u: module(nn.PReLU(), t(3, 4)),
)
case(
    "low",
    "LSTMCell",
    module=lambda t, u: module(nn.LSTMCell(4, 4), t(3, 4)),
    function=lambda t, u: torch.lstm_cell(t(3, 4), (t(3, 4), t(3, 4)), u(16, 4), u(16, 4), u(16), u(16)),
)
case(
    "low",
    "GRUCell",
    module=lambda t, u: module(nn.GRUCell(4, 4), t(3, 4)),
    function=lambda t, u: torch.gru_cell(t(3, 4), t(3, 4), u(12, 4), u(12, 4), u(12), u(12)),
)
case(
    "low",
    "RNNCell",
    module_tanh=lambda t, u: module(nn.RNNCell(4, 4), t(3, 4)),
    module_relu=lambda t, u: module(nn.RNNCell(4, 4, nonlinearity="relu"), t(3, 4)),
    function=lambda t, u: torch.rnn_tanh_cell(t(3, 4), t(3, 4), u(4, 4), u(4, 4), u(4), u(4)),
)
case(
    "low",
    "scaled_dot_product_attention (header)",
    functional=lambda t, u: F.scaled_dot_product_attention(t(2, 2, 4, 8), u(2, 2, 4, 8), t(2, 2, 4, 8)),
    module=lambda t, u: module(nn.MultiheadAttention(8, 2), *[t(4, 2, 8)] * 3),
)

for name in (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log"),
    *("log10", "log1p", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
):
    case(
        "float32",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4).abs() / 8),
        method=lambda t, u, name=name: getattr(t(3, 4).abs() / 8, name)(),
    )
case("float32", "__pow__", operator=lambda t, u: t(3, 4) ** 2, operator_tensor=lambda t, u: positive(t(3)) ** t(3))
case("float32", "__rpow__", operator=lambda t, u: 2 ** t(3, 4))
case(
    "float32",
    "pow",
    function=lambda t, u: torch.pow(t(3, 4), 2),
    method=lambda t, u: positive(t(3)).pow(t(3)),
    scalar=lambda t, u: torch.pow(2.0, t(3)),
)
case(
    "float32",
    "square (through pow)",
    function=lambda t, u: torch.square(t(3, 4)),
    method=lambda t, u: t(3, 4).square(),
)
case("float32", "__rdiv__", operator=lambda t, u: 2.0 / positive(t(3, 4)))
case("float32", "__rtruediv__", operator=lambda t, u: positive(t(3, 4)).__rtruediv__(2.0))
case(
    "float32",
    "binary_cross_entropy_with_logits",
    functional=lambda t, u: F.binary_cross_entropy_with_logits(t(3, 4), t(3, 4).abs().clamp(max=1)),
    module=lambda t, u: module(nn.BCEWithLogitsLoss(), t(3, 4), t(3, 4).abs().clamp(max=1)),
)
case(
    "float32",
    "cosine_embedding_loss",
    functional=lambda t, u: F.cosine_embedding_loss(t(3, 4), t(3, 4), torch.ones(3)),
    module=lambda t, u: module(nn.CosineEmbeddingLoss(), t(3, 4), t(3, 4), torch.ones(3)),
)
case("float32", "cdist", function=lambda t, u: torch.cdist(t(3, 4), t(5, 4)))
case(
    "float32",
    "cosine_similarity",
    functional=lambda t, u: F.cosine_similarity(t(3, 4), t(3, 4)),
    module=lambda t, u: module(nn.CosineSimilarity(), t(3, 4), t(3, 4)),
)
case(
    "float32",
    "cross_entropy",
    functional=lambda t, u: F.cross_entropy(t(3, 4), labels),
    module=lambda t, u: module(nn.CrossEntropyLoss(), t(3, 4), labels),
    functional_smoothed=lambda t, u: F.cross_entropy(t(3, 4), labels, label_smoothing=0.1),
)
case(
    "float32",
    "nll_loss",
    functional=lambda t, u: F.nll_loss(t(3, 4), labels),
    functional_2d=lambda t, u: F.nll_loss(t(3, 4, 2, 2), torch.zeros(3, 2, 2, dtype=torch.long)),
    module=lambda t, u: module(nn.NLLLoss(), t(3, 4), labels),
)
for name in ("cumprod", "cumsum"):
    case(
        "float32",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4), 1),
        method=lambda t, u, name=name: getattr(t(3, 4), name)(-1),
    )
for name in ("sum", "prod"):
    case(
        "float32",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4)),
        method=lambda t, u, name=name: getattr(t(3, 4), name)(dim=1, keepdim=True),
    )
case("float32", "dist", function=lambda t, u: torch.dist(t(3, 4), t(3, 4)), method=lambda t, u: t(3).dist(t(3), 1))
case(
    "float32",
    "group_norm",
    function=lambda t, u: torch.group_norm(t(2, 4, 3), 2),
    functional=lambda t, u: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    module=lambda t, u: module(nn.GroupNorm(2, 4), t(2, 4, 3)),
)
case(
    "float32",
    "layer_norm",
    function=lambda t, u: torch.layer_norm(t(3, 4), (4,)),
    functional=lambda t, u: F.layer_norm(t(3, 4), (4,), t(4), t(4)),
    module=lambda t, u: module(nn.LayerNorm(4), t(3, 4)),
    native=lambda t, u: torch.native_layer_norm(t(3, 4), (4,), None, None, 1e-5),
)
case(
    "float32",
    "hinge_embedding_loss",
    functional=lambda t, u: F.hinge_embedding_loss(t(3, 4), torch.ones(3, 4)),
    module=lambda t, u: module(nn.HingeEmbeddingLoss(), t(3, 4), torch.ones(3, 4)),
)
for name, loss in (("kl_div", nn.KLDivLoss), ("l1_loss", nn.L1Loss), ("mse_loss", nn.MSELoss)):
    case(
        "float32",
        name,
        functional=lambda t, u, name=name: getattr(F, name)(t(3, 4), t(3, 4), reduction="sum"),
        module=lambda t, u, loss=loss: module(loss(reduction="sum"), t(3, 4), t(3, 4)),
    )
for name, loss in (("smooth_l1_loss", nn.SmoothL1Loss), ("huber_loss (header)", nn.HuberLoss)):
    case(
        "float32",
        name,
        functional=lambda t, u, name=name: getattr(F, name.split()[0])(t(3, 4), t(3, 4)),
        module=lambda t, u, loss=loss: module(loss(), t(3, 4), t(3, 4)),
    )
case(
    "float32",
    "soft_margin_loss",
    functional=lambda t, u: F.soft_margin_loss(t(3, 4), t(3, 4).sign()),
    module=lambda t, u: module(nn.SoftMarginLoss(), t(3, 4), t(3, 4).sign()),
)
case(
    "float32",
    "poisson_nll_loss",
    functional=lambda t, u: F.poisson_nll_loss(t(3, 4), t(3, 4).abs()),
    module=lambda t, u: module(nn.PoissonNLLLoss(), t(3, 4), t(3, 4).abs()),
)
case(
    "float32",
    "margin_ranking_loss",
    functional=lambda t, u: F.margin_ranking_loss(t(3), t(3), torch.ones(3)),
    module=lambda t, u: module(nn.MarginRankingLoss(), t(3), t(3), torch.ones(3)),
)
case(
    "float32",
    "multilabel_margin_loss",
    functional=lambda t, u: F.multilabel_margin_loss(t(3, 4), torch.zeros(3, 4, dtype=torch.long)),
    module=lambda t, u: module(nn.MultiLabelMarginLoss(), t(3, 4), torch.zeros(3, 4, dtype=torch.long)),
)
case(
    "float32",
    "multi_margin_loss",
    functional=lambda t, u: F.multi_margin_loss(t(3, 4), labels),
    module=lambda t, u: module(nn.MultiMarginLoss(), t(3, 4), labels),
)
case(
    "float32",
    "triplet_margin_loss",
    functional=lambda t, u: F.triplet_margin_loss(t(3, 4), t(3, 4), t(3, 4)),
    module=lambda t, u: module(nn.TripletMarginLoss(), t(3, 4), t(3, 4), t(3, 4)),
)
for name, normalise in (("softmax", nn.Softmax), ("log_softmax", nn.LogSoftmax)):
    case(
        "float32",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4), 1),
        method=lambda t, u, name=name: getattr(t(3, 4), name)(dim=-1),
        functional=lambda t, u, name=name: getattr(F, name)(t(3, 4), dim=-1),
        module=lambda t, u, normalise=normalise: module(normalise(dim=-1), t(3, 4)),
    )
case(
    "float32",
    "softmin",
    functional=lambda t, u: F.softmin(t(3, 4), dim=1),
    module=lambda t, u: module(nn.Softmin(dim=1), t(3, 4)),
)
case(
    "float32",
    "softplus",
    functional=lambda t, u: F.softplus(t(3, 4)),
    module=lambda t, u: module(nn.Softplus(), t(3, 4)),
)
case(
    "float32",
    "norm",
    function=lambda t, u: torch.norm(t(3, 4)),
    function_along_a_dim=lambda t, u: torch.norm(t(3, 4), 2, 1, True),
    method=lambda t, u: t(3, 4).norm(),
    method_1=lambda t, u: t(3, 4).norm(1, dim=0),
    overload=lambda t, u: torch.ops.aten.norm.Scalar(t(3, 4)),
    overload_along_a_dim=lambda t, u: torch.ops.aten.norm.ScalarOpt_dim(t(3, 4), 2, [1]),
    linalg=lambda t, u: torch.linalg.norm(t(3, 4)),
    linalg_vector=lambda t, u: torch.linalg.vector_norm(t(3, 4)),
    linalg_matrix=lambda t, u: torch.linalg.matrix_norm(t(3, 4)),
    linalg_matrix_1=lambda t, u: torch.linalg.matrix_norm(t(3, 4), 1),
    nuclear_overload=lambda t, u: torch.nuclear_norm(t(3, 4)),
    nuclear_along_dims=lambda t, u: torch.nuclear_norm(t(3, 4), (0, 1)),
    frobenius=lambda t, u: torch.frobenius_norm(t(3, 4), (0, 1)),
)
case("float32", "normalize", functional=lambda t, u: F.normalize(t(3, 4)))
case("float32", "pdist", functional=lambda t, u: F.pdist(t(3, 4)), function=lambda t, u: torch.pdist(t(3, 4)))
case(
    "float32",
    "renorm",
    function=lambda t, u: torch.renorm(t(3, 4), 2, 0, 1.0),
    method=lambda t, u: t(3, 4).renorm(2, 0, 1.0),
)
case(
    "float32",
    "logsumexp (header)",
    function=lambda t, u: torch.logsumexp(t(3, 4), 1),
    method=lambda t, u: t(3, 4).logsumexp(1),
)
if hasattr(torch, "rms_norm"):
    case(
        "float32",
        "rms_norm (header)",
        functional=lambda t, u: F.rms_norm(t(3, 4), (4,)),
        module=lambda t, u: module(nn.RMSNorm(4), t(3, 4)),
    )
for mode, shapes in (
    ("nearest", ((1, 2, 4), (1, 2, 4, 4), (1, 2, 4, 4, 4))),
    ("nearest-exact", ((1, 2, 4), (1, 2, 4, 4), (1, 2, 4, 4, 4))),
    ("linear", ((1, 2, 4),)),
    ("bilinear", ((1, 2, 4, 4),)),
    ("bicubic", ((1, 2, 4, 4),)),
    ("trilinear", ((1, 2, 4, 4, 4),)),
):
    case(
        "float32",
        f"interpolate {mode} (header)",
        **{
            f"functional_{len(shape) - 2}d": lambda t, u, shape=shape, mode=mode: F.interpolate(
                t(*shape), scale_factor=2.0, mode=mode
            )
            for shape in shapes
        },
        **{
            f"overload_{len(shape) - 2}d": lambda t, u, shape=shape, mode=mode: upsampled(t(*shape), mode)
            for shape in shapes
        },
    )
for name in ("bilinear", "bicubic"):
    case(
        "float32",
        f"antialiased {name} (header)",
        overload=lambda t, u, name=name: getattr(torch.ops.aten, f"_upsample_{name}2d_aa").default(
            t(1, 2, 8, 8), [4, 4], False
        ),
    )

for name in ("addcdiv", "addcmul"):
    case(
        "widest",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3), u(3), positive(t(3))),
        method=lambda t, u, name=name: getattr(u(3), name)(t(3), positive(t(3)), value=0.5),
    )
case("widest", "atan2", function=lambda t, u: torch.atan2(t(3), u(3)), method=lambda t, u: u(3).atan2(t(3)))
case(
    "widest",
    "bilinear",
    functional=lambda t, u: F.bilinear(t(3, 4), u(3, 5), t(2, 4, 5)),
    function=lambda t, u: torch.bilinear(t(3, 4), u(3, 5), t(2, 4, 5), t(2)),
)
case(
    "widest",
    "cross",
    function=lambda t, u: torch.cross(t(2, 3), u(2, 3), dim=1),
    method=lambda t, u: t(2, 3).cross(u(2, 3), dim=1),
)
case("widest", "dot", function=lambda t, u: torch.dot(t(3), u(3)), method=lambda t, u: t(3).dot(u(3)))
case("widest", "vdot (header)", function=lambda t, u: torch.vdot(t(3), u(3)))
case(
    "widest",
    "grid_sample",
    functional=lambda t, u: F.grid_sample(t(1, 2, 4, 4), u(1, 3, 3, 2).tanh(), align_corners=False),
)
case(
    "widest",
    "index_put",
    function=lambda t, u: torch.index_put(t(3), [torch.tensor([0, 1])], u(2)),
    method=lambda t, u: t(3).index_put([torch.tensor([0])], u(1), accumulate=True),
)
case(
    "widest",
    "scatter_add",
    function=lambda t, u: torch.scatter_add(t(3), 0, torch.tensor([0, 1]), u(2)),
    method=lambda t, u: t(3).scatter_add(0, torch.tensor([0, 1]), u(2)),
)
case("widest", "tensordot", function=lambda t, u: torch.tensordot(t(3, 4), u(4, 5), 1))

case(
    "refused",
    "binary_cross_entropy",
    functional=lambda t, u: F.binary_cross_entropy(t(3).sigmoid(), t(3).sigmoid()),
    module=lambda t, u: module(nn.BCELoss(), t(3).sigmoid(), t(3).sigmoid()),
)

for name in ["relu", "sigmoid", "tanh", "sqrt", "abs", "neg", "sin", "cos", "erf"]:
    case(
        "unlisted",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(positive(t(3, 4))),
        method=lambda t, u, name=name: getattr(positive(t(3, 4)), name)(),
    )
for name in ("gelu", "silu", "elu", "leaky_relu", "hardswish", "mish"):
    case("unlisted", name, functional=lambda t, u, name=name: getattr(F, name)(t(3, 4)))
for name in ("add", "sub", "mul", "div", "maximum"):
    case(
        "unlisted",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4), positive(t(3, 4))),
    )
for name in ("mean", "var", "std", "amax"):
    case(
        "unlisted",
        name,
        function=lambda t, u, name=name: getattr(torch, name)(t(3, 4), 1),
        method=lambda t, u, name=name: getattr(t(3, 4), name)(1),
    )
case("unlisted", "trace (in the CPU's list)", function=lambda t, u: torch.trace(t(3, 3)))
case("unlisted", "stack (in the CPU's list)", function=lambda t, u: torch.stack([t(3), t(3)]))
case("unlisted", "cat (in the CPU's list)", function=lambda t, u: torch.cat([t(3), t(3)]))
case("unlisted", "index_copy (in the CPU's list)", method=lambda t, u: t(3).index_copy(0, torch.tensor([0]), t(1)))
case(
    "unlisted",
    "adaptive_avg_pool3d (in the CPU's list)",
    functional=lambda t, u: F.adaptive_avg_pool3d(t(1, 2, 4, 4, 4), 2),
)
case("unlisted", "max_pool3d (in the CPU's list)", functional=lambda t, u: F.max_pool3d(t(1, 2, 4, 4, 4), 2))
case(
    "unlisted",
    "reflection_pad1d (in the CPU's list)",
    functional=lambda t, u: F.pad(t(1, 2, 4), (1, 1), mode="reflect"),
)
case(
    "unlisted",
    "replication_pad2d (in the CPU's list)",
    functional=lambda t, u: F.pad(t(1, 2, 4, 4), (1, 1, 1, 1), mode="replicate"),
)
case("unlisted", "avg_pool2d", functional=lambda t, u: F.avg_pool2d(t(1, 2, 4, 4), 2))
case(
    "unlisted",
    "batch_norm",
    functional=lambda t, u: F.batch_norm(t(4, 3), torch.zeros(3), torch.ones(3), training=True),
    module=lambda t, u: module(nn.BatchNorm1d(3), t(4, 3)),
)
case("unlisted", "instance_norm", functional=lambda t, u: F.instance_norm(t(2, 3, 4)))
case("unlisted", "dropout", functional=lambda t, u: F.dropout(t(3, 4)), module=lambda t, u: module(nn.Dropout(), t(3)))
case("unlisted", "embedding", functional=lambda t, u: F.embedding(labels, t(3, 4)))
case("unlisted", "masked_fill", method=lambda t, u: t(3).masked_fill(labels > 0, 1.0))
case("unlisted", "exp_ (in place)", method=lambda t, u: t(3, 4).exp_())
case("unlisted", "mm (out=)", function=lambda t, u: torch.mm(t(3, 4), t(4, 3), out=torch.empty_like(t(3, 3))))
case("unlisted", "softmax with dtype=", functional=lambda t, u: F.softmax(t(3, 4), dim=1, dtype=t(1).dtype))
case("unlisted", "sum with dtype=", method=lambda t, u: t(3, 4).sum(dtype=t(1).dtype))
