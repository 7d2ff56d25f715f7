"""LeNet-5 for 28x28 digits (LeCun et al., 1998), with or without batch norm."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions and three linear layers: images (batch, channels, 28, 28) to logits (batch, classes).

    ReLU and max pooling, as LeNet is written today. Without ``norm`` it has the 61,706 parameters of LeNet-5;
    with it, a batch norm follows each layer but the last: 62,158 parameters.
    """

    def __init__(self, *, channels: int = 1, classes: int = 10, norm: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5, padding=2),
            *_activation(nn.BatchNorm2d, 6, norm),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            *_activation(nn.BatchNorm2d, 16, norm),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            *_activation(nn.BatchNorm1d, 120, norm),
            nn.Linear(120, 84),
            *_activation(nn.BatchNorm1d, 84, norm),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _activation(batch_norm: type[nn.BatchNorm1d] | type[nn.BatchNorm2d], width: int, norm: bool) -> list[nn.Module]:
    return [batch_norm(width), nn.ReLU(inplace=True)] if norm else [nn.ReLU(inplace=True)]
