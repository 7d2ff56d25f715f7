"""Small models and losses that tests of all folders share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Call(nn.Module):
    """A model from a function of itself and its input, with modules and parameters by name."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Then(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class InTurn(nn.Module):
    """Layers in a list, of which the forward pass calls one after the other, by a function if there is one."""

    def __init__(self, *layers: nn.Module, each: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self.each = nn.ModuleList(layers), each

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.each is None else self.each(layer, x)
        return x


def blocks(count: int = 4, width: int = 24, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Blocks of a linear layer and an activation, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), act()) for _ in range(count)))


def layers(count: int = 4, width: int = 16, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """The layers of such blocks in a row."""
    return nn.Sequential(*(layer for block in blocks(count, width, act) for layer in block.children()))


def attention(width: int = 8) -> Call:
    """A block whose memory grows with the square of a length, and not with the number of inputs."""

    def attend(m: Any, x: Tensor) -> Tensor:
        return x + torch.softmax(m.q(x) @ x.transpose(1, 2), -1) @ m.v(x)

    return Call(attend, q=nn.Linear(width, width), v=nn.Linear(width, width))


def standardized(x: Tensor) -> Tensor:
    """Statistics by hand, over the sequence."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)


def squares(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()
