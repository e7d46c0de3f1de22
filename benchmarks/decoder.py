"""The model that the benchmarks run: a plain pre-norm decoder in two sizes, with its weights tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = {"vocabulary": 8192, "width": 512, "heads": 8, "depth": 12}
"""42 million parameters, the model of the speed figures."""

LARGE = {"vocabulary": 8192, "width": 2048, "heads": 16, "depth": 16}
"""823 million parameters, 3.3 GB in FP32, the model of the memory figures."""


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to what it attends to."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and inside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, context: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, length, vocabulary] of ``input_ids`` [batch, length]; ``labels`` are for the loss."""
        del labels
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def small() -> Decoder:
    """Return the model of the speed figures."""
    return Decoder(**SMALL)


def large() -> Decoder:
    """Return the model of the memory figures."""
    return Decoder(**LARGE)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, in FP32."""
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


def batch(samples: int, length: int) -> dict[str, Tensor]:
    """Return random ids and labels [samples, length]."""
    text = torch.randint(SMALL["vocabulary"], (samples, length + 1))
    return {"input_ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}
