"""A small decoder in the manner of Llama: RMS norms, rotary positions, a gated feed-forward with its product inline."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in FP32 and handed on in the type that came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` [..., width]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the positions, computed in FP32 from a table that no cast touches."""

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_width, self.base = head_width, base

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [length, head width] for ``x`` [batch, length, ...], in its type."""
        steps = torch.arange(0, self.head_width, 2, dtype=torch.float32, device=x.device)
        angles = torch.outer(
            torch.arange(x.shape[1], dtype=torch.float32, device=x.device), self.base ** (-steps / self.head_width)
        )
        doubled = torch.cat([angles, angles], dim=-1)
        return doubled.cos().to(x.dtype), doubled.sin().to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [batch, heads, length, head width] by its positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``x`` [batch, length, width] to what it attends to."""
        batch, length, width = x.shape
        q, k, v = (
            projection(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, *positions), rotated(k, *positions)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): the product belongs to no child, only to this module's own code."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and gated feed-forward, each behind a norm and inside a residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = SelfAttention(width, heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = GatedMLP(width, hidden)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.rotary_emb = RotaryEmbedding(width // heads)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] of ``input_ids`` [batch, length]."""
        x = self.embed_tokens(input_ids)
        positions = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


def build() -> Decoder:
    """Return the model of this run, 70 thousand parameters."""
    return Decoder(vocabulary=256, width=32, heads=2, hidden=96, depth=4)
