"""A decoder as one writes it by hand, with the factory and the loss that gpt.yaml names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and feed-forward, each behind a norm and inside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attn_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, length, width] to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A causal language model with learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits [batch, length, vocabulary] of ``input_ids`` [batch, length]; ``labels`` are for the loss."""
        del labels
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(width: int, depth: int) -> GPT:
    """Return the model; the config's ``kwargs`` arrive here."""
    return GPT(vocabulary=256, context=64, width=width, heads=4, depth=depth)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of the next token; positions labelled -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
