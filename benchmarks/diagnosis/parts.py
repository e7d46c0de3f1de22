"""The healthy parts that the cases are put together from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "Do", "Residual", "big_rows", "fixed", "mean_square", "mlp"]


class Do(nn.Module):
    """A leaf that computes a function of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Call(nn.Module):
    """A module of named parts, with a forward of (module, ...) given as a function."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Residual(nn.Module):
    """x + inner(x), added in the block's own code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def mlp(width: int = 32, depth: int = 2) -> nn.Sequential:
    """Healthy layers."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def fixed(layer: nn.Linear, weight: Tensor | float, bias: Tensor | float = 0.0) -> nn.Linear:
    """Give a linear layer these values; a number stands for a multiple of the identity (weight) or for all (bias)."""
    with torch.no_grad():
        if isinstance(weight, Tensor):
            layer.weight.copy_(weight)
        else:
            layer.weight.copy_(weight * torch.eye(*layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.as_tensor(bias).expand_as(layer.bias))
    return layer


def big_rows(*shape: int, rows: tuple[int, ...], factor: float) -> Tensor:
    """Normal numbers, clipped to 2 and with the named samples multiplied by ``factor``."""
    x = torch.randn(*shape).clamp(-2, 2)
    x[list(rows)] *= factor
    return x


def mean_square(output: Any, batch: Any) -> Tensor:
    """A loss for models that return one tensor."""
    return output.float().square().mean()
