"""A convolutional autoencoder and its loss."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def down(inputs: int, outputs: int) -> nn.Sequential:
    """Halve height and width."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def up(inputs: int, outputs: int) -> nn.Sequential:
    """Double height and width."""
    return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 2, stride=2), nn.BatchNorm2d(outputs), nn.ReLU())


class Autoencoder(nn.Module):
    """Squeezes images through a narrow middle and draws them again."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(down(channels, width), down(width, 2 * width), down(2 * width, 4 * width))
        self.decoder = nn.Sequential(up(4 * width, 2 * width), up(2 * width, width), up(width, width))
        self.to_image = nn.Conv2d(width, channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return the image [batch, channels, height, width] as it comes back."""
        return self.to_image(self.decoder(self.encoder(image))).sigmoid()


def build() -> Autoencoder:
    """Return the model."""
    return Autoencoder(channels=3, width=16)


def reconstruction(output: Tensor, batch: Tensor) -> Tensor:
    """Return the mean squared difference from the image, which is the whole batch."""
    return F.mse_loss(output.float(), batch.float())
