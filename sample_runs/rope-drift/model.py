"""A small decoder with rotary positions whose table of inverse frequencies is a buffer, so that a cast converts it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions, in the type of the buffer."""

    inv_freq: Tensor

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        steps = torch.arange(0, head_width, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", base ** (-steps / head_width), persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [length, head width] of the positions from 0."""
        positions = torch.arange(length, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions, self.inv_freq)
        doubled = torch.cat([angles, angles], dim=-1)
        return doubled.cos(), doubled.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [batch, heads, length, head width] by its positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``x`` [batch, length, width] to what it attends to."""
        batch, length, width = x.shape
        q, k, v = self.qkv_proj(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q, *positions), rotated(k, *positions), v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and inside a residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        x = x + self.attn(self.attn_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class LongContextDecoder(nn.Module):
    """A causal language model."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.rotary_emb = RotaryEmbedding(width // heads)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] of ``input_ids`` [batch, length]."""
        x = self.embed_tokens(input_ids)
        positions = self.rotary_emb(input_ids.shape[1])
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


def build() -> LongContextDecoder:
    """Return the model of this run, 69 thousand parameters."""
    return LongContextDecoder(vocabulary=128, width=48, heads=2, hidden=96, depth=3)
