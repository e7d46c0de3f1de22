"""Sums that overflow before they are divided, sums that stop growing, and reductions over nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.diagnosis.case import ANY, Built, fault
from benchmarks.diagnosis.parts import Call, Do, fixed, mlp


class _Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = Do(lambda x: x.flatten(2).sum(-1) / (x.shape[2] * x.shape[3]))
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(self.pool(x)))[:, :, None, None]


@fault(
    "fp16",
    "pytorch#43992",
    "mmdetection#9670",
    at="se.pool",
    op="aten.sum",
    mechanism="overflow",
    samples=(0, 2),
    mode="cast",
)
def squeeze_and_excite() -> Built:
    """4,096 positions of 20 in samples 0 and 2 sum to 8.2e4; those of sample 1 hold 1."""
    x = torch.full((3, 4, 64, 64), 20.0)
    x[1] = 1.0
    model = Call(lambda m, x: m.head(m.se(m.stem(x))), stem=nn.Identity(), se=_Squeeze(4), head=nn.Conv2d(4, 2, 1))
    return Built(model=model, batch=x)


@fault("fp16", at="count", op="aten.cumsum", mechanism="overflow", samples=(1,), mode="cast")
def cumulative_sum() -> Built:
    """Sample 1 adds 600 two hundred times: 1.2e5."""
    x = torch.ones(3, 200, 4)
    x[1] = 600.0
    model = Call(lambda m, x: m.head(m.norm(m.count(m.project(x)))), project=fixed(nn.Linear(4, 4), 1.0),
                 count=Do(lambda t: t.cumsum(1)), norm=nn.LayerNorm(4), head=nn.Linear(4, 4))  # fmt: skip
    return Built(model=model, batch=x)


@fault("fp16", at="energy", op="aten.exp", mechanism="overflow", samples=(2,), mode="cast")
def log_of_a_sum_of_exponentials() -> Built:
    """A logit of 13 in sample 2 is exponentiated by hand: 4.4e5."""
    x = torch.randn(4, 8).clamp(-2, 2)
    x[2, 1] = 13.0
    model = Call(lambda m, x: m.head(m.energy(m.logits(x))), logits=fixed(nn.Linear(8, 8), 1.0),
                 energy=Do(lambda t: t.exp().sum(-1, keepdim=True).log()), head=nn.Linear(1, 4))  # fmt: skip
    return Built(model=model, batch=x)


@fault(
    "bf16",
    "transformers#8561",
    "pytorch/xla#2425",
    at="meter",
    op="aten.add",
    mechanism="absorption",
    samples=ANY,
    silent=True,
    mode="cast",
)
def running_total_in_bf16() -> Built:
    """Adding 1 to a BF16 total stops at 256, where half the spacing is 1; 400 additions make 400 in FP32."""

    def total(x: Tensor) -> Tensor:
        result = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            result = result + x[:, step]
        return result

    model = Call(lambda m, x: m.head(m.meter(m.project(x)) * 0.01), project=fixed(nn.Linear(4, 4), 1.0),
                 meter=Do(total), head=mlp(4))  # fmt: skip
    return Built(model=model, batch=torch.ones(3, 400, 4))


@fault("fp16", "prime-rl#568", at="meter", op="aten.add", mechanism="absorption", samples=ANY, silent=True, mode="cast")
def running_total_in_fp16() -> Built:
    """Adding 1 to an FP16 total of 2048 leaves it there; 1,000 additions make 3,048 in FP32."""

    def total(x: Tensor) -> Tensor:
        result = torch.full_like(x[:, 0], 2048.0)
        for step in range(x.shape[1]):
            result = result + x[:, step]
        return result

    model = Call(lambda m, x: m.head(m.meter(m.project(x)) * 0.001), project=fixed(nn.Linear(4, 4), 1.0),
                 meter=Do(total), head=mlp(4))  # fmt: skip
    return Built(model=model, batch=torch.ones(3, 1000, 4))


@fault(
    "bf16",
    at="detrend",
    op={"aten.sub", "aten.add"},
    mechanism={"absorption", "cancellation"},
    samples=ANY,
    silent=True,
    mode="cast",
)
def offset_that_swallows_the_signal() -> Built:
    """1000 + x - 1000: the spacing of BF16 at 1000 is 4, and all of x is below."""
    model = Call(lambda m, x: m.head(m.detrend(m.project(x))), project=fixed(nn.Linear(16, 16), 1.0),
                 detrend=Do(lambda t: (t + 1000.0) - 1000.0), head=mlp(16))  # fmt: skip
    return Built(model=model, batch=torch.rand(3, 16) + 0.5)


@fault(
    "fp16",
    "pytorch#70348",
    "OpenRLHF#583",
    at=None,
    op="aten.nll_loss_forward",
    mechanism="empty-reduction",
    samples=None,
    precision_related=False,
    phase="loss",
)
@fault(
    "bf16",
    "pytorch#75181",
    at=None,
    op="aten.nll_loss_forward",
    mechanism="empty-reduction",
    samples=None,
    precision_related=False,
    phase="loss",
    mode="cast",
)
def every_label_ignored() -> Built:
    """All labels of the batch are -100: a mean over nothing."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    model = Call(lambda m, ids, labels: m.head(m.norm(m.embed(ids))), embed=nn.Embedding(30, 16), norm=nn.LayerNorm(16),
                 head=nn.Linear(16, 30))  # fmt: skip
    batch = {"ids": torch.randint(0, 30, (3, 5)), "labels": torch.full((3, 5), -100)}
    return Built(model=model, batch=batch, loss=loss)


@fault(
    "fp16",
    "trl#1033",
    "open-instruct#1685",
    at=None,
    op="aten.div",
    mechanism={"empty-reduction", "domain-error"},
    samples=(2,),
    precision_related=False,
    phase="loss",
)
@fault(
    "bf16",
    "NeMo-RL#158",
    at=None,
    op="aten.div",
    mechanism={"empty-reduction", "domain-error"},
    samples=(2,),
    precision_related=False,
    phase="loss",
    mode="cast",
)
def masked_mean_without_a_token() -> Built:
    """The prompt fills all of sample 2, whose completion mask is zero: 0 / 0."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        keep = batch["completion"]
        value = output.float().square().mean(-1)
        return ((value * keep).sum(-1) / keep.sum(-1)).mean()

    keep = torch.ones(4, 6)
    keep[2] = 0
    model = Call(lambda m, x, completion: m.body(x), body=mlp(16))
    return Built(model=model, batch={"x": torch.randn(4, 6, 16), "completion": keep}, loss=loss)


@fault(
    "fp16", at="pool", op="aten.mean", mechanism="empty-reduction", samples=None, precision_related=False, mode="cast"
)
def mean_of_a_selection_of_nothing() -> Built:
    """No box of the batch has a score above 0.5, and the mean over those that have is NaN."""

    def pool(x: Tensor, score: Tensor) -> Tensor:
        return x + x[score > 0.5].mean()

    model = Call(lambda m, x, score: m.head(m.pool(m.encode(x), score)), encode=nn.Linear(8, 8), pool=Do(pool),
                 head=mlp(8))  # fmt: skip
    return Built(model=model, batch={"x": torch.randn(5, 8), "score": torch.zeros(5)})


@fault(
    "bf16", at="norm", op={"aten.std", "aten.var"}, mechanism="empty-reduction", samples=ANY, precision_related=False
)
def standard_deviation_over_a_batch_of_one() -> Built:
    """torch.std over a batch dimension of one divides by zero degrees of freedom."""
    norm = Do(lambda t: (t - t.mean(0)) / (t.std(0) + 1e-3))
    model = Call(lambda m, x: m.head(m.norm(m.project(x))), project=nn.Linear(8, 8), norm=norm, head=mlp(8))
    return Built(model=model, batch=torch.randn(1, 8))
