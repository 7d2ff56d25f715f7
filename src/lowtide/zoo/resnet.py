"""ResNet (He et al., 2015) and ResNeXt (Xie et al., 2016), for images and for one-dimensional signals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lowtide.errors import WorkloadError


class ResNet(nn.Module):
    """A residual network: a stem, four stages of blocks, a linear head.

    Takes (batch, channels, height, width), or (batch, channels, samples) with ``dims=1``; returns logits
    (batch, classes). The layers and the in-place ReLUs are torchvision's, so parameters and memory are too.
    ``depth`` is 18, 34, 50, 101 or 152. From 50 on, ``groups=32`` with ``group_width`` 4 or 8 is a ResNeXt.
    ``width`` is the stem's: 64 in the paper, less for a small model of the same shape.
    """

    def __init__(
        self,
        depth: int,
        *,
        dims: int = 2,
        channels: int = 3,
        classes: int = 1000,
        width: int = 64,
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        _check(depth, dims, groups)
        layers = _LAYERS[dims]
        self.stem = nn.Sequential(
            layers.conv(channels, width, kernel_size=7, stride=2, padding=3, bias=False),
            layers.norm(width),
            nn.ReLU(inplace=True),
            layers.max_pool(kernel_size=3, stride=2, padding=1),
        )
        self.stages = nn.Sequential()
        wide = width
        for stage, count in enumerate(_BLOCKS[depth]):
            inner = width * 2**stage
            blocks = nn.Sequential()
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                if depth < 50:
                    widths, kernels = (wide, inner, inner), (3, 3)
                else:
                    grouped = inner * group_width // 64 * groups
                    widths, kernels = (wide, grouped, grouped, 4 * inner), (1, 3, 1)
                blocks.append(Residual(layers, widths, kernels, stride, groups))
                wide = widths[-1]
            self.stages.append(blocks)
        self.head = nn.Sequential(layers.mean_pool(1), nn.Flatten(), nn.Linear(wide, classes))
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


@dataclass(frozen=True)
class Layers:
    """The layers of a ResNet that know the number of dimensions."""

    conv: type[nn.Conv1d] | type[nn.Conv2d]
    norm: type[nn.BatchNorm1d] | type[nn.BatchNorm2d]
    max_pool: type[nn.MaxPool1d] | type[nn.MaxPool2d]
    mean_pool: type[nn.AdaptiveAvgPool1d] | type[nn.AdaptiveAvgPool2d]


class Residual(nn.Module):
    """Convolutions of these widths and kernels, each with batch norm, and a shortcut.

    Kernels of 3 and 3 are the block of ResNet-18 and 34. Kernels of 1, 3 and 1 are the bottleneck of deeper networks.
    The first kernel of 3 strides, and has the groups of a ResNeXt.
    """

    def __init__(self, layers: Layers, widths: Sequence[int], kernels: Sequence[int], stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for i, kernel in enumerate(kernels):
            first = i == kernels.index(3)
            conv = layers.conv(
                widths[i],
                widths[i + 1],
                kernel_size=kernel,
                stride=stride if first else 1,
                padding=kernel // 2,
                groups=groups if first else 1,
                bias=False,
            )
            self.body.extend([conv, layers.norm(widths[i + 1]), nn.ReLU(inplace=True)])
        last = self.body.pop(-1)
        self.shortcut = nn.Identity()
        if widths[0] != widths[-1] or stride != 1:
            conv = layers.conv(widths[0], widths[-1], kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, layers.norm(widths[-1]))
        self.act = last

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.act(out)


_LAYERS = {
    1: Layers(nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d),
    2: Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d),
}
_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def initialise(module: nn.Module) -> None:
    """Draw the weights of a convolution as He et al. do."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _check(depth: int, dims: int, groups: int) -> None:
    if depth not in _BLOCKS:
        raise WorkloadError(f"There is no ResNet of depth {depth}", hint=f"Choose one of {_list(_BLOCKS)}.")
    if dims not in _LAYERS:
        raise WorkloadError(f"A ResNet cannot have dims={dims}", hint=f"Choose one of {_list(_LAYERS)}.")
    if groups > 1 and depth < 50:
        raise WorkloadError(f"A ResNet of depth {depth} has no groups", hint="ResNeXt starts at depth 50.")


def _list(choices: Iterable[int]) -> str:
    return ", ".join(map(str, choices))
