"""A small encoder in the manner of T5: RMS norms, a ReLU feed-forward, residuals around both halves of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in FP32 as T5 does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` [..., width]."""
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention over all positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [batch, length, width] plus what it attends to."""
        batch, length, width = x.shape
        normed = self.norm(x)
        q, k, v = (
            projection(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return x + self.o(mixed)


class FeedForward(nn.Module):
    """Norm, widen, ReLU, narrow, residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.wi = nn.Linear(width, hidden, bias=False)
        self.act = nn.ReLU()
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [batch, length, width] plus the feed-forward of it."""
        return x + self.wo(self.act(self.wi(self.norm(x))))


class Block(nn.Module):
    """One encoder block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.ff = FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        return self.ff(self.attention(x))


class Encoder(nn.Module):
    """A stack of blocks and a last norm."""

    def __init__(self, width: int, heads: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.final_norm = RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        for block in self.block:
            x = block(x)
        return self.final_norm(x)


class TokenTagger(nn.Module):
    """Embeds tokens, encodes them, and gives each a tag."""

    def __init__(self, vocabulary: int, tags: int, width: int, heads: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder = Encoder(width, heads, hidden, depth)
        self.tag_head = nn.Linear(width, tags)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, length, tags] of ``input_ids`` [batch, length]; ``labels`` are for the loss."""
        del labels
        return self.tag_head(self.encoder(self.shared(input_ids)))


def build() -> TokenTagger:
    """Return the model of this run, 54 thousand parameters."""
    return TokenTagger(vocabulary=512, tags=16, width=32, heads=4, hidden=128, depth=3)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the tags."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
