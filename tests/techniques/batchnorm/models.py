"""Models in the ways that people write batch norm and activation; each is small, and most are four channels wide."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def image(channels: int = 4, *, dims: int = 2, side: int = 6) -> Tensor:
    return torch.randn(3, channels, *[side] * dims, dtype=torch.float64)


def conv(wide_in: int = 4, wide_out: int = 4) -> nn.Conv2d:
    return nn.Conv2d(wide_in, wide_out, kernel_size=3, padding=1, bias=False)


class HardSwish(nn.Module):
    """As in many copies of MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = HardSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class HardSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + 3) / 6


class ResNetBlock(nn.Module):
    """torchvision's: one ReLU for all."""

    def __init__(self, wide: int = 4, *, downsample: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(wide, wide), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = conv(wide, wide), nn.BatchNorm2d(wide)
        self.downsample = nn.Sequential(conv(wide, wide), nn.BatchNorm2d(wide)) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Shifted(nn.Module):
    """relu(bn(conv(x)) + r), with an r that is no map like x."""

    def __init__(self, residual: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.end = conv(), nn.BatchNorm2d(4), conv()
        self.bias, self.embed = nn.Parameter(torch.randn(4, 1, 1)), nn.Linear(4, 4)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.relu(self.bn(self.conv(x)) + self.residual(self, x)).reshape(-1, 4, 6, 6))


class TwoEnds(nn.Module):
    """relu(bn(conv(x)) + bn(conv(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(conv(), nn.BatchNorm2d(4))
        self.right = nn.Sequential(conv(), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.right(x) + self.left(x))


class Written(nn.Module):
    """The batch norm's input is written to before the residual is added; it can only be evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.bn(x)
        return torch.relu(y + torch.tanh_(x))


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class EndsElsewhere(nn.Module):
    """Batch norms at the end of a module, whose activation is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = ConvNorm()
        self.b = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), ConvNorm())
        self.c = nn.Sequential(ConvNorm(), nn.ReLU())
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = self.act(x + self.b(x))
        return self.c(x)


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1, self.bn2, self.conv2 = nn.BatchNorm2d(4), conv(), nn.BatchNorm2d(4), conv()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + x


class DenseLayer(nn.Module):
    """torchvision's: it takes a tensor or a list of them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = nn.BatchNorm2d(wide), nn.ReLU(inplace=True), conv(wide, 4)
        self.norm2, self.relu2, self.conv2 = nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv(4, 2)
        self.drop_rate = 0.5
        self.memory_efficient = False

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def any_requires_grad(self, inputs: list[Tensor]) -> bool:
        return any(tensor.requires_grad for tensor in inputs)

    def forward(self, input: Tensor | list[Tensor]) -> Tensor:
        previous = [input] if isinstance(input, Tensor) else input
        if self.memory_efficient and self.any_requires_grad(previous):
            raise NotImplementedError
        new = self.conv2(self.relu2(self.norm2(self.bn_function(previous))))
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return new


class DenseBlock(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({f"layer{i}": DenseLayer(4 + 2 * i) for i in range(3)})

    def forward(self, first: Tensor) -> Tensor:
        features = [first]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Excited(nn.Module):
    """Squeeze and excitation, with the helper modules that timm puts between batch norm and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.drop, self.act1 = conv(), nn.BatchNorm2d(4), nn.Identity(), nn.SiLU(inplace=True)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
        self.excite = nn.Conv2d(2, 4, 1)
        self.conv3, self.bn3 = conv(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.drop(self.bn1(self.conv1(x))))
        out = out * torch.sigmoid(self.excite(self.squeeze(out)))
        return torch.relu(self.bn3(self.conv3(out)) + x)


class Decoder(nn.Module):
    """An optional skip, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.conv2 = nn.LazyConv2d(4, 3, padding=1), nn.BatchNorm2d(4), conv()

    def forward(self, x: Tensor, skip: Tensor | None = None, *, normal: bool = True) -> Tensor:
        if skip is not None:
            x = torch.cat([x, skip], 1)
        x = self.bn(self.conv1(x))
        return self.conv2(F.relu(x) if normal else torch.tanh(x))


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(4), conv()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]] | Tensor:
        out = F.relu(self.bn(sum(inputs)))
        return self.conv(out)


class Taps(nn.Module):
    """A nn.Sequential as a list of layers, whose outputs are tapped."""

    def __init__(self, tap: int) -> None:
        super().__init__()
        self.features = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.BatchNorm2d(4), nn.ReLU())
        self.tap = tap

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        taps: list[Tensor] = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i == self.tap:
                taps.append(x * 2)
        return (*taps, x)


class Switched(nn.Module):
    """Behaviour that depends on plain attributes and on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.end, self.aux = conv(), nn.BatchNorm2d(4), conv(), nn.BatchNorm2d(4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = self.end(self.scale * F.relu(self.bn(self.conv(x))))
        return (out, torch.tanh(self.aux(out))) if self.training else out


class Block(nn.Module):
    """A block whose forward is given."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn, self.relu, self.end = conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()
        self.run = run
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def applied(function: Callable[[Tensor], Tensor]) -> Block:
    """conv(function(bn(conv(x))))."""
    return Block(lambda self, x: self.end(function(self.bn(self.conv(x)))))


def joined(add: Callable[[Tensor, Tensor], Tensor]) -> Block:
    """conv(relu(bn(conv(x)) + 2 * x)), the sum given."""
    return Block(lambda self, x: self.end(F.relu(add(self.bn(self.conv(x)), 2 * x))))


def decides(self: Any, x: Tensor) -> Tensor:
    y = self.relu(self.bn(self.conv(x)))
    return y if x.sum() > 0 else -y


def draws(self: Any, x: Tensor) -> Tensor:
    y = self.relu(self.bn(self.conv(x)))
    return y if random.random() < 2 else x


def draws_tensors(self: Any, x: Tensor) -> Tensor:
    y = self.relu(self.bn(self.conv(x)))
    return y if torch.rand(1).item() < 2 else x


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return self.relu(self.bn(self.conv(x)))


def freezes(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.conv(x)
    return self.relu(self.bn(x))


def recomputes(self: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: self.relu(self.bn(self.conv(x))), x, use_reentrant=False)


def reads_twice(self: Any, x: Tensor) -> Tensor:
    y = self.bn(self.conv(x))
    return self.relu(y) + y


def calls_twice(self: Any, x: Tensor) -> Tensor:
    return self.relu(self.bn(self.relu(self.bn(self.conv(x)))))


def softens(self: Any, x: Tensor) -> Tensor:
    return F.softmax(self.bn(self.conv(x)), 1)


def asks_the_type(self: Any, x: Tensor) -> Tensor:
    y = self.conv(x)
    return self.relu(self.bn(y if isinstance(y, Tensor) else y[0]))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.mean() > 0)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def build() -> nn.Sequential:
    act = nn.PReLU()
    blocks = ResNetBlock(downsample=True), EndsElsewhere(), PreActivation()
    return nn.Sequential(conv(), nn.BatchNorm2d(4), act, *blocks, act)
