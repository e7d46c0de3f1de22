"""A small convolutional network that predicts depth from an image, with a skip connection around its middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvBlock(nn.Module):
    """Convolution, group norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        return self.act(self.norm(self.conv(x)))


class DepthNet(nn.Module):
    """Down, middle, up, with the first features joined to the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = ConvBlock(3, width)
        self.down = ConvBlock(width, 2 * width, stride=2)
        self.middle = ConvBlock(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.merge = ConvBlock(2 * width, width)
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, x: Tensor, depth: Tensor | None = None) -> Tensor:
        """Return depth [batch, 1, height, width] of ``x`` [batch, 3, height, width]; ``depth`` is for the loss."""
        del depth
        early = self.stem(x)
        late = self.up(self.middle(self.down(early)))
        return self.head(self.merge(torch.cat([early, late], dim=1)))


def build() -> DepthNet:
    """Return the model of this run, 21 thousand parameters."""
    return DepthNet(width=16)


def loss(predicted: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean absolute error of the depth."""
    return F.l1_loss(predicted, batch["depth"])
