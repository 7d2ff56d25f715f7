"""Wide residual networks: for 32x32 images (Zagoruyko and Komodakis, 2016), and WRN-38 (Wu et al., 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.errors import WorkloadError
from lowtide.zoo.resnet import initialise


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
            first = Block(wide, (inner, inner), stride)
            self.stages.append(nn.Sequential(first, *(Block(inner, (inner, inner)) for _ in range(blocks - 1))))
            wide = inner
        self.head = head(wide, classes)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class WiderResNet(nn.Module):
    """WRN-38 of "Wider or Deeper": images (batch, channels, height, width) to logits (batch, classes).

    Six stages of pre-activation blocks; the last two are one bottleneck each. A max pool halves the image before
    each stage but the last: the form that In-Place ABN trained on ImageNet, without dropout. ``width`` is the
    stem's, and the stages' widths follow it: 64 in the paper. 109,167,912 parameters for 1,000 classes.
    """

    def __init__(
        self,
        *,
        blocks: tuple[int, ...] = (3, 3, 6, 3, 1, 1),
        width: int = 64,
        channels: int = 3,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        if len(blocks) != len(_WIDER) or min(blocks) < 1:
            raise WorkloadError(
                f"blocks={blocks} does not fit a WRN-38",
                hint="Give six counts of at least 1, such as 3, 3, 6, 3, 1, 1.",
            )
        self.stem = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
        self.stages = nn.Sequential()
        wide = width
        for stage, (count, multiples) in enumerate(zip(blocks, _WIDER, strict=True)):
            widths = tuple(width * multiple for multiple in multiples)
            parts: list[nn.Module] = [nn.MaxPool2d(kernel_size=3, stride=2, padding=1)] if stage < 5 else []
            for _ in range(count):
                parts.append(Block(wide, widths))
                wide = widths[-1]
            self.stages.append(nn.Sequential(*parts))
        self.head = head(wide, classes)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


class Block(nn.Module):
    """Norm, ReLU, convolution, as often as there are ``widths``: two 3x3, or a bottleneck of 1x1, 3x3, 1x1.

    The first convolution strides. If the shape changes, the shortcut convolves the first ReLU's output.
    """

    def __init__(self, wide_in: int, widths: tuple[int, ...], stride: int = 1) -> None:
        super().__init__()
        self.pre = nn.Sequential(nn.BatchNorm2d(wide_in), nn.ReLU(inplace=True))
        kernels = {2: (3, 3), 3: (1, 3, 1)}[len(widths)]
        self.body = nn.Sequential(_conv(wide_in, widths[0], kernels[0], stride))
        for inner, wide, kernel in zip(widths, widths[1:], kernels[1:], strict=False):
            self.body.extend([nn.BatchNorm2d(inner), nn.ReLU(inplace=True), _conv(inner, wide, kernel)])
        wide_out = widths[-1]
        self.shortcut = None if wide_in == wide_out and stride == 1 else _conv(wide_in, wide_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.pre(x)
        out = self.body(active)
        out += x if self.shortcut is None else self.shortcut(active)
        return out


# Widths of each stage's convolutions, in widths of the stem: 128 is 2 times 64.
_WIDER = ((2, 2), (4, 4), (8, 8), (8, 16), (8, 16, 32), (16, 32, 64))


def _conv(wide_in: int, wide_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(wide_in, wide_out, kernel_size=kernel, stride=stride, padding=kernel // 2, bias=False)


def head(wide: int, classes: int) -> nn.Sequential:
    """Norm, ReLU, the mean over the image, and a linear layer."""
    return nn.Sequential(
        nn.BatchNorm2d(wide),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(wide, classes),
    )
