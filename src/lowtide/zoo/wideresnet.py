"""Wide residual networks (Zagoruyko and Komodakis, 2016) for 32x32 images."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.errors import WorkloadError


class WideResNet(nn.Module):
    """WRN-depth-widen: images (batch, channels, 32, 32) to logits (batch, classes); no dropout.

    Pre-activation blocks: batch norm keeps its input, the convolution keeps the (in-place) ReLU's output, and
    nothing else is saved. WRN-28-2 has 1,467,610 parameters for 10 classes.
    """

    def __init__(self, *, depth: int = 28, widen: int = 2, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise WorkloadError(f"There is no WideResNet of depth {depth}", hint="Choose 10, 16, 22, 28, 34, ...")
        self.stem = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.stages = nn.Sequential()
        wide = 16
        for inner, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            first = Block(wide, inner, stride)
            self.stages.append(nn.Sequential(first, *(Block(inner, inner, 1) for _ in range(blocks - 1))))
            wide = inner
        self.head = nn.Sequential(
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(wide, classes),
        )
        self.apply(_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class Block(nn.Module):
    """Norm, ReLU, convolution, twice. Where the shape changes, the shortcut convolves the first ReLU."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.pre = nn.Sequential(nn.BatchNorm2d(wide_in), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(wide_in, wide_out, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(wide_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide_out, wide_out, kernel_size=3, padding=1, bias=False),
        )
        self.shortcut = (
            None
            if wide_in == wide_out and stride == 1
            else nn.Conv2d(wide_in, wide_out, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = self.pre(x)
        out = self.body(active)
        out += x if self.shortcut is None else self.shortcut(active)
        return out


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
