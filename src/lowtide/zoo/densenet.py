"""DenseNet-121 (Huang et al., 2016): every layer reads all the layers before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowtide.zoo.wideresnet import head


class DenseNet(nn.Module):
    """Images (batch, channels, height, width) of at least 32x32 to logits (batch, classes).

    ``blocks`` are the layers of each dense block, ``growth`` the channels that each layer adds. The defaults
    are DenseNet-121: 7,978,856 parameters. Concatenations are kept for the backward pass, as in torchvision.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        channels: int = 3,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        wide = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(channels, wide, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        for index, layers in enumerate(blocks):
            if index > 0:
                self.blocks.append(_transition(wide, wide // 2))
                wide //= 2
            self.blocks.append(nn.Sequential(*(DenseLayer(wide + i * growth, growth) for i in range(layers))))
            wide += layers * growth
        self.head = head(wide, classes)
        self.apply(_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class DenseLayer(nn.Module):
    """Append ``growth`` new channels to the input's."""

    def __init__(self, wide: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, 4 * growth, kernel_size=1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, kernel_size=3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], dim=1)


def _transition(wide_in: int, wide_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(wide_in),
        nn.ReLU(inplace=True),
        nn.Conv2d(wide_in, wide_out, kernel_size=1, bias=False),
        nn.AvgPool2d(2),
    )


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
