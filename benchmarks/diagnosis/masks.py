"""Masks: constants that round to -Inf, rows without an unmasked entry, and products with -Inf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.case import Built, fault
from benchmarks.diagnosis.parts import Call, Do, mean_square, mlp

_LENGTH = 6


def _padded(*, whole: bool) -> Tensor:
    """Return a mask of 1 (attend) and 0 for three samples; sample 1 is padded by two, or throughout."""
    keep = torch.ones(3, _LENGTH)
    keep[1, : _LENGTH if whole else 2] = 0
    return keep


def _model(scores_of: Callable[[Tensor, Tensor], Tensor], probabilities: Callable[[Tensor], Tensor]) -> nn.Module:
    def attend(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return m.out(probabilities(scores_of(scores, keep)) @ v)

    parts = {name: nn.Linear(32, 32) for name in ("q", "k", "v", "out")}

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        return m.head(m.norm(x + m.attn(m.embed(x), keep)))

    return Call(forward, embed=nn.Linear(32, 32), attn=Call(attend, **parts), norm=nn.LayerNorm(32), head=mlp(32))


def _case(
    scores_of: Callable[[Tensor, Tensor], Tensor],
    *,
    whole: bool,
    probabilities: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1),
) -> Built:
    return Built(
        model=_model(scores_of, probabilities),
        batch={"x": torch.randn(3, _LENGTH, 32), "keep": _padded(whole=whole)},
        loss=mean_square,
    )


def _first_sample_only(output: Tensor, batch: Any) -> Tensor:
    return output[0].float().square().mean()


@fault(
    "fp16",
    "transformers#17306",
    "transformers#17433",
    at="attn",
    op="aten.add",
    mechanism="overflow",
    samples=(1,),
    mode="cast",
)
def lowest_value_plus_a_low_score() -> Built:
    """-65504 plus a score of -32 is -Inf in FP16; every key of sample 1 is padding."""

    def scores(s: Tensor, keep: Tensor) -> Tensor:
        low = torch.finfo(s.dtype).min
        return (s * 0 - 32.0) + (1.0 - keep[:, None, :]).to(s.dtype) * low

    return _case(scores, whole=True)


@fault(
    "fp16",
    "NeMo-Automodel#2658",
    at="attn",
    op="aten.add",
    mechanism="overflow",
    samples=(1,),
    precision_related=False,
    mode="cast",
)
@fault(
    "bf16", "NeMo-Automodel#2658", at="attn", op="aten.add", mechanism="overflow", samples=(1,), precision_related=False
)
def two_masks_of_the_lowest_value() -> Built:
    """A causal and a padding mask, each of the lowest finite value, meet: -Inf in every format."""

    def scores(s: Tensor, keep: Tensor) -> Tensor:
        low = torch.finfo(s.dtype).min
        padding = torch.zeros_like(s).masked_fill(keep[:, None, :] == 0, low)
        causal = torch.zeros_like(s).masked_fill(keep[:, None, :] == 0, low)
        return s + (padding + causal)

    return _case(scores, whole=True)


@fault(
    "fp16",
    "pytorch#103963",
    "flax#982",
    at="attn",
    op="aten._softmax",
    mechanism="masked-row",
    samples=(1,),
    precision_related=False,
    mode="cast",
)
@fault(
    "bf16",
    "pytorch#131060",
    at="attn",
    op="aten._softmax",
    mechanism="masked-row",
    samples=(1,),
    precision_related=False,
)
@fault(
    "fp16", "burn#4697", at="attn", op="aten._softmax", mechanism="masked-row", samples=(1,), precision_related=False
)
def row_masked_throughout() -> Built:
    """Every key of sample 1 is filled with -Inf."""
    return _case(lambda s, keep: s.masked_fill(keep[:, None, :] == 0, -math.inf), whole=True)


@fault(
    "bf16",
    "pytorch#103963",
    at="attn",
    op="aten.sub",
    mechanism="masked-row",
    samples=(1,),
    precision_related=False,
    mode="cast",
)
def row_masked_throughout_softmax_by_hand() -> Built:
    """The row's maximum is -Inf, and -Inf - -Inf is NaN."""

    def softmax(s: Tensor) -> Tensor:
        powers = (s - s.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(-1, keepdim=True)

    return _case(lambda s, keep: s.masked_fill(keep[:, None, :] == 0, -math.inf), whole=True, probabilities=softmax)


@fault(
    "fp16",
    "pytorch#41508",
    "pytorch#42323",
    at="attn",
    op="aten._softmax",
    mechanism="masked-row",
    samples=(1,),
    precision_related=False,
)
@fault(
    "bf16",
    "pytorch#41508",
    at="attn",
    op="aten._softmax",
    mechanism="masked-row",
    samples=(1,),
    precision_related=False,
    mode="cast",
)
def multihead_attention_with_weights() -> Built:
    """Sample 1 is padding throughout, and only sample 0 is in the loss."""

    def forward(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        h = m.embed(x)
        return m.head(m.norm(h + m.attn(h, h, h, key_padding_mask=padding, need_weights=True)[0]))

    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = Call(forward, embed=nn.Linear(16, 16), attn=attention, norm=nn.LayerNorm(16), head=mlp(16))
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1] = True
    return Built(model=model, batch={"x": torch.randn(2, 5, 16), "padding": padding}, loss=_first_sample_only)


@fault(
    "fp16",
    "fairseq#3575",
    "linformer#19",
    at="attn",
    op={"aten.mul", "aten.add"},
    mechanism="unrepresentable-constant",
    samples=(1,),
    mode="cast",
)
def constant_of_minus_1e9() -> Built:
    """(1 - keep) x -1e9 is -Inf in FP16; every key of sample 1 is padding."""
    return _case(lambda s, keep: s + (1.0 - keep[:, None, :]).to(s.dtype) * -1e9, whole=True)


@fault("fp16", "kospeech#37", at="attn", op="aten.mul", mechanism="unrepresentable-constant", samples=(1,), mode="cast")
def constant_subtracted_where_masked() -> Built:
    """(1 - keep) x 1e10 is Inf in FP16, and is subtracted from the scores of sample 1."""
    return _case(lambda s, keep: s - (1.0 - keep[:, None, :]).to(s.dtype) * 1e10, whole=True)


@fault(
    "fp16",
    "onnx#8068",
    at="attn",
    op="aten.mul",
    mechanism="invalid-operation",
    precision_related=False,
    samples=(0, 1, 2),
    mode="cast",
)
@fault(
    "bf16",
    "onnx#8068",
    at="attn",
    op="aten.mul",
    mechanism="invalid-operation",
    precision_related=False,
    samples=(0, 1, 2),
)
def zero_times_minus_infinity() -> Built:
    """(1 - keep) x -Inf is NaN wherever a key may be attended to."""
    return _case(lambda s, keep: s + (1.0 - keep[:, None, :]).to(s.dtype) * -math.inf, whole=False)


@fault(
    "fp16",
    "transformers#35332",
    "DeBERTa#77",
    at="attn",
    op="aten._to_copy",
    mechanism="unrepresentable-constant",
    samples=(1,),
    mode="cast",
)
@fault(
    "bf16",
    "transformers#35332",
    at="attn",
    op="aten._to_copy",
    mechanism="unrepresentable-constant",
    samples=(1,),
    mode="cast",
)
def lowest_value_of_fp32_converted() -> Built:
    """A mask of FP32's lowest value is -Inf in both half formats; every key of sample 1 is padding."""

    def scores(s: Tensor, keep: Tensor) -> Tensor:
        bias = torch.zeros(s.shape).masked_fill(keep[:, None, :] == 0, torch.finfo(torch.float32).min)
        return s * 0 + bias.to(s.dtype)

    return _case(scores, whole=True)


@fault(
    "fp16",
    "pytorch#101967",
    at="pool",
    op={"aten.mul"},
    mechanism="invalid-operation",
    precision_related=False,
    samples=(2,),
    mode="cast",
)
def infinite_entry_masked_by_a_product() -> Built:
    """A distance of Inf stands for "no edge", and multiplying it with zero does not remove it."""

    def pool(x: Tensor, keep: Tensor) -> Tensor:
        distance = torch.zeros_like(x).masked_fill(keep == 0, math.inf)
        return x + distance * keep

    keep = torch.ones(4, 16)
    keep[2, 3:5] = 0
    model = Call(lambda m, x, keep: m.head(m.pool(m.embed(x), keep)), embed=nn.Linear(16, 16), pool=Do(pool),
                 head=mlp(16))  # fmt: skip
    return Built(model=model, batch={"x": torch.randn(4, 16), "keep": keep})
