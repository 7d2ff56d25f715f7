"""U-Net (Ronneberger et al., 2015): a class for every pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, classes, height, width).

    Sides are multiples of 16. There are five levels: ``width`` channels at the top, twice as many at each level below.
    Convolutions are padded, without bias, and followed by batch norm. Transposed convolutions lead up. 3 channels and 2
    classes have 31,037,698 parameters, one class 31,037,633: the usual counts for this variant.
    """

    def __init__(self, *, channels: int = 3, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(
            _two_convs(wide_in, wide) for wide_in, wide in zip([channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(Up(2 * wide, wide) for wide in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](x)
        skips: list[Tensor] = []
        for down in self.down[1:]:
            skips.append(x)
            x = down(self.pool(x))
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


class Up(nn.Module):
    """Double the sides, halve the channels, and mix with the skip of the same size."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(wide_in, wide_out, kernel_size=2, stride=2)
        self.mix = _two_convs(2 * wide_out, wide_out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([skip, self.grow(x)], dim=1))


def _two_convs(wide_in: int, wide_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(wide_in, wide_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(wide_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(wide_out, wide_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(wide_out),
        nn.ReLU(inplace=True),
    )
