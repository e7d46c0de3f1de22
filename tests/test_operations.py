"""From the module to the operation: what it was, why it failed, and what is passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanprobe

Code = Callable[[Tensor], Tensor]


class Core(nn.Module):
    """Two linear layers with functional code of ours between them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.code(self.first(x)))


class Net(nn.Module):
    """Healthy layers around :class:`Core`."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.core = Core(code)
        self.after = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.core(self.before(x)))


def diagnosed(code: Code, **options: Any) -> nanprobe.Report:
    torch.manual_seed(0)
    model = Net(code)
    torch.manual_seed(1)
    return nanprobe.replay(model, torch.randn(4, 6, 32), **{"dtype": "fp16", "mode": "cast", **options})


def masked_attention(mask: Tensor) -> Code:
    def code(y: Tensor) -> Tensor:
        scores = y @ y.transpose(1, 2)
        return torch.softmax(scores.masked_fill(mask, float("-inf")), -1) @ y

    return code


def additive_mask(fill: Callable[[Tensor], float], whole_row: bool) -> Code:
    def code(y: Tensor) -> Tensor:
        mask = torch.zeros(6, 6)
        mask[:, 4:] = 1
        if whole_row:
            mask[2] = 1
        return torch.softmax(y @ y.transpose(1, 2) - 20 + mask.to(y) * fill(y), -1) @ y

    return code


WHOLE_ROW = torch.zeros(6, 6, dtype=torch.bool)
WHOLE_ROW[2] = True
CAUSAL = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)

FAULTS: dict[str, tuple[Code, str, str, bool]] = {
    "square": (lambda y: (y * 300) ** 2 * 1e-5, "aten.pow", "overflow", True),
    "product": (lambda y: (y * 300) * (y * 400), "aten.mul", "overflow", True),
    "exponential": (lambda y: torch.exp(y * 0 + 12.0), "aten.exp", "overflow", True),
    "residual": (lambda y: (y * 0 + 4e4) + (y * 0 + 4e4), "aten.add", "overflow", True),
    "sum": (lambda y: (y * 0 + 20).repeat(1, 1, 400).sum(-1, keepdim=True) / 12800 + y, "aten.sum", "overflow", True),
    "log of zero": (lambda y: torch.log(F.relu(y)), "aten.log", "domain-error", False),
    "root of negative": (torch.sqrt, "aten.sqrt", "domain-error", False),
    "eps that is zero": (lambda y: (y - y) / ((y - y).abs() + 1e-8), "aten.div", "underflow", True),
    "zero vector": (
        lambda y: F.normalize(y * (torch.arange(6) > 0).to(y)[None, :, None], eps=1e-12, dim=-1),
        "aten.div",
        "underflow",
        True,
    ),
    "masked row": (masked_attention(WHOLE_ROW), "aten._softmax", "masked-row", False),
    "smallest value and a score": (
        additive_mask(lambda y: torch.finfo(y.dtype).min, whole_row=True),
        "aten.add",
        "overflow",
        True,
    ),
    "empty mean": (lambda y: y + y[:, :0].mean(), "aten.mean", "empty-reduction", False),
    "norm that collapses": (
        lambda y: (y * 300) * torch.rsqrt(((y * 300) ** 2).mean(-1, keepdim=True) + 1e-6),
        "aten.pow",
        "overflow",
        True,
    ),
}


@pytest.fixture(params=[150_000_000, 0], ids=["whole", "focus"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace all of the model, as is done with a small one, and then a stretch of it, as with a large one."""
    monkeypatch.setattr("nanprobe.pipeline.tracing.WHOLE_UP_TO", request.param)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_is_named_with_its_mechanism(name: str) -> None:
    code, op, mechanism, precision_related = FAULTS[name]
    report = diagnosed(code)
    bad = report.first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.op, bad.mechanism) == ("forward", "core", op, mechanism)
    assert bad.precision_related is precision_related
    assert report.verdict == ("precision" if precision_related else "not-precision")
    assert op in bad.explanation


FAULTS["fill that the format cannot hold"] = (
    additive_mask(lambda y: -1e9, whole_row=True),
    "aten.mul",
    "unrepresentable-constant",
    True,
)
FAULTS["nothing times an infinite fill"] = (
    lambda y: y + (1 - torch.ones(1).to(y)) * float("-inf"),
    "aten.mul",
    "invalid-operation",
    False,
)
FAULTS["factor beyond the format"] = (lambda y: y * 1e6, "aten.mul", "overflow", True)

HARMLESS: dict[str, Code] = {
    "causal mask": masked_attention(CAUSAL),
    "large negative fill that leaves every row something": additive_mask(lambda y: -1e9, whole_row=False),
    "smallest value that leaves every row something": additive_mask(
        lambda y: torch.finfo(y.dtype).min, whole_row=False
    ),
    "square below the limit": lambda y: (y * 50) ** 2 * 1e-3,
    "norm in FP32": lambda y: (
        (y.float() * 300) * torch.rsqrt(((y.float() * 300) ** 2).mean(-1, keepdim=True) + 1e-6)
    ).to(y),
    "eps that is held": lambda y: (y - y) / ((y - y).abs() + 1e-3),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_near_misses_are_no_faults(name: str) -> None:
    report = diagnosed(HARMLESS[name])
    assert report.first_bad is None
    assert report.exit_code == 0


def test_the_norm_that_collapses_says_that_its_own_code_absorbs_the_inf() -> None:
    bad = diagnosed(FAULTS["norm that collapses"][0]).first_bad
    assert bad is not None
    assert (bad.absorbed_by, bad.absorbed_op) == ("core", "aten.rsqrt")
    assert bad.reference_absmax is not None
    assert bad.reference_absmax > 65504


def test_a_weight_that_autocast_turns_into_inf_is_the_weights_fault() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        model[1].weight.mul_(1e6)
    bad = nanprobe.replay(model, torch.randn(3, 16), dtype="fp16").first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.parameter) == ("parameter", "1", "1.weight")
    assert (bad.op, bad.mechanism) == ("aten._to_copy", "overflow")


def test_a_leaf_names_its_product() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[1].weight.mul_(1e3)
    bad = nanprobe.replay(model, torch.randn(3, 16), dtype="fp16").first_bad
    assert bad is not None
    assert (bad.module, bad.op, bad.mechanism) == ("1", "aten.addmm", "overflow")


def test_a_cast_at_the_door_of_a_layer() -> None:
    bad = diagnosed(lambda y: y.float() * 1e6, mode="autocast").first_bad
    assert bad is not None
    assert (bad.module, bad.op, bad.mechanism) == ("core.second", "aten._to_copy", "overflow")


def test_inside_the_loss_function() -> None:
    report = diagnosed(lambda y: y, loss=lambda output, _: torch.log(output.float().clamp(min=0)).mean())
    bad = report.first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.op, bad.mechanism) == ("loss", None, "aten.log", "domain-error")


def test_a_loss_over_no_labels() -> None:
    def loss(output: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, 1), torch.full((24,), -100))

    bad = diagnosed(lambda y: y, loss=loss).first_bad
    assert bad is not None
    assert (bad.op, bad.mechanism) == ("aten.nll_loss_forward", "empty-reduction")


BACKWARD: dict[str, tuple[Code, str, str]] = {
    "root at zero": (
        lambda y: torch.sqrt((y - y).pow(2).sum(-1, keepdim=True)) + y,
        "aten.sqrt",
        "domain-error",
    ),
    "branch not taken": (
        lambda y: torch.where(y > 0, torch.sqrt(y), torch.zeros_like(y)),
        "aten.sqrt",
        "masked-gradient",
    ),
}


def test_an_eps_that_is_zero_shows_in_backward() -> None:
    def code(y: Tensor) -> Tensor:
        return y + torch.sqrt((y - y).pow(2).sum(-1, keepdim=True) + 1e-8)

    bad = diagnosed(code, loss=lambda output, _: output.float().mean(), loss_scale=8192).first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.op, bad.mechanism) == ("backward", "core", "aten.sqrt", "underflow")
    assert bad.precision_related
    assert {remedy.kind for remedy in bad.remedies} == {"raise-eps", "keep-fp32"}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("name", BACKWARD)
def test_in_backward_the_forward_operation_is_named(name: str) -> None:
    code, op, mechanism = BACKWARD[name]
    bad = diagnosed(code, loss=lambda output, _: output.float().mean()).first_bad
    assert bad is not None
    assert (bad.phase, bad.module, bad.op, bad.mechanism) == ("backward", "core", op, mechanism)
    assert bad.backward_op == "aten.div"


def test_without_operations_it_stops_at_modules() -> None:
    bad = diagnosed(FAULTS["product"][0], operations=False).first_bad
    assert bad is not None
    assert (bad.module, bad.op) == ("core", None)


class Rotary(nn.Module):
    """Multiplies by tables of cosines and sines, whose angles are rounded to the module's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / 10000 ** (torch.arange(0, 32, 2) / 32))

    def forward(self, y: Tensor) -> Tensor:
        angles = torch.arange(y.shape[1]).to(self.inverse)[:, None] * self.inverse
        both = torch.cat([angles, angles], -1)
        return y * both.cos() + y * both.sin()


DRIFTS: dict[str, tuple[Code, str, str]] = {
    "angles": (Rotary(), "aten.mul", "divergence"),
    "difference of sums": (lambda y: (y + 1000) - 1000, "aten.add", "cancellation"),
    "bound that rounds to one": (
        lambda y: torch.log(1 - torch.sigmoid(y * 0 + 12).clamp(1e-4, 1 - 1e-4)).clamp(min=-20) * y,
        "aten.clamp",
        "unrepresentable-constant",
    ),
}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("name", DRIFTS)
def test_a_silent_drift_names_the_operation_that_lost_the_digits(name: str) -> None:
    code, op, mechanism = DRIFTS[name]
    torch.manual_seed(0)
    model = Net(code)
    report = nanprobe.replay(model, torch.randn(2, 400, 32), dtype="bf16", mode="cast")
    drift = report.precisions["bf16"].first_divergence
    assert report.first_bad is None
    assert drift is not None
    assert (drift.module, drift.op, drift.mechanism) == ("core.code" if name == "angles" else "core", op, mechanism)
    assert report.verdict == "precision"


def test_a_drift_within_tolerance_is_none() -> None:
    report = diagnosed(lambda y: (y + 1) - 1, dtype="bf16")
    assert report.precisions["bf16"].first_divergence is None
