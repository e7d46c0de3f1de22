"""A small vision transformer whose attention is written out: raw scores first, scaled afterwards."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F


class RawScores(nn.Module):
    """Every query's dot product with every key, not yet scaled."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scores [batch, heads, length, length] of ``q`` and ``k`` [batch, heads, length, head width]."""
        return q @ k.transpose(-2, -1)


class Attention(nn.Module):
    """Multi-head self-attention; the scale comes after the product of queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.scores = RawScores()
        self.softmax = nn.Softmax(dim=-1)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to what it attends to."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.softmax(self.scores(q, k) / math.sqrt(q.shape[-1]))
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Widen, GELU, narrow."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """One transformer block with its norms in front."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, blocks, mean over patches, classes."""

    def __init__(self, classes: int, width: int, heads: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        """Return logits [batch, classes] of ``image`` [batch, 3, 16, 16]; ``label`` is for the loss."""
        del label
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def build() -> VisionTransformer:
    """Return the model of this run, 60 thousand parameters."""
    return VisionTransformer(classes=10, width=48, heads=2, hidden=96, depth=3)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the classes."""
    return F.cross_entropy(logits, batch["label"])
